"""Check and repair of a journal: a copy is kept, and as few records as possible are lost."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from hpcsched.core import events as ev
from hpcsched.core.transitions.decisions import PolicyMaker
from hpcsched.errors import BadInput, StoreError
from hpcsched.patience import kind_of
from hpcsched.store import journal
from hpcsched.store.archive import Mark, Unreadable, found_parts
from hpcsched.store.files import sync_folder, write_atomically
from hpcsched.store.replay import Contradiction, Replayed, replay, void_of, voided

MAX_VOIDS = 100
"""The most records that are voided before the rest of a journal is cut off (chosen)."""


@dataclass(kw_only=True)
class Findings:
    """The findings about a journal, a line each; those in `wrong` make the run impossible to resume."""

    records: int = 0
    wrong: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def check(path: Path, make_policy: PolicyMaker) -> Findings:
    """Read a journal from end to end. Raises StoreError if it cannot be read at all."""
    found = Findings()
    try:
        replayed = _all_of(path, make_policy, found)
    except journal.Damaged as error:
        found.records = error.number - 1
        found.wrong.append(f"damaged at byte {error.offset}, record {error.number}: {error.why}")
        return found
    except Contradiction as error:
        found.records = error.number
        kind = type(error.event).__name__
        found.wrong.append(f"record {error.number} ({kind}) cannot be handled: {error.why}")
        return found
    except Unreadable as error:
        found.wrong.append(f"{error}; nothing but a copy of that file mends this")
        return found
    found.records = replayed.records
    if not replayed.mark.records and (void := sorted(voided(path))):
        found.notes.append(f"records that count for nothing: {', '.join(map(str, void))}")
    torn = path.stat().st_size - replayed.length
    if torn > 0:
        found.notes.append(f"a crash cut the last record short: the next run drops its {torn} bytes")
    return found


def _all_of(path: Path, make_policy: PolicyMaker, found: Findings) -> Replayed:
    """The replay of all records; of those of an archive that cannot be read a checkpoint may tell as well."""
    try:
        return replay(path, make_policy, short_cut=False)
    except Unreadable as error:
        replayed = replay(path, make_policy)
        found.notes.append(f"{error}; the checkpoint stands for them, for this version of hpcsched")
        return replayed


def repair(path: Path, make_policy: PolicyMaker) -> list[str]:
    """Repair a journal; returns a line for each change, none if nothing was wrong.

    Records that cannot be read are replaced by voids if the others hold without them; records that cannot be
    handled are voided. If that is not enough, all records from the first bad one on are cut off. The old file
    stays beside the new one. What is in the archive is only voided. The caller holds the run's lock. Raises
    StoreError.
    """
    if not check(path, make_policy).wrong:
        return []
    data = journal.content(path)
    archived, first, done = _archived(path, data)
    begin = archived[-1].records if archived else 0
    head = journal.first_line(archived) if archived else b""
    lines, mended, first_bad = _without_damage(data[first:], begin)
    done += mended
    kept = next_copy(path)
    try:
        shutil.copy2(path, kept)
        sync_folder(path.parent)
    except OSError as error:
        raise StoreError(f"cannot keep a copy of {path}: {error.strerror}; nothing was changed") from error
    _put(path, head, lines)
    for _ in range(MAX_VOIDS):
        try:
            replayed = replay(path, make_policy)
            break
        except Contradiction as error:
            first_bad = min(first_bad, error.number)
            void = void_of(error.number, error.event, error.why, at=error.event.at)
            lines.append(journal.encode(begin + len(lines) + 1, void))
            _put(path, head, lines)
            done.append(f"voided record {error.number} ({void.kind}): {error.why}")
    else:
        kept_lines = max(0, first_bad - 1 - begin)
        lines, cut = lines[:kept_lines], len(lines) - MAX_VOIDS - kept_lines
        _put(path, head, lines)
        replayed = replay(path, make_policy)
        done = [f"cut {cut} records off, from record {first_bad} on: they rest on what is lost"]
    left = sum(not job.state.final for job in replayed.machine.run.jobs.values())
    return [*done, f"{replayed.records} records, jobs left: {left}; the old journal is in {kept.name}"]


def next_copy(path: Path) -> Path:
    """A free name for a copy beside a file."""
    number = 1
    while kind_of(copy := path.with_name(f"{path.name}.{number}.bak")) is not None:
        number += 1
    return copy


def _put(path: Path, head: bytes, lines: list[bytes]) -> None:
    write_atomically(path, head + b"".join(lines), durable=True)


def _archived(path: Path, data: bytes) -> tuple[list[Mark], int, list[str]]:
    """What is in the archive, where the first record is in the journal, and what was done to know that."""
    try:
        return *journal.begin_of(path, data), []
    except journal.Damaged:
        found = found_parts(path)
    return found, data.find(b"\n") + 1, [f"the line on the archive was damaged: it has {len(found)} files"]


def _without_damage(data: bytes, begin: int) -> tuple[list[bytes], list[str], int]:
    """The records after `begin` as lines, voids where they cannot be read; what was done, and the first bad
    record."""
    found: dict[int, tuple[bytes, float]] = {}
    bad: dict[int, bytes] = {}
    done: list[str] = []
    first_bad, last = 2**63, begin
    for line in data.splitlines(keepends=True):
        try:
            seq, event = journal.decode(line)
            if not line.endswith(b"\n"):
                raise ValueError("no end of line")
        except journal.UnknownRecord as error:
            raise StoreError(f"it is no damage: {error}; nothing was changed") from error
        except (ValueError, BadInput):
            last += 1
            bad[last] = line
            continue
        if seq in found:
            first_bad = min(first_bad, seq)
            done.append(f"record {seq} is there twice: the first one stands")
        elif seq < max(found, default=0):
            first_bad = min(first_bad, seq)
            done.append(f"record {seq} was not where it belongs: put there")
        found.setdefault(seq, (line, event.at))
        last = seq
    lines: list[bytes] = []
    for seq in sorted(found):
        line, at = found[seq]
        while (number := begin + len(lines) + 1) < seq:
            first_bad = min(first_bad, number)
            what = _kind(bad.get(number, b""))
            done.append(f"record {number}{what} cannot be read: a void is in its place")
            lines.append(_unreadable(number, at))
        lines.append(line)
    for number in sorted(number for number in bad if number > begin + len(lines)):
        first_bad = min(first_bad, begin + len(lines) + 1)
        done.append(f"record {number}{_kind(bad[number])} cannot be read, and is the last one: cut off")
    return lines, done, first_bad


def _kind(bad: bytes) -> str:
    """What a damaged record seems to have been."""
    kind = re.search(rb'"type":"([A-Za-z]+)"', bad)
    return f" ({kind[1].decode()})" if kind else ""


def _unreadable(record: int, at: float) -> bytes:
    error = "the record was damaged"
    return journal.encode(record, ev.EventVoided(at=at, record=record, kind="Unreadable", error=error))
