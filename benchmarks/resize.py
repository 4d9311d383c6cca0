"""What suspending, resuming and resizing a training costs, all ways side by side, on CPU slots (gloo).

    python benchmarks/resize.py [--json] [--quick] [--cuda] [--fresh-memory]

With `--cuda`: suspended and resumed on one GPU, with 1 GB of state; on two, if there are, resized in place.
Other sizes, and what a suspend's time goes into: `suspend.py`.

One training with about 90 MB of state (11 million parameters and their momentum). The launcher is the
agent's own; this program plays the agent. "Gap": from the end of the last step before to the end of the
first step after, less one step at the new rank count: time in which nothing was trained. It may be below 0,
where that step was faster than most. What a user sees of resizes that a run decides on: `resize_seen.py`.

A virtual machine may charge 13 us for a page of memory that its host has to find first, and 1.6 us for one
that it has had in use before. The machines that hpcsched is for own their memory: so before each start this
program uses and frees six times the state (`--fresh-memory`: it does not).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import mmap
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from common import Report, main, median, ms, wait_for

from hpcsched.contract.exits import SUSPENDED
from hpcsched.contract.orders import Resize, Suspend
from hpcsched.core.model import JobSpec, Kind
from hpcsched.devices import open_devices
from hpcsched.launch.base import LaunchPlan
from hpcsched.launch.local import LocalLauncher
from hpcsched.launch.plans import plan_attempt
from hpcsched.launch.workers import LocalWorkers

REPEAT, FEW, QUICK_REPEAT = 21, 5, 2
"""Where there is no goal, and each costs seconds, a few samples will do."""
WIDTH, QUICK_WIDTH, CUDA_WIDTH, LAYERS = 1900, 64, 6450, 3
BATCH = 32
DEADLINE_S = 60.0
STEPS_BETWEEN = 6
REST_S, SHORT_REST_S = 3.0, 0.5
"""Time in which a standby that was used is replaced, and where there are none."""


class Training:
    """One job, as its agent sees it."""

    def __init__(
        self,
        folder: Path,
        standbys: int | None,
        width: int,
        devices: str,
        *,
        fresh: bool,
        adamw: bool = False,
    ) -> None:
        folder.mkdir()
        self.rest_s = REST_S if standbys else SHORT_REST_S
        self._used = 0 if fresh else 6 * 8 * LAYERS * width**2
        self.folder, self.job = folder, folder / "jobs" / "1"
        self.job.mkdir(parents=True)
        self.record = folder / "steps"
        self.record.touch()
        self.devices = open_devices(devices, "here")
        self.launcher = LocalLauncher(
            cpus=self.devices.cpus,
            device_env=self.devices.environment,
            devices=self.devices.inventory(),
            standbys=standbys,
        )
        record = str(self.record)
        args = {"width": width, "layers": LAYERS, "batch": BATCH, "record": record, "adamw": adamw}
        self.spec = JobSpec(
            name="wide",
            kind=Kind.TRAINER,
            model="wide",
            trainer="resize_training:Wide",
            args=args,
            steps=10**9,
            workdir=str(Path(__file__).parent),
        )
        self.attempt = 0
        self.workers: list[LocalWorkers] = []

    def plan(self, ranks: range, *, resume: bool) -> LaunchPlan:
        chosen = tuple(self.devices.inventory()[rank] for rank in ranks)
        plan = plan_attempt(
            self.spec,
            job_id=1,
            attempt=self.attempt,
            run_id="bench",
            run_dir=self.folder,
            output=self.folder / "output",
            devices=chosen,
            resume=resume,
        )
        return replace(plan, cwd=Path(__file__).parent)

    def start(self, world: int) -> float:
        """Launch it; returns when that was asked for."""
        self._use_memory()
        self.attempt += 1
        plan = self.plan(range(world), resume=self.attempt > 1)
        asked = time.monotonic()
        self.workers = [self.launcher.launch(plan)]
        return asked

    def leave(self, *, quick: bool) -> tuple[float, float]:
        """Suspend it, and wait until that is durable; returns when it was asked for, and when its devices
        were free."""
        times = self.suspend(quick=quick)
        self.launcher.wait_kept(DEADLINE_S)
        return times

    def suspend(self, *, quick: bool) -> tuple[float, float]:
        """The same, without the wait."""
        asked = time.monotonic()
        self.workers[0].tell(Suspend(quick=quick))
        for crew in self.workers:
            crew.signal(signal.SIGTSTP)
        self._until(lambda: all(crew.reap() is not None for crew in self.workers), "the suspend")
        free = time.monotonic()
        codes = [crew.reap() for crew in self.workers]
        for crew in self.workers:
            crew.close()
        if SUSPENDED not in codes:
            raise RuntimeError(f"not suspended: {codes}; {(self.folder / 'output').read_text()[-2000:]}")
        return asked, free

    def resize(self, old: int, new: int, *, one_host: bool = True) -> None:
        self._use_memory()
        self.attempt += 1
        keep = tuple(range(min(old, new)))
        self.workers[0].expect(self.attempt)
        if new > old:
            joins = self.workers[0].where
            plan = replace(
                self.plan(range(old, new), resume=True), first_rank=old, world_size=new, joins=joins
            )
            self.workers.append(self.launcher.launch(plan))
        self.workers[0].tell(Resize(self.attempt, new, keep, one_host))
        self._until((self.job / f"ready.{self.attempt}").exists, "the resize")
        self._until(lambda: sum(crew.living for crew in self.workers) == new, "leaving ranks")

    def resized_at(self) -> float:
        """When rank 0 had done the newest resize."""
        written = (self.job / f"ready.{self.attempt}").stat().st_mtime
        return written - (time.time() - time.monotonic())

    def steps(self, what: str) -> list[float]:
        """When rank 0's steps have begun ("b") or ended ("e")."""
        whole, _, _ = self.record.read_text().rpartition("\n")  # the last line may be on its way
        lines = (line.split() for line in whole.splitlines())
        return [float(t) for rank, kind, _, t, _ in lines if rank == "0" and kind == what]

    def train(self, steps: int = STEPS_BETWEEN) -> list[float]:
        """Let it do so many more steps; returns when the newest ended."""
        before = len(self.steps("e"))
        self._until(lambda: len(self.steps("e")) >= before + steps, "training")
        return self.steps("e")[-steps:]

    def close(self) -> None:
        for crew in self.workers:
            crew.signal(signal.SIGKILL)
            with contextlib.suppress(RuntimeError):
                self._until(lambda crew=crew: crew.reap() is not None, "its end")  # type: ignore[misc]
            crew.close()
        self.launcher.close()
        self.devices.close()

    def _use_memory(self) -> None:
        if self._used:
            with mmap.mmap(-1, self._used) as memory:
                for page in range(0, self._used, mmap.PAGESIZE):
                    memory[page] = 1

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + DEADLINE_S
        while not condition():
            if time.monotonic() > end:
                text = (self.folder / "output").read_text()[-3000:]
                raise RuntimeError(f"{what}: not after {DEADLINE_S:g} s; {text}")
            time.sleep(0.001)


