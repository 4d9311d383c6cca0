"""What packing gains a Hyperband search: a real one on handwritten digits, and the paper's by simulation.

    python benchmarks/packed_hyperband.py [--json] [--quick]

The real one (R = 27, eta = 3) is run on two CPU slots with packing and without, in turn, and has to find the
same winner. The other is the search of pack, section 5.4 (R = 81, eta = 3, the 1,056 configurations of Table
3, epochs of 10,000 samples), with several seeds, on one and on four simulated devices. Their speeds are
measured here first: a step of a small MLP and of a small CNN alone, with its own input, and packed by two to
eight, at three batch sizes and interpolated between them, and packs whose members have different batches.
Starts cost nothing there, and models of two activations gain nothing from each other. Bounds say what those
costs allow; ASHA and halving get as many epochs as Hyperband.
"""

from __future__ import annotations

import argparse
import re
import time
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import ROOT, Report, Scratch, hpcsched, main, median

if TYPE_CHECKING:
    from hpcsched.core.jobs import Job
    from hpcsched.core.machine import Machine
    from hpcsched.core.model import JobSpec

SEARCH = ROOT / "jobscripts" / "search-digits.toml"
REPEATS = 3
PAPER = {"batch": "1.2 to 1.8", "random": "1.1 to 2.5", "knn": "1.2 to 2.7"}
"""Speedups of Table 4, DenseNet-121 to MLP-3."""

DEVICES = (1, 4)
BATCHES = (20, 45, 70)
COUNTS = (1, 2, 4, 8)
SEEDS = (1, 2, 3, 4, 5)
"""Searches of the same space with other trials."""

SAMPLES = 10_000
GOAL = 1.5
SPACE = """
schema = 1
trainer = "simulated:Model"
metric = "accuracy"
mode = "max"
R = {R}
eta = 3
seed = {seed}
exact = false
architecture = ["activation"]
packing = "{packing}"
[space]
batch = {{ choice = [20, 25, 30, 35, 40, 45, 50, 55, 60, 65, 70] }}
optimizer = {{ choice = ["adam", "sgd", "adagrad", "momentum"] }}
lr = {{ choice = [0.000001, 0.00001, 0.0001, 0.001, 0.01, 0.1] }}
activation = {{ choice = ["sigmoid", "leaky_relu", "tanh", "relu"] }}
"""


def measure(options: argparse.Namespace) -> Report:
    report = Report()
    _live(report, quick=options.quick)
    for kind in ("mlp", "cnn"):
        _simulated(report, kind, quick=options.quick)
    return report


# -- the real one -------------------------------------------------------------------------------------


def _live(report: Report, *, quick: bool) -> None:
    text = re.sub("(?m)^against.*\\n", "", SEARCH.read_text())
    if quick:
        text = text.replace("R = 27", "R = 3")
    found: dict[str, list[dict[str, Any]]] = {}
    order = ["off", "auto"] * (1 if quick else REPEATS) + ([] if quick else ["knn", "batch", "random"])
    for packing in order:
        with Scratch.make() as scratch:
            file = scratch.folder / "search.toml"
            file.write_text(text)
            words = ("--packing", packing, "--devices", "cpu:2", "--dir", scratch.folder / "run")
            command = hpcsched("tune", file, *words, "--quiet", "--json")
            began = time.monotonic()
            page = scratch.json(command, deadline_s=900)
            found.setdefault(packing, []).append({**page, "process_s": time.monotonic() - began})
    walls = {packing: [page["wall_s"] for page in pages] for packing, pages in found.items()}
    report.results |= {f"digits_{packing}_wall_s": times for packing, times in walls.items()}
    off = median(walls["off"])
    best = {page["best"]["job"] for pages in found.values() for page in pages}
    trainings = len(found["off"][0]["trials"])
    for packing, times in walls.items():
        ratio = off / median(times)
        goal = "at least 3x" if packing == "auto" else ""
        report.row(
            f"Hyperband on digits, {trainings} trials, packing {packing}",
            f"{median(times):.1f} s ({ratio:.2f}x)",
            goal=goal,
            ok=ratio >= 3 if goal else None,
        )
    report.row("... the winners", ", ".join(sorted(best)), goal="the same", ok=len(best) == 1)


