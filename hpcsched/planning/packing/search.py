"""The search for packs by predicted time (`pack_opt` of section 5.2, with a measured cost model).

Members that predictions cannot tell apart are of one kind: a plan is how many packs there are of each shape.
The effort is counted in changes tried, not in seconds: the same problem gives the same plan.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush, heapreplace
from math import inf

from hpcsched.planning.packing.admission import PackLimits
from hpcsched.planning.packing.costs import ModelBatch
from hpcsched.planning.packing.speeds import MemberKind, Shape, Speeds, shaped, size

Shapes = Counter[Shape]
"""How many packs of each shape."""

Score = tuple[float, float]
"""Seconds until all is done on all devices, and of all packs together; less is better."""

MAX_CHANGES_TRIED = 20_000
"""Work of one climb, in changes tried, at most (chosen). New packs and dealing anew to the devices count by
their members and packs: some ten microseconds each."""

MAX_CLIMBS = 3
"""The most starts that are climbed from, the best ones (chosen)."""

MAX_NEIGHBOURS = 16
"""Shapes that a shape is tried with, at most (chosen): those next to it in order, which are alike."""

MAX_OPTIMAL_PACKS = 12
"""The most packs that are dealt to the devices in the best of all ways (chosen)."""

MAX_EXCHANGED_PACKS = 100
"""The most packs that are exchanged between devices (chosen)."""

REL_TOLERANCE = 1e-9
"""The share by which times must differ to be different: less is rounding."""


def dealt(times_s: Sequence[float], devices: int) -> list[int]:
    """The device of each pack: the longest first, each to the device that is free first.

    Few packs are dealt such that all are done as early as can be, more are exchanged while that helps. Of
    many the longest first is close to that anyway.
    """
    order = sorted(range(len(times_s)), key=lambda i: (-times_s[i], i))
    free = [(0.0, device) for device in range(devices)]
    turns = []
    for i in order:
        busy_s, device = free[0]
        heapreplace(free, (busy_s + times_s[i], device))
        turns.append(device)
    if 1 < devices < len(order) <= MAX_OPTIMAL_PACKS:
        turns = _exactly([times_s[i] for i in order], devices, turns, max(free)[0])
    elif 1 < devices < len(order) <= MAX_EXCHANGED_PACKS:
        _exchange([times_s[i] for i in order], devices, turns)
    found = [0] * len(times_s)
    for i, device in zip(order, turns, strict=True):
        found[i] = device
    return found


def makespan_s(times_s: Sequence[float], devices: int) -> float:
    """Seconds until all packs are done that are dealt so."""
    busy_s = [0.0] * devices
    for time_s, device in zip(times_s, dealt(times_s, devices), strict=True):
        busy_s[device] += time_s
    return max(busy_s)


def _exactly(times_s: Sequence[float], devices: int, turns: list[int], done_s: float) -> list[int]:
    """The best way to deal, by trying all that could be better than these turns, which take `done_s`."""
    least_s = max(times_s[0], sum(times_s) / devices) * (1 + REL_TOLERANCE)
    busy_s, taken = [0.0] * devices, [0] * len(times_s)

    def go_on(i: int) -> None:
        nonlocal turns, done_s
        if i == len(times_s):
            turns, done_s = list(taken), max(busy_s)
            return
        tried = set()
        for device in range(devices):
            before_s = busy_s[device]
            if (
                done_s <= least_s
                or before_s in tried
                or before_s + times_s[i] >= done_s * (1 - REL_TOLERANCE)
            ):
                continue
            tried.add(before_s)
            busy_s[device], taken[i] = before_s + times_s[i], device
            go_on(i + 1)
            busy_s[device] = before_s

    go_on(0)
    return turns


def _exchange(times_s: Sequence[float], devices: int, turns: list[int]) -> None:
    """Moves packs from the busiest device to others, or changes them for shorter ones, while that helps."""
    busy_s = [0.0] * devices
    for time_s, device in zip(times_s, turns, strict=True):
        busy_s[device] += time_s
    for _ in times_s:
        busiest = busy_s.index(max(busy_s))
        here = [i for i, device in enumerate(turns) if device == busiest]
        best_s, change = busy_s[busiest] * (1 - REL_TOLERANCE), None
        partners: list[tuple[int | None, int]] = [(None, device) for device in range(devices)]
        partners += enumerate(turns)
        for there, device in partners:
            if device == busiest:
                continue
            for i in here:
                less_s = times_s[i] - (0.0 if there is None else times_s[there])
                done_s = max(busy_s[busiest] - less_s, busy_s[device] + less_s)
                if done_s < best_s:
                    best_s, change = done_s, (i, there, device, less_s)
        if change is None:
            return
        i, there, device, less_s = change
        turns[i] = device
        if there is not None:
            turns[there] = busiest
        busy_s[busiest] -= less_s
        busy_s[device] += less_s


class PackSearch:
    """Looks for the packs of some members that are done first on so many devices."""

    def __init__(self, speeds: Speeds, limits: PackLimits, devices: int) -> None:
        self.speeds, self.limits, self.devices = speeds, limits, devices
        self._times_s: dict[Shape, float] = {}
        self._spent = 0.0

    def best(self, kinds: Counter[MemberKind], starts: Iterable[Shapes] = ()) -> Shapes:
        """The best packs found for so many members of each kind, from the `starts` and others.

        Never worse than every member alone, and without packs that gain nothing.
        """
        count = kinds.total()
        alone: Shapes = Counter({((kind, 1),): n for kind, n in kinds.items()})
        if count <= self.devices:
            return alone
        found: list[Shapes] = [alone, *starts]
        cap = min(self.limits.most, -(-count // self.devices))
        while cap > 1:
            alike = self._alike(kinds, cap)
            found += [alike, self._merged(alike, cap), self._merged(alone, cap)]
            cap //= 2
        distinct = {tuple(sorted(shapes.items())): shapes for shapes in found}
        ranked = sorted(distinct.values(), key=self.score)
        climbed = [self._without_loss(self._climbed(shapes)) for shapes in ranked[:MAX_CLIMBS]]
        return min([*climbed, *map(self._without_loss, ranked)], key=self.score)

    def score(self, shapes: Shapes) -> Score:
        """The predicted times of packs of these shapes."""
        times_s = [self.time_s(shape) for shape in shapes.elements()]
        return makespan_s(times_s, self.devices), sum(times_s)

    def _quick_score(self, shapes: Shapes) -> Score:
        """The same, dealt by the longest first only."""
        times_s = [self.time_s(shape) for shape in shapes.elements()]
        busy_s = [0.0] * self.devices
        if self.devices > 1:
            for time_s in sorted(times_s, reverse=True):
                heapreplace(busy_s, busy_s[0] + time_s)
        total_s = sum(times_s)
        return max(busy_s) if self.devices > 1 else total_s, total_s

    def time_s(self, shape: Shape) -> float:
        """The predicted seconds of one pack; infinite if it does not fit on a device."""
        if shape not in self._times_s:
            groups = Counter[ModelBatch]()
            for kind, n in shape:
                groups[kind.key] += n
            self._spent += len(shape) / 4
            refused = size(shape) > 1 and self.limits.refusal(groups, self.speeds)
            self._times_s[shape] = inf if refused else self.speeds.time_s(shape)
        return self._times_s[shape]

    def _without_loss(self, shapes: Shapes) -> Shapes:
        """The members of packs that gain nothing are alone."""
        found = Shapes()
        for shape, n in shapes.items():
            if self.time_s(shape) < self.speeds.separate_s(shape) * (1 - REL_TOLERANCE):
                found[shape] += n
            else:
                for kind, members in shape:
                    found[((kind, 1),)] += n * members
        return found

    # -- starts ------------------------------------------------------------------------------------------

    def _alike(self, kinds: Counter[MemberKind], cap: int) -> Shapes:
        """Packs of one kind each, such that all together take the least time: the best for one device.

        Found at once and not step by step, as stacking two may lose where stacking eight gains.
        """
        found = Shapes()
        for kind, count in kinds.items():
            each_s = [0.0] + [self.time_s(((kind, n),)) for n in range(1, min(cap, count) + 1)]
            least_s, last = [0.0], [0]
            for m in range(1, count + 1):
                choices = ((least_s[m - n] + each_s[n], n) for n in range(1, min(m, len(each_s) - 1) + 1))
                time_s, n = min(choices)
                least_s.append(time_s)
                last.append(n)
            while count:
                found[((kind, last[count]),)] += 1
                count -= last[count]
        return found

    def _merged(self, shapes: Shapes, cap: int) -> Shapes:
        """Two packs become one, those first that save most by it, while any do."""
        left = Shapes(shapes)
        heap: list[tuple[float, Shape, Shape]] = []

        def consider(one: Shape, other: Shape) -> None:
            both = _joined(one, other)
            if size(both) <= cap:
                saved_s = self.time_s(one) + self.time_s(other) - self.time_s(both)
                if saved_s > REL_TOLERANCE * self.time_s(one):
                    heappush(heap, (-saved_s, one, other))

        order = sorted(left)
        for i, one in enumerate(order):
            for other in order[i : i + MAX_NEIGHBOURS]:
                consider(one, other)
        while heap:
            _, one, other = heap[0]
            if not left[one] or not left[other] or (one == other and left[one] < 2):
                heappop(heap)
                continue
            both = _joined(one, other)
            left[one] -= 1
            left[other] -= 1
            left[both] += 1
            if left[both] == 1:
                place = bisect_left(order, both)
                if order[place : place + 1] != [both]:
                    order.insert(place, both)
                for third in _near(both, order):
                    if left[third] and third != both:
                        consider(both, third)
            elif left[both] == 2:
                consider(both, both)
        return +left

    # -- changes -----------------------------------------------------------------------------------------

    def _climbed(self, shapes: Shapes) -> Shapes:
        """The same or better: one change after another, while any helps and there is effort left."""
        shapes = Shapes(shapes)
        self._spent, turn = 0.0, 0
        best = self._quick_score(shapes)
        better = True
        while better and self._spent < MAX_CHANGES_TRIED:
            better = False
            order = sorted(shapes, key=lambda shape: (-self.time_s(shape), shape))
            alike = sorted(shapes)
            for place in range(len(order)):
                one = order[(place + turn) % len(order)]
                for old, new in _changes(one, _near(one, alike), shapes):
                    self._spent += 1
                    total_s = best[1] + sum(map(self.time_s, new)) - sum(map(self.time_s, old))
                    least_s = max(total_s / self.devices, *map(self.time_s, new))
                    if not _less((least_s, total_s), best):
                        continue
                    other = Shapes(shapes)
                    other.subtract(old)
                    other.update(new)
                    other = +other
                    self._spent += other.total() / 20
                    score = self._quick_score(other)
                    if _less(score, best):
                        shapes, best, better = other, score, True
                        break
                if better or self._spent >= MAX_CHANGES_TRIED:
                    turn += place
                    break
        return shapes


def _less(one: Score, other: Score) -> bool:
    """Whether a score is better by more than rounding."""
    for a, b in zip(one, other, strict=True):
        if abs(a - b) > REL_TOLERANCE * b:
            return a < b
    return False


def _changes(
    one: Shape, near: Sequence[Shape], shapes: Shapes
) -> Iterator[tuple[tuple[Shape, ...], tuple[Shape, ...]]]:
    """Packs that go, and those that come for them: with `one` among those that go."""
    if size(one) > 1:
        yield (one,), tuple(((kind, 1),) for kind, n in one for _ in range(n))
        for kind, n in one:
            for k in sorted({1, n // 2, n}):
                if 0 < k < size(one):
                    part = ((kind, k),)
                    yield (one,), (_less_by(one, part), part)
    for other in near:
        if other == one and shapes[one] < 2:
            continue
        pair = (one, other)
        yield pair, (_joined(one, other),)
        for kind, n in one:
            for k in sorted({1, n}):
                if k < size(one):
                    part = ((kind, k),)
                    yield pair, (_less_by(one, part), _joined(other, part))
            for swapped, _ in other:
                if kind != swapped:
                    part, back = ((kind, 1),), ((swapped, 1),)
                    yield (
                        pair,
                        (_joined(_less_by(one, part), back), _joined(_less_by(other, back), part)),
                    )


def _near(shape: Shape, order: Sequence[Shape]) -> Sequence[Shape]:
    """All shapes of a sorted list that has it too if they are few, else those that are next to it."""
    low = max(0, min(bisect_left(order, shape) - MAX_NEIGHBOURS // 2, len(order) - MAX_NEIGHBOURS))
    return order[low : low + MAX_NEIGHBOURS]


def _joined(one: Shape, other: Shape) -> Shape:
    counts = dict(one)
    for kind, n in other:
        counts[kind] = counts.get(kind, 0) + n
    return shaped(counts)


def _less_by(shape: Shape, part: Shape) -> Shape:
    counts = dict(shape)
    for kind, n in part:
        counts[kind] -= n
    return shaped(counts)