@contextlib.contextmanager
def training(
    root: Path, name: str, standbys: int | None, width: int, devices: str = "cpu:2", *, fresh: bool
) -> Iterator[Training]:
    job = Training(root / name, standbys, width, devices, fresh=fresh)
    try:
        yield job
    finally:
        job.close()


def step_of(ends: list[float]) -> float:
    return median([b - a for a, b in itertools.pairwise(ends)])


def in_place(job: Training, repeat: int, report: Report, name: str, *, one_host: bool) -> None:
    """Grow from 1 to 2 and shrink back, again and again."""
    job.start(1)
    job.train(10)
    for _ in range(repeat):
        for old, new, way in ((1, 2, "grow"), (2, 1, "shrink")):
            job.resize(old, new, one_host=one_host)
            step_s = step_of(job.train())
            done = job.resized_at()  # the steps around it are the last before and the first after
            gap_s = next(b - a for a, b in itertools.pairwise(job.steps("e")) if a < done < b) - step_s
            report.results.setdefault(f"{name}_{way}_gap_s", []).append(gap_s)
            report.results.setdefault(f"{name}_{way}_step_s", []).append(step_s)
        time.sleep(job.rest_s)
    job.leave(quick=False)


def by_restart(
    job: Training, repeat: int, report: Report, name: str, sizes: tuple[int, int], *, quick: bool
) -> None:
    """Suspend and resume, between two rank counts in turn."""
    way = "grow" if sizes[0] < sizes[1] else "shrink" if sizes[0] > sizes[1] else "same"
    for _ in range(repeat):
        job.start(sizes[0])
        job.train(4)
        asked, free = job.leave(quick=quick)
        last = job.steps("e")[-1]
        time.sleep(job.rest_s)
        launched = job.start(sizes[1])
        ends = job.train()
        first_begun = next(t for t in job.steps("b") if t > launched)
        first_ended = next(t for t in job.steps("e") if t > launched)
        step_s = step_of(ends)
        values = {f"{way}_gap_s": (free - last) + (first_ended - launched) - step_s}
        if way == "same":
            values |= {
                "suspend_s": free - max(asked, last),
                "to_first_step_s": first_begun - launched,
                "through_first_step_s": first_ended - launched,
            }
        for what, value in values.items():
            report.results.setdefault(f"{name}_{what}", []).append(value)
        job.leave(quick=quick)
        time.sleep(job.rest_s)


