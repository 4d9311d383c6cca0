"""How long it takes to plan VGG-16, WideResNet-101-2 and Inception-v3 on 8 and on 1,024 GPUs.

    python benchmarks/burst_plans.py [--json] [--quick]

Beside each stands our own rewrite of the paper's Algorithm 1, from its text, on the same costs and in turn
with the planner; and what the paper reports (Table 3, on another machine). The authors' own program is not
run here: in the same minutes it took 5 to 14 times as long as the planner (measured from outside). The
layers' times are those of an A100.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

from common import ROOT, Report, main, median, ms

from hpcsched.planning.burst.costs import Interconnect, ModelCosts
from hpcsched.planning.burst.graph import LayerProfile, ProfiledLayer
from hpcsched.planning.burst.planner import plan
from hpcsched.testing.deeppool import RewrittenSearch

CASES = (
    ("vgg16", 8, 32, 0.01, 0.005),
    ("wrn101-2", 8, 16, 0.02, 0.010),
    ("inception-v3", 8, 32, 0.22, 0.020),
    ("vgg16", 1024, 1024, 0.05, 0.020),
    ("wrn101-2", 1024, 1024, 0.11, 0.040),
    ("inception-v3", 1024, 1024, 3.23, 0.180),
)
"""Model, GPUs, global batch, seconds in the paper, most seconds that the median should take."""

NETWORK = Interconnect(bandwidth_bytes_s=600e9, latency_s=1e-5)
"""NVSwitch, as in the paper's Table 2."""

LIMIT = 2.0


def measure(options: argparse.Namespace) -> Report:
    report = Report()
    for model, gpus, batch, paper_s, goal_s in CASES[: 2 if options.quick else None]:
        path = ROOT / "profiles" / "layers" / f"{model}-a100.json"
        profile = LayerProfile.parse(json.loads(path.read_text(encoding="utf-8")), where=str(path))

        def ours(profile: LayerProfile = profile, gpus: int = gpus, batch: int = batch) -> object:
            return plan(profile, gpus=gpus, global_batch=batch, network=NETWORK, amplification=LIMIT)

        def rewrite(profile: LayerProfile = profile, gpus: int = gpus, batch: int = batch) -> object:
            costs = ModelCosts(profile, gpus=gpus, global_batch=batch, network=NETWORK)
            return RewrittenSearch(costs, LIMIT).time_us()

        ours()  # the first call imports
        pairs = [(_seconds(ours, 1)[0], _seconds(rewrite, 1)[0]) for _ in range(3 if options.quick else 15)]
        mine, theirs = [a for a, _ in pairs], [b for _, b in pairs]
        report.results[f"{model}_{gpus}_s"] = mine
        report.results[f"{model}_{gpus}_algorithm_1_s"] = theirs
        ratio = median(theirs) / median(mine)
        report.row(
            f"a plan of {model} for {gpus:,} GPUs",
            f"median {ms(median(mine))}; our rewrite of Algorithm 1 {ms(median(theirs))} ({ratio:.1f}x)",
            goal=f"at most {ms(goal_s)} (paper {ms(paper_s)})",
            ok=median(mine) <= goal_s,
        )
    _growth(report, quick=options.quick)
    return report


def _growth(report: Report, *, quick: bool) -> None:
    """Chains of more and more layers: the time for each layer should not grow."""
    per_layer = {}
    for layers in (100, 1000) if quick else (100, 1000, 10_000):
        chain = LayerProfile(
            model="chain",
            device="none",
            layers=tuple(
                ProfiledLayer(
                    id=i,
                    name=str(i),
                    prev=(i - 1,) if i else (),
                    parameter_bytes=1 << 20,
                    activation_bytes=1 << 16,
                    forward_us={1: 20.0 + i % 7, 64: 300.0},
                    backward_us={1: 40.0, 64: 500.0 + i % 5},
                )
                for i in range(layers)
            ),
        )
        taken = _seconds(
            lambda chain=chain: plan(  # type: ignore[misc]
                chain, gpus=8, global_batch=64, network=NETWORK, amplification=LIMIT
            ),
            3,
        )
        report.results[f"chain_of_{layers}_s"] = taken
        per_layer[layers] = median(taken) / layers
    first, last = next(iter(per_layer.values())), list(per_layer.values())[-1]
    shown = ", ".join(f"{count:,} layers {each * 1e6:.0f} us" for count, each in per_layer.items())
    report.row(
        "a plan of a chain, for each layer",
        f"{shown}: {last / first:.2f}x",
        goal="no more than linear in the layers",
        ok=last <= 1.2 * first,
    )


def _seconds(call: Callable[[], object], times: int) -> list[float]:
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return taken


if __name__ == "__main__":
    main("time of a burst plan", measure)
