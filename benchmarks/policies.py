"""How good the policies are: random job sets simulated under each, against MARBLE and a provable bound.

    python benchmarks/policies.py [--sets 200] [--policies exclusive,marble,equal,optimus,planner]
        [--goal both|makespan|jct] [--eps 1] [--budget 200] [--arrivals [0.5]] [--wrong 0.15 | --no-profiles]
        [--come-and-go]
        [--only-family NAME] [--jobs-max 100] [--sizes uniform] [--first-seed 0] [--workers 2] [--quick]
        [--output FILE | --json]

The sets are those of `hpcsched.testing.families`: the same seeds give the same sets and, but for planning
times, the same numbers. A policy may carry options: `--policies planner:goal=jct:eps=inf,planner`; --goal,
--eps and --budget are for a planner without its own.

MARBLE and `exclusive`, which all others are measured by, always go by exact profiles. With --wrong and
--no-profiles the others go by wrong ones or by none, while jobs run by the exact ones; MARBLE with the same
wrong ones then has a line of its own. With --come-and-go each set has one host that stays, and others
that come and go.

The raw ratios of all sets are written to benchmarks/results/, or printed with --json.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing import Pool
from pathlib import Path
from typing import Any

from common import Row, median, ms, percentile
from machine import headline, machine
from run_all import keep

from hpcsched.core.model import JobState
from hpcsched.core.plan import Plan
from hpcsched.core.profile import Profile
from hpcsched.policy import POLICIES, make_policy
from hpcsched.policy.options import NumberOption
from hpcsched.sim.blocks import Block, joining, placed
from hpcsched.sim.bounds import BoundJob, lower_bound_s, mean_jct_bound_s
from hpcsched.sim.engine import Simulation
from hpcsched.testing.families import FAMILIES, SIZE_LAWS, JobSet, come_and_go, random_set, wrong

HERE = Path(__file__).parent
BASELINES = ("marble", "exclusive")
SAME = "marble, same profiles"
DEFAULT = "exclusive,marble,equal,optimus,planner"
JUDGED = {"makespan": "makespan_over_marble", "mean JCT": "jct_over_marble", "latest job": "latest"}
HEAD = (
    "policy",
    "makespan / bound",
    "makespan / MARBLE",
    "mean JCT / bound",
    "mean JCT / MARBLE",
    "latest job",
    "GPU-h",
    "switches",
    "planning",
    "longest plan",
)


@dataclass(frozen=True)
class Outcome:
    """What one job set took under one policy; `jct_s` by job, in the order of the set."""

    makespan_s: float
    jct_s: tuple[float, ...]
    gpu_hours: float
    switches: float
    plans_s: tuple[float, ...]

    @property
    def mean_jct_s(self) -> float:
        return sum(self.jct_s) / len(self.jct_s)


@dataclass(frozen=True)
class Task:
    """One job set to simulate: its seed, and the program's options."""

    seed: int
    options: argparse.Namespace


def play(
    jobs: JobSet,
    policy: str,
    options: Mapping[str, Any],
    beliefs: Sequence[Profile],
    blocks: Sequence[Block] = (),
) -> Outcome:
    """Simulate a set under a policy that goes by these profiles, on its own host or on those of `blocks`."""
    truth = None if beliefs == jobs.profiles else jobs.profiles
    simulation = Simulation(
        jobs.jobs,
        beliefs,
        gpus=0 if blocks else jobs.gpus,
        policy=policy,
        options=options,
        stories=False,
        truth=truth,
        happenings=joining(placed(blocks)),
    )
    plans_s: list[float] = []
    simulation.machine.make_plan = _timed(simulation.machine.make_plan, plans_s)
    done = simulation.run()
    by_name = {job.spec.name: job for job in done.run.jobs.values()}
    ends = [by_name[spec.name] for spec in jobs.jobs]
    if any(job.state is not JobState.COMPLETED for job in ends):
        raise RuntimeError(f"{jobs.name} under {policy}: not all jobs completed")
    attempts = [attempt for job in ends for attempt in job.attempts]
    return Outcome(
        makespan_s=max(job.ended_s for job in ends),
        jct_s=tuple(job.ended_s - job.spec.submit_at for job in ends),
        gpu_hours=sum(len(a.gpus) * (a.end_s - a.start_s) for a in attempts) / 3600,
        switches=sum(job.suspensions for job in ends) / len(ends),
        plans_s=tuple(plans_s),
    )


def _timed(make_plan: Callable[[], Plan], taken_s: list[float]) -> Callable[[], Plan]:
    def timed() -> Plan:
        begun = time.process_time()
        try:
            return make_plan()
        finally:
            taken_s.append(time.process_time() - begun)

    return timed


