"""Stream workers on a GPU: the same training with any number of them, what more of them at once gain, what
comparing and deciding cost.

    python benchmarks/vsw_gpu.py [--json] [--quick] [--nets mlp-3,...] [--budget-s 570] [--output FILE]

The pack paper's four networks. First it is checked that workers at once train what workers one after the
other do. Then each network is measured as by `hpcsched profile vsw`, local batches doubled and workers at
once one more until memory or gain ends; and how far a fit of the throughput (Eq. 1) to all counts but one
misses that one. At last each trains as it decides by itself, and halves are compared every ten steps. Needs
one idle GPU and less than ten minutes; what is not reached in time is noted, and `--output` holds what is
known after each local batch. `--quick` has tiny sizes and also runs on the CPU, to show that it works: there
is one worker at once then.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import time
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import torch
from common import Report, main, median, ms, partial_results
from networks import NETS, deterministic, distance, network, short, usable_device

from hpcsched.errors import ConfigError
from hpcsched.planning.vsw.costs import BatchTimes
from hpcsched.planning.vsw.options import WorkerOptions
from hpcsched.worker.session.session import session_of
from hpcsched.worker.session.trainer import Parts
from hpcsched.worker.vsw.adaptive_batches import AdaptiveBatches
from hpcsched.worker.vsw.probe import MOST_AT_ONCE, ProbePoint, VswProbe, VswTimes, doubled

CHECKED_BATCH, CHECKED_STEPS, CHECKED_WORKERS = 32, 4, (2, 4)
CLOSE = 1e-6
"""How far the weights may be apart after `CHECKED_STEPS` in double precision, as a part of the largest one:
batch norms over few samples enlarge what rounding makes of another order of sums, up to a thousandfold each
step."""

LOCAL_BATCHES, QUICK_LOCAL_BATCHES = (8, 256), (2, 4)
WINDOW_S, QUICK_WINDOW_S = 0.4, 0.01
PROFILE_S = 85.0
"""So long is a network measured at most, or a seventh of the budget."""

STEPS, QUICK_STEPS, EVERY, AS_USUAL = 200, 24, 10, 100
"""Of a training, between two comparisons in it, and as the paper has it: that is what shares are of."""
WARM_UP = 10
GOAL = 0.005
BUDGET_S = 570.0


class Timed(AdaptiveBatches):
    """Notes how long its steps take, with comparing the halves and without, and its decisions."""

    def __init__(self, parts: Parts, options: WorkerOptions) -> None:
        self.usual: list[float] = []
        self.compared: list[float] = []
        self.decisions: list[float] = []
        self.found = ""
        super().__init__(parts, options)

    def train_step(self) -> None:
        taken = self.compared if self.measures else self.usual
        began = now(self.device)
        super().train_step()
        if self.training.step >= WARM_UP:
            taken.append(now(self.device) - began)
        course = self.course
        self.found = ", ".join(
            f"local batch {course.local_batch}, {share.at_once} at once" for share in course.shares if share
        )

    def decide(self) -> None:
        began = now(self.device)
        super().decide()
        self.decisions.append(now(self.device) - began)


def options_of(parser: argparse.ArgumentParser) -> None:
    partial_results(parser, BUDGET_S)
    parser.add_argument("--nets", default=",".join(NETS), help=f"of {', '.join(NETS)}")


def measure(options: argparse.Namespace) -> Report:
    bench = Bench(usable_device(quick=options.quick), quick=options.quick, budget_s=options.budget_s)
    bench.report.output = options.output
    nets = options.nets.split(",")
    if unknown := set(nets) - set(NETS):
        raise SystemExit(f"unknown networks: {', '.join(sorted(unknown))}; known: {', '.join(NETS)}")
    for part in (bench.check, bench.profile, bench.train):
        for net in nets:
            bench.clear()
            if time.monotonic() > bench.deadline:
                bench.report.row(f"`{net}`: {part.__name__}", "not reached in time")
                continue
            try:
                part(net)
            except (ConfigError, RuntimeError) as error:
                bench.report.row(f"`{net}`: {part.__name__}", short(error), ok=False)
    return bench.report


class Bench:
    """Measures until the time is over."""

    def __init__(self, device: torch.device, *, quick: bool, budget_s: float = BUDGET_S) -> None:
        self.device, self.quick = device, quick
        self.deadline = time.monotonic() + budget_s
        self.profile_s = min(PROFILE_S, budget_s / 7)
        self.report = Report(quick=quick)

    def check(self, net: str) -> None:
        """Some workers at once, in whole rounds, against one after the other; in double precision."""
        found: dict[int, float] = {}
        with deterministic():
            alone = self._weights(net, 1)
            for count in CHECKED_WORKERS:
                found[count] = distance(self._weights(net, count), alone)
        self.report.results[f"{net}_differs"] = list(found.values())
        self.report.row(
            f"`{net}`: weights against those of one worker at once",
            ", ".join(f"{count} at once {far:.0e}" for count, far in found.items()),
            goal=f"{CLOSE:g}",
            ok=all(far <= CLOSE for far in found.values()),
        )

    def _weights(self, net: str, count: int) -> dict[str, torch.Tensor]:
        """After some steps, each of as many local batches."""
        pins = {"workers": count, "accumulation": max(CHECKED_WORKERS) // count - 1}
        parts = network(net, CHECKED_BATCH, dtype=torch.float64, small=self.quick, device=self.device)
        strategy = AdaptiveBatches(parts, WorkerOptions.parse(pins))
        for _ in session_of(parts, strategy, total_steps=CHECKED_STEPS).steps():
            strategy.train_step()
        return {name: value.detach().clone() for name, value in parts.model.named_parameters()}

    def profile(self, net: str) -> None:
        """By local batch and workers at once."""
        low, high = QUICK_LOCAL_BATCHES if self.quick else LOCAL_BATCHES
        window_s = QUICK_WINDOW_S if self.quick else WINDOW_S
        parts = network(net, high, small=self.quick, device=self.device)
        probe = VswProbe(parts, self.device, halves=True, seconds=window_s)
        until = min(self.deadline, time.monotonic() + self.profile_s)
        most = MOST_AT_ONCE if self.device.type == "cuda" else 1
        found, ended, told = VswTimes(), "", 0
        for found in probe.run(doubled(low, high), most):
            told = self._tell_whole(net, found, told)
            if time.monotonic() > until:
                ended = ", not all in time"
                break
        self._tell_whole(net, found, told, ended=ended, last=True)

    def _tell_whole(
        self, net: str, found: VswTimes, told: int, *, ended: str = "", last: bool = False
    ) -> int:
        """Tell of the local batches that have got all their workers, but not of the first `told`; how many
        were told of by then."""
        groups = itertools.groupby(found.points, lambda point: point.local_batch)
        whole = [(local, list(points)) for local, points in groups]
        for local, points in whole[told : None if last else -1]:
            self._tell(net, local, points, found.costs.speeds[local], ended)
        return max(told, len(whole) - 1)

    def _tell(
        self, net: str, local: int, points: Sequence[ProbePoint], speed: BatchTimes, ended: str
    ) -> None:
        samples_s = [point.samples_s for point in points]
        name = f"{net}_local_{local}"
        self.report.results[f"{name}_samples_per_s"] = samples_s
        self.report.results[f"{name}_peak_mib"] = [point.memory_mib or 0.0 for point in points]
        best = max(range(len(points)), key=lambda place: samples_s[place])
        words = f"1 worker {samples_s[0]:.0f} samples/s"
        if len(points) > 1:
            gain = samples_s[best] / samples_s[0] - 1
            words += f"; {points[best].at_once} of 1 to {len(points)} at once {gain:+.0%}"
        if errors := foretold(speed):
            self.report.results[f"{name}_fit_error"] = errors
            words += f"; the fit misses those between by {fmean(errors):.1%}"
        memory = [point.memory_mib for point in points if point.memory_mib]
        words += f"; {memory[0]:.0f} to {memory[-1]:.0f} MiB" if memory else ""
        self.report.row(f"`{net}`, local batch {local}: workers at once", words + ended)

    def train(self, net: str) -> None:
        """Which configuration it finds; how long a step that compares, and a decision, take."""
        low, high = QUICK_LOCAL_BATCHES if self.quick else (LOCAL_BATCHES[0], LOCAL_BATCHES[1] // 4)
        batch = 2 * high
        table: dict[str, Any] = {"local_batch": [low, high], "global_batch": [batch, 2 * batch]}
        table |= {"similarity": -0.999, "every": EVERY}  # never below: the batch stays
        parts = network(net, batch, small=self.quick, device=self.device)
        timed = Timed(parts, WorkerOptions.parse(table))
        for _ in session_of(parts, timed, total_steps=QUICK_STEPS if self.quick else STEPS).steps():
            timed.train_step()
        decisions = timed.decisions[2:] or timed.decisions
        self.report.results |= {
            f"{net}_usual_s": timed.usual,
            f"{net}_compared_s": timed.compared,
            f"{net}_decision_s": decisions,
        }
        step_s, compared_s, decision_s = map(median, (timed.usual, timed.compared, decisions))
        cost, share = max(0.0, compared_s / step_s - 1) / AS_USUAL, decision_s / step_s / AS_USUAL
        self.report.row(
            f"`{net}`, batch {batch}: comparing halves, a decision, every {AS_USUAL} steps",
            f"{cost:.2%}, {share:.2%} of all time (steps {ms(step_s)}, {ms(compared_s)}; "
            f"a decision {ms(decision_s)}); found {timed.found}",
            goal=f"{GOAL:.1%} each",
            ok=None if self.quick else max(cost, share) <= GOAL,
        )

    def clear(self) -> None:
        """Give back what the last one held."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def foretold(speed: BatchTimes) -> list[float]:
    """How far the time of each number of workers at once between the others is from what those foretell, as a
    part of it; nothing where there are fewer than four."""
    errors = []
    counts = sorted(speed.times)
    for left_out in counts[1:-1] if len(counts) > 3 else ():
        others = {n: times for n, times in speed.times.items() if n != left_out}
        guess = BatchTimes(local_batch=speed.local_batch, times=others, most=speed.most).at(left_out)
        true = speed.times[left_out]
        compute_s = true.forward_s + true.backward_s
        errors.append(abs((guess.forward_s + guess.backward_s) / compute_s - 1))
    return errors


def now(device: torch.device) -> float:
    """When all that was asked for is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


if __name__ == "__main__":
    main(__doc__ or "", measure, options_of=options_of)
