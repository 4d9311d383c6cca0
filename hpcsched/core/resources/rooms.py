"""What a job's needs leave of the GPUs: which suit it, and whether hosts have the cores and the memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Container, Mapping
from dataclasses import dataclass, field

from hpcsched.core.jobs import Job
from hpcsched.core.model import HostCores
from hpcsched.core.needs import Needs
from hpcsched.core.resources.gpus import GpusByHost, suits
from hpcsched.core.resources.ledger import Ledger
from hpcsched.core.resources.queue import Meets
from hpcsched.core.run import Run

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
    """

    def __init__(self, run: Run, ledger: Ledger, too_short: Callable[[Job], Collection[str]]) -> None:
        self._run, self._ledger, self._too_short = run, ledger, too_short

    def now(self, job: Job) -> Room | None:
        """The most GPUs that a job could have on each host, its own and free ones; None: as many as that."""
        short = () if job.state.active else self._too_short(job)
        if not (short or self._counts(job.spec.needs)):
            return None
        mine = set(job.gpus) if job.state.active else set()
        room = self._room(job.spec.needs, self._taken(without=job), mine)
        return {host: 0 if host in short else gpus for host, gpus in room.items()} if short else room

    def at_most(self, job: Job) -> Room | None:
        """The same, were all GPUs, cores and memory free."""
        return self._room(job.spec.needs) if self._counts(job.spec.needs) else None

    def for_needs(self, needs: Needs | None) -> Room:
        """The GPUs of each host that a job with such needs could have, were all of them free."""
        return self._room(needs) if self._counts(needs) else self._ledger.capacity().by_host()

    def most_for(self, job: Job) -> int:
        """The GPUs that a job's hosts could each give it, were all of them free."""
        return self._ledger.capacity().most(job.spec.nodes, room=self.at_most(job))

    def starts_now(self, job: Job) -> bool:
        """Whether a waiting job's least count can be had now."""
        free, spec = self._ledger.free_by_host(), job.spec
        return free.fits(job.least, spec.nodes, self.now(job))

    def meets_now(self) -> Meets | None:
        """Says of waiting jobs whether their needs are met, as long as nothing changes; None: all are."""
        return self._meets(self._ledger.free_by_host(), self._taken()) if self._ledger.has_needs else None

    def meets_at_all(self) -> Meets | None:
        """The same, were all else over."""
        return self._meets(self._ledger.capacity(), None) if self._ledger.has_needs else None

    def _meets(self, gpus: GpusByHost, taken: _Taken | None) -> Meets:
        rooms: dict[Needs | None, Room] = {}

        def meets(count: int, nodes: int, needs: Needs | None) -> bool:
            if not self._counts(needs):
                return True
            if needs not in rooms:
                rooms[needs] = self._room(needs, taken)
            return gpus.fits(count, nodes, rooms[needs])

        return meets

    def usable(self, job: Job, host: str) -> list[int]:
        """The free GPUs of a host that suit a job; those come first that the fewest others ask for."""
        needs, devices, asked = job.spec.needs, self._ledger.devices, self._ledger.picky
        found = [gpu for gpu in self._ledger.free.on(host) if suits(needs, devices[gpu])]
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

    def _room(self, needs: Needs | None, taken: _Taken | None = None, mine: Container[int] = ()) -> Room:
        """`taken` None: all is free. `mine`: GPUs that are the job's own."""
        ledger = self._ledger
        there: Counter[str] = Counter(dict.fromkeys(ledger.host_names, 0))
        for gpu, device in ledger.devices.items():
            if (taken is None or gpu in ledger.free or gpu in mine) and suits(needs, device):
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