# -- the paper's, simulated ----------------------------------------------------------------------------


def _simulated(report: Report, kind: str, *, quick: bool) -> None:
    costs = {batch: _costs(kind, batch, quick=quick) for batch in (BATCHES[:1] if quick else BATCHES)}
    for batch, (alone_s, packed) in costs.items():
        report.results[f"{kind}_{batch}_separate_s"] = [alone_s]
        report.results |= {f"{kind}_{batch}_packed_{n}_s": [step_s] for n, step_s in packed.items()}
    mixed = {}
    for n in COUNTS[1:2] if quick else COUNTS[1:]:
        shares = _mixed(kind, n, quick=quick)
        report.results[f"{kind}_mixed_{n}_share"], mixed[n] = shares, median(shares)
        report.row(
            f"{n} of `{kind}`, each at a batch of its own, as one: the time of separate ones",
            f"{mixed[n]:.0%}",
        )
    models = Models(costs, mixed)
    seeds = SEEDS[:1] if quick else SEEDS
    for devices in DEVICES:
        where = "1 device" if devices == 1 else f"{devices} devices"
        off = [_search_s("off", models, devices, seed, quick=quick) for seed in seeds]
        for packing in ("batch", "random", "knn", "auto"):
            walls = [_search_s(packing, models, devices, seed, quick=quick) for seed in seeds]
            report.results[f"{kind}_{packing}_on_{devices}_search_s"] = walls
            gains = sorted(alone / wall for alone, wall in zip(off, walls, strict=True))
            paper = f"; paper: {PAPER[packing]}x" if packing in PAPER and devices == 1 else ""
            goal = f"at least {GOAL}x" if packing == "auto" else ""
            report.row(
                f"the paper's search, simulated, {kind}, {where}, packing {packing}",
                f"{median(gains):.2f}x ({gains[0]:.2f} to {gains[-1]:.2f}{paper})",
                goal=goal,
                ok=median(gains) >= GOAL if goal else None,
            )
        report.results[f"{kind}_off_on_{devices}_search_s"] = off
    _asha(report, kind, models, seeds, quick=quick)
    for mix, words in ((False, ""), (True, ", if batches of all sizes were one at the cost of the largest")):
        bounds = sorted(_bound(models, seed, mix=mix, quick=quick) for seed in seeds)
        report.results[f"{kind}_bound_{'mixed' if mix else 'alike'}"] = bounds
        report.row(
            f"... bound, {kind}: all trials of a model as one from the start, without a limit{words}",
            f"{median(bounds):.2f}x ({bounds[0]:.2f} to {bounds[-1]:.2f})",
        )


def _asha(report: Report, kind: str, models: Models, seeds: Sequence[int], *, quick: bool) -> None:
    """ASHA and halving with about the budget that Hyperband has, on four devices: how long each takes, and
    when the first trial has been trained to its end."""
    budget, trials = (49, 16) if quick else (1581, 431)
    methods = {
        "Hyperband": "",
        "halving": f'method = "halving"\ntrials = {trials}\n',
        "ASHA": f'method = "asha"\nbudget = {budget}\n',
    }
    for packing in ("off", "auto"):
        for method, lines in methods.items():
            found = [_search(packing, models, 4, seed, quick=quick, rest=lines) for seed in seeds]
            sets = [list(machine.run.jobs.values()) for machine in found]
            walls = [max(job.ended_s or 0.0 for job in jobs) for jobs in sets]
            whole = 9.0 if quick else 81.0
            firsts = [
                min(job.ended_s or 0.0 for job in jobs if job.spec.args["epochs"] == whole) for jobs in sets
            ]
            key = f"{kind}_{method.lower()}_{packing}"
            report.results |= {f"{key}_search_s": walls, f"{key}_first_s": firsts}
            report.row(
                f"{method}, {budget} epochs, simulated, {kind}, 4 devices, packing {packing}",
                f"{median(walls):.1f} s, the first whole training after {median(firsts):.1f} s",
            )


