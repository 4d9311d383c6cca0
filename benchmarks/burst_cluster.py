"""Samples a second of 8 GPUs: data parallel, burst, burst with background jobs, and static partitions.

    python benchmarks/burst_cluster.py [--json] [--quick] [--draw]

The comparisons of the DeepPool paper's Figures 9 and 10, simulated from the layers' measured times on an
A100: plans by the planner, each GPU a device that does not preempt (`simulated.cluster`). Foreground and
background train the same model. Nothing here was measured on GPUs but the layers. `--draw` makes
benchmarks/results/burst-cluster.svg.
"""

from __future__ import annotations

import argparse
import json
import sys
from itertools import product
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from common import ROOT, Report, main
from simulated.cluster import Throughput, background_alone, collocated, partition

from hpcsched.planning.burst.costs import Interconnect
from hpcsched.planning.burst.graph import LayerProfile
from hpcsched.planning.burst.planner import plan

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GPUS = 8
MODELS = (("vgg16", 32), ("wrn101-2", 16), ("inception-v3", 32))
"""And their global batches, as in Figure 9."""

NETWORK = Interconnect(bandwidth_bytes_s=600e9, latency_s=1e-5)
LIMITS = (2.0, inf)
BACKGROUND_BATCHES = (2, 8)
THRESHOLDS = (0.05, 0.2, None)
"""Of the slowdown of a chunk from which the background is held back; None: from none."""

PARTITIONS = (1, 2, 4, 8)
"""GPUs of the foreground job; the others have a background job each."""


def measure(options: argparse.Namespace) -> Report:
    report = Report()
    drawn = {}
    for name, batch in MODELS[: 1 if options.quick else None]:
        path = ROOT / "profiles" / "layers" / f"{name}-a100.json"
        profile = LayerProfile.parse(json.loads(path.read_text(encoding="utf-8")), where=str(path))
        drawn[profile.model] = points = _points(profile, batch, quick=options.quick)
        for kind, found in points.items():
            report.results[f"{name}_{kind}_foreground"] = [each.foreground for _, each in found]
            report.results[f"{name}_{kind}_background"] = [each.background for _, each in found]
        _rows(report, profile.model, points)
    if options.draw:
        _draw(drawn, ROOT / "benchmarks" / "results" / "burst-cluster.svg")
    return report


Points = dict[str, list[tuple[str, Throughput]]]


def _points(profile: LayerProfile, batch: int, *, quick: bool) -> Points:
    points: Points = {"data_parallel": [], "burst": [], "burst_and_background": [], "partition": []}
    one_us = sum(layer.forward_at(batch) + layer.backward_at(batch) for layer in profile.layers)
    points["single"] = [("1 GPU", Throughput(batch / one_us * 1e6, 0.0))]
    points["background_only"] = [
        (f"batch {n}", Throughput(0.0, GPUS * background_alone(profile, n))) for n in BACKGROUND_BATCHES
    ]
    whole = plan(profile, gpus=GPUS, global_batch=batch, network=NETWORK)
    points["data_parallel"] = [("", Throughput(batch / whole.data_parallel_us * 1e6, 0.0))]
    for limit in LIMITS[: 1 if quick else None]:
        made = plan(profile, gpus=GPUS, global_batch=batch, network=NETWORK, amplification=limit)
        points["burst"].append((f"limit {limit:g}", Throughput(batch / made.iter_us * 1e6, 0.0)))
        thresholds = THRESHOLDS[:1] if quick else THRESHOLDS
        for background, threshold in product(BACKGROUND_BATCHES[: 1 if quick else None], thresholds):
            label = f"limit {limit:g}, background batch {background}, threshold {threshold}"
            found = collocated(profile, made, background, threshold=threshold)
            points["burst_and_background"].append((label, found))
            print(f"{profile.model}: {label} ...", file=sys.stderr, flush=True)
    for gpus in PARTITIONS:
        part = plan(profile, gpus=gpus, global_batch=batch, network=NETWORK)
        for background in BACKGROUND_BATCHES:
            rest = partition(profile, part, GPUS, background)
            plain = Throughput(batch / part.data_parallel_us * 1e6, rest.background)
            points["partition"].append((f"{gpus} GPUs, background batch {background}", plain))
    return points


