"""CPU cores for jobs that need no GPU (NEARCHUS): which there are, who has how much of which.

Cores are counted in hundredths. Nothing of the GPUs depends on what is here, but for CPU slots: while jobs
on CPU cores use the cores of a slot, they have it on loan, and nobody else can get it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from hpcsched.contract.seats import Seat
from hpcsched.core.model import Device, HostCores, Usage

WHOLE = 100
"""Hundredths of a core."""

LEAST = 10
"""The smallest share of a process, in hundredths of a core."""

Grant = Mapping[int, int]
"""How many hundredths of which cores of a host."""


@dataclass(slots=True, kw_only=True)
class Allotment:
    """What a job on CPU cores has.

    `usage` is the newest measurement of the seats of its present attempt, and `memory` what the policy wants
    to remember of the job, for as long as the run lasts.
    """

    host: str = ""
    seats: tuple[Seat, ...] = ()
    grant: Grant = field(default_factory=dict)
    next_grant: Grant | None = None
    usage: Usage | None = None
    memory: object = None

    @property
    def held(self) -> Grant:
        """What nobody else can have: also what it is about to get, or to give back."""
        return self.grant if self.next_grant is None else most(self.grant, self.next_grant)


@dataclass(slots=True)
class Cores:
    """The cores of a run: `hosts` have them, `of` is what jobs have; those of hosts that are given back are
    `away`.

    `loans` are the CPU slots that are on loan: their host, and what each of their cores counts for.
    """

    hosts: dict[str, HostCores] = field(default_factory=dict)
    of: dict[int, Allotment] = field(default_factory=dict)
    loans: dict[int, tuple[str, Grant]] = field(default_factory=dict)
    away: dict[str, HostCores] = field(default_factory=dict)

    def there(self, host: str) -> dict[int, int]:
        """What there is of each core of a host, with what is on loan."""
        known = self.hosts.get(host)
        own = dict.fromkeys(known.own, WHOLE) if known else {}
        return total([own, *(grant for lender, grant in self.loans.values() if lender == host)])

    def taken(self, host: str) -> dict[int, int]:
        """What jobs have of the cores of a host."""
        return total(allotment.held for allotment in self.of.values() if allotment.host == host)

    def free(self, host: str) -> dict[int, int]:
        """What nobody has of the cores of a host."""
        return less(self.there(host), self.taken(host))


ON_CORES = "cores"
"""The kind of device that stands for the cores of a seat where a launcher is told of devices."""


def device_of(seat: Seat) -> Device:
    """What a launcher starts a process on that has cores and no device."""
    return Device(index=-1, host=seat.host, kind=ON_CORES, handle=",".join(map(str, seat.cores)))


def total(grants: Iterable[Grant]) -> dict[int, int]:
    """The sum of grants on the same host."""
    found: dict[int, int] = {}
    for grant in grants:
        for core, part in grant.items():
            found[core] = found.get(core, 0) + part
    return found


def less(grant: Grant, other: Grant) -> dict[int, int]:
    """What is left of a grant without another one; no core has less than nothing."""
    rest = {core: part - other.get(core, 0) for core, part in grant.items()}
    return {core: part for core, part in rest.items() if part > 0}


def most(one: Grant, other: Grant) -> dict[int, int]:
    """Enough for the one and for the other."""
    return {core: max(one.get(core, 0), other.get(core, 0)) for core in {**one, **other}}


def fits(grant: Grant, room: Grant) -> bool:
    """Whether there is room for a grant."""
    return all(part <= room.get(core, 0) for core, part in grant.items())


def most_cores(hosts: Iterable[HostCores], devices: Iterable[Device]) -> float:
    """The most cores that one host could give a job, were all of them free."""
    slots = list(devices)
    found = [
        WHOLE * len(host.own) + sum(sum(of_slot(s, slots).values()) for s in slots if s.host == host.host)
        for host in hosts
    ]
    return max(found, default=0) / WHOLE


def of_slot(slot: Device, others: Iterable[Device]) -> dict[int, int]:
    """What each core of a CPU slot counts for: slots may have to share a core."""
    sharing = [cores_of(other) for other in others if other.host == slot.host]
    return {core: WHOLE // max(1, sum(core in cores for cores in sharing)) for core in cores_of(slot)}


def cores_of(slot: Device) -> tuple[int, ...]:
    """The cores in the handle of a CPU slot, such as "0-3,8"; of anything else none."""
    if slot.kind not in ("cpu", ON_CORES):
        return ()
    found: list[int] = []
    for part in filter(None, slot.handle.split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return tuple(found)
