"""How long the core takes for an event that leads to a decision, with 10,000 jobs queued.

    python benchmarks/decisions.py [--json] [--quick]

Timed is `Machine.handle` alone, as the live agent and the simulator both call it: no journal, no process.
Events come from a simulation of a mixed queue (6 GPUs, `promote=always`), so that starts, promotions,
readiness and arrivals occur in their natural mixture while at least that many jobs wait. Many events find
no GPU free and cost next to nothing, so the goal is judged by the kind with the worst 99th percentile.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from pathlib import Path

from common import JOB_SETS, Report, main, median, ms, percentile

from hpcsched import jobfile
from hpcsched.core import events as ev
from hpcsched.core.actions import Action, Suspend
from hpcsched.core.machine import Machine
from hpcsched.core.model import JobSpec, Kind
from hpcsched.core.profile import Profile
from hpcsched.sim.engine import Simulation
from hpcsched.store.profiles import load_profiles

QUEUED, QUICK_QUEUED = 10_000, 500
EXITS, QUICK_EXITS = 3_000, 100
GOAL_S = 0.001
PAPER_SET_S = (0.173, 0.124, 0.112)
REPEATS = 5


class _Enough(Exception):
    """Fewer jobs wait than the benchmark is about."""


Record = Callable[[ev.Event, list[Action], float], None]


def measure(options: argparse.Namespace) -> Report:
    report = Report()
    profiles = load_profiles("marble-summit")
    queued, exits = (QUICK_QUEUED, QUICK_EXITS) if options.quick else (QUEUED, EXITS)
    samples, bulk_s = _long_queue(profiles, queued, exits)
    report.results |= {f"{kind}_s": taken for kind, taken in samples.items()}
    report.results["bulk_submission_s"] = [bulk_s]
    everything = [s for taken in samples.values() for s in taken]
    label = f"one decision with {queued:,} jobs queued ({len(everything):,} events)"
    worst = max(percentile(taken, 0.99) for taken in samples.values())
    report.row(label, _spread(everything), goal="p99 at most 1 ms, of each kind", ok=worst <= GOAL_S)
    for kind, taken in samples.items():
        report.row(f"... {kind} ({len(taken):,})", _spread(taken))
    report.row(f"... all {queued + 2 * exits:,} jobs submitted at once", ms(bulk_s))
    for file, paper_s in zip(JOB_SETS, PAPER_SET_S, strict=True):
        totals = [_whole_set(file, profiles) for _ in range(REPEATS)]
        report.results[f"{file.stem}_scheduling_s"] = totals
        report.row(
            f"all scheduling of job set {file.stem[-1]}",
            ms(median(totals)),
            goal=f"paper: {paper_s * 1000:.0f} ms",
            ok=median(totals) <= paper_s,
        )
    return report


def _spread(samples: list[float]) -> str:
    return f"p50 {ms(median(samples))}, p99 {ms(percentile(samples, 0.99))}, max {ms(max(samples))}"


def _long_queue(
    profiles: tuple[Profile, ...], queued: int, exits: int
) -> tuple[dict[str, list[float]], float]:
    """Seconds of each event's handling by kind, and of the submission of all jobs at once.

    An event that led to a promotion counts as one, whatever it was.
    """
    rng = random.Random(1)
    samples: dict[str, list[float]] = {"exit": [], "promotion": [], "ready": [], "arrival": []}
    bulk: list[float] = []

    def record(event: ev.Event, actions: list[Action], taken_s: float) -> None:
        if isinstance(event, ev.JobsSubmitted):
            bulk.append(taken_s)
        elif bulk and len(machine.own.queue) < queued:
            raise _Enough
        elif any(isinstance(action, Suspend) for action in actions):
            samples["promotion"].append(taken_s)
        elif isinstance(event, ev.WorkersExited):
            samples["exit"].append(taken_s)
        elif isinstance(event, ev.WorkersReady):
            samples["ready"].append(taken_s)
        elif isinstance(event, ev.TimerFired) and event.key[0] == "arrival":
            samples["arrival"].append(taken_s)

    models = [profile.model for profile in profiles]
    waiting = [_job(f"w{i}", rng, models) for i in range(queued + exits)]
    late = [_job(f"l{i}", rng, models, submit_at=rng.uniform(1, 100 * exits)) for i in range(exits)]
    simulation = Simulation([*waiting, *late], profiles, gpus=6, options={"promote": "always"})
    machine = simulation.machine
    _time_handle(machine, record)
    try:
        simulation.run()
    except _Enough:
        pass
    else:
        raise RuntimeError("the simulation ended although jobs waited")
    samples["submission"] = []
    for i in range(exits):
        spec, start = _job(f"s{i}", rng, models), time.perf_counter()
        machine_id = len(machine.run.jobs) + 1
        Machine.handle(machine, ev.JobsSubmitted(at=machine.run.now, first_id=machine_id, jobs=(spec,)))
        samples["submission"].append(time.perf_counter() - start)
    return {kind: taken for kind, taken in samples.items() if taken}, bulk[0]


def _job(name: str, rng: random.Random, models: list[str], submit_at: float = 0.0) -> JobSpec:
    """Most jobs take any count; some are rigid, some have bounds."""
    least, most = rng.choice([(1, None), (1, None), (1, None), (1, 1), (2, 2), (2, 4), (4, None)])
    model, steps = rng.choice(models), rng.randint(50, 4000)
    return JobSpec(
        name=name,
        kind=Kind.REPLAY,
        model=model,
        steps=steps,
        gpus_min=least,
        gpus_max=most,
        submit_at=submit_at,
    )


def _whole_set(file: Path, profiles: tuple[Profile, ...]) -> float:
    """Seconds in the core for all events of a job set."""
    taken: list[float] = []
    jobs = jobfile.load(file, workdir=Path.cwd()).jobs
    simulation = Simulation(jobs, profiles, gpus=6, options={"promote": "always"})
    _time_handle(simulation.machine, lambda event, actions, seconds: taken.append(seconds))
    simulation.run()
    return sum(taken)


def _time_handle(machine: Machine, record: Record) -> None:
    """Have each call of `machine.handle` timed, and told to `record`."""
    handle = machine.handle

    def timed(event: ev.Event) -> list[Action]:
        start = time.perf_counter()
        actions = handle(event)
        record(event, actions, time.perf_counter() - start)
        return actions

    machine.handle = timed  # type: ignore[method-assign]


if __name__ == "__main__":
    main("time of a decision", measure)
