"""The replay of a journal into a machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from hpcsched import mechanisms, strategies
from hpcsched.core import events as ev
from hpcsched.core.machine import Machine
from hpcsched.core.mechanisms.registry import added
from hpcsched.core.transitions.decisions import PolicyMaker
from hpcsched.errors import BadInput, StoreError
from hpcsched.store import journal

_ENDS = (ev.WorkersExited, ev.LaunchFailed)
_MARK = b'"type":"EventVoided"'
_ADDED = b'"mechanisms":["'


class Contradiction(StoreError):
    """A record, `number` with its `event`, that cannot be handled after the ones before it, and why."""

    def __init__(self, path: Path, number: int, event: ev.Event, why: str) -> None:
        self.number, self.event, self.why = number, event, why
        what = f"record {number} ({type(event).__name__}) contradicts the ones before ({why})"
        super().__init__(f"{path}: {what}; `hpcsched journal repair` voids it, a copy is kept")


class NotInstalled(StoreError):
    """A journal needs a strategy or a mechanism of a package that is not here: it is no damage."""

    def __init__(self, path: Path, number: int, kind: str, names: Sequence[str]) -> None:
        what = f"record {number} can be handled only where the package is installed that adds the {kind}"
        super().__init__(f"{path}: {what} {' and '.join(map(repr, names))}")


class Replayed(NamedTuple):
    """The machine after the replay of a journal.

    `length`: the end of the journal's last whole record, in bytes. `records`: their number. `commands`: the
    inbox commands whose events it holds.
    """

    machine: Machine
    length: int
    records: int
    commands: set[str]


def replay(path: Path, make_policy: PolicyMaker, *, before: int | None = None) -> Replayed:
    """Handle all events of a journal but the voided ones (`before`: those before this record).

    Raises StoreError: Damaged, Contradiction, NotInstalled.
    """
    if _ADDED in journal.content(path):  # to look for other packages takes as long as to start Python
        mechanisms.load()
    machine, length, records, commands = Machine(make_policy), 0, 0, set[str]()
    void = voided(path)
    for event, end in journal.read(path):
        if before is not None and records + 1 >= before:
            break
        length, records = end, records + 1
        if event.cause.startswith("inbox:"):
            commands.add(event.cause.removeprefix("inbox:"))
        if records in void:
            continue
        needed = event.mechanisms if isinstance(event, ev.AgentStarted) else ()
        if missing := [name for name in needed if name not in added()]:
            raise NotInstalled(path, records, "mechanism", missing)
        try:
            machine.handle(event)
        except Exception as error:
            if missing := _not_installed(machine, event):
                raise NotInstalled(path, records, "strategy", missing) from error
            why = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
            raise Contradiction(path, records, event, why) from error
    return Replayed(machine, length, records, commands)


def _not_installed(machine: Machine, event: ev.Event) -> list[str]:
    """The strategies of the jobs there are, and of those that come, that nothing here adds."""
    specs = [job.spec for job in machine.run.jobs.values()]
    specs += event.jobs if isinstance(event, ev.JobsSubmitted) else ()
    kinds = {str(spec.strategy["kind"]) for spec in specs}
    return sorted(kind for kind in kinds if not strategies.known(kind))


def valid_events(path: Path) -> Iterator[ev.Event]:
    """The events of a journal without the voided ones. Raises StoreError."""
    void = voided(path)
    for number, (event, _) in enumerate(journal.read(path), 1):
        if number not in void:
            yield event


def voided(path: Path) -> set[int]:
    """The numbers of the voided records of a journal; a void comes after the record that it voids."""
    found = set()
    data = journal.content(path)
    for line in data.splitlines(keepends=True) if _MARK in data else ():
        if _MARK not in line:
            continue
        try:
            _, event = journal.decode(line)
        except (ValueError, BadInput):
            continue  # the reader of the records tells
        if isinstance(event, ev.EventVoided):
            found.add(event.record)
    return found


def void_of(record: int, event: ev.Event, error: str, *, at: float) -> ev.EventVoided:
    """The void of a record: the event that makes it count for nothing."""
    return ev.EventVoided(
        at=at,
        record=record,
        kind=type(event).__name__,
        error=error,
        job_id=event.job_id if isinstance(event, ev.JobEvent) else None,
        attempt=event.attempt if isinstance(event, ev.AttemptEvent) else None,
        ended=isinstance(event, _ENDS),
    )