def measure(options: argparse.Namespace) -> Report:
    repeat, few = (QUICK_REPEAT, QUICK_REPEAT) if options.quick else (REPEAT, FEW)
    width = QUICK_WIDTH if options.quick else WIDTH
    report = Report()
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # "has saved": we look anyway
    with tempfile.TemporaryDirectory(prefix="hpcsched-bench-") as folder:
        root = Path(folder)
        fresh = options.fresh_memory
        if options.cuda:
            on_gpus(root, report, repeat, fresh=fresh)
            return report
        with training(root, "in-place", 2, width, fresh=fresh) as job:
            warm(job)
            in_place(job, repeat, report, "in_place", one_host=True)
            in_place(job, repeat, report, "broadcast", one_host=False)
            by_restart(job, repeat, report, "standby", (1, 1), quick=True)
        with training(root, "zygote", 0, width, fresh=fresh) as job:
            warm(job)
            by_restart(job, repeat, report, "zygote", (1, 1), quick=True)
            by_restart(job, few, report, "zygote", (1, 2), quick=True)
            by_restart(job, few, report, "zygote", (2, 1), quick=True)
        with training(root, "cold", None, width, fresh=fresh) as job:
            by_restart(job, repeat, report, "cold", (1, 1), quick=False)
            by_restart(job, few, report, "cold", (1, 2), quick=False)
            by_restart(job, few, report, "cold", (2, 1), quick=False)
    rows(report)
    return report


def on_gpus(root: Path, report: Report, repeat: int, *, fresh: bool) -> None:
    """On a GPU: suspend 1 GB of state, and resume it from a standby, from the zygote, and from nothing."""
    gpus = len(found := open_devices("cuda", "here").inventory())
    if not found:
        raise RuntimeError("there is no GPU here")
    for name, standbys in (("standby", 2), ("zygote", 0), ("cold", None)):
        with training(root, name, standbys, CUDA_WIDTH, f"cuda:{min(gpus, 2)}", fresh=fresh) as job:
            if standbys is not None:
                warm(job)
            by_restart(job, repeat, report, name, (1, 1), quick=standbys is not None)
            if gpus > 1 and name == "standby":
                in_place(job, repeat, report, "in_place", one_host=True)
    results = {name: median(values) for name, values in report.results.items()}
    for name, value in results.items():
        goal_s = 0.1 if name == "standby_suspend_s" else None
        report.row(
            name.removesuffix("_s").replace("_", " "),
            ms(value),
            goal="" if goal_s is None else f"<= {ms(goal_s)}",
            ok=None if goal_s is None else value <= goal_s,
        )


def warm(job: Training) -> None:
    """Have the zygote started, and wait until it forks."""
    job.start(1)
    job.train(2)
    job.leave(quick=False)
    assert job.launcher._zygotes is not None
    zygote = job.launcher._zygotes.of(sys.executable)

    def ready() -> bool:
        zygote.look()
        return zygote.ready

    wait_for(ready, "the zygote", deadline_s=DEADLINE_S)
    time.sleep(job.rest_s)


def rows(report: Report) -> None:
    results = {name: median(values) for name, values in report.results.items()}
    cold = {way: results[f"cold_{way}_gap_s"] for way in ("grow", "shrink", "same")}

    def row(what: str, name: str, goal_s: float | None, against: float | None = None) -> None:
        value = results[name]
        goal = "" if goal_s is None else f"<= {ms(goal_s)}"
        factor = "" if against is None else f" ({against / value:.0f}x less than cold)" if value > 0 else ""
        ok = None if goal_s is None else value <= goal_s
        report.row(what, f"{ms(value)}{factor}", goal=goal, ok=ok)

    row("step, 1 rank", "in_place_shrink_step_s", None)
    row("step, 2 ranks", "in_place_grow_step_s", None)
    row("shrink in place: gap", "in_place_shrink_gap_s", 0.010, cold["shrink"])
    row("grow in place, shared memory: gap", "in_place_grow_gap_s", 0.060, cold["grow"])
    row("grow in place, broadcast: gap", "broadcast_grow_gap_s", None, cold["grow"])
    row("suspend into memory, until the slots are free, less the step's rest", "standby_suspend_s", 0.060)
    row("suspend to disk", "cold_suspend_s", None)
    row("resume from a standby, to the first step", "standby_to_first_step_s", 0.150)
    row("... through the first step", "standby_through_first_step_s", None)
    row("resume from the zygote, to the first step", "zygote_to_first_step_s", 0.350)
    row("... through the first step", "zygote_through_first_step_s", None)
    row("resume from nothing, to the first step", "cold_to_first_step_s", None)
    for way in ("grow", "shrink"):
        row(f"{way} by a restart from the zygote: gap", f"zygote_{way}_gap_s", None, cold[way])
        row(f"{way} by a restart from nothing: gap", f"cold_{way}_gap_s", None)
    for what, name in (("standby", "standby_same_gap_s"), ("zygote", "zygote_same_gap_s")):
        factor = cold["same"] / results[name]
        report.row(
            f"suspend and resume through the {what} against from nothing",
            f"{factor:.1f}x less",
            goal=">= 5x less",
            ok=factor >= 5,
        )


if __name__ == "__main__":
    sys.path.insert(0, os.fspath(Path(__file__).parent))
    main(__doc__ or "", measure, "--cuda", "--fresh-memory")
