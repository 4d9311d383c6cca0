"""Ways to choose packs: the paper's (section 5.3, 5.4) and one by predicted time.

Each takes a problem and returns packs, every member in one of them. Those of the paper fill one pack after
another until the device is full, and know nothing of what a pack gains.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import heappop, heappush
from random import Random

from hpcsched.planning.packing.admission import MAX_PACK_SIZE
from hpcsched.planning.packing.costs import ModelBatch
from hpcsched.planning.packing.distance import apart, places
from hpcsched.planning.packing.joining import MAX_MEMBERS, best_place
from hpcsched.planning.packing.problem import PackProblem
from hpcsched.planning.packing.search import PackSearch, Shapes
from hpcsched.planning.packing.speeds import MemberKind, Pack, PackMember, Shape, shaped, size

Packs = list[Pack]
Strategy = Callable[[PackProblem], Packs]


def singleton(problem: PackProblem) -> Packs:
    """Every member alone."""
    return [(member,) for member in problem.members]


def random_packs(problem: PackProblem) -> Packs:
    """Members drawn at random, by the problem's seed."""
    drawn = list(problem.members)
    Random(problem.seed).shuffle(drawn)
    packs = []
    while drawn:
        packs.append(_filled(problem, drawn[0], drawn[1:]))
        drawn = _without(drawn, packs[-1])
    return packs


def by_batch(problem: PackProblem) -> Packs:
    """Only members of the same batch size share a pack; those that come first are packed first."""
    packs = []
    for batch in dict.fromkeys(member.batch for member in problem.members):
        left = [member for member in problem.members if member.batch == batch]
        while left:
            packs.append(_filled(problem, left[0], left[1:]))
            left = _without(left, packs[-1])
    return packs


def knn(problem: PackProblem) -> Packs:
    """A member drawn at random, by the seed, and those nearest to it within the threshold; and so on."""
    rng = Random(problem.seed)
    space = problem.space
    place = {member.name: places(member, space) for member in problem.members}
    left = list(problem.members)
    packs = []
    while left:
        centroid = left.pop(rng.randrange(len(left)))
        here = place[centroid.name]
        away = [(apart(here, place[member.name]), i) for i, member in enumerate(left)]
        near = [left[i] for distance, i in sorted(away) if distance <= problem.threshold]
        packs.append(_filled(problem, centroid, near))
        left = _without(left, packs[-1])
    return packs


def measured(problem: PackProblem) -> Packs:
    """The packs that are predicted to be done first, as far as a search finds them.

    It starts from what the other strategies choose, among others. Never later than one by one, and no pack
    that gains nothing. With no more members than devices every member is alone; else packs are balanced over
    the devices by their time.
    """
    speeds = problem.speeds
    waiting: dict[MemberKind, deque[PackMember]] = {}
    for member in problem.members:
        waiting.setdefault(speeds.kind(member), deque()).append(member)
    others = (STRATEGIES[name](problem) for name in STRATEGIES if name not in ("off", "run", "measured"))
    starts = [Shapes(speeds.shape(pack) for pack in packs) for packs in others]
    kinds = Counter({kind: len(members) for kind, members in waiting.items()})
    found = PackSearch(speeds, problem.limits, problem.devices).best(kinds, starts)
    packs = []
    for shape in sorted(found.elements()):
        packs.append(tuple(waiting[kind].popleft() for kind, n in shape for _ in range(n)))
    return packs


def as_run(problem: PackProblem) -> Packs:
    """The packs of `run` and `simulate`: in the order of the members, each starts on a device that is free,
    joins one that it pays to join (`joining`), or waits and begins a pack of its own. A run knows nothing of
    the factors of pairs, and of those that are equally good takes the one with the most similar arguments.

    Members that join when others have left a pack are shown as packs of their own.
    """
    found: Packs = []
    waiting = list(problem.members)
    while waiting:
        begun, waiting = _begun(problem, waiting)
        found += begun
    return found


def _begun(problem: PackProblem, members: Sequence[PackMember]) -> tuple[Packs, list[PackMember]]:
    """The packs that begin when all devices are free, and the members that wait for others to end."""
    speeds = problem.speeds
    most = MAX_MEMBERS if problem.limits.most == MAX_PACK_SIZE else problem.limits.most
    packs = [[member] for member in members[: problem.devices]]
    alike: dict[Shape, list[int]] = {}  # heaps of packs that predictions do not tell apart
    for number in range(len(packs)):
        alike.setdefault(speeds.shape(packs[number]), []).append(number)
    waiting = []
    for member in members[problem.devices :]:
        kind = speeds.kind(member)
        fitting = {}
        for shape in sorted(alike, key=lambda shape: (size(shape), alike[shape][0])):
            grown = shaped(Counter(dict(shape)) + Counter([kind]))
            if size(shape) < most and _may_fit(problem, grown):
                fitting[shape] = list(Counter(dict(shape)).elements())
        found = best_place(speeds, fitting, kind)
        if found is None:
            waiting.append(member)
            continue
        number = heappop(alike[found])
        if not alike[found]:
            del alike[found]
        packs[number].append(member)
        heappush(alike.setdefault(speeds.shape(packs[number]), []), number)
    return [tuple(pack) for pack in packs], waiting


def _may_fit(problem: PackProblem, shape: Shape) -> bool:
    """Not if it is known not to: a run finds out what was not measured."""
    capacity_mib = problem.limits.capacity_mib
    if capacity_mib is None:
        return True
    known = (problem.speeds.peak_mib(key, n) or 0.0 for key, n in _by_key(shape).items())
    return sum(known) <= capacity_mib * (1 - problem.limits.reserve)


def _by_key(shape: Shape) -> Counter[ModelBatch]:
    counts: Counter[ModelBatch] = Counter()
    for kind, n in shape:
        counts[kind.key] += n
    return counts


STRATEGIES: Mapping[str, Strategy] = {
    "off": singleton,
    "run": as_run,
    "measured": measured,
    "knn": knn,
    "batch": by_batch,
    "random": random_packs,
}
"""By name; of two that are equally good, `auto` takes the first."""


def _filled(problem: PackProblem, first: PackMember, candidates: Iterable[PackMember]) -> Pack:
    """A pack of the first and of those candidates that still fit, in their order."""
    pack, groups, share = [first], Counter([first.key]), problem.share
    full: set[ModelBatch] = set()  # once one of a key does not fit, no other of it does
    for member in candidates:
        if len(pack) >= share:
            break
        if member.key in full:
            continue
        groups[member.key] += 1
        if problem.limits.refusal(groups, problem.speeds):
            groups[member.key] -= 1
            groups = +groups
            full.add(member.key)
        else:
            pack.append(member)
    return tuple(pack)


def _without(members: list[PackMember], pack: Pack) -> list[PackMember]:
    gone = {member.name for member in pack}
    return [member for member in members if member.name not in gone]
