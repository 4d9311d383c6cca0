"""What packing saves on a GPU: four networks, packs of several sizes and batches, all ways to make steps.

    python benchmarks/pack_gpu.py [--json] [--quick] [--nets mlp-3,...] [--sizes 2,4,8] [--budget-s 570]
                                  [--output FILE]

As in the pack paper (figures 4 and 6): MLP-3, MobileNetV2, ResNet-50 and DenseNet-121, 2 to 8 of them at a
batch of 32, and 2 of them at batches up to 100; IMPV (Eq. 3) against each alone, and the peak of the memory.
Eight MLP-3 with batches from 20 to 70 are a stack for each batch, and one that fills up the smaller ones.
First it is checked that each way trains what a training alone does. Then what packs have to beat: as many
processes, one training each, with and without NVIDIA's multi-process service. What is refused, finds no
memory or is not reached in time is noted and does no harm to the rest; `--output` holds what is known after
each combination. Needs one idle GPU and less than ten minutes. `--quick` has tiny sizes and also runs on the
CPU, to show that it works: then without streams, graphs and MPS.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from common import Report, main, median, ms, partial_results
from networks import NETS, deterministic, distance, network, short, usable_device
from side_by_side import answer_rates, measured_together, quit_mps, under_mps
from torch import nn

from hpcsched.errors import ConfigError
from hpcsched.worker import Parts
from hpcsched.worker.packed import Failed, OutOfMemory, Pack, load, pack
from hpcsched.worker.session.data_parallel import DataParallel
from hpcsched.worker.session.session import session_of

MODES = ("loop", "streams", "graph", "stacked", "auto")
BATCH, BATCHES, QUICK_BATCH = 32, (50, 64, 80, 100), 2
SIZES, QUICK_SIZES = (2, 4, 8, 3, 6), (2,)
"""The most telling first: time may run out."""
CHECKED_BATCH, CHECKED_STEPS = 8, 8
OWN_SEEDS = 1000
WINDOW_S, LEAST_STEPS, SLICES = 0.6, 3, 3
MOST_STEPS_TO_BEGIN = 400
BUDGET_S = 570.0
RIVALS = ("processes", "mps")
UNEQUAL, QUICK_UNEQUAL = (20, 20, 35, 35, 50, 50, 70, 70), (2, 2, 3)
"""Batches of trainings of which a stack may fill up the smaller ones."""
SLOWER = 0.02
"""What `auto` may lose against each training alone, one after the other."""
CLOSE = 1e-6
"""How far the weights may be from those of a training alone after `CHECKED_STEPS`, in double precision: as
networks with batch norm enlarge what rounding makes of another order of sums."""


def options_of(parser: argparse.ArgumentParser) -> None:
    partial_results(parser, BUDGET_S)
    parser.add_argument("--nets", type=_list_of(str, NETS), default=NETS, help=f"of {', '.join(NETS)}")
    parser.add_argument("--sizes", type=_list_of(int, SIZES), help=f"of packs, of {sorted(SIZES)}")
    parser.add_argument("--rival", nargs=3, metavar=("NET", "BATCH", "SEED"), help=argparse.SUPPRESS)


def _list_of(kind: Callable[[str], Any], known: Sequence[Any]) -> Callable[[str], tuple[Any, ...]]:
    def parsed(text: str) -> tuple[Any, ...]:
        found = tuple(kind(word) for word in text.split(","))
        if unknown := [word for word in found if word not in known]:
            raise argparse.ArgumentTypeError(f"unknown: {unknown[0]}; known: {', '.join(map(str, known))}")
        return found

    return parsed


def measure(options: argparse.Namespace) -> Report:
    device = usable_device(quick=options.quick)
    bench = Bench(device, quick=options.quick, budget_s=options.budget_s)
    if options.rival:
        net, batch, seed = options.rival
        sys.exit(bench.rival(net, int(batch), int(seed)))
    bench.report.output = options.output
    batch = QUICK_BATCH if options.quick else BATCH
    sizes = options.sizes or (QUICK_SIZES if options.quick else SIZES)
    for net in options.nets:
        bench.check(net)
    for size in sizes:
        for net in options.nets:
            bench.compare(net, size, batch)
        for net in options.nets:
            bench.compare_processes(net, size, batch)
    if "mlp-3" in options.nets:
        bench.compare_unequal("mlp-3", QUICK_UNEQUAL if options.quick else UNEQUAL)
    for larger in () if options.quick or options.sizes else BATCHES:
        for net in options.nets:
            bench.compare(net, 2, larger)
    return bench.report


class Bench:
    """Measures until the time is over."""

    def __init__(self, device: torch.device, *, quick: bool, budget_s: float = BUDGET_S) -> None:
        self.device, self.quick, self.dtype = device, quick, torch.float32
        self.deadline = time.monotonic() + budget_s
        self.report = Report(quick=quick)
        self._alone: dict[tuple[str, int], tuple[list[float], float]] = {}

    @property
    def modes(self) -> tuple[str, ...]:
        gpu = self.device.type == "cuda"
        return tuple(mode for mode in MODES if gpu or mode not in ("streams", "graph"))

    # -- correctness -----------------------------------------------------------------------------------

    def check(self, net: str) -> None:
        """Two of a network train as each does alone, in all ways; in double precision."""
        if time.monotonic() > self.deadline:
            self.report.row(f"`{net}`: weights against those of a training alone", "not reached in time")
            return
        batch, self.dtype = CHECKED_BATCH, torch.float64
        found: dict[str, str] = {}
        good = True
        with deterministic():
            alone = [self.weights_alone(net, seed, batch) for seed in range(2)]
            for mode in self.modes:
                try:
                    together = self.packed(net, 2, batch, mode)
                    members = list(together.members)
                    while members[0].session.step < CHECKED_STEPS:
                        together.step()
                    together.settle()
                    far = max(
                        distance(member.parts.model.state_dict(), weights)
                        for member, weights in zip(members, alone, strict=True)
                    )
                    self.report.results.setdefault(f"{net}_{mode}_differs", []).append(far)
                    found[mode], good = f"{far:.0e}", good and far <= CLOSE
                except (ConfigError, OutOfMemory, Failed) as error:
                    found[mode] = short(error)
        self.dtype = torch.float32
        words = ", ".join(f"{mode} {what}" for mode, what in found.items())
        self.report.row(
            f"`{net}`: weights against those of a training alone", words, goal=f"{CLOSE:g}", ok=good
        )

    def weights_alone(self, net: str, seed: int, batch: int) -> dict[str, torch.Tensor]:
        training = self.alone(net, seed, batch)
        for _ in range(CHECKED_STEPS):
            model = next(training)
        training.close()
        return {name: value.clone() for name, value in model.state_dict().items()}

    # -- speed and memory --------------------------------------------------------------------------------

    def compare(self, net: str, size: int, batch: int) -> None:
        """So many of a network, in all ways."""
        name, words = f"{net}_b{batch}_n{size}", []
        what = f"{size} of `{net}` at batch {batch}: IMPV"
        auto: float | None = None
        if time.monotonic() > self.deadline:
            self.report.row(what, "not reached in time")
            return
        alone, alone_mib = self.alone_s(net, batch)
        for mode in self.modes:
            if time.monotonic() > self.deadline:
                words.append(f"{mode} not reached in time")
                continue
            self.clear()
            try:
                samples, taken = self.packed_s(net, size, batch, mode)
            except (ConfigError, OutOfMemory, Failed) as error:
                words.append(f"{mode} {short(error)}")
                continue
            peak_mib = self.peak_mib()
            impv = 1 - median(samples) / (size * median(alone))
            auto = impv if mode == "auto" else auto
            self.report.results[f"{name}_{mode}_step_s"] = samples
            self.report.results[f"{name}_{mode}_ratio"] = [1 - impv]
            self.report.results[f"{name}_{mode}_peak_mib"] = [peak_mib]
            words.append(f"{mode} {impv:+.0%} ({peak_mib:.0f} MiB{taken})")
        self.clear()
        words.append(f"each alone {ms(median(alone))}, {alone_mib:.0f} MiB")
        self.report.row(
            what,
            "; ".join(words),
            goal=f"`auto` at most {SLOWER:.0%} slower than each alone in turn",
            ok=None if self.quick or auto is None else auto >= -SLOWER,
        )

    def compare_unequal(self, net: str, batches: Sequence[int]) -> None:
        """As many of a network with batches of their own: each alone in turn, a stack of those of each batch
        (`equal`), one of all (`ragged`), and what `auto` takes."""
        name, words = f"{net}_unequal", []
        what = f"{len(batches)} of `{net}` at batches {', '.join(map(str, dict.fromkeys(batches)))}: IMPV"
        if time.monotonic() > self.deadline:
            self.report.row(what, "not reached in time")
            return
        alone_s = sum(median(self.alone_s(net, batch)[0]) for batch in batches)
        ways = {
            "equal": ("stacked", [[b] * batches.count(b) for b in dict.fromkeys(batches)]),
            "ragged": ("stacked", [batches]),
            "auto": ("auto", [batches]),
        }
        for way, (mode, packs) in ways.items():
            self.clear()
            try:
                found = [self.steps_s(self.pack_of(net, some, mode)) for some in packs]
            except (ConfigError, OutOfMemory, Failed) as error:
                words.append(f"{way} {short(error)}")
                continue
            samples = [sum(each) for each in zip(*(samples for samples, _ in found), strict=True)]
            impv = 1 - median(samples) / alone_s
            self.report.results[f"{name}_{way}_step_s"] = samples
            self.report.results[f"{name}_{way}_ratio"] = [1 - impv]
            words.append(f"{way} {impv:+.0%}" + (f" ({found[0][1]})" if way == "auto" else ""))
        self.clear()
        words.append(f"each alone {ms(alone_s)} together")
        self.report.row(what, "; ".join(words))

    def compare_processes(self, net: str, size: int, batch: int) -> None:
        """So many of a network, each in a process of its own: what packs have to beat."""
        name, words = f"{net}_b{batch}_n{size}", []
        for rival in RIVALS if self.device.type == "cuda" else RIVALS[:1]:
            if time.monotonic() > self.deadline:
                words.append(f"{rival} not reached in time")
                continue
            self.clear()
            try:
                step_s = self.processes_s(net, size, batch, shared=rival == "mps")
            except (ConfigError, RuntimeError, TimeoutError) as error:
                words.append(f"{rival} {short(error)}")
                continue
            ratio = step_s / (size * median(self.alone_s(net, batch)[0]))
            self.report.results[f"{name}_{rival}_step_s"] = [step_s]
            self.report.results[f"{name}_{rival}_ratio"] = [ratio]
            words.append(f"{rival} {1 - ratio:+.0%}")
        self.report.row(f"{size} of `{net}` at batch {batch} in processes: IMPV", "; ".join(words))

    def processes_s(self, net: str, size: int, batch: int, *, shared: bool) -> float:
        """Seconds in which so many processes make a step each."""
        commands = []
        try:
            for seed in range(size):
                environ = under_mps() if shared else dict(os.environ)
                command = [sys.executable, __file__, "--rival", net, str(batch), str(seed)]
                commands.append(([*command, *(["--quick"] if self.quick else [])], environ))
            return size / sum(measured_together(commands))
        finally:
            if shared:
                quit_mps()

    def rival(self, net: str, batch: int, seed: int) -> int:
        """In one of those processes: answers with its steps per second."""
        training = self.alone(net, seed, batch)
        for _ in range(LEAST_STEPS + 2):
            next(training)

        def rate() -> float:
            began, steps = self.now(), 0
            while self.now() - began < (0.05 if self.quick else 2 * WINDOW_S):
                next(training)
                steps += 1
            return steps / (self.now() - began)

        return answer_rates(rate)

    def alone_s(self, net: str, batch: int) -> tuple[list[float], float]:
        """Seconds of a step of one training alone, and the peak of its memory."""
        if (net, batch) not in self._alone:
            self.clear()
            training = self.alone(net, 0, batch)
            samples = self.timed(lambda: next(training))
            self._alone[net, batch] = samples, self.peak_mib()
            self.report.results[f"{net}_b{batch}_alone_step_s"] = samples
            self.report.results[f"{net}_b{batch}_alone_peak_mib"] = [self._alone[net, batch][1]]
        return self._alone[net, batch]

    def packed_s(self, net: str, size: int, batch: int, mode: str) -> tuple[list[float], str]:
        """Seconds of a step of a pack; and what `auto` has taken."""
        samples, taken = self.steps_s(self.packed(net, size, batch, mode))
        return samples, f", {taken}" if mode == "auto" else ""

    def steps_s(self, together: Pack) -> tuple[list[float], str]:
        """Seconds of a step of a pack that is in its mode; and that mode."""
        for _ in range(MOST_STEPS_TO_BEGIN):
            group = together.groups[0]
            if group.wanted is not None and group.mode == group.wanted:
                break
            together.step()
        together.settle()
        mode = together.groups[0].mode
        return self.timed(together.step, steps=10 if mode == "turns" else None), mode

    def timed(self, step: Callable[[], object], *, steps: int | None = None) -> list[float]:
        """Seconds of a step, some times."""
        for _ in range(steps or LEAST_STEPS + 2):
            step()
        began = self.now()
        for _ in range(steps or LEAST_STEPS):
            step()
        once_s = (self.now() - began) / (steps or LEAST_STEPS)
        count = steps or max(LEAST_STEPS, round(WINDOW_S / SLICES / once_s) if not self.quick else 1)
        samples = []
        for _ in range(SLICES):
            began = self.now()
            for _ in range(count):
                step()
            samples.append((self.now() - began) / count)
        return samples

    def now(self) -> float:
        """When all that was asked for is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def clear(self) -> None:
        """Have the GPU's memory be what is needed; its peak counts from here."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

    def peak_mib(self) -> float:
        """The most that was allocated."""
        return torch.cuda.max_memory_allocated(self.device) / 2**20 if self.device.type == "cuda" else 0.0

    # -- trainings ---------------------------------------------------------------------------------------

    def alone(self, net: str, seed: int, batch: int) -> Iterator[nn.Module]:
        """As `ddp` trains, a step at a time."""
        parts = self.parts(net, seed, batch)
        strategy = DataParallel(parts)
        for _ in session_of(parts, strategy, total_steps=10**9).steps():
            strategy.train_step()
            yield parts.model

    def packed(self, net: str, size: int, batch: int, mode: str) -> Pack:
        return self.pack_of(net, [batch] * size, mode)

    def pack_of(self, net: str, batches: Sequence[int], mode: str) -> Pack:
        """Of trainings with these batches."""
        members = []
        for seed, batch in enumerate(batches):
            parts = self.parts(net, seed, batch)
            # As in a run no two trainings have generators of one seed, nor has the process that of one of
            # them: a graph's capture looks at that.
            torch.manual_seed(OWN_SEEDS + seed)
            members.append(load(parts, name=str(seed), steps=10**9))
        torch.manual_seed(OWN_SEEDS - 1)
        return pack(members, mode=mode)

    def parts(self, net: str, seed: int, batch: int) -> Parts:
        return network(net, batch, seed=seed, dtype=self.dtype, small=self.quick)


if __name__ == "__main__":
    main("packs on a GPU", measure, options_of=options_of)
