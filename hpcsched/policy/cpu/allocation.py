"""Who has which CPU cores, the same under every policy: first come, first served (NEARCHUS, section IV).

A job starts on a part of its budget as soon as that is free, and grows, where its search says so, into what
nobody waits for; a program that is no training of ours has what it asks for. On CPU slots nobody grows onto
a slot while a job waits for GPUs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from hpcsched.contract.seats import Seat
from hpcsched.core.jobs import Job
from hpcsched.core.mechanisms.cpu.cores import WHOLE, Grant, total
from hpcsched.core.mechanisms.cpu.view import CoresDecision, CoresView, Remember, Reseat, StartOnCores
from hpcsched.core.reasons import Reason, Why
from hpcsched.planning.ps.cores import lay_out
from hpcsched.policy.cpu.configurations import KEPT, CpuShape, Rules
from hpcsched.policy.cpu.dtconfig import ScalingSearch, look


class AllotCores:
    """Gives CPU cores to jobs that need no GPU."""

    def allot(self, view: CoresView) -> list[CoresDecision]:
        """Who starts, and who goes on with other seats."""
        rooms = {host: view.room(host, lent=True) for host in view.hosts}
        decisions: list[CoresDecision] = []
        starting: list[Job] = []
        waits = False
        for job in view.waiting():
            started = self._start(view, job, rooms, starting)
            if isinstance(started, StartOnCores):
                decisions.append(started)
                starting.append(job)
            elif started:
                waits = True  # who comes later must not take what it waits for
                break
        for job in view.running:
            found = self._change(view, job, rooms, waits=waits)
            if found is not None:
                decisions.append(found)
        return decisions

    def _start(
        self, view: CoresView, job: Job, rooms: dict[str, dict[int, int]], starting: Sequence[Job]
    ) -> StartOnCores | bool:
        """The start of a job; else whether it waits for cores."""
        rules, search = Rules.of(job.spec.strategy), ScalingSearch()
        allotment = view.of.get(job.id)
        if allotment is not None and isinstance(allotment.memory, ScalingSearch):
            search = allotment.memory.anew()
        host, room = max(rooms.items(), key=lambda entry: sum(entry[1].values()), default=("", {}))
        there = sum(room.values())
        first, again = rules.first(), search.best.shape if search.best else None
        shape = again if again and again.cores <= there else first
        if shape.cores > there:
            return shape.cores <= WHOLE * view.most()  # one that can never start keeps nobody waiting
        if not view.in_time(job, starting):
            return False
        grant = granted(shape.cores, {}, room, view.hosts[host].numa, first=view.room(host, lent=False))
        _take(room, grant)
        seats, _ = seated((), shape, host, grant, view.hosts[host].numa)
        because = ", as when it was fastest" if shape is again else ""
        facts = {"seats": str(shape), "cores": shape.cores / WHOLE, "budget": rules.budget / WHOLE}
        reason = Reason(Why.SEATED, {**facts, "because": because})
        return StartOnCores(job=job, host=host, seats=seats, grant=grant, memory=search, reason=reason)

    def _change(
        self, view: CoresView, job: Job, rooms: dict[str, dict[int, int]], *, waits: bool
    ) -> CoresDecision | None:
        allotment = view.of[job.id]
        usage, search = allotment.usage, allotment.memory
        if (
            not job.settled
            or usage is None
            or not isinstance(search, ScalingSearch)
            or allotment.host not in rooms
        ):
            return None
        room = rooms[allotment.host] if not waits else {}
        if room and view.slots_wanted:
            own = view.room(allotment.host, lent=False)
            room = {core: min(part, own.get(core, 0)) for core, part in room.items()}
        rules, held = Rules.of(job.spec.strategy), sum(allotment.grant.values())
        if rules.fixed:
            return None
        found = look(search, job.current.seats, usage, rules, sum(room.values()), held)
        if found is None:
            return None
        if found.shape is None:
            return Remember(job=job, memory=found.search, reason=_new(job, found.reason))
        numa = view.hosts[allotment.host].numa
        first = view.room(allotment.host, lent=False)
        cores = held if KEPT * held <= found.shape.cores <= held else found.shape.cores
        grant = granted(cores, allotment.grant, room, numa, first=first)
        _take(rooms[allotment.host], {c: part - allotment.grant.get(c, 0) for c, part in grant.items()})
        seats, keep = seated(job.current.seats, found.shape, allotment.host, grant, numa)
        assert found.reason is not None
        return Reseat(job=job, seats=seats, keep=keep, grant=grant, memory=found.search, reason=found.reason)


def _new(job: Job, reason: Reason | None) -> Reason | None:
    """The reason, unless the job's story ends with the same one already."""
    last = job.story[-1].reason.why if job.story else None
    return None if reason is None or reason.why is last else reason


def _take(room: dict[int, int], grant: Grant) -> None:
    for core, part in grant.items():
        if part > 0:
            room[core] -= part


def granted(
    cores: int, own: Grant, room: Grant, numa: Mapping[int, int], *, first: Collection[int] = ()
) -> dict[int, int]:
    """So many hundredths of cores: those that the job has, with more from `room` or without some of them.

    Those of `first` first, so that no slot is lent without need; then of the NUMA node that has most of the
    job's, and whole cores, so that few processes share one; and the last ones, as other jobs take the first.
    """
    grant = dict(own)
    spare = sum(grant.values()) - cores
    for core in sorted(grant, key=lambda core: (grant[core], -core)):
        part = min(max(0, spare), grant[core])
        grant[core], spare = grant[core] - part, spare - part
    more = max(0, -spare)
    nodes = total({numa.get(core, 0): part} for core, part in (own or room).items())

    def worth(core: int) -> tuple[bool, bool, int, bool, int]:
        near = -nodes.get(numa.get(core, 0), 0)
        return core not in grant, core not in first, near, room[core] < WHOLE, -core

    for core in sorted(room, key=worth):
        part = min(more, room[core])
        grant[core], more = grant.get(core, 0) + part, more - part
    return {core: part for core, part in grant.items() if part > 0}


def seated(
    seats: Sequence[Seat], shape: CpuShape, host: str, grant: Grant, numa: Mapping[int, int]
) -> tuple[tuple[Seat, ...], tuple[int, ...]]:
    """The seats of a configuration by rank, and the ranks that stay of those that there are.

    Of each kind the first ones stay; those that join come after all others. Rank 0 is a server.
    """
    servers, workers = list(shape.servers), list(shape.workers)
    found: list[tuple[bool, int]] = []
    keep: list[int] = []
    for rank, seat in enumerate(seats):
        shares = servers if seat.server else workers
        if shares:
            found.append((seat.server, shares.pop(0)))
            keep.append(rank)
    found += [*((True, share) for share in servers), *((False, share) for share in workers)]
    free = {core: part / WHOLE for core, part in grant.items()}
    cores = lay_out([share / WHOLE for _, share in found], free, numa)
    placed = tuple(
        Seat(server=server, share=share / WHOLE, host=host, cores=on)
        for (server, share), on in zip(found, cores, strict=True)
    )
    return placed, tuple(keep)