def _rows(report: Report, model: str, points: Points) -> None:
    """Figure 9 in words: totals against data parallel, at two levels of what the foreground may lose."""
    plain = points["data_parallel"][0][1]
    burst = max((each for _, each in points["burst"]), key=lambda each: each.foreground)
    report.row(
        f"{model}: burst against data parallel",
        f"{burst.foreground:.0f} against {plain.foreground:.0f} samples/s "
        f"({burst.foreground / plain.foreground:.2f}x)",
    )
    for kept in (0.95, 0.82):
        good = [
            (label, each)
            for label, each in points["burst_and_background"]
            if each.foreground >= kept * burst.foreground
        ]
        if not good:
            report.row(f"{model}: burst + background, foreground keeps {kept:.0%}", "no such point")
            continue
        label, best = max(good, key=lambda item: item[1].total)
        rivals = [each for _, each in points["partition"] if each.foreground >= best.foreground]
        rival = max((each.total for each in rivals), default=0.0)
        against = f"; the best partition as fast: {rival:.0f}" if rival else "; no partition is as fast"
        report.row(
            f"{model}: burst + background, foreground keeps {kept:.0%}",
            f"{best.foreground:.0f} + {best.background:.0f} = {best.total:.0f} samples/s "
            f"({best.total / plain.total:.2f}x data parallel; {label}){against}",
            goal="paper: 1.2-2.3x data parallel",
        )


def _draw(drawn: dict[str, Points], path: Path) -> None:
    from hpcsched.report.drawing import INK, PALETTE, save_svg

    def draw(figure: Figure) -> None:
        figure.set_size_inches(11, 3.6 * len(drawn))
        rows = figure.subplots(len(drawn), 2, squeeze=False)
        for (model, points), (bars, scatter) in zip(drawn.items(), rows, strict=True):
            burst = max((each for _, each in points["burst"]), key=lambda each: each.foreground)
            kept = [x for _, x in points["burst_and_background"] if x.foreground >= 0.95 * burst.foreground]
            shown = [
                ("DP", points["data_parallel"][0][1]),
                ("BP", burst),
                ("BP + Col", max(kept, key=lambda x: x.total) if kept else burst),
                ("BG only", max((x for _, x in points["background_only"]), key=lambda x: x.total)),
            ]
            names = [name for name, _ in shown]
            foreground = [x.foreground for _, x in shown]
            bars.bar(names, foreground, color=PALETTE[0], label="foreground")
            background = [x.background for _, x in shown]
            bars.bar(names, background, bottom=foreground, color=PALETTE[1], label="background")
            bars.set_title(f"{model}: samples a second, simulated", loc="left", color=INK)
            bars.legend(frameon=False)
            single = points["single"][0][1].foreground
            for kind, marker, colour, name in (
                ("burst_and_background", "o", PALETTE[0], "burst + background"),
                ("partition", "s", PALETTE[5], "static partition"),
            ):
                found = [each for _, each in points[kind]]
                speedups = [each.foreground / single for each in found]
                totals = [each.total for each in found]
                scatter.plot(speedups, totals, marker, color=colour, label=name)
            scatter.set_xlabel("foreground speed-up over one GPU", color=INK)
            scatter.set_ylabel("samples a second, all jobs", color=INK)
            scatter.set_ylim(bottom=0)
            scatter.set_xlim(left=0)
            scatter.legend(frameon=False)
        figure.tight_layout()

    save_svg(draw, path)


if __name__ == "__main__":
    main("cluster throughput with burst plans", measure, "--draw")
