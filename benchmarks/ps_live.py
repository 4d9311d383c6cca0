"""Live searches for a configuration on CPU slots, against every configuration tried by itself.

    python benchmarks/ps_live.py [--json] [--quick]

Two trainings on the cores of this machine: in `network` the servers' links are limited to a few MiB/s, so
that more servers are what helps; in `processes` a worker waits most of the time, as one does that cannot use
more cores (the maximum-utilisation bottleneck), so that more workers help. Each is trained with its numbers
of servers and workers given, one pair after the other, and then with none given. What counts is the speed
when the search has come to rest, and for how long training stood still for each change.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from pathlib import Path
from typing import Any

from common import Report, Scratch, hpcsched, main, median

from hpcsched.core import events as ev
from hpcsched.core.machine import Machine
from hpcsched.core.mechanisms.cpu.layout import said_seats
from hpcsched.core.reasons import Why
from hpcsched.policy import make_policy
from hpcsched.store import journal

TRAINER = '''
import time
import torch
from torch import nn
from hpcsched.worker import Parts, Trainer

class Waits(Trainer):
    """`parameters` to exchange, and `wait_s` for a global batch in which no core is used."""

    def build(self, args):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, args["parameters"] // 16, bias=False), nn.Linear(1, 1))
        x = torch.randn(960, 16)

        def loss(model, batch):
            time.sleep(args["wait_s"] * len(batch[0]) / 96)
            return model[0](batch[0]).square().mean(dim=1) + model[1].weight.sum()

        optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
        return Parts(model=model, optimizer=optimizer, dataset=(x,), global_batch=96, loss=loss)
'''
Counts = tuple[int, ...]
TRAININGS: dict[str, tuple[dict[str, Any], dict[str, Any], Why, Counts, Counts]] = {
    "network": (
        {"parameters": 400_000, "wait_s": 0.05},
        {"link": 40.0},
        Why.NETWORK_BOTTLENECK,
        (1, 2, 4, 7),
        (2, 3, 5),
    ),
    "processes": (
        {"parameters": 1_600, "wait_s": 0.08},
        {},
        Why.UTILISATION_BOTTLENECK,
        (1,),
        (1, 2, 4, 6, 9, 13),
    ),
}
"""Arguments of the trainer, options of its strategy, the bottleneck that is there, and the numbers of servers
and of workers that are tried."""

SETTLED_S, EACH_S = 480.0, 60.0
"""How long a search may take, and that for the shares where the numbers are given."""
MEASURED_S = 120.0
"""How much longer, at most, if nothing was measured by then."""

GOAL = 0.9
STANDS_GOAL_S = 0.06


def measure(options: argparse.Namespace) -> Report:
    report = Report()
    for name, (args, strategy, bottleneck, servers, workers) in TRAININGS.items():
        rates: dict[tuple[int, int], float] = {}
        pairs = [(s, w) for s in servers for w in workers]
        for pair in pairs[:1] if options.quick else pairs:
            given = {"servers": pair[0], "workers": pair[1], "start": 1.0}
            machine = trained(args, {**strategy, **given}, until_s=EACH_S, quick=options.quick)
            rates[pair] = max(rates_of(machine))
            report.results[f"{name}_{pair[0]}_{pair[1]}_rate"] = [rates[pair]]
        machine = trained(args, strategy, until_s=SETTLED_S, quick=options.quick)
        found, (pair, best) = rates_of(machine)[-1], max(rates.items(), key=lambda entry: entry[1])
        job = machine.run.jobs[1]
        report.results[f"{name}_found_rate"] = [found]
        stood = [a.stopped_s for a in job.attempts if a.stopped_s is not None]
        report.results[f"{name}_stood_still_s"] = stood
        report.results[f"{name}_changes"] = [float(len(job.attempts) - 1)]
        seats = job.current.seats
        report.row(
            f"{name}: found {said_seats(seats)} in {len(job.attempts) - 1} changes; best of all tried "
            f"{pair[0]} + {pair[1]}",
            f"{found:.4g} of {best:.4g} steps/s: {found / best:.2f}",
            goal=f">= {GOAL}",
            ok=None if options.quick else found >= GOAL * best,
        )
        seen = sum(note.reason.why is bottleneck for note in job.story)
        report.row(
            f"{name}: named {bottleneck}",
            f"{seen} times",
            goal="once",
            ok=None if options.quick else seen > 0,
        )
        if stood:
            step_s = 1 / min(a.usage.rate for a in job.attempts if a.usage)
            most = max(stood)
            what = f"median and most of {len(stood)}; a step was {1e3 * step_s:.0f} ms"
            report.row(
                f"{name}: training stood still for a change ({what})",
                f"{1e3 * median(stood):.0f} ms, {1e3 * most:.0f} ms",
                goal=f"a step + {1e3 * STANDS_GOAL_S:.0f} ms",
                ok=None if options.quick else most <= step_s + STANDS_GOAL_S,
            )
    return report


def trained(args: dict[str, Any], strategy: dict[str, Any], *, until_s: float, quick: bool) -> Machine:
    """The run of one job until its search rests, or so long and longer if it was not measured by then;
    `quick`: until it was measured once."""
    with Scratch.make() as scratch:
        (scratch.folder / "waits.py").write_text(TRAINER)
        table = {"kind": "ps", "cpus": 2, **strategy}
        (scratch.folder / "set.toml").write_text(
            "schema = 1\n[[job]]\nname = 'x'\ntrainer = 'waits:Waits'\nsteps = 1000000\n"
            f"args = {_toml(args)}\nstrategy = {_toml(table)}\n"
        )
        run = scratch.folder / "run"
        command = hpcsched("run", "set.toml", "--devices", "cpu:2", "--dir", run, "--quiet")
        with scratch.start(command):
            end, deadline = time.monotonic() + until_s, time.monotonic() + until_s + MEASURED_S
            while time.monotonic() < deadline:
                time.sleep(1.0)
                machine = replayed(run / "journal.jsonl")
                job = machine.run.jobs.get(1) if machine else None
                if job is None or not job.attempts or not job.attempts[0].usage:
                    continue
                if quick or job.story[-1].reason.why is Why.SETTLED or time.monotonic() > end:
                    break
        found = replayed(run / "journal.jsonl")
    assert found is not None, "the run has begun"
    return found


def replayed(path: Path) -> Machine | None:
    """The machine that a journal leads to, up to where it was not told to end."""
    machine = Machine(make_policy)
    with contextlib.suppress(OSError):
        if not path.exists():
            return None
    for event, _ in journal.read(path):
        if isinstance(event, ev.DrainRequested):
            break
        machine.handle(event)
    return machine


def rates_of(machine: Machine) -> list[float]:
    """The speeds of the configurations that were measured; RuntimeError if none was."""
    job = machine.run.jobs[1]
    usages = [attempt.usage for attempt in job.attempts if attempt.usage]
    if not usages:
        raise RuntimeError(f"job 1 was never measured: {[str(note.reason) for note in job.story]}")
    return [usage.rate for usage in usages]


def _toml(table: dict[str, Any]) -> str:
    return "{ " + ", ".join(f"{key} = {json.dumps(value)}" for key, value in table.items()) + " }"


if __name__ == "__main__":
    main(__doc__.partition("\n")[0], measure)
