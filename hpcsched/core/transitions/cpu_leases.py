"""Jobs get cores and give them back; CPU slots are lent out for that while nobody else has them."""

from __future__ import annotations

from hpcsched.core.actions import Resize
from hpcsched.core.jobs import Job, Target
from hpcsched.core.resources.cpu import Allotment, Grant, fits, less, most, of_slot
from hpcsched.core.transitions.costs import Teaching


class Seating(Teaching):
    """A run's state in which jobs hold CPU cores."""

    def allotment(self, job: Job) -> Allotment:
        """What a job on CPU cores has."""
        return self.cores.of.setdefault(job.id, Allotment())

    def room(self, host: str, *, lent: bool) -> dict[int, int]:
        """What could be had of the cores of a host: what is free, and if `lent` what free CPU slots could
        lend."""
        room = self.cores.free(host)
        for gpu in self.free.on(host) if lent else ():
            for core, part in of_slot(self.devices[gpu], self.devices.values()).items():
                room[core] = room.get(core, 0) + part
        return room

    def _seat(self, job: Job, host: str, grant: Grant) -> None:
        """Let a job that is about to start have these cores."""
        allotment = self.allotment(job)
        allotment.host, allotment.grant, allotment.next_grant, allotment.usage = host, {}, None, None
        self._hold(job, allotment, grant)
        allotment.grant, allotment.next_grant = dict(grant), None

    def _reseat(self, job: Job, target: Target, keep: tuple[int, ...], grant: Grant) -> None:
        """Have a job that runs go on with other seats, in place; until it does, it holds both grants."""
        job.target = job.becoming = target
        self._hold(job, self.allotment(job), grant)
        self._do(Resize, job, gpus=(), role=target.role, seats=target.seats, keep=keep)
        self._timer("resize", job, self._resize_limit_s(job, 0))

    def _hold(self, job: Job, allotment: Allotment, grant: Grant) -> None:
        """Add to what a job has of its host's cores; slots are taken on loan for it where they must be."""
        host = allotment.host
        more = less(most(allotment.held, grant), allotment.held)
        for gpu in reversed(self.free.on(host)):  # others take the first ones first
            if fits(more, free := self.cores.free(host)):
                break
            lent = of_slot(self.devices[gpu], self.devices.values())
            if any(core in lent for core in less(more, free)):
                self.free.remove(gpu)
                self.cores.loans[gpu] = host, lent
        if not fits(more, self.cores.free(host)):
            raise self._invalid(job, f"cannot have {more} of the cores of {host}")
        allotment.next_grant = dict(grant)
        self.changed.add(job.id)

    def _now_has_next(self, job: Job) -> None:
        """A job has gone over to what it was to have."""
        allotment = self.allotment(job)
        if allotment.next_grant is not None:
            allotment.grant, allotment.next_grant = allotment.next_grant, None
        allotment.usage = None
        self._return_loans()

    def _keeps_its_cores(self, job: Job) -> None:
        """What a job was to have is wanted no more."""
        self.allotment(job).next_grant = None
        self._return_loans()

    def _unseat(self, job: Job) -> None:
        """A job has left its cores."""
        allotment = self.allotment(job)
        allotment.seats, allotment.grant, allotment.next_grant, allotment.usage = (), {}, None, None
        self._return_loans()

    def _return_loans(self) -> None:
        """Give back the slots that are not needed any more."""
        for gpu, (host, lent) in list(self.cores.loans.items()):
            if fits(lent, self.cores.free(host)):
                del self.cores.loans[gpu]
                self.free.add(gpu)
