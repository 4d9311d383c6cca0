"""Who holds what: the GPUs and cores of a run, and one lease for each job that runs, by one mechanism."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from hpcsched.core.jobs import Job, Target
from hpcsched.core.mechanisms.base import Mechanism
from hpcsched.core.model import Attempt, Device, HostCores, JobSpec, Role
from hpcsched.core.needs import Needs
from hpcsched.core.nouns import GPU, noun
from hpcsched.core.resources.gpus import FreeGpus, GpusByHost, own_type

M = TypeVar("M", bound=Mechanism)


class Ledger:
    """The devices of a run, which of them are free, and the leases.

    A job that runs has one lease, by the mechanism of its role. It begins with `hold`; a job that is to go on
    with another one holds both from `change` until `settle`, or until `keep` gives the new one up; `release`
    ends it, and hands to its heir what somebody else used by it.
    """

    def __init__(self) -> None:
        self.devices: dict[int, Device] = {}
        """The healthy devices."""
        self.lost: dict[int, str] = {}
        """By lost device, why."""
        self._lost_devices: dict[int, Device] = {}
        self._away: dict[int, Device] = {}
        """Devices of hosts that are given back, or about to end."""
        self._on_host: dict[str, tuple[int, ...]] = {}
        """By host all devices that it has had in this life."""
        self.kinds: frozenset[str] = frozenset()
        """The kinds of the devices that there were when this life began."""
        self.types: tuple[str, ...] = ("",)
        """The types of GPU that there were in this life; first the run's own, "" everywhere in the core."""
        self.own_type = ""
        """The name of the run's own type."""
        self._type_of: dict[int, str] = {}
        """By GPU its type, where that is not the run's own."""
        self._by_type = True
        self.spreads = False
        """Whether hosts may give a job unequally many GPUs (`JobSpec.uneven`)."""
        self.noun = GPU
        """What people call these devices: see `nouns.noun`."""
        self.moves = 0
        """How often it has changed which devices there are, or which are free."""
        self.free = FreeGpus({}, ())
        self.host_cores: Mapping[str, HostCores] = {}
        """By host its cores and memory, as far as they are known."""
        self.picky: tuple[Needs, ...] = ()
        """The different needs of jobs of the run that cannot use every GPU."""
        self.counts_cores = False
        """Whether a job of the run has said how many cores it needs for each GPU."""
        self.has_needs = False
        """Whether a job of the run needs more than a number of GPUs."""
        self.mechanisms: tuple[Mechanism, ...] = ()
        """All of them, GPUs of one's own first."""
        self._used: list[Mechanism] = []
        self._unused: list[Mechanism] = []
        """Those that no job has needed yet; one that no job ever needs is not among them."""
        self._of_class: dict[type[Mechanism], Mechanism] = {}
        self._hooks: dict[str, tuple[Callable[..., Any], ...]] = {}
        self._by_role: dict[str, Mechanism] = {}
        self._healthy: Mapping[str, int] = {}

    def install(self, own: Mechanism, others: Sequence[Mechanism]) -> None:
        """Lease GPUs of one's own by `own`, and all else by the others; called once."""
        self.mechanisms = (own, *others)
        self._own = own
        plain = Mechanism.needed_by
        self._unused = [one for one in others if type(one).needed_by is not plain]
        self._by_role = {one.role: one for one in self.mechanisms if one.role is not None}
        self._by_role[Role.SECONDARY] = own
        self._of_class = {type(one): one for one in self.mechanisms}
        for name, plain in vars(Mechanism).items():
            if callable(plain) and not name.startswith("_"):
                own_way = (one for one in self.mechanisms if getattr(type(one), name) is not plain)
                self._hooks[name] = tuple(getattr(one, name) for one in own_way)

    # --- devices ----------------------------------------------------------------------------

    def begin_life(
        self,
        devices: Iterable[Device],
        cores: Iterable[HostCores] = (),
        *,
        by_type: bool = True,
        spreads: bool = False,
    ) -> None:
        """Begin with these devices, and these cores and memory of their hosts; only jobs whose attempts go on
        hold any.

        `by_type` False: all GPUs count as of one type. `spreads`: hosts may give a job unequally many.
        """
        self.spreads = spreads
        self.host_cores = {host.host: host for host in cores}
        self.lost, self._lost_devices, self._away = {}, {}, {}
        healthy = {device.index: device for device in devices}
        self.kinds = frozenset(device.kind for device in healthy.values())
        self.noun, self._on_host = noun(self.kinds), {}
        self.types, self._type_of, self._by_type = ("",), {}, by_type
        self.own_type = own_type(healthy.values()) or self.own_type  # hosts may come later
        self._note(healthy.values())
        self._have(healthy, (gpu for gpu in healthy if not self._own.on(gpu)))

    def lose(self, gpu: int, why: str) -> None:
        """Use this device no more."""
        left = {index: device for index, device in self.devices.items() if index != gpu}
        self._lost_devices[gpu] = self.devices[gpu]
        self._have(left, self.free - {gpu})
        self.lost[gpu] = why

    def find(self, gpu: int) -> None:
        """Use a lost device again; it is free unless a job that ends because of the loss still has it."""
        device = self._lost_devices.pop(gpu)
        del self.lost[gpu]
        all_of_them = {**self.devices, gpu: device}
        free = self.free if self._own.on(gpu) else self.free | {gpu}
        self._have({index: all_of_them[index] for index in sorted(all_of_them)}, free)

    def add(self, devices: Iterable[Device], cores: Iterable[HostCores]) -> None:
        """Use the devices, cores and memory of hosts that join; nobody holds any."""
        new = {device.index: device for device in devices}
        self.host_cores = {**self.host_cores, **{host.host: host for host in cores}}
        self.kinds |= {device.kind for device in new.values()}
        self.own_type = self.own_type or own_type(new.values())
        self._note(new.values())
        self._have({**self.devices, **new}, self.free | new.keys())

    def put_away(self, gpus: Iterable[int]) -> None:
        """Give these devices to nobody any more: their host is given back, or about to end."""
        self._away.update((gpu, self.devices[gpu]) for gpu in gpus)
        left = {index: device for index, device in self.devices.items() if index not in self._away}
        self._have(left, self.free - self._away.keys())

    def take_back(self, gpus: Iterable[int]) -> None:
        """Use these devices again; those are free that no job still has."""
        back = {gpu: self._away.pop(gpu) for gpu in gpus if gpu in self._away}
        all_of_them = {**self.devices, **back}
        free = self.free | {gpu for gpu in back if not self.on(gpu)}
        self._have({index: all_of_them[index] for index in sorted(all_of_them)}, free)

    def _have(self, devices: dict[int, Device], free: Iterable[int]) -> None:
        self.moves += 1
        self.devices, self.free = devices, FreeGpus(devices, free)
        self._healthy = self.by_host(devices)

    @property
    def host_names(self) -> tuple[str, ...]:
        """The hosts of the devices, in order."""
        return tuple(self._healthy)

    def gpus_on(self, host: str) -> int:
        """How many GPUs of a host are healthy."""
        return self._healthy.get(host, 0)

    def take(self, gpu: int) -> None:
        """Give a free device to somebody."""
        self.moves += 1
        self.free.remove(gpu)

    def give_back(self, gpu: int) -> None:
        """Have a device free again, unless it was lost meanwhile."""
        if gpu in self.devices:
            self.moves += 1
            self.free.add(gpu)

    def free_by_host(self) -> GpusByHost:
        """The free GPUs, host by host; hosts with none are there too."""
        return GpusByHost(self.free.by_host(), spreads=self.spreads)

    def capacity(self) -> GpusByHost:
        """All healthy GPUs, host by host."""
        return GpusByHost(self._healthy, spreads=self.spreads)

    def by_host(self, gpus: Iterable[int]) -> Mapping[str, int]:
        """How many of these GPUs, as far as they are healthy, lie on which host."""
        return Counter(self.devices[gpu].host for gpu in gpus if gpu in self.devices)

    def hosts_with(self, gpus: Iterable[int]) -> set[str]:
        """The hosts on which the healthy ones of these GPUs lie."""
        return {self.devices[gpu].host for gpu in gpus if gpu in self.devices}

    def hosts_of(self, job: Job) -> Mapping[str, int]:
        """How many of the healthy GPUs of a running job's attempt lie on which host."""
        return self.by_host(job.current.gpus)

    # --- types of GPU -----------------------------------------------------------------------

    @property
    def one_type(self) -> bool:
        """Whether all GPUs of this life were of one type."""
        return len(self.types) == 1

    def type_of(self, gpus: Collection[int]) -> str:
        """The type of these GPUs, lost ones too; of several types their names together, of none the own."""
        if self.one_type or not gpus:
            return ""
        found = {self._type_of.get(gpu, "") for gpu in gpus}
        return found.pop() if len(found) == 1 else " + ".join(sorted(map(self.said_type, found)))

    def said_type(self, gpu_type: str) -> str:
        """The name of a type."""
        return gpu_type or self.own_type

    def free_by_type(self) -> dict[str, int]:
        """How many GPUs are free, by the name of their type."""
        return Counter(self.devices[gpu].gpu_type for gpu in sorted(self.free))

    # --- mechanisms -------------------------------------------------------------------------

    def use(self, spec: JobSpec) -> None:
        """Note the mechanisms that such a job needs, and what of its needs is counted from now on."""
        if (needs := spec.needs) is not None and needs.places:
            self.has_needs = True
            self.counts_cores |= needs.cpus_per_gpu is not None
            if needs.picky and needs not in self.picky:
                self.picky = (*self.picky, needs)
        for one in self._unused:
            if one.needed_by(spec):
                one.used = True
                self._used = [each for each in self.mechanisms if each.used]
                self._unused = [each for each in self._unused if not each.used]

    def mechanism(self, kind: type[M]) -> M:
        """The mechanism of this class. Raises KeyError if it is not there."""
        found = self._of_class[kind]
        assert isinstance(found, kind)
        return found

    def hooks(self, name: str) -> tuple[Callable[..., Any], ...]:
        """The method of this name of all mechanisms that have one of their own, in order."""
        return self._hooks[name]

    def by_role(self, role: str) -> Mechanism:
        """The mechanism by which an attempt in this role holds what it runs on."""
        return self._by_role[role]

    def waits_by(self, job: Job) -> Mechanism:
        """The mechanism in whose queue the job waits."""
        for one in self._used:
            if one.waits(job):
                return one
        return self._own

    def holds_by(self, job: Job) -> Mechanism:
        """The mechanism by which the job holds what it runs on."""
        for one in self._used:
            if one.has(job):
                return one
        return self._own

    def owns(self, job: Job) -> bool:
        """Whether the job holds GPUs of its own."""
        return self.holds_by(job) is self._own

    def held_from_s(self, job: Job, attempt: Attempt) -> float | None:
        """Since when an attempt has counted as the one that has its devices; None: never."""
        return self.by_role(attempt.role).held_from_s(job, attempt)

    def room_mib(self, job: Job) -> float | None:
        """The most memory that a job that is launched may take of its device, in MiB; None: not limited."""
        return next((mib for room in self.hooks("room_mib") if (mib := room(job)) is not None), None)

    # --- leases -----------------------------------------------------------------------------

    def hold(self, job: Job, target: Target) -> None:
        """Have a job that starts hold `target`. Raises InvalidTransition if it cannot be had."""
        self.by_role(target.role).hold(job, target)

    def change(self, job: Job, target: Target) -> None:
        """Have a job that runs hold `target` too. Raises InvalidTransition if it cannot be had."""
        self.holds_by(job).change(job, target)

    def settle(self, job: Job, target: Target) -> None:
        """Have a job that has gone over to `target` hold that alone."""
        self.holds_by(job).settle(job, target)

    def keep(self, job: Job) -> None:
        """Have a job hold what it runs on alone."""
        self.holds_by(job).keep(job)

    def release(self, job: Job) -> None:
        """Have a job whose attempt is over hold nothing."""
        self.holds_by(job).release(job)

    def inherit(self, gpu: int) -> bool:
        """Whether somebody who has shared a GPU takes it over from the job that gives it back."""
        return bool(self._used) and any(one.inherit(gpu) for one in self._used)

    def on(self, gpu: int) -> list[int]:
        """Ids of the jobs that use a GPU in any way."""
        return [job_id for one in self.mechanisms for job_id in one.on(gpu)]

    def in_use(self, host: str) -> bool:
        """Whether a job uses a GPU of a host in any way, a lost one too."""
        return any(self.on(gpu) for gpu in self._on_host.get(host, ()))

    def users(self, host: str) -> list[int]:
        """Ids of the jobs that use a GPU of a host in any way, a lost one too."""
        there = self._on_host.get(host, ())
        return list(dict.fromkeys(job_id for gpu in there for job_id in self.on(gpu)))

    def host_of(self, gpu: int) -> str:
        """The host of a device, whether it is used, lost or put away; "" if there is no such device."""
        for devices in (self.devices, self._lost_devices, self._away):
            if gpu in devices:
                return devices[gpu].host
        return ""

    def _note(self, devices: Iterable[Device]) -> None:
        for device in devices:
            self._on_host[device.host] = (*self._on_host.get(device.host, ()), device.index)
            if self._by_type and device.gpu_type != self.own_type:
                self._type_of[device.index] = device.gpu_type
        self.types = tuple(dict.fromkeys((*self.types, *self._type_of.values())))

    def dequeue(self, job: Job) -> None:
        """Take a job out of the queue, if it is in one."""
        self._own.dequeue(job)
        for one in self._used:
            one.dequeue(job)

    def queued(self, job: Job) -> bool:
        """Whether the job waits in a queue of the foreground."""
        return any(job.id in one.queue for one in self.mechanisms if one.foreground)

    @property
    def waiting(self) -> bool:
        """Whether a job is in some queue."""
        return any(len(one.queue) for one in self.mechanisms)
