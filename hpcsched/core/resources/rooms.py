"""What is left of the GPUs for a job: those that suit it, of one type, where hosts have cores and memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Container, Mapping
from dataclasses import dataclass, field
from math import inf

from hpcsched.core.jobs import Job
from hpcsched.core.model import HostCores
from hpcsched.core.needs import Needs
from hpcsched.core.resources.gpus import GpusByHost, suits
from hpcsched.core.resources.ledger import Ledger
from hpcsched.core.resources.queue import Asked, Meets
from hpcsched.core.run import Run
from hpcsched.core.transitions.estimates import Estimates

Room = Mapping[str, int]
"""By host the most GPUs that a job can have there."""


@dataclass(slots=True)
class _Taken:
    """What jobs have of the hosts' cores and memory."""

    cores: Counter[str] = field(default_factory=Counter)
    memory: Counter[str] = field(default_factory=Counter)


class Rooms:
    """Says on which hosts a job's needs are met, as far as these are counted.

    Cores are counted of jobs that hold GPUs of their own: `cpus_per_gpu` for each, else an equal share of
    those that their host keeps for GPU jobs. Memory is counted of all jobs that say how much they need. A
    host that does not know its own has enough. While no job of the run has needs, nothing is counted.
    On a host that ends too soon for a job (`too_short`) there is no room for it.

    In a run with GPUs of several types a job has room on those of one type alone, unless it can mix them.
    """

    def __init__(
        self, run: Run, ledger: Ledger, estimates: Estimates, too_short: Callable[[Job], Collection[str]]
    ) -> None:
        self._run, self._ledger, self._estimates, self._too_short = run, ledger, estimates, too_short

    def now(self, job: Job, left: GpusByHost | None = None) -> Room | None:
        """The most GPUs that a job could have on each host, its own and free ones; None: as many as that.
        `left`: see `type_of`."""
        short = () if job.state.active else self._too_short(job)
        gpu_type = self.type_of(job, left)
        if not (short or gpu_type is not None or self._counts(job.spec.needs)):
            return None
        mine = set(job.gpus) if job.state.active else set()
        room = self._room(job.spec.needs, self._taken(without=job), mine, gpu_type)
        return _without(room, short)

    def at_most(self, job: Job, left: GpusByHost | None = None) -> Room | None:
        """The same, were all GPUs, cores and memory free."""
        gpu_type = self.type_of(job, left)
        if gpu_type is None and not self._counts(job.spec.needs):
            return None
        return self._room(job.spec.needs, gpu_type=gpu_type)

    def rooms_for(self, asked: Asked) -> list[Room]:
        """The GPUs of each host that such a job could have, were all of them free: by type of GPU."""
        if self._ledger.one_type and not self._counts(asked.needs):
            return [self._ledger.capacity().by_host()]
        return [self._room(asked.needs, gpu_type=each) for each in self._types(mixes=asked.mixes)]

    def most_for(self, job: Job, left: GpusByHost | None = None) -> int:
        """The GPUs that a job's hosts could each give it, were all of them free."""
        spec, room = job.spec, self.at_most(job, left)
        return self._ledger.capacity().most(spec.nodes, room=room, uneven=spec.uneven)

    # --- types of GPU -----------------------------------------------------------------------

    def type_of(self, job: Job, left: GpusByHost | None = None) -> str | None:
        """The type of the GPUs that a job has. Of one that waits: of the types on which it could start now,
        the one that is known to be fastest on what it would get there; if there is none, of those on which it
        could at all. Among equals it is the one that the fewest others ask for, then the one that the run has
        had for longest.

        `left`: the GPUs that are free, if some of the ledger's are about to be given to others. None: it
        does not matter, as there is one type only, or the job can mix them.
        """
        ledger = self._ledger
        if ledger.one_type or job.spec.mixes_types:
            return None
        if job.gpus:
            return ledger.type_of(job.gpus)
        free, taken = ledger.free_by_host() if left is None else left, self._taken(without=job)
        found = self._fastest(job, free, taken, self._too_short(job))
        if found is None:
            found = self._fastest(job, ledger.capacity())
        return found or ""

    def _fastest(
        self, job: Job, gpus: GpusByHost, taken: _Taken | None = None, short: Collection[str] = ()
    ) -> str | None:
        best, found = (False, 0.0, -inf), None
        for gpu_type in self._ledger.types:
            room = _without(self._room(job.spec.needs, taken, gpu_type=gpu_type), short)
            least, most = job.limits(gpus.most(job.spec.nodes, room=room, uneven=job.spec.uneven))
            if most < max(1, least):
                continue
            profile = self._estimates.profile(job, gpu_type)
            rate = profile.rate(job.fastest(profile, most, least)) if profile else float(most)
            this = profile is not None, rate, -float(self._asked_for(gpu_type))
            if this > best:
                best, found = this, gpu_type
        return found

    def _asked_for(self, gpu_type: str) -> int:
        """How many needs of jobs that cannot use every GPU such GPUs suit."""
        ledger = self._ledger
        these = [device for gpu, device in ledger.devices.items() if ledger.type_of((gpu,)) == gpu_type]
        return sum(any(suits(needs, device) for device in these) for needs in ledger.picky)

    def split(self, job: Job) -> str:
        """The free GPUs by type, in words, if a waiting job could start on them but for that; else ""."""
        if self.type_of(job) is None or self.starts_now(job):
            return ""
        room = _without(self._room(job.spec.needs, self._taken(without=job)), self._too_short(job))
        if not self._ledger.free_by_host().fits(job.least, job.spec.nodes, job.spec.uneven, room):
            return ""
        return ", ".join(f"{count} x {name}" for name, count in self._ledger.free_by_type().items())

    def _types(self, *, mixes: bool) -> tuple[str | None, ...]:
        return (None,) if mixes or self._ledger.one_type else self._ledger.types

    # --- jobs that wait ---------------------------------------------------------------------

    def starts_now(self, job: Job) -> bool:
        """Whether a waiting job's least count can be had now."""
        free, spec = self._ledger.free_by_host(), job.spec
        return free.fits(job.least, spec.nodes, spec.uneven, self.now(job))

    def meets_now(self) -> Meets | None:
        """Says of waiting jobs whether their needs are met, as long as nothing changes; None: all are."""
        return self._meets(self._ledger.free_by_host(), self._taken()) if self._matters else None

    def meets_at_all(self) -> Meets | None:
        """The same, were all else over."""
        return self._meets(self._ledger.capacity(), None) if self._matters else None

    @property
    def _matters(self) -> bool:
        return self._ledger.has_needs or not self._ledger.one_type

    def _meets(self, gpus: GpusByHost, taken: _Taken | None) -> Meets:
        rooms: dict[tuple[Needs | None, bool], list[Room]] = {}

        def meets(asked: Asked) -> bool:
            types, key = self._types(mixes=asked.mixes), (asked.needs, asked.mixes)
            if types == (None,) and not self._counts(asked.needs):
                return True
            if key not in rooms:
                rooms[key] = [self._room(asked.needs, taken, gpu_type=each) for each in types]
            return any(gpus.fits(asked.gpus, asked.nodes, asked.uneven, room) for room in rooms[key])

        return meets

    def usable(self, job: Job, host: str) -> list[int]:
        """The free GPUs of a host that suit a job; those come first that the fewest others ask for."""
        needs, devices, asked = job.spec.needs, self._ledger.devices, self._ledger.picky
        gpu_type = self.type_of(job)
        found = [
            gpu
            for gpu in self._ledger.free.on(host)
            if suits(needs, devices[gpu]) and gpu_type in (None, self._ledger.type_of((gpu,)))
        ]
        if not asked:
            return found
        return sorted(found, key=lambda gpu: (sum(suits(other, devices[gpu]) for other in asked), gpu))

    def memory_left_mib(self, host: str) -> float | None:
        """The main memory of a host that no job has asked for; None: the host does not know its own."""
        cores = self._ledger.host_cores.get(host)
        if cores is None or cores.memory_mib is None:
            return None
        return cores.memory_mib - self._taken().memory[host]

    def _counts(self, needs: Needs | None) -> bool:
        return self._ledger.counts_cores or (needs is not None and needs.places)

    def _room(
        self,
        needs: Needs | None,
        taken: _Taken | None = None,
        mine: Container[int] = (),
        gpu_type: str | None = None,
    ) -> Room:
        """`taken` None: all is free. `mine`: GPUs that are the job's own. `gpu_type` None: of any type."""
        ledger = self._ledger
        there: Counter[str] = Counter(dict.fromkeys(ledger.host_names, 0))
        for gpu, device in ledger.devices.items():
            of_it = gpu_type in (None, ledger.type_of((gpu,)))
            if of_it and (taken is None or gpu in ledger.free or gpu in mine) and suits(needs, device):
                there[device.host] += 1
        taken = taken or _Taken()
        for host in there:
            cores = ledger.host_cores.get(host)
            if cores is None:
                continue
            each = self._cores_each(needs, cores)
            if cores.kept and each:
                there[host] = min(there[host], max(0, cores.kept - taken.cores[host]) // each)
            memory = needs.memory_mib if needs else None
            if memory and cores.memory_mib is not None and taken.memory[host] + memory > cores.memory_mib:
                there[host] = 0
        return there

    def _taken(self, without: Job | None = None) -> _Taken:
        taken, ledger = _Taken(), self._ledger
        for job in self._run.active.values():
            if job is without:
                continue
            gpus, needs = ledger.by_host(job.gpus), job.spec.needs
            if ledger.owns(job):
                for host, count in gpus.items():
                    if cores := ledger.host_cores.get(host):
                        taken.cores[host] += count * self._cores_each(needs, cores)
            if needs and needs.memory_mib:
                for host in {*gpus, *(seat.host for seat in job.current.seats)}:
                    taken.memory[host] += needs.memory_mib  # type: ignore[assignment]
        return taken

    def _cores_each(self, needs: Needs | None, host: HostCores) -> int:
        """The cores that a job's ranks have for each GPU of a host."""
        if needs and needs.cpus_per_gpu is not None:
            return needs.cpus_per_gpu
        return host.kept // max(1, self._ledger.gpus_on(host.host))


def _without(room: Room, hosts: Collection[str]) -> Room:
    return {host: 0 if host in hosts else gpus for host, gpus in room.items()} if hosts else room