@dataclass
class Models:
    """The measured costs of a kind of model: by batch, seconds of a step alone and of one of so many as one,
    and by number, the share of the time of separate trainings that so many of different batches take."""

    costs: Mapping[int, tuple[float, dict[int, float]]]
    mixed: Mapping[int, float]

    def profile(self, name: str, batch: int) -> Any:
        from hpcsched.core.profile import Profile

        alone_s = _between(batch, {b: alone for b, (alone, _) in self.costs.items()})
        counts = next(iter(self.costs.values()))[1]
        packed = {n: _between(batch, {b: packed[n] for b, (_, packed) in self.costs.items()}) for n in counts}
        return Profile(
            model=name, device="simulated", throughput={1: 1 / alone_s}, global_batch=batch, packed_s=packed
        )

    def interference(self) -> Any:
        """The true speeds of packs: models of one activation go in the better way of two, those of each batch
        as one and so one after the other, or all of them together, as was measured; models of several
        activations go one after the other."""
        from hpcsched.sim.interference import Interference, a_sample, pack_of

        mixed = self.mixed

        class Measured(Interference):
            def factor(self, machine: Machine, job: Job) -> float:
                pack = pack_of(machine, job)
                if not pack:
                    return super().factor(machine, job)
                kinds = Counter(member.spec.model for member in pack)
                alike_s: dict[str, float] = {}
                alone_s: dict[str, float] = {}
                for member in pack:
                    activation = member.spec.args["activation"]
                    own_s = a_sample(machine, member, kinds[member.spec.model])
                    alike_s[activation] = alike_s.get(activation, 0.0) + own_s
                    alone_s[activation] = alone_s.get(activation, 0.0) + a_sample(machine, member)
                together_s = 0.0
                for activation, separate_s in alone_s.items():
                    n = sum(member.spec.args["activation"] == activation for member in pack)
                    share = _between(min(n, max(mixed)), {1: 1.0, **mixed})
                    together_s += min(alike_s[activation], separate_s * share)
                return min(1.0, a_sample(machine, job) / together_s)

        return Measured()


def _model(args: Mapping[str, Any]) -> str:
    """Models of one architecture and batch size."""
    return f"{args['activation']}-{args['batch']}"


def _accuracy(args: Mapping[str, Any]) -> float:
    """Anything that does not depend on the packing: who wins does not change what a search costs."""
    chosen = {key: value for key, value in args.items() if key != "epochs"}
    return zlib.crc32(repr(sorted(chosen.items())).encode()) / 2**32


def _bound(models: Models, seed: int, *, mix: bool, quick: bool) -> float:
    """How many times as long the trials of a search take separately as if all of a model (`mix`: of an
    activation) were computed as one from the start, without a limit, at the speed of eight at the most."""
    from hpcsched.planning.packing.joining import costs_of
    from hpcsched.planning.packing.speeds import MemberKind, Speeds, shaped
    from hpcsched.tuning import TrialOutcome, Tuning, parse_search

    tuning = Tuning(
        parse_search(SPACE.format(R=9 if quick else 81, packing="auto", seed=seed), where="search")
    )
    outcomes: dict[str, TrialOutcome] = {}
    while not tuning.finished(outcomes):
        for job in tuning.jobs(outcomes):
            outcomes.setdefault(job.name, TrialOutcome("completed", {"accuracy": _accuracy(job.args)}))
    whole = {job.trial: job for job in tuning.jobs(outcomes)}
    sets: dict[str, list[Any]] = {}
    for job in whole.values():
        sets.setdefault(job.args["activation"] if mix else _model(job.args), []).append(job)
    separate_s = together_s = 0.0
    for jobs in sets.values():
        steps = [max(1, round(job.budget * SAMPLES / job.args["batch"])) for job in jobs]
        profiles = [models.profile(_model(job.args), job.args["batch"]) for job in jobs]
        separate_s += sum(n / profile.rate(1) for n, profile in zip(steps, profiles, strict=True))
        costs = costs_of(max(profiles, key=lambda profile: profile.global_batch))
        assert costs is not None
        shape = shaped(Counter(MemberKind(costs.key, n) for n in steps))
        together_s += Speeds([costs]).time_s(shape)
    return separate_s / together_s


