"""The state a journal leads to."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from hpcsched.core.deciding import PolicyMaker
from hpcsched.core.machine import Machine
from hpcsched.errors import StoreError
from hpcsched.store import journal


class Replayed(NamedTuple):
    """A machine brought up to date from a journal.

    `length` and `records` say where the journal's last whole record ends; `commands` are the inbox
    commands whose events it holds.
    """

    machine: Machine
    length: int
    records: int
    commands: set[str]


def replay(path: Path, make_policy: PolicyMaker) -> Replayed:
    """Handle all events of a journal; raises StoreError if it is damaged or contradicts itself."""
    machine, length, records, commands = Machine(make_policy), 0, 0, set[str]()
    for event, end in journal.read(path):
        length, records = end, records + 1
        if event.cause.startswith("inbox:"):
            commands.add(event.cause.removeprefix("inbox:"))
        try:
            machine.handle(event)
        except (KeyError, IndexError, ValueError) as error:
            what = f"record {records} ({type(event).__name__}) contradicts the ones before"
            raise StoreError(f"{path}: {what}") from error
    return Replayed(machine, length, records, commands)
