"""One option per group: the workers add up exactly, and the slowest group is fastest (section 5.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpcsched.compat import bit_count, zip
from hpcsched.errors import HpcschedError

MOST_SUMS = 2**31
"""Sums of workers that are kept at most (chosen), a bit each."""

Runs = list[tuple[int, int]]
"""Consecutive numbers of workers: the first, and how many."""


class Option(NamedTuple):
    """So many workers on a group, and the seconds of a step with them."""

    workers: int
    iter_s: float


class Infeasible(HpcschedError):
    """No choice of options adds up; the text says why."""


class TooLarge(Infeasible):
    """There are too many sums of workers to try."""


def solve(groups: Sequence[Sequence[Option]], workers: int, *, use_all: bool = False) -> list[int | None]:
    """The index of each group's option (None: not used) with which a step takes least.

    The workers of the options add up to `workers` exactly, and the largest `iter_s` is least among all
    choices. Of equally fast choices one with the fewest groups is taken, the first groups first.

    The times are searched by halves; which sums can be reached within a time are the bits of one integer,
    and a run of consecutive numbers of workers is added by doubling.

    Args:
        groups: the options of each group; `workers` of each at least 1, `iter_s` finite.
        workers: what they add up to, at least 1.
        use_all: every group takes an option.

    Raises Infeasible, also for groups without options if all must be used; TooLarge, which is one, where it
    would take too long, or too much memory.
    """
    if workers * len(groups) ** (1 if use_all else 2) > MOST_SUMS:
        raise TooLarge(f"{workers} workers on {len(groups)} groups are more than can be planned")
    keys = _keys(groups)
    kinds = {key: _Kind.of(key) for key in dict.fromkeys(keys)}
    order = [kinds[key] for key in keys]
    every = np.sort(np.concatenate([kind.times for kind in kinds.values()] or [np.zeros(0)]))
    search = _Search(order, workers, use_all)
    if not len(every) or not search.reaches(float(every[-1])):
        raise Infeasible(_why(order, workers, use_all))
    low, high = 0, len(every) - 1
    while low < high:
        middle = (low + high) // 2
        if search.reaches(float(every[middle])):
            high = middle
        else:
            low = middle + 1
    return search.trace(float(every[low]))


def _keys(groups: Sequence[Sequence[Option]]) -> list[tuple[Option, ...]]:
    """The groups as tuples; a group that is given several times becomes one tuple."""
    made: dict[int, tuple[Option, ...]] = {}
    return [made.setdefault(id(group), tuple(group)) for group in groups]


@dataclass(frozen=True, eq=False)
class _Kind:
    """The options that groups have in common: the fastest for each number of workers, in their order."""

    counts: NDArray[np.int64]
    times: NDArray[np.float64]
    index: NDArray[np.int64]

    @classmethod
    def of(cls, options: Sequence[Option]) -> _Kind:
        counts = np.fromiter((option.workers for option in options), np.int64, len(options))
        times = np.fromiter((option.iter_s for option in options), np.float64, len(options))
        order = np.lexsort((times, counts))  # stable: the first of equal options
        first = np.ones(len(order), dtype=bool)
        first[1:] = np.diff(counts[order]) != 0
        index = order[first]
        return cls(counts[index], times[index], index)

    def within(self, limit_s: float) -> _Set:
        """The numbers of workers with which a step takes at most so long."""
        return _Set.of(self.counts[self.times <= limit_s])


@dataclass(frozen=True, eq=False)
class _Set:
    """Numbers of workers, as bits and as runs."""

    bits: int
    runs: Runs

    @classmethod
    def of(cls, numbers: NDArray[np.int64]) -> _Set:
        """The set of these numbers, which rise."""
        if not len(numbers):
            return cls(0, [])
        marks = np.zeros(numbers[-1] + 1, dtype=bool)
        marks[numbers] = True
        breaks = np.flatnonzero(np.diff(numbers) != 1) + 1
        starts = np.concatenate([[0], breaks])
        lengths = np.diff(np.concatenate([starts, [len(numbers)]]))
        bits = int.from_bytes(np.packbits(marks, bitorder="little").tobytes(), "little")
        return cls(bits, list(zip(numbers[starts].tolist(), lengths.tolist(), strict=True)))


class _Search:
    def __init__(self, order: Sequence[_Kind], workers: int, use_all: bool) -> None:
        self.order, self.workers, self.use_all = order, workers, use_all
        self.mask = (1 << (workers + 1)) - 1

    def reaches(self, limit_s: float) -> bool:
        """Whether the workers can be reached within the time."""
        own = {id(kind): kind.within(limit_s) for kind in self.order}
        reach = 1
        for kind in self.order:
            more = _add(reach, own[id(kind)], self.mask)
            reach = more if self.use_all else reach | more
        return bool(reach >> self.workers & 1)

    def trace(self, limit_s: float) -> list[int | None]:
        """The choice within a time in which the workers can be reached."""
        own = {id(kind): kind.within(limit_s) for kind in self.order}
        # By the number of groups used, the sums that the groups so far can reach.
        before = [{0: 1}]
        for kind in self.order:
            reach = {} if self.use_all else dict(before[-1])
            for used, sums in before[-1].items():
                if more := _add(sums, own[id(kind)], self.mask):
                    reach[used + 1] = reach.get(used + 1, 0) | more
            before.append(reach)
        left = self.workers
        used = min(used for used, sums in before.pop().items() if sums >> left & 1)
        chosen: list[int | None] = []
        for kind in reversed(self.order):
            reach = before.pop()
            if not self.use_all and reach.get(used, 0) >> left & 1:
                chosen.append(None)
                continue
            fits = np.flatnonzero((kind.times <= limit_s) & (kind.counts <= left))
            fits = fits[_bits(reach[used - 1], left)[left - kind.counts[fits]]]
            best = fits[np.argmin(kind.times[fits])]
            chosen.append(int(kind.index[best]))
            left -= int(kind.counts[best])
            used -= 1
        return chosen[::-1]


def _add(sums: int, own: _Set, mask: int) -> int:
    """All sums of a bit of `sums` and a number of the set, as bits."""
    runs = own.runs
    # Shifted once for each run of one of them: better that with fewer.
    if bit_count(sums & ~(sums << 1)) < len(runs):
        runs, sums = _Set.of(np.flatnonzero(_bits(sums, sums.bit_length()))).runs, own.bits
    total = 0
    for first, length in runs:
        spread, done = sums, 1
        while 2 * done <= length:
            spread |= spread << done
            done *= 2
        if done < length:
            spread |= spread << (length - done)
        total |= spread << first
    return total & mask


def _bits(sums: int, most: int) -> NDArray[np.bool_]:
    """The bits 0 to `most` as an array."""
    raw = (sums & ((1 << (most + 1)) - 1)).to_bytes(most // 8 + 1, "little")
    return np.unpackbits(np.frombuffer(raw, dtype=np.uint8), bitorder="little").astype(bool)


def _why(order: Sequence[_Kind], workers: int, use_all: bool) -> str:
    some = [kind for kind in order if len(kind.counts)]
    if not some:
        return "no group has an option"
    if use_all and len(some) < len(order):
        return f"group {next(i for i, kind in enumerate(order) if not len(kind.counts)) + 1} has no option"
    least = (sum if use_all else min)(int(kind.counts[0]) for kind in some)
    most = sum(int(kind.counts[-1]) for kind in some)
    if not least <= workers <= most:
        return f"the groups reach {least}..{most} workers, {workers} are asked"
    step = 0
    for kind in some:
        step = gcd(step, *np.diff(kind.counts).tolist(), 0 if use_all else int(kind.counts[0]))
    base = least if use_all else 0
    if step == 0:
        return f"the groups reach {least} workers only, {workers} are asked"
    if (workers - base) % step:
        if base % step == 0:
            return f"only multiples of {step} workers can be reached, {workers} are asked"
        return f"only {least} workers and {step}, {2 * step}, ... more can be reached, {workers} are asked"
    reach = 1
    mask = (1 << (most + 1)) - 1
    for kind in order:
        more = _add(reach, _Set.of(kind.counts), mask)
        reach = more if use_all else reach | more
    bits = np.flatnonzero(_bits(reach, most))
    below, above = int(bits[bits < workers].max()), int(bits[bits > workers].min())
    return f"no choice of options adds up to {workers} workers; {below} and {above} can be reached"
