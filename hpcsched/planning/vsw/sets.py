"""The best sets of GPUs of each size for a trajectory of batches, without enumerating sets (section 6.3).

Within a time each kind of GPU can run some number of workers, and the best set of n GPUs is that of the n
that can run most. So for each n the least time is found by halves. What the all-reduce takes depends on n and
on whether the set is on one host, which are searched separately.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from hpcsched.compat import dataclass, zip
from hpcsched.planning.vsw.rounds import Floats, Ints, Rounds

_HALVINGS = 48
"""Of times that are at most some hundred times too long: down to what floats can tell."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SetPlace:
    """The hosts of a set of GPUs of some size: one, or several.

    Args:
        count: GPUs of the set.
        host: the one host; None: several.
        available: GPUs of each kind there.
    """

    count: int
    host: int | None
    available: Ints


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GpuSet:
    """A set of GPUs: where, how many of each kind, and the seconds that the trajectory takes on it."""

    place: SetPlace
    kinds: Ints
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchTrajectory:
    """The global batches of a training.

    Args:
        samples: of each batch of the trajectory.
        workers: of each batch, by local batch.
        rounds: how workers run on each kind of GPU, by local batch; None: not at all.
    """

    samples: Floats
    workers: Mapping[int, Ints]
    rounds: Mapping[int, Sequence[Rounds | None]]


def places(hosts: Ints, counts: Sequence[int]) -> list[SetPlace]:
    """The hosts that sets of these sizes can be on; of hosts with the same GPUs the first.

    Args:
        hosts: GPUs of each kind (columns) on each host (rows).
    """
    _, first = np.unique(hosts, axis=0, return_index=True)
    total = hosts.sum(axis=0)
    found = []
    for count in counts:
        for host in sorted(first.tolist()):
            if count <= hosts[host].sum():
                found.append(SetPlace(count=count, host=host, available=hosts[host]))
        if len(hosts) > 1 and 2 <= count <= total.sum():
            found.append(SetPlace(count=count, host=None, available=total))
    return found


def best_sets(
    trajectory: BatchTrajectory,
    hosts: Ints,
    counts: Sequence[int],
    communication_s: Callable[[int, bool], tuple[float, float]],
) -> dict[int, GpuSet]:
    """The set of each size on which the trajectory takes least; sizes that cannot run it are left out.

    Of one batch this is exact. Of several, the sets compared at each place are those best for one of them.

    Args:
        communication_s: by the number of GPUs and whether they are on one host.
    """
    where = places(hosts, counts)
    if not where:
        return {}
    search = _Search(trajectory, hosts, communication_s)
    own_s, kinds = search.run(where)
    fastest = own_s.argmin(axis=0)
    tried: list[SetPlace] = []
    sets: list[Ints] = []
    for i, place in enumerate(where):
        if not np.isfinite(own_s[:, i].min(axis=0)).all():
            continue
        for each in np.unique(kinds[fastest[i], i, np.arange(len(fastest[i]))], axis=0):
            tried.append(place)
            sets.append(each)
    best: dict[int, GpuSet] = {}
    if not tried:
        return best
    each_s, _ = search.run(tried, np.array(sets))
    seconds = each_s.min(axis=0).sum(axis=-1)
    for place, chosen, taken_s in zip(tried, sets, seconds.tolist(), strict=True):
        if np.isfinite(taken_s) and (place.count not in best or taken_s < best[place.count].seconds):
            best[place.count] = GpuSet(place=place, kinds=chosen, seconds=taken_s)
    return best


