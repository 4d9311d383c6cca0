"""How long a device takes for what its workers compute: by the host's clock on a CPU, by events on a GPU."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from statistics import fmean, median
from typing import Union

import torch

from hpcsched.compat import dataclass, pairwise, zip

Kind = tuple[int, int]
"""The samples of a local batch, and how many workers compute one at the same time."""

KEPT = 512
"""So many of the newest rounds of a kind are kept."""

Mark = Union[float, torch.cuda.Event]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTime:
    """What a round took, in seconds: to read the batches, forward pass, backward pass."""

    read_s: float
    forward_s: float
    backward_s: float

    @property
    def all_s(self) -> float:
        return self.read_s + self.forward_s + self.backward_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundsTaken:
    """What one rank has measured since it was last asked: rounds by kind and how many there were of each, and
    the optimizer's step."""

    rounds: Mapping[Kind, RoundTime]
    counts: Mapping[Kind, int]
    update_s: float | None


class DeviceClock:
    """Collects marks, four a round; they become seconds only when somebody asks."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._rounds: dict[Kind, deque[tuple[Mark, ...]]] = defaultdict(lambda: deque(maxlen=KEPT))
        self._updates: deque[tuple[Mark, Mark]] = deque(maxlen=KEPT)

    def mark(self) -> Mark:
        """Now, or when the GPU comes to this point."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def round(self, kind: Kind, *marks: Mark) -> None:
        """A round was begun, read, gone through forward, and through backward, at these marks."""
        self._rounds[kind].append(marks)

    def update(self, begun: Mark, done: Mark) -> None:
        """The optimizer took its step between these."""
        self._updates.append((begun, done))

    def forget(self, kind: Kind) -> None:
        """What was measured of this kind does not count: the first ones take longer."""
        self._rounds.pop(kind, None)

    def take(self) -> RoundsTaken:
        """What it took since this was last asked for; waits for what the GPU has not come to yet."""
        rounds = {kind: _usual(found) for kind, found in self._rounds.items()}
        counts = {kind: len(found) for kind, found in self._rounds.items()}
        update_s = median(_between(*marks) for marks in self._updates) if self._updates else None
        self._rounds.clear()
        self._updates.clear()
        return RoundsTaken(rounds=rounds, counts=counts, update_s=update_s)


def _usual(rounds: Iterable[tuple[Mark, ...]]) -> RoundTime:
    """The mean of some rounds, without the longest one of four or more.

    Not the median: who shares a core with others is as fast as ever in most rounds, and stands still in some.
    """
    times = [[_between(*pair) for pair in pairwise(marks)] for marks in rounds]
    if len(times) >= 4:
        times.remove(max(times, key=sum))
    read_s, forward_s, backward_s = map(fmean, zip(*times, strict=True))
    return RoundTime(read_s=read_s, forward_s=forward_s, backward_s=backward_s)


def _between(begun: Mark, done: Mark) -> float:
    if isinstance(begun, float) or isinstance(done, float):
        assert isinstance(begun, float) and isinstance(done, float)
        return done - begun
    done.synchronize()
    return float(begun.elapsed_time(done)) / 1e3
