"""GPUs host by host: how many there are to give, and which hosts a job gets them on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableSet
from math import inf
from typing import Any

from hpcsched.core.model import Device
from hpcsched.core.needs import Needs

Fits = Callable[[int, int, bool], bool]
"""Whether so many GPUs could be had on each of so many hosts, or (True) so many in the mean."""

SIMULATED = "simulated"
PRETENDED = ("replay", SIMULATED)
"""Kinds of GPUs that are not there: each stands for whatever a job needs."""


def suits(needs: Needs | None, device: Device) -> bool:
    """Whether a job with these needs can use a device."""
    if needs is None or (device.kind in PRETENDED and not device.stands_for):
        return True
    memory_mib = device.memory_mib
    if memory_mib is None and device.kind == SIMULATED:
        memory_mib = inf  # nobody has said how much memory GPUs of its type have
    return needs.suits(device.gpu_type, memory_mib)


def own_type(devices: Iterable[Device]) -> str:
    """The type of GPU that a run goes by: that of most GPUs of its first host ("": it has none)."""
    first, types = None, Counter[str]()
    for device in devices:
        first = device.host if first is None else first
        if device.host == first:
            types[device.gpu_type] += 1
    return types.most_common(1)[0][0] if types else ""


class FreeGpus(MutableSet[int]):
    """The GPUs of a run that are free: how many lie on which host is known without looking through them."""

    def __init__(self, devices: Mapping[int, Device], free: Iterable[int]) -> None:
        self._devices = devices
        self._of_host: dict[str, list[int]] = {}
        for index in sorted(devices):
            self._of_host.setdefault(devices[index].host, []).append(index)
        self._free: set[int] = set()
        self._changed = set(self._of_host)
        self._counts = {device.host: 0 for device in devices.values()}
        for gpu in free:
            self.add(gpu)

    @classmethod
    def _from_iterable(cls, gpus: Iterable[Any]) -> set[Any]:
        return set(gpus)  # what & and - and | give is no more than a set

    def __contains__(self, gpu: object) -> bool:
        return gpu in self._free

    def __iter__(self) -> Iterator[int]:
        return iter(self._free)

    def __len__(self) -> int:
        return len(self._free)

    def add(self, gpu: int) -> None:
        if gpu not in self._free:
            self._free.add(gpu)
            self._counts[host := self._devices[gpu].host] += 1
            self._changed.add(host)

    def discard(self, gpu: int) -> None:
        if gpu in self._free:
            self._free.remove(gpu)
            self._counts[host := self._devices[gpu].host] -= 1
            self._changed.add(host)

    def take_changed(self) -> set[str]:
        """The hosts of which other GPUs are free than when this was last called; at first all."""
        changed, self._changed = self._changed, set()
        return changed

    def on(self, host: str) -> list[int]:
        """Those of a host, in order."""
        return [gpu for gpu in self._of_host.get(host, ()) if gpu in self._free]

    def by_host(self) -> dict[str, int]:
        """How many there are on each host; hosts with none of them are there too."""
        return dict(self._counts)


def shares(count: int, there: Mapping[str, int]) -> dict[str, int]:
    """How many GPUs each of these hosts gives to a job that gets `count` on each in the mean: as equally many
    as those that are `there` allow, and fewer in all only where there are not so many."""
    left, given = count * len(there), dict.fromkeys(there, 0)
    for i, (host, gpus) in enumerate(sorted(there.items(), key=lambda entry: entry[1])):
        given[host] = min(gpus, left // (len(there) - i))
        left -= given[host]
    return given


class GpusByHost:
    """GPUs by host, in the order of the hosts; they go down as GPUs are handed out.

    A job asks for `count` GPUs on each of `nodes` hosts (MARBLE section VII-B.2: the same count on each). An
    `uneven` one is content with so many on each in the mean, and at least one, where that `spreads`.
    """

    def __init__(self, gpus: Mapping[str, int], *, spreads: bool = False) -> None:
        self._gpus, self.spreads = dict(gpus), spreads
        self.left = sum(self._gpus.values())
        """GPUs left on all hosts together."""

    def most(
        self,
        nodes: int,
        own: Mapping[str, int] | None = None,
        room: Mapping[str, int] | None = None,
        *,
        uneven: bool = False,
    ) -> int:
        """The largest count that can be had on each of `nodes` hosts; `own` counts as there too.
        `room`: at most so many can be used on a host, what is `own` included (None: all)."""
        if nodes > len(self._gpus):
            return 0
        if nodes == 1 and not own and room is None:
            return max(self._gpus.values(), default=0)
        counts = sorted(self._counts(own, room), reverse=True)
        least = counts[nodes - 1]
        return sum(counts[:nodes]) // nodes if uneven and self.spreads and least > 0 else least

    def by_host(self) -> dict[str, int]:
        """The GPUs left on each host."""
        return dict(self._gpus)

    def fits(
        self, count: int, nodes: int, uneven: bool = False, room: Mapping[str, int] | None = None
    ) -> bool:
        """Whether `nodes` hosts have `count` GPUs each."""
        return self.most(nodes, room=room, uneven=uneven) >= count

    def pick(
        self,
        wanted: int,
        nodes: int,
        own: Mapping[str, int] | None = None,
        room: Mapping[str, int] | None = None,
        *,
        uneven: bool = False,
    ) -> tuple[int, tuple[str, ...]]:
        """How many GPUs of `wanted` can be had on each of `nodes` hosts, and on which; (0, ()) for none.

        Of the hosts that have them: the job's own first, which keep its data in their caches; then the
        fullest, so that the large holes stay; then in their order. An uneven job gets equally many where that
        is possible; else its own hosts if they have enough in all, or those with the most.
        """
        count = min(wanted, self.most(nodes, own, room, uneven=uneven))
        if count < 1:
            return 0, ()
        own = own or {}
        enough = [
            (host not in own, gpus, i, host)
            for i, (host, gpus) in enumerate(zip(self._gpus, self._counts(own, room), strict=True))
            if gpus >= count
        ]
        if len(enough) < nodes:
            return count, self._with_enough_in_all(count * nodes, nodes, own, room)
        chosen = sorted(enough)[:nodes]
        return count, tuple(host for _, _, _, host in sorted(chosen, key=lambda entry: entry[2]))

    def _with_enough_in_all(
        self, gpus: int, nodes: int, own: Mapping[str, int], room: Mapping[str, int] | None
    ) -> tuple[str, ...]:
        there = dict(zip(self._gpus, self._counts(own, room), strict=True))
        chosen = [host for host in there if host in own and there[host]]
        if len(chosen) != nodes or sum(there[host] for host in chosen) < gpus:
            chosen = sorted(there, key=lambda host: (-there[host], host not in own))[:nodes]
        return tuple(host for host in there if host in chosen)

    def take(self, hosts: Iterable[str], count: int, own: Mapping[str, int] | None = None) -> None:
        """Hand out `count` GPUs on each of these hosts, those that are `own` there not counted; where one has
        fewer, others give more."""
        own, of_each = own or {}, dict.fromkeys(hosts, count)
        if self.spreads and any(self._gpus[host] + own.get(host, 0) < count for host in of_each):
            of_each = shares(count, {host: self._gpus[host] + own.get(host, 0) for host in of_each})
        for host, share in of_each.items():
            given = max(0, share - own.get(host, 0))
            self._gpus[host] -= given
            self.left -= given

    def give(self, hosts: Iterable[str], count: int) -> None:
        """Take back `count` GPUs of each of these hosts."""
        for host in hosts:
            self._gpus[host] += count
            self.left += count

    def _counts(self, own: Mapping[str, int] | None, room: Mapping[str, int] | None = None) -> Iterable[int]:
        if room is not None:
            own = own or {}
            return [min(gpus + own.get(host, 0), room.get(host, 0)) for host, gpus in self._gpus.items()]
        if not own:
            return self._gpus.values()
        return [gpus + own.get(host, 0) for host, gpus in self._gpus.items()]
