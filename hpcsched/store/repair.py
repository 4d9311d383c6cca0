"""What is wrong with a journal, and how it is mended: with a copy kept, and as little lost as can be."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from hpcsched.core import events as ev
from hpcsched.core.transitions.decisions import PolicyMaker
from hpcsched.errors import BadInput, StoreError
from hpcsched.store import journal
from hpcsched.store.files import sync_folder, write_atomically
from hpcsched.store.replay import Contradiction, replay, void_of, voided

MOST_VOIDS = 100
"""Records that are voided before the rest of a journal is given up: they rest on one that is gone."""


@dataclass(kw_only=True)
class Findings:
    """What there is to say of a journal, a line each; `wrong`: what keeps the run from being gone on with."""

    records: int = 0
    wrong: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def check(path: Path, make_policy: PolicyMaker) -> Findings:
    """Read a journal from end to end; raises StoreError if it cannot be read at all."""
    found = Findings()
    try:
        replayed = replay(path, make_policy)
    except journal.Damaged as error:
        found.records = error.number - 1
        found.wrong.append(f"damaged at byte {error.offset}, record {error.number}: {error.why}")
        return found
    except Contradiction as error:
        found.records = error.number
        kind = type(error.event).__name__
        found.wrong.append(f"record {error.number} ({kind}) cannot be handled: {error.why}")
        return found
    found.records = replayed.records
    void = sorted(voided(path))
    if void:
        found.notes.append(f"records that count for nothing: {', '.join(map(str, void))}")
    torn = path.stat().st_size - replayed.length
    if torn > 0:
        found.notes.append(f"a crash cut the last record short: the next run drops its {torn} bytes")
    return found


def repair(path: Path, make_policy: PolicyMaker) -> list[str]:
    """Mend a journal; a line for each thing that was done, none if nothing was wrong.

    Records that cannot be read are replaced by voids where the others stand without them; records that
    cannot be handled are voided. Where that is not enough all from the first bad one on is cut off. The old
    file stays beside the new one. Only for who holds the run's lock. Raises StoreError.
    """
    if not check(path, make_policy).wrong:
        return []
    lines, done, first_bad = _without_damage(journal.content(path))
    kept = next_copy(path)
    try:
        shutil.copy2(path, kept)
        sync_folder(path.parent)
    except OSError as error:
        raise StoreError(f"cannot keep a copy of {path}: {error.strerror}; nothing was changed") from error
    _put(path, lines)
    for _ in range(MOST_VOIDS):
        try:
            replayed = replay(path, make_policy)
            break
        except Contradiction as error:
            first_bad = min(first_bad, error.number)
            void = void_of(error.number, error.event, error.why, at=error.event.at)
            lines.append(journal.encode(len(lines) + 1, void))
            _put(path, lines)
            done.append(f"voided record {error.number} ({void.kind}): {error.why}")
    else:
        lines, cut = lines[: first_bad - 1], len(lines) - MOST_VOIDS - first_bad + 1
        _put(path, lines)
        replayed = replay(path, make_policy)
        done = [f"cut {cut} records off, from record {first_bad} on: they rest on what is lost"]
    left = sum(not job.state.final for job in replayed.machine.run.jobs.values())
    return [*done, f"{replayed.records} records, jobs left: {left}; the old journal is in {kept.name}"]


def next_copy(path: Path) -> Path:
    """A name for a copy beside a file that nothing has yet."""
    number = 1
    while (copy := path.with_name(f"{path.name}.{number}.bak")).exists():
        number += 1
    return copy


def _put(path: Path, lines: list[bytes]) -> None:
    write_atomically(path, b"".join(lines), durable=True)


def _without_damage(data: bytes) -> tuple[list[bytes], list[str], int]:
    """The records as lines, voids where they cannot be read; what was done, and the first bad record."""
    found: dict[int, tuple[bytes, float]] = {}
    bad: dict[int, bytes] = {}
    done: list[str] = []
    first_bad, last = 2**63, 0
    for line in data.splitlines(keepends=True):
        try:
            seq, event = journal.decode(line)
            if not line.endswith(b"\n"):
                raise ValueError("no end of line")
        except journal.OfAnother as error:
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
        while (number := len(lines) + 1) < seq:
            first_bad = min(first_bad, number)
            what = _kind(bad.get(number, b""))
            done.append(f"record {number}{what} cannot be read: a void is in its place")
            lines.append(_unreadable(number, at))
        lines.append(line)
    for number in sorted(number for number in bad if number > len(lines)):
        first_bad = min(first_bad, len(lines) + 1)
        done.append(f"record {number}{_kind(bad[number])} cannot be read, and is the last one: cut off")
    return lines, done, first_bad


def _kind(bad: bytes) -> str:
    """What a damaged record seems to have been."""
    kind = re.search(rb'"type":"([A-Za-z]+)"', bad)
    return f" ({kind[1].decode()})" if kind else ""


def _unreadable(record: int, at: float) -> bytes:
    error = "the record was damaged"
    return journal.encode(record, ev.EventVoided(at=at, record=record, kind="Unreadable", error=error))
