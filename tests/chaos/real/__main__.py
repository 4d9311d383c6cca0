"""Schedules of faults over real runs, several at a time.

    python -m tests.chaos.real --seconds 60 [--first SEED] [--flavour WORD] [--at-once 4] [--json FILE]
    python -m tests.chaos.real --only SEED [--flavour WORD] [--shrink]

`--most N`: no more schedules. `--until-found`: ends with the first violation.

Exit code 1 when one violates what must hold, or none could be played. `--json`: rows are added to those that
the file has.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from .campaign import Row, commit, played, shrunk, unplayed
from .faults import PATIENCE_S
from .places import clean_up_after
from .schedule import FLAVOURS, Schedule, drawn
from .shim import library
from .weights import undisturbed

HANGS_S = 2 * PATIENCE_S
"""After which a schedule's own process counts as hanging."""


def main(words: Sequence[str]) -> int:
    """Play schedules; the exit code."""
    parser = argparse.ArgumentParser(prog="chaos.real", description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--first", type=int, default=0, metavar="SEED")
    parser.add_argument("--most", type=int, default=10**9, metavar="N")
    parser.add_argument("--only", type=int, metavar="SEED")
    parser.add_argument("--flavour", choices=sorted(FLAVOURS), default="")
    parser.add_argument("--at-once", type=int, default=4, metavar="N")
    parser.add_argument("--shrink", action="store_true")
    parser.add_argument("--until-found", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(words)
    if args.only is not None:
        return _only(args.only, args.flavour, shrink=args.shrink)
    undisturbed(), library(), commit()  # once, and not beside others
    began, rows = time.monotonic(), list[Row]()
    seeds, under_way = iter(range(args.first, args.first + args.most)), dict[int, Playing]()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends what is under way, too
    try:
        _play(args, seeds, under_way, rows, began)
    finally:
        for one in under_way.values():
            one.kill()
    bad, skipped = [row for row in rows if row.violations], [row for row in rows if row.skipped]
    said = f"{len(bad)} with violations" + (f", {len(skipped)} skipped" if skipped else "")
    print(f"{len(rows)} schedules in {time.monotonic() - began:.0f} s, {said}")
    return bool(bad) or len(skipped) == len(rows)  # where nothing was played nothing is shown to hold


def _play(
    args: argparse.Namespace,
    seeds: Iterator[int],
    under_way: dict[int, Playing],
    rows: list[Row],
    began: float,
) -> None:
    """Play as long as there is time; `rows` has what has ended."""
    while True:
        while len(under_way) < args.at_once and time.monotonic() - began < args.seconds:
            if (seed := next(seeds, None)) is None:
                break
            one = Playing.begin(drawn(seed, args.flavour))
            under_way[one.pid] = one
        if not under_way:
            break
        for one in [one for one in under_way.values() if one.over()]:
            rows.append(under_way.pop(one.pid).row())
            _tell(rows[-1])
            if args.until_found and rows[-1].violations:
                return
            if args.json:
                add(args.json, rows[-1])
        time.sleep(0.05)


@dataclass
class Playing:
    """A schedule that is played in a process of its own, a fork of this one."""

    schedule: Schedule
    pid: int
    told: Path
    began: float

    @classmethod
    def begin(cls, schedule: Schedule) -> Playing:
        told = Path(tempfile.mkstemp(prefix="chaos-row-")[1])
        if not (pid := os.fork()):
            try:
                os.setsid()
                told.write_bytes(msgspec.json.encode(played(schedule)))
            finally:
                os._exit(0)
        return cls(schedule, pid, told, time.monotonic())

    def over(self) -> bool:
        """Whether it has ended; one that hangs is killed, with all that it has started."""
        if time.monotonic() - self.began > HANGS_S:
            self.kill()
        return bool(os.waitpid(self.pid, os.WNOHANG)[0])

    def kill(self) -> None:
        """Kill it, and all that it has started."""
        os.kill(self.pid, signal.SIGKILL)
        clean_up_after(self.pid)

    def row(self) -> Row:
        text = self.told.read_bytes()
        self.told.unlink()
        return msgspec.json.decode(text, type=Row) if text else unplayed(self.schedule, "it has hung")


def _tell(row: Row) -> None:
    about = row.skipped or f"{row.lives} lives, {dict(row.faults)}"
    print(f"seed {row.seed} {row.flavour} {row.seconds} s: {about}", flush=True)
    for line in row.violations:
        print(f"    !! {line}", flush=True)


def _only(seed: int, flavour: str, *, shrink: bool) -> int:
    schedule = drawn(seed, flavour)
    row = played(schedule)
    if shrink and row.violations:
        schedule = shrunk(schedule)
        row = played(schedule)
    print("\n".join([str(schedule), *(f"    {line}" for line in row.said)]))
    _tell(row)
    return bool(row.violations)


def add(path: Path, row: Row) -> None:
    """Add a row to a file of results, in the place of one of the same seed; what else is there stays.

    A seed that has once violated something at a commit has done so, however it goes another time.
    """
    page = json.loads(path.read_text()) if path.exists() else {"schema": 1}
    rows = page.get("schedules", [])
    same = [one for one in rows if (one["seed"], one["flavour"]) == (row.seed, row.flavour)]
    if any(one["violations"] and one["commit"] == row.commit for one in same):
        return
    rows = [*(one for one in rows if one not in same), row.page()]
    others = "".join(f"{json.dumps(key)}: {json.dumps(page[key])},\n" for key in page if key != "schedules")
    part = path.with_suffix(".part")
    part.write_text(f'{{{others}"schedules": [\n' + ",\n".join(map(json.dumps, rows)) + "\n]}\n")
    part.rename(path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
