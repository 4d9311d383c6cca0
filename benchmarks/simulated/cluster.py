"""What a cluster of GPUs gets done when a burst plan leaves room for background jobs (section 7.1).

Every GPU is a simulated device that does not preempt. On its foreground lane runs its rank's part of the
plan, on its background lane a training of the same model with a small batch. A layer's kernels take the share
of the device that its measured times tell: what its samples a second are of those with large batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hpcsched.planning.background.feedback import Feedback
from hpcsched.planning.background.pacing import Pacer
from hpcsched.planning.background.referee import Referee
from hpcsched.planning.burst.graph import LayerProfile, ProfiledLayer
from hpcsched.planning.burst.plan import BurstPlan

from .device import Chunk, Device, Kernel, Lane, Model

KERNEL_US = 100.0
"""About how long one kernel of a layer takes."""
FOREGROUND_CHUNK_US, BACKGROUND_CHUNK_US = 500.0, 300.0
"""Kernels are launched in CUDA graphs of about so long."""
REDUCING_BLOCKS = 12
REDUCING_SUFFERS = 1.2
"""An all-reduce takes more than twice as long in company (section 5)."""
_STEPS, _SETTLING_STEPS = 120, 60
_OUTSTANDING = 2
_ELSEWHERE = "elsewhere"
_LEAST_US = 1.0


@dataclass(frozen=True, slots=True)
class Throughput:
    """Samples a second of the foreground job and of all background jobs together."""

    foreground: float
    background: float

    @property
    def total(self) -> float:
        return self.foreground + self.background


def background_alone(profile: LayerProfile, batch: int) -> float:
    """Samples a second of a background job with a GPU to itself."""
    lane = Lane(_background(profile, batch))
    span_us = 20 * _time_us(profile, batch)
    Device(Model(), [lane]).run(span_us)
    return lane.steps * batch / span_us * 1e6


def partition(profile: LayerProfile, plan: BurstPlan, gpus: int, batch: int) -> Throughput:
    """A data parallel job on some GPUs, background jobs alone on the others."""
    free = gpus - plan.gpus
    return Throughput(plan.global_batch / plan.iter_us * 1e6, free * background_alone(profile, batch))


def collocated(
    profile: LayerProfile, plan: BurstPlan, batch: int, *, threshold: float | None = 0.05
) -> Throughput:
    """A background job with local batch `batch` beside every rank of a plan.

    `threshold`: the background is held back from chunks that it slows down by more (None: from none). The
    ranks wait for each other, so the slowest one's slowdown is that of the step.
    """
    slowdown, background = 0.0, 0.0
    known: dict[tuple[Chunk, ...], tuple[float, float]] = {}
    for rank in range(plan.gpus):
        chunks = tuple(_foreground(profile, plan, rank))
        if chunks not in known:
            known[chunks] = _beside(chunks, profile, plan, batch, threshold)
        slower, rate = known[chunks]
        slowdown, background = max(slowdown, slower), background + rate
    return Throughput(plan.global_batch / plan.iter_us * 1e6 / (1 + slowdown), background)


def _beside(
    chunks: Sequence[Chunk], profile: LayerProfile, plan: BurstPlan, batch: int, threshold: float | None
) -> tuple[float, float]:
    """The foreground's slowdown on one GPU, and the background's samples a second there."""
    span_us = _STEPS * plan.iter_us
    alone = Lane(chunks)
    Device(Model(), [alone]).run(span_us)
    reducing = [chunk.name == "all-reduce" for chunk in chunks]
    feedback = None if threshold is None else Feedback(reducing, threshold=threshold)
    referee = Referee(Pacer(_OUTSTANDING), feedback)
    first = Lane(chunks, priority=1, gate=Referee(Pacer(_OUTSTANDING)), watcher=referee)
    second = Lane(_background(profile, batch), gate=referee)
    device = Device(Model(), [first, second])
    settled_us = _SETTLING_STEPS * plan.iter_us
    device.run(settled_us)
    before = first.steps, second.steps
    device.run(span_us)
    spent_us = span_us - settled_us
    steps, others = first.steps - before[0], second.steps - before[1]
    usual = alone.steps * spent_us / span_us
    return max(0.0, usual / steps - 1), others * batch / spent_us * 1e6


def _foreground(profile: LayerProfile, plan: BurstPlan, rank: int) -> Iterator[Chunk]:
    """A rank's step: its layers, their gradients' sums, and the time in which others compute."""
    now_us, gathered_us = 0.0, 0.0
    gathered: list[Kernel] = []
    for layer in sorted((x for x in plan.layers if rank in x.ranks), key=lambda x: x.start_us):
        measured = profile.layers[layer.id]
        samples = plan.global_batch // len(layer.ranks)
        own_us = measured.forward_at(samples) + measured.backward_at(samples)
        sums_us = layer.end_us - layer.start_us - own_us
        if (gap_us := layer.start_us - now_us) > _LEAST_US:
            if gathered:
                yield Chunk("layers", tuple(gathered))
            yield Chunk(_ELSEWHERE, _kernels(1, gap_us, KERNEL_US))
            gathered, gathered_us = [], 0.0
        gathered += _kernels(_blocks(measured, samples), own_us, KERNEL_US)
        gathered_us += own_us
        if sums_us > _LEAST_US or gathered_us > FOREGROUND_CHUNK_US:
            yield Chunk("layers", tuple(gathered))
            gathered, gathered_us = [], 0.0
        if sums_us > _LEAST_US:
            yield Chunk("all-reduce", _kernels(REDUCING_BLOCKS, sums_us, KERNEL_US, REDUCING_SUFFERS))
        now_us = layer.end_us
    if gathered:
        yield Chunk("layers", tuple(gathered))
    if plan.iter_us - now_us > _LEAST_US:
        yield Chunk(_ELSEWHERE, _kernels(1, plan.iter_us - now_us, KERNEL_US))


def _background(profile: LayerProfile, batch: int) -> tuple[Chunk, ...]:
    chunks, gathered, gathered_us = [], [], 0.0
    for layer in profile.layers:
        own_us = layer.forward_at(batch) + layer.backward_at(batch)
        for kernel in _kernels(_blocks(layer, batch), own_us, KERNEL_US):
            gathered.append(kernel)
            gathered_us += kernel.block_us
            if gathered_us >= BACKGROUND_CHUNK_US:
                chunks.append(Chunk("part", tuple(gathered)))
                gathered, gathered_us = [], 0.0
    if gathered:
        chunks.append(Chunk("part", tuple(gathered)))
    return tuple(chunks)


def _kernels(blocks: int, us: float, each_us: float, suffers: float = 0.0) -> tuple[Kernel, ...]:
    """So much time as kernels of about `each_us`; the gaps between them are part of it."""
    number = max(1, round(us / each_us))
    gap_us = Model().gap_us
    return tuple(Kernel(blocks, max(0.5, us / number - gap_us), suffers) for _ in range(number))


def _blocks(layer: ProfiledLayer, samples: int) -> int:
    """Of the device's places, as many as its speed is of the best that was measured."""

    def rate(n: int) -> float:
        return n / max(1e-9, layer.forward_at(n) + layer.backward_at(n))

    best = max(rate(n) for n in (*layer.forward_us, samples))
    return max(1, round(Model().places * rate(samples) / best))


def _time_us(profile: LayerProfile, batch: int) -> float:
    return sum(layer.forward_at(batch) + layer.backward_at(batch) for layer in profile.layers)
