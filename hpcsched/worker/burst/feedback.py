"""What a running training teaches about its layers: measured times, and whether another plan would pay."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from statistics import median

import torch

from hpcsched.compat import dataclass
from hpcsched.planning.burst.graph import LayerProfile, time_at

EVERY, FIRST = 100, 20
"""Layers are timed in every so manieth step, and first in this one: it takes longer, as nothing overlaps."""
WEIGHT = 0.5
"""How much what was measured since the last correction counts against what was known before."""
WORTH = 0.05
"""Another plan must save at least this share of a step."""


LOSS, UPDATE = -1, -2
"""Timed like layers: a loss by samples, and an optimizer's step by bytes of parameters."""


@dataclass(frozen=True, slots=True)
class Timing:
    """One layer's times on one rank for a share of so many samples; or those of `LOSS` or `UPDATE`."""

    layer: int
    samples: int
    forward_us: float
    backward_us: float


class LayerClock:
    """Times layers while it is `on`: with the host's clock on a CPU, by events on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.on = False
        self._cuda = device.type == "cuda"
        self._marks: dict[tuple[int, int, bool], list[tuple[torch.cuda.Event, torch.cuda.Event]]] = (
            defaultdict(list)
        )
        self._times: dict[tuple[int, int, bool], list[float]] = defaultdict(list)

    def forward(self, layer: int, samples: int) -> contextlib.AbstractContextManager[None]:
        """Times what is inside as the forward pass of a layer."""
        return self._time((layer, samples, True)) if self.on else contextlib.nullcontext()

    def backward(self, layer: int, samples: int) -> contextlib.AbstractContextManager[None]:
        """Times what is inside as the backward pass of a layer."""
        return self._time((layer, samples, False)) if self.on else contextlib.nullcontext()

    @contextlib.contextmanager
    def _time(self, what: tuple[int, int, bool]) -> Iterator[None]:
        if self._cuda:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            yield
            end.record()
            self._marks[what].append((begin, end))
        else:
            began = time.perf_counter()
            yield
            self._times[what].append((time.perf_counter() - began) * 1e6)

    def take(self) -> list[Timing]:
        """The medians of what was measured since this was last asked for."""
        for what, marks in self._marks.items():
            for begin, end in marks:
                end.synchronize()
                self._times[what].append(begin.elapsed_time(end) * 1e3)
        times, self._times = self._times, defaultdict(list)
        self._marks.clear()
        return [
            Timing(layer, samples, median(found), median(times.get((layer, samples, False), [0.0])))
            for (layer, samples, forward), found in times.items()
            if forward
        ]


def corrected(profile: LayerProfile, timings: Iterable[Timing], weight: float = WEIGHT) -> LayerProfile:
    """The profile, brought nearer to what was measured: by (layer, batch), smoothed exponentially.

    Of several ranks with the same share the slowest counts, as the others wait for it. Batches of a layer
    that were not measured change in proportion to the nearest one that was: else a plan would look
    better for nothing but being unknown.
    """
    seen: dict[int, dict[int, tuple[float, float]]] = defaultdict(dict)
    for timing in timings:
        forward, backward = seen[timing.layer].get(timing.samples, (0.0, 0.0))
        pair = max(forward, timing.forward_us), max(backward, timing.backward_us)
        seen[timing.layer][timing.samples] = pair
    layers = []
    for layer in profile.layers:
        found = seen.get(layer.id, {})
        forward_us = _nearer(layer.forward_us, {n: pair[0] for n, pair in found.items()}, weight)
        backward_us = _nearer(layer.backward_us, {n: pair[1] for n, pair in found.items()}, weight)
        layers.append(replace(layer, forward_us=forward_us, backward_us=backward_us))
    loss_us = _nearer(profile.loss_us, {n: us for n, (us, _) in seen[LOSS].items()}, weight)
    update_us = profile.update_us
    if found := seen[UPDATE]:
        byte_us = max(us / n for n, (us, _) in found.items())
        update_us = (1 - weight) * update_us + weight * byte_us if update_us else byte_us
    return replace(profile, layers=tuple(layers), loss_us=loss_us, update_us=update_us)


def _nearer(known: Mapping[int, float], seen: Mapping[int, float], weight: float) -> dict[int, float]:
    known = known or seen
    smoothed = {n: (1 - weight) * time_at(known, n) + weight * us for n, us in seen.items()}
    result = dict(known)
    if smoothed:
        for batch, us in known.items():
            near = min(smoothed, key=lambda n: (abs(n - batch), n))
            before = time_at(known, near)
            result[batch] = us * smoothed[near] / before if before > 0 else us
    return dict(sorted((result | smoothed).items()))


def pays(now_s: float, then_s: float, steps_left: int, switch_s: float) -> bool:
    """Whether to go from steps of `now_s` to steps of `then_s`, at the cost of `switch_s` once."""
    return then_s <= (1 - WORTH) * now_s and (now_s - then_s) * steps_left > switch_s