def compare(task: Task) -> tuple[str, dict[str, dict[str, float]]]:
    """The set's name; and its ratios and counts by policy."""
    options = task.options
    jobs = random_set(
        task.seed,
        options.only_family,
        arrivals=options.arrivals,
        most_jobs=options.jobs_max,
        sizes=options.sizes,
    )
    beliefs = jobs.profiles
    if options.no_profiles:
        beliefs = ()
    elif options.wrong:
        beliefs = wrong(jobs.profiles, task.seed, options.wrong)
    models = {p.model: p for p in jobs.profiles}
    work = [BoundJob(profile=models[j.model], steps=j.steps, submit_s=j.submit_at) for j in jobs.jobs]
    blocks = come_and_go(jobs) if options.come_and_go else ()
    gpus = 0 if blocks else jobs.gpus
    bound_s, jct_bound_s = (
        lower_bound_s(work, gpus, blocks=blocks),
        mean_jct_bound_s(work, gpus, blocks=blocks),
    )

    outcomes = {name: play(jobs, name, {}, jobs.profiles, blocks) for name in BASELINES}
    for label, (name, own) in options.specs.items():
        if label not in BASELINES:
            outcomes[label] = play(jobs, name, own, beliefs, blocks)
    marble, exclusive = (outcomes[name] for name in BASELINES)
    rows = {}
    for label in options.specs:
        out = outcomes[label]
        latest = [max(pair) for pair in zip(marble.jct_s, exclusive.jct_s, strict=True)]
        rows[label] = {
            "makespan_over_bound": out.makespan_s / bound_s,
            "makespan_over_marble": out.makespan_s / marble.makespan_s,
            "jct_over_bound": out.mean_jct_s / jct_bound_s,
            "jct_over_marble": out.mean_jct_s / marble.mean_jct_s,
            "latest": max(mine / theirs for mine, theirs in zip(out.jct_s, latest, strict=True)),
            "gpu_hours_over_marble": out.gpu_hours / marble.gpu_hours,
            "switches_per_job": out.switches,
            "planning_s": sum(out.plans_s),
            "longest_plan_s": max(out.plans_s, default=0.0),
            "plans": len(out.plans_s),
        }
    return jobs.name, rows


# --- what is printed ------------------------------------------------------------------------


def columns(found: Mapping[str, dict[str, float]]) -> list[str]:
    """The table's cells for one policy; `found` are its ratios by set."""

    def samples(key: str) -> list[float]:
        return [row[key] for row in found.values()]

    def spread(key: str, *, worst: bool = True) -> str:
        x = samples(key)
        text = f"{median(x):.3f} (p95 {percentile(x, 0.95):.2f}"
        return text + (f", worst {max(x):.2f})" if worst else ")")

    plans_s = [s for s in samples("planning_s") if s]
    return [
        spread("makespan_over_bound", worst=False),
        spread("makespan_over_marble"),
        spread("jct_over_bound", worst=False),
        spread("jct_over_marble"),
        f"{median(samples('latest')):.2f} (worst {max(samples('latest')):.2f})",
        f"{median(samples('gpu_hours_over_marble')):.2f}",
        f"{median(samples('switches_per_job')):.2f}",
        f"{ms(median(plans_s))} (worst {ms(max(plans_s))})" if plans_s else "",
        ms(max(samples("longest_plan_s"))) if plans_s else "",
    ]


def rows(label: str, found: Mapping[str, dict[str, float]]) -> list[Row]:
    """The lines that `run_all.py` prints."""
    cells = dict(zip(HEAD[1:], columns(found), strict=True))
    about = f"{len(found)} random job sets, {label}"
    return [Row(f"{about}: {what}", "", cells[what]) for what in ("makespan / MARBLE", "mean JCT / MARBLE")]


def tables(results: Mapping[str, Mapping[str, dict[str, float]]]) -> str:
    """All policies; the worst sets of each; and the gap to the bound family by family."""
    lines = [_line(HEAD), _line(["---"] * len(HEAD))]
    lines += [_line([label, *columns(found)]) for label, found in results.items()]
    lines += [
        "",
        "Medians over the sets. Latest job: the largest of a job's end - submit over the larger of that",
    ]
    lines += [
        "under MARBLE and exclusive. GPU-h: over MARBLE's. Switches: for each job. Planning: CPU time.",
        "",
    ]
    for label, found in results.items():
        worst = [max(found, key=lambda name, key=key: found[name][key]) for key in JUDGED.values()]
        if label != "marble":
            said = ", ".join(f"{what} {name}" for what, name in zip(JUDGED, worst, strict=True))
            lines.append(f"Worst sets under {label}: {said}")
    for label, found in results.items():
        if SAME in results and label not in (*BASELINES, SAME):
            same = results[SAME]
            for what, key in list(JUDGED.items())[:2]:
                over = [row[key] / same[name][key] for name, row in found.items()]
                said = f"median {median(over):.3f}, p95 {percentile(over, 0.95):.2f}, worst {max(over):.2f}"
                lines.append(f"{what} of {label} over that of {SAME}: {said}")
    names = next(iter(results.values()))
    families = [f for f in FAMILIES if any(name.startswith(f) for name in names)]
    head = ["makespan / bound, median", *families]
    lines += ["", _line(head), _line(["---"] * len(head))]
    for label, found in results.items():
        by_family = [[r for name, r in found.items() if name.startswith(family)] for family in families]
        gaps = [f"{median([r['makespan_over_bound'] for r in rows]):.3f} ({len(rows)})" for rows in by_family]
        lines.append(_line([label, *gaps]))
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


