"""The replay of a journal into a machine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from hpcsched import mechanisms, strategies
from hpcsched.core import events as ev
from hpcsched.core.machine import Machine
from hpcsched.core.mechanisms.registry import added
from hpcsched.core.transitions.decisions import PolicyMaker
from hpcsched.errors import BadInput, StoreError
from hpcsched.store import checkpoint, journal
from hpcsched.store.archive import CHECKPOINT, Mark, folder_of

_ENDS = (ev.WorkersExited, ev.LaunchFailed)
_MARK = b'"type":"EventVoided"'
_STARTED = b'"type":"AgentStarted"'
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

    `length`: the end of the journal's last whole record, in bytes. `records`: the number of all of the run.
    `commands`: the inbox commands whose events they hold. `mark`: a checkpoint stood for those before it.
    """

    machine: Machine
    length: int
    records: int
    commands: set[str]
    mark: Mark = Mark()


def replay(
    path: Path, make_policy: PolicyMaker, *, before: int | None = None, short_cut: bool = True
) -> Replayed:
    """The machine after all events of a run but the voided ones (`before`: those before this record).

    Those that a checkpoint stands for are not read, unless there is to be no `short_cut`. Raises StoreError:
    Damaged, Contradiction, NotInstalled, Unreadable.
    """
    contents = journal.Contents(path)
    if short_cut:
        begun = _by_checkpoint(contents, make_policy, before)
        if begun is None and contents.archived:
            contents = journal.Contents(path)  # the checkpoint may be newer than what was read before it
            begun = _by_checkpoint(contents, make_policy, before)
        if begun:
            rest = contents.rest(begun.records, begun.length)
            return _replay(contents, begun, rest, _voids_in(contents.data[begun.length :]), before)
    if any(_ADDED in records for records in contents.bodies()):
        mechanisms.load()  # to look for other packages takes as long as to start Python
    begun = Replayed(Machine(make_policy), 0, 0, set())
    return _replay(contents, begun, contents.all(), _voids(contents), before)


def _by_checkpoint(
    contents: journal.Contents, make_policy: PolicyMaker, before: int | None
) -> Replayed | None:
    """The machine after those records that a checkpoint stands for; None: there is none for these."""
    found = checkpoint.read(folder_of(contents.path) / CHECKPOINT)
    if found is None or (before is not None and before <= found.mark.records):
        return None
    offset = contents.place_of(found.mark)
    if offset is None or any(void <= found.mark.records for void in _voids_in(contents.data[offset:])):
        return None
    try:
        machine, commands = found.load(make_policy)
    except BadInput:
        return None
    return Replayed(machine, offset, found.mark.records, commands, found.mark)


def _replay(
    contents: journal.Contents,
    begun: Replayed,
    events: Iterable[tuple[ev.Event, int]],
    void: set[int],
    before: int | None,
) -> Replayed:
    path, (machine, length, records, commands, mark) = contents.path, begun
    for event, end in events:
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
    return Replayed(machine, max(length, contents.first), records, commands, mark)


def _not_installed(machine: Machine, event: ev.Event) -> list[str]:
    """The strategies of the jobs there are, and of those that come, that nothing here adds."""
    specs = [job.spec for job in machine.run.jobs.values()]
    specs += event.jobs if isinstance(event, ev.JobsSubmitted) else ()
    kinds = {str(spec.strategy["kind"]) for spec in specs}
    return sorted(kind for kind in kinds if not strategies.known(kind))


def valid_events(path: Path) -> Iterator[ev.Event]:
    """The events of a run without the voided ones. Raises StoreError."""
    contents = journal.Contents(path)
    void = _voids(contents)
    for number, (event, _) in enumerate(contents.all(), 1):
        if number not in void:
            yield event


def last_start(path: Path) -> ev.AgentStarted | None:
    """How the newest agent of a run began; None before the first one. Raises StoreError.

    Read from the end on: nothing is said of records before it, nor whether what comes after it can be read.
    """
    void = set[int]()
    for records in journal.Contents(path).backwards():
        void |= _voids_in(records)
        at = len(records)
        while (at := records.rfind(_STARTED, 0, at)) >= 0:
            begin, end = records.rfind(b"\n", 0, at) + 1, records.find(b"\n", at) + 1
            with contextlib.suppress(ValueError, BadInput):
                seq, event = journal.decode(records[begin:end])
                if isinstance(event, ev.AgentStarted) and seq not in void:
                    return event
    return None


def voided(path: Path) -> set[int]:
    """The numbers of the voided records of a run; a void comes after the record that it voids."""
    return _voids(journal.Contents(path))


def _voids(contents: journal.Contents) -> set[int]:
    return set[int]().union(*map(_voids_in, contents.bodies()))


def _voids_in(records: bytes) -> set[int]:
    """The numbers of the records that some of these void."""
    found = set()
    for line in records.splitlines(keepends=True) if _MARK in records else ():
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