def _costs(kind: str, batch: int, *, quick: bool) -> tuple[float, dict[int, float]]:
    """Seconds of a step alone, and of one of so many as one in the fastest mode: medians of CPU time, one
    thread."""
    import torch
    from pack_steps import Case

    torch.set_num_threads(1)
    rounds = 1 if quick else 5
    found = {n: Case(kind, n, batch).run(1, rounds) for n in (COUNTS[:2] if quick else COUNTS)}
    packed = {n: median(samples["auto_step_s"]) for n, samples in found.items()}
    return median(found[1]["separate_step_s"]), packed


def _mixed(kind: str, n: int, *, quick: bool) -> list[float]:
    """The share of the time of separate trainings that a pack of so many takes, each with a batch of its own,
    spread over those of the search."""
    from pack_steps import Case

    first, last = BATCHES[0], BATCHES[-1]
    batches = [round(first + (last - first) * i / (n - 1)) for i in range(n)]
    samples = 2_000 if quick else 20_000
    found = (Case(kind, n, 0, batches).samples_s("auto", samples) for _ in range(1 if quick else 5))
    return [packed_s / alone_s for alone_s, packed_s in found]


def _search_s(packing: str, models: Models, devices: int, seed: int, *, quick: bool, rest: str = "") -> float:
    machine = _search(packing, models, devices, seed, quick=quick, rest=rest)
    return max(job.ended_s or 0.0 for job in machine.run.jobs.values())


def _search(packing: str, models: Models, devices: int, seed: int, *, quick: bool, rest: str = "") -> Machine:
    """The paper's search as a simulated run; `rest`: more lines of its file."""
    from hpcsched.sim.engine import Simulation
    from hpcsched.tuning import parse_search, source_of
    from hpcsched.tuning.feeding import Feeder

    text = rest + SPACE.format(R=9 if quick else 81, packing=packing, seed=seed)
    feed = Feeder(source_of(parse_search(text, where="search")), workdir=Path())

    def jobs(machine: Machine) -> list[JobSpec]:
        found = []
        for spec in feed(machine):
            before = machine.run.job_of(spec.continues or "")
            done = before.spec.args["epochs"] if before else 0.0
            assert spec.epochs is not None
            steps = max(1, round((spec.epochs - done) * SAMPLES / spec.args["batch"]))
            args = {**spec.args, "epochs": spec.epochs}
            found.append(replace(spec, model=_model(spec.args), args=args, steps=steps, training=None))
        return found

    profiles = [
        models.profile(_model({"activation": activation, "batch": batch}), batch)
        for activation in ("sigmoid", "leaky_relu", "tanh", "relu")
        for batch in range(20, 71, 5)
    ]
    machine = Simulation(
        (),
        profiles,
        gpus=devices,
        source=jobs,
        metrics=lambda spec: {"accuracy": _accuracy(spec.args)},
        interference=models.interference(),
        stories=False,
    ).run()
    assert machine.run.finished
    return machine


def _between(x: float, points: Mapping[int, float]) -> float:
    """On the line through the two measured points around x; through the ends beyond them."""
    known = sorted(points.items())
    if len(known) == 1:
        return known[0][1]
    upper = next((i for i, (at, _) in enumerate(known) if at >= x), len(known) - 1)
    (x0, y0), (x1, y1) = known[max(0, upper - 1)], known[max(1, upper)]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


if __name__ == "__main__":
    main(__doc__.splitlines()[0], measure)