# --- the command line -----------------------------------------------------------------------


def specs(options: argparse.Namespace) -> dict[str, tuple[str, dict[str, Any]]]:
    """Name and options of each policy, by label; what the policies do not accept raises ConfigError."""
    found = {}
    for label in options.policies.split(","):
        name, *pairs = label.strip().split(":")
        own: dict[str, Any] = dict(pair.split("=", 1) for pair in pairs)
        if name == "planner":
            given = {"goal": options.goal, "eps": options.eps, "budget": options.budget}
            own = {**{key: value for key, value in given.items() if value is not None}, **own}
        if name in POLICIES or options.policies != DEFAULT:
            make_policy(name, own, where="--policies")
            found[label.strip()] = (name, own)
    if "marble" in found and (options.wrong or options.no_profiles):
        found[SAME] = ("marble", {})
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare policies on random job sets.")
    parser.add_argument("--sets", type=int, default=200, help="how many job sets (200)")
    parser.add_argument("--first-seed", type=int, default=0, help="the seed of the first one (0)")
    parser.add_argument("--policies", default=DEFAULT, metavar="P[:K=V...],...")
    parser.add_argument("--goal", help="the planner's")
    parser.add_argument("--eps", help="the planner's")
    parser.add_argument("--budget", help="the planner's")
    parser.add_argument(
        "--arrivals",
        type=NumberOption(least=0).read,
        nargs="?",
        const=0.5,
        default=0.0,
        help="jobs come over this share of the time their work takes (0.5), not all at once",
    )
    beliefs = parser.add_mutually_exclusive_group()
    beliefs.add_argument(
        "--wrong", type=NumberOption(least=0).read, default=0.0, help="profiles are wrong by this"
    )
    beliefs.add_argument("--no-profiles", action="store_true", help="policies know no profiles")
    parser.add_argument("--come-and-go", action="store_true", help="on hosts that come and go")
    parser.add_argument("--only-family", choices=sorted(FAMILIES))
    parser.add_argument("--jobs-max", type=int, default=100)
    parser.add_argument(
        "--sizes", choices=SIZE_LAWS, default=SIZE_LAWS[0], help="how the numbers of jobs are drawn"
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--output", type=Path, metavar="FILE", help="where to write the ratios")
    parser.add_argument("--json", action="store_true", help="print everything as JSON instead of tables")
    parser.add_argument("--quick", action="store_true", help="a few small sets: shows that it works")
    options = parser.parse_args()
    if options.quick:
        options.sets, options.jobs_max = min(options.sets, 4), min(options.jobs_max, 10)
    options.specs = specs(options)
    return options


def main() -> int:
    options = parse()
    about = machine()
    tasks = [Task(options.first_seed + i, options) for i in range(options.sets)]
    results: dict[str, dict[str, dict[str, float]]] = {label: {} for label in options.specs}
    # So that the workers are ended on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with Pool(options.workers, signal.signal, (signal.SIGTERM, signal.SIG_DFL)) as pool:
        for number, (name, by_policy) in enumerate(pool.imap(compare, tasks), 1):
            for label, row in by_policy.items():
                results[label][name] = row
            if sys.stderr.isatty():
                print(f"\r{number} of {options.sets} sets", end="", file=sys.stderr, flush=True)
    asked = {key: value for key, value in vars(options).items() if key not in ("output", "json", "specs")}
    page = {
        "schema": 1,
        "quick": options.quick,
        "machine": about,
        "options": asked,
        "sets": list(next(iter(results.values()))),
        "results": {
            f"{label}_{key}": [round(row[key], 5) for row in found.values()]
            for label, found in results.items()
            for key in next(iter(found.values()))
        },
        "rows": [asdict(row) for label, found in results.items() for row in rows(label, found)],
    }
    output = options.output
    if output is None and not options.quick and not options.json:
        output = HERE / "results" / f"{about['date'][:10]}-policies{_variant(options)}.json"
    if output:
        keep(page, output)
    if options.json:
        print(json.dumps(page))
    else:
        last = options.first_seed + options.sets - 1
        print(f"{headline(about)}\n\n{options.sets} job sets, seeds {options.first_seed} to {last}\n")
        print(tables(results))
    return 0


def _variant(options: argparse.Namespace) -> str:
    """What is not the default, for the file's name."""
    words = [options.only_family, options.goal, f"eps-{options.eps}" if options.eps else None]
    words += [f"arrivals-{options.arrivals:g}"] if options.arrivals else []
    words += [f"wrong-{options.wrong:g}"] if options.wrong else []
    words += [options.sizes] if options.sizes != SIZE_LAWS[0] else []
    words += ["come-and-go"] if options.come_and_go else []
    words += ["no-profiles"] if options.no_profiles else []
    return "".join(f"-{word}" for word in words if word)


if __name__ == "__main__":
    sys.exit(main())
