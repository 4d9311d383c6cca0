"""How many GPUs there are at each time, as hosts come and go: what the bounds are about."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from hpcsched.sim.blocks import Block

GpuType = str | None
"""A type of GPU; None: all of them."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """A time in which the same GPUs are there: by type those of each host, the largest first."""

    start_s: float
    end_s: float
    on_hosts: Mapping[GpuType, tuple[int, ...]]
    gpus: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "gpus", sum(self.on_hosts[None]))

    def most(self, nodes: int, gpu_type: GpuType = None, *, uneven: bool = False) -> int:
        """The largest count that `nodes` hosts have at once; 0 if there are not so many hosts. `uneven`: each
        has one, and all together so many in the mean."""
        on_hosts = self.on_hosts.get(gpu_type, ())[:nodes]
        if nodes > len(on_hosts):
            return 0
        return sum(on_hosts) // nodes if uneven and on_hosts[-1] else on_hosts[-1]


class Capacity:
    """GPUs by time, from 0 on. All times are in seconds.

    All GPUs together are a machine that has speed 1 while there are most of them. Its clock tells how much it
    could have done by then. Where the same GPUs are there all the time, clock and time are the same number.

    Args:
        blocks: the hosts.
        worth: as how many GPUs one of a type counts in areas and for that machine, from 0 to 1; default: 1.
    """

    def __init__(self, blocks: Iterable[Block], worth: Mapping[str, float] | None = None) -> None:
        blocks = [block for block in blocks if block.nodes and block.end_s > block.start_s]
        changes = {0.0} | {block.start_s for block in blocks} | {block.end_s for block in blocks}
        times = sorted(at for at in changes if 0 <= at < math.inf)
        self.types = tuple(dict.fromkeys(one.gpu_type for one in blocks if one.gpus)) or ("",)
        """The types of the GPUs."""
        found: list[tuple[float, Mapping[GpuType, tuple[int, ...]]]] = []
        for at in times:
            here = [one for one in blocks if one.start_s <= at < one.end_s]
            on_hosts = {each: _on_hosts(here, each) for each in (None, *self.types)}
            if not found or found[-1][1] != on_hosts:
                found.append((at, on_hosts))
        ends = [*(at for at, _ in found[1:]), math.inf]
        self.stretches: Sequence[Stretch] = [
            Stretch(at, end_s, on_hosts) for (at, on_hosts), end_s in zip(found, ends, strict=True)
        ]
        self.gpus = max(stretch.gpus for stretch in self.stretches)
        """The most GPUs at a time."""
        self._starts = [stretch.start_s for stretch in self.stretches]
        self._sizes = [
            sum((worth or {}).get(each, 1.0) * sum(stretch.on_hosts[each]) for each in self.types)
            for stretch in self.stretches
        ]
        self.size = max(self._sizes)
        """The most at a time, each counted by what it is worth."""
        self._speeds = [size / self.size if self.size else 0.0 for size in self._sizes]
        lengths = [later - at for at, later in pairwise(self._starts)]
        done = (length * speed for length, speed in zip(lengths, self._speeds, strict=False))
        self._clocks = list(accumulate(done, initial=0.0))

    @property
    def constant(self) -> bool:
        """Whether the same GPUs are there all the time."""
        return len(self.stretches) == 1

    def hosts(self, gpu_type: GpuType = None) -> int:
        """The most hosts with such GPUs at a time."""
        return max(len(stretch.on_hosts[gpu_type]) for stretch in self.stretches)

    def most(self, nodes: int, gpu_type: GpuType = None, *, uneven: bool = False) -> int:
        """The largest count that `nodes` hosts have at some time at once."""
        return max(stretch.most(nodes, gpu_type, uneven=uneven) for stretch in self.stretches)

    def clock(self, at: float) -> float:
        """The clock at a time."""
        if math.isinf(at):
            return at
        k = bisect_right(self._starts, at) - 1
        return self._clocks[k] + (at - self._starts[k]) * self._speeds[k]

    def time(self, clock: float) -> float:
        """The first time at which the clock says so; infinite if it never does."""
        for k, speed in enumerate(self._speeds):
            end = self._clocks[k + 1] if k + 1 < len(self._clocks) else math.inf
            if clock <= self._clocks[k]:
                return self._starts[k]
            if speed and clock <= end:
                return self._starts[k] + (clock - self._clocks[k]) / speed
        return math.inf

    def moment(self, begin: float, end: float) -> float:
        """The integral of the time over the clock from `begin` to `end`; infinite if it never says `end`."""
        total = 0.0
        for k, speed in enumerate(self._speeds):
            last = k + 1 == len(self._clocks)
            low, high = max(begin, self._clocks[k]), end if last else min(end, self._clocks[k + 1])
            if speed and high > low:
                at, clock = self._starts[k], self._clocks[k]
                first, then = at + (low - clock) / speed, at + (high - clock) / speed
                total += (high - low) * (first + then) / 2
            elif last and high > low:
                return math.inf
        return total

    def area_end_s(self, start_s: float, gpu_s: float) -> float:
        """When so many GPU-seconds have come from `start_s` on."""
        for stretch, size in zip(self.stretches, self._sizes, strict=True):
            at = max(start_s, stretch.start_s)
            if at >= stretch.end_s:
                continue
            room = size * (stretch.end_s - at) if size else 0.0
            if gpu_s <= room:
                return at + gpu_s / size if gpu_s else at
            gpu_s -= room
        return math.inf

    def job_end_s(
        self,
        start_s: float,
        seconds: Mapping[GpuType, Mapping[int, float]],
        nodes: int,
        *,
        uneven: bool = False,
    ) -> float:
        """When a job alone that begins at `start_s` is done at the soonest: it takes these seconds by type of
        its GPUs and their count over all of its `nodes` hosts, with the fastest that fits at each time."""
        left, at = 1.0, start_s
        for stretch in self.stretches:
            if at >= stretch.end_s:
                continue
            at = max(at, stretch.start_s)
            best_s = math.inf
            for gpu_type, by_count in seconds.items():
                most = stretch.most(nodes, gpu_type, uneven=uneven) * nodes
                best_s = min([best_s, *(s for count, s in by_count.items() if count <= most)])
            if at + left * best_s <= stretch.end_s:
                return at + left * best_s
            left -= (stretch.end_s - at) / best_s
            at = stretch.end_s
        return math.inf


def _on_hosts(blocks: Iterable[Block], gpu_type: GpuType) -> tuple[int, ...]:
    """The GPUs of each host that has some of this type, the largest first; of all types also none."""
    those = (one for one in blocks if gpu_type is None or (one.gpus and one.gpu_type == gpu_type))
    return tuple(sorted((one.gpus for one in those for _ in range(one.nodes)), reverse=True))
