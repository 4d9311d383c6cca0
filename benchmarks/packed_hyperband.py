"""What packing gains a Hyperband search: a real one on handwritten digits, and the paper's by simulation.

    python benchmarks/packed_hyperband.py [--json] [--quick]

The real one (R = 27, eta = 3) is run on two CPU slots with packing and without, in turn, and has to find the
same winner. The other is the search of pack, section 5.4 (R = 81, eta = 3, the 1,056 configurations of Table
3, epochs of 10,000 samples), on one and on four simulated devices. Their speeds are measured here first: a
step of a small MLP and of a small CNN alone, with its own input, and packed by two to eight, at three batch
sizes and interpolated between them. Starts cost nothing there, and models of two architectures or batch sizes
gain nothing from each other.
"""

from __future__ import annotations

import argparse
import re
import time
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import ROOT, Report, Scratch, hpcsched, main, median

SEARCH = ROOT / "jobscripts" / "search-digits.toml"
REPEATS = 3
PAPER = {"batch": "1.2 to 1.8", "random": "1.1 to 2.5", "knn": "1.2 to 2.7"}
"""Speedups of Table 4, DenseNet-121 to MLP-3."""

DEVICES = (1, 4)
BATCHES = (20, 45, 70)
COUNTS = (1, 2, 4, 8)
SAMPLES = 10_000
SPACE = """
schema = 1
trainer = "simulated:Model"
metric = "accuracy"
mode = "max"
R = {R}
eta = 3
seed = 1
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
        goal = "at least 2x" if packing == "auto" else ""
        report.row(
            f"Hyperband on digits, {trainings} trials, packing {packing}",
            f"{median(times):.1f} s ({ratio:.2f}x)",
            goal=goal,
            ok=ratio >= 2 if goal else None,
        )
    report.row("... the winners", ", ".join(sorted(best)), goal="the same", ok=len(best) == 1)


# -- the paper's, simulated ----------------------------------------------------------------------------


def _simulated(report: Report, kind: str, *, quick: bool) -> None:
    costs = {batch: _costs(kind, batch, quick=quick) for batch in (BATCHES[:1] if quick else BATCHES)}
    for batch, (alone_s, packed) in costs.items():
        report.results[f"{kind}_{batch}_separate_s"] = [alone_s]
        report.results |= {f"{kind}_{batch}_packed_{n}_s": [step_s] for n, step_s in packed.items()}
    for devices in DEVICES:
        walls = {}
        for packing in ("off", "batch", "random", "knn", "auto"):
            walls[packing] = _search_s(packing, costs, devices, quick=quick)
            report.results[f"{kind}_{packing}_on_{devices}_search_s"] = [walls[packing]]
        for packing, wall_s in walls.items():
            paper = f"; paper: {PAPER[packing]}x" if packing in PAPER and devices == 1 else ""
            where = "1 device" if devices == 1 else f"{devices} devices"
            report.row(
                f"the paper's search, simulated, {kind}, {where}, packing {packing}",
                f"{wall_s:.0f} s ({walls['off'] / wall_s:.2f}x{paper})",
            )


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


def _search_s(
    packing: str, costs: Mapping[int, tuple[float, dict[int, float]]], devices: int, *, quick: bool
) -> float:
    from hpcsched.core.machine import Machine
    from hpcsched.core.model import JobSpec
    from hpcsched.sim.engine import Simulation
    from hpcsched.tuning import Tuning, parse_search
    from hpcsched.tuning.feeding import Feeder

    text = SPACE.format(R=9 if quick else 81, packing=packing)
    feed = Feeder(Tuning(parse_search(text, where="search")), workdir=Path())

    def model(args: Mapping[str, Any]) -> str:
        """Models of one architecture and batch size can be computed as one."""
        return f"{args['activation']}-{args['batch']}"

    def jobs(machine: Machine) -> list[JobSpec]:
        found = []
        for spec in feed(machine):
            before = machine.run.job_of(spec.continues or "")
            done = before.spec.args["epochs"] if before else 0.0
            assert spec.epochs is not None
            steps = max(1, round((spec.epochs - done) * SAMPLES / spec.args["batch"]))
            args = {**spec.args, "epochs": spec.epochs}
            found.append(replace(spec, model=model(spec.args), args=args, steps=steps, training=None))
        return found

    def accuracy(spec: JobSpec) -> dict[str, float]:
        """Anything that does not depend on the packing: who wins does not change what a search costs."""
        chosen = {key: value for key, value in spec.args.items() if key != "epochs"}
        return {"accuracy": zlib.crc32(repr(sorted(chosen.items())).encode()) / 2**32}

    batches = range(20, 71, 5)
    activations = ("sigmoid", "leaky_relu", "tanh", "relu")
    profiles = [
        _profile(model({"activation": activation, "batch": batch}), batch, costs)
        for activation in activations
        for batch in batches
    ]
    machine = Simulation((), profiles, gpus=devices, source=jobs, metrics=accuracy, stories=False).run()
    assert machine.run.finished
    return max(job.ended_s or 0.0 for job in machine.run.jobs.values())


def _profile(name: str, batch: int, costs: Mapping[int, tuple[float, dict[int, float]]]) -> Any:
    from hpcsched.core.profile import Profile

    alone_s = _between(batch, {b: alone for b, (alone, _) in costs.items()})
    counts = next(iter(costs.values()))[1]
    packed = {n: _between(batch, {b: packed[n] for b, (_, packed) in costs.items()}) for n in counts}
    return Profile(
        model=name, device="simulated", throughput={1: 1 / alone_s}, global_batch=batch, packed_s=packed
    )


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
