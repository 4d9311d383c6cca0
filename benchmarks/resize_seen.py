"""What a user sees of a resize in place: gaps between the steps of a training that `hpcsched run` resizes.

    python benchmarks/resize_seen.py [--json] [--quick] [--rounds N]

The training is that of `resize.py`, 90 MB of state, its own stamps of each step's end all that is looked
at. It has two CPU slots; each time that a guest (`cat` of a pipe) comes it shrinks to one, and grows again
when that has gone (`--policy equal`). In turn with it, in the same minutes, the resizes that `resize.py`
orders itself.

*Stood still*: from the last step's end before to the first one's after, less the median step at the new
count. That gap has one whole step in it, and that one is of the new count: less a step of the old count it
would be the steps' difference more. *Lost in all*: what the steps from six before the gap to six after it
took longer than as many median steps of their count: also what the training is slowed by while the joining
rank is built beside it, and by memory that is used for the first time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common import Report, Scratch, hpcsched, main, median, ms, percentile, wait_for
from resize import BATCH, DEADLINE_S, LAYERS, QUICK_WIDTH, WIDTH, in_place, training, warm

ROUNDS, QUICK_ROUNDS = 5, 1
GUESTS, QUICK_GUESTS = 4, 1
"""In each round, and so many resizes each way."""
AROUND = 6
"""Steps before and after a gap that count as around it."""
GOALS_S = {"shrink": 0.010, "grow": 0.060}


@dataclass(frozen=True)
class Change:
    """One change of the number of ranks: the step's end after it at `at` among the ends of all steps."""

    at: int
    old: int
    new: int

    @property
    def way(self) -> str:
        return "grow" if self.new > self.old else "shrink"


def measure(options: argparse.Namespace) -> Report:
    report = Report()
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # "has saved": `resize` looks anyway
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    guests, width = (QUICK_GUESTS, QUICK_WIDTH) if options.quick else (GUESTS, WIDTH)
    for number in range(rounds):
        parts = [
            lambda: _by_the_scheduler(report, guests, width),
            lambda: _by_ourselves(report, guests, width),
        ]
        for part in parts if number % 2 == 0 else parts[::-1]:
            part()
    for way in ("shrink", "grow"):
        for key, words in (
            (f"run_{way}_still_s", f"{way} in place by `hpcsched run`: stood still"),
            (f"run_{way}_lost_s", "... lost in all, around it"),
            (f"run_{way}_less_old_s", "... the gap less a step of the old count"),
            (f"run_{way}_said_s", "... as rank 0 measures it, and `explain` says"),
            (f"in_place_{way}_gap_s", f"{way} in place by `resize.py`, in turn with it: stood still"),
        ):
            found = report.results.get(key, [])
            if not found:
                raise RuntimeError(f"{key}: there was none")
            goal_s = GOALS_S[way] if "still" in key else None
            report.row(
                words,
                f"{ms(median(found))} (a tenth below {ms(percentile(found, 0.1))}, above "
                f"{ms(percentile(found, 0.9))}; {len(found)})",
                goal="" if goal_s is None else f"<= {ms(goal_s)}",
                ok=None if goal_s is None else median(found) <= goal_s,
            )
    return report


def _by_ourselves(report: Report, repeat: int, width: int) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="hpcsched-bench-") as folder,
        training(Path(folder), "in-place", 2, width, fresh=False) as job,
    ):
        warm(job)
        in_place(job, repeat, report, "in_place", one_host=True)