class _Search:
    def __init__(
        self,
        trajectory: BatchTrajectory,
        hosts: Ints,
        communication_s: Callable[[int, bool], tuple[float, float]],
    ) -> None:
        self.trajectory, self.communication_s = trajectory, communication_s
        on_hosts = hosts > 0
        only = np.where(on_hosts.sum(axis=0) == 1, on_hosts.argmax(axis=0), -1)
        self.only_on = only
        """The one host that has a kind; -1: several do."""

    def run(self, where: Sequence[SetPlace], kinds: Ints | None = None) -> tuple[Floats, Ints]:
        """Seconds and kinds of the best set for each batch at each place, by local batch first.

        Args:
            kinds: the sets, if only their seconds are asked for.

        Returns:
            seconds [local batches, places, batches], inf if a batch cannot be run; kinds [.., .., .., kinds].
        """
        batches = len(self.trajectory.samples)
        rows = len(where) * batches
        count = np.repeat([place.count for place in where], batches)
        several = np.repeat([place.host is None for place in where], batches)
        available = np.repeat([place.available for place in where], batches, axis=0)
        times = [self.communication_s(place.count, place.host is not None) for place in where]
        most_s, last_s = (np.repeat(column, batches) for column in np.array(times).T)
        fixed = None if kinds is None else np.repeat(kinds, batches, axis=0)
        asked = [np.flatnonzero(own) for own in (available if fixed is None else fixed).T]
        seconds, chosen = [], []
        for local_batch, by_kind in self.trajectory.rounds.items():
            workers = np.tile(self.trajectory.workers[local_batch], len(where))
            known = [rounds for rounds in by_kind if rounds is not None]
            longest_s = max((rounds.longest_s(int(workers.max())) for rounds in known), default=0.0)

            def pick(limit_s: Floats, by_kind: Sequence[Rounds | None] = by_kind) -> tuple[Ints, Ints]:
                able = np.zeros((rows, len(by_kind)), dtype=np.int64)
                for kind, rounds in enumerate(by_kind):
                    if rounds is not None:
                        at = asked[kind]
                        able[at, kind] = rounds.capacity(limit_s[at], most_s[at], last_s[at])
                if fixed is not None:
                    return fixed, able
                return self._ablest(able, available, count, several), able

            low, high = np.zeros(rows), longest_s + most_s + last_s
            enough = _enough(*pick(high), workers, count)
            for _ in range(_HALVINGS):
                middle = (low + high) / 2
                within = _enough(*pick(middle), workers, count)
                high = np.where(within, middle, high)
                low = np.where(within, low, middle)
            chosen.append(pick(high)[0].reshape(len(where), batches, -1))
            steps = np.tile(self.trajectory.samples, len(where)) / (workers * local_batch)
            seconds.append(np.where(enough, high * steps, np.inf).reshape(len(where), batches))
        return np.array(seconds), np.array(chosen)

    def _ablest(self, able: Ints, available: Ints, count: Ints, several: Ints) -> Ints:
        """The GPUs of each kind in the sets that can run most workers, a set a row."""
        order = np.argsort(-able, axis=1, kind="stable")
        there = np.take_along_axis(available, order, axis=1)
        before = np.cumsum(there, axis=1) - there
        taken = np.clip(count[:, None] - before, 0, there)
        only_on = self.only_on[order]
        for host in np.unique(self.only_on[self.only_on >= 0]):
            # A set over several hosts cannot consist of what a single host has: its last gives way.
            own = only_on == host
            rows = np.flatnonzero(several & ((taken * own).sum(axis=1) == count))
            last = taken.shape[1] - 1 - np.argmax(taken[rows, ::-1] > 0, axis=1)
            taken[rows, last] -= 1
            taken[rows, np.argmin(own[rows], axis=1)] += 1
        sets = np.zeros_like(taken)
        np.put_along_axis(sets, order, taken, axis=1)
        return sets


def _enough(sets: Ints, able: Ints, workers: Ints, count: Ints) -> Ints:
    """Whether sets can run the workers, at least one on each GPU."""
    each = ((sets == 0) | (able > 0)).all(axis=1)
    enough: Ints = each & ((sets * able).sum(axis=1) >= workers) & (workers >= count)
    return enough


def indices(found: GpuSet, by_host: Sequence[Mapping[int, Sequence[int]]]) -> tuple[int, ...]:
    """Which GPUs make up a set: those of as few hosts as can be, hosts with many of them first.

    Args:
        by_host: the GPUs of each kind on each host.
    """
    left = found.kinds.copy()
    hosts = list(range(len(by_host))) if found.place.host is None else [found.place.host]
    chosen: list[int] = []
    used: list[int] = []
    while left.sum():
        offers = {
            host: {kind: min(int(left[kind]), len(gpus)) for kind, gpus in by_host[host].items()}
            for host in hosts
            if host not in used
        }
        host = max(offers, key=lambda each: (sum(offers[each].values()), -each))
        offer = offers[host]
        if found.place.host is None and not used and sum(offer.values()) == left.sum():
            _leave_one(offer, {kind for other in offers if other != host for kind in by_host[other]})
        for kind, many in offer.items():
            chosen += by_host[host][kind][:many]
            left[kind] -= many
        used.append(host)
    return tuple(sorted(chosen))


def _leave_one(offer: dict[int, int], elsewhere: set[int]) -> None:
    """One GPU less of a kind that other hosts have too: a set that was found over several hosts."""
    kind = next(kind for kind, many in offer.items() if many and kind in elsewhere)
    offer[kind] -= 1