def _by_the_scheduler(report: Report, guests: int, width: int) -> None:
    with Scratch.make() as scratch:
        record, run, door = (scratch.folder / name for name in ("steps", "run", "door"))
        record.touch()
        os.mkfifo(door)
        scratch.env["PYTHONPATH"] = str(Path(__file__).parent)
        args = f'{{ width = {width}, layers = {LAYERS}, batch = {BATCH}, record = "{record}" }}'
        job = '[[job]]\nname = "wide"\ntrainer = "resize_training:Wide"\nsteps = 1000000000'
        file = scratch.folder / "jobs.toml"
        file.write_text(f"schema = 1\n{job}\nargs = {args}\ngpus = {{ min = 1, max = 2 }}\n")
        policy = ("--policy", "equal", "--policy-option", "resize=always")
        command = hpcsched("run", file, "--dir", run, "--devices", "cpu:2", *policy, "--quiet")
        with scratch.start(command):
            for number in range(guests):
                _train_on(record, ranks=2)
                # It waits at the door, which costs no processor time.
                guest = ("--name", f"guest-{number}", "--gpus", "1", "--", "cat", door)
                scratch.run(hpcsched("submit", "--dir", run, *guest), deadline_s=DEADLINE_S)
                _train_on(record, ranks=1)
                door.write_bytes(b"")  # it goes
            _train_on(record, ranks=2)
            said = _said(run / "journal.jsonl")
        stamps = _stamps(record)
        found = changes(stamps)
        for change in found:
            _take(report, [at for at, _ in stamps], change)
        for change, said_s in zip(found, said, strict=True):
            report.results.setdefault(f"run_{change.way}_said_s", []).append(said_s)


def _train_on(record: Path, *, ranks: int) -> None:
    """Wait until so many ranks have made the steps that `_take` looks at."""

    def done() -> bool:
        newest = _stamps(record)[-4 * AROUND :]
        return len(newest) == 4 * AROUND and {count for _, count in newest} == {ranks}

    wait_for(done, f"steps on {ranks} ranks", deadline_s=DEADLINE_S)


def _take(report: Report, ends: Sequence[float], change: Change) -> None:
    steps = [b - a for a, b in itertools.pairwise(ends)]  # steps[i] ends with ends[i + 1]
    at = change.at - 1
    before, after = steps[max(0, at - 3 * AROUND) : at - AROUND], steps[at + AROUND : at + 3 * AROUND]
    if len(before) < AROUND or len(after) < AROUND:
        return
    old_s, new_s, gap_s = median(before), median(after), steps[at]
    window = steps[at - AROUND : at + AROUND]
    values = {
        "still_s": gap_s - new_s,
        "less_old_s": gap_s - old_s,
        "lost_s": sum(window) - AROUND * (old_s + new_s),
        "old_step_s": old_s,
        "new_step_s": new_s,
    }
    for key, value in values.items():
        report.results.setdefault(f"run_{change.way}_{key}", []).append(value)


def changes(stamps: Sequence[tuple[float, int]]) -> list[Change]:
    """Where the number of ranks changes, by the ends of the steps of rank 0 and their numbers of ranks."""
    pairs = enumerate(itertools.pairwise(stamps), 1)
    return [Change(at, old, new) for at, ((_, old), (_, new)) in pairs if old != new]


def _stamps(record: Path) -> list[tuple[float, int]]:
    """When each step of rank 0 has ended, and on how many ranks it was made."""
    whole, _, _ = record.read_text().rpartition("\n")  # the last line may be on its way
    lines = (line.split() for line in whole.splitlines())
    return [(float(t), int(ranks)) for rank, what, _, t, ranks in lines if (rank, what) == ("0", "e")]


def _said(journal: Path) -> list[float]:
    """What rank 0 itself says of how long it stood still, resize by resize."""
    lines = [line for line in journal.read_text().splitlines() if '"WorkersResized"' in line]
    return [seconds for line in lines if (seconds := _stopped(json.loads(line))) is not None]


def _stopped(table: object) -> float | None:
    """The `stopped_s` anywhere in a record of the journal."""
    if isinstance(table, dict):
        if isinstance(value := table.get("stopped_s"), int | float):
            return float(value)
        return next((v for part in table.values() if (v := _stopped(part)) is not None), None)
    return None


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, metavar="N", help=f"rounds, each of both ways ({ROUNDS})")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main("what is seen of resizes in place", measure, options_of=_options)
