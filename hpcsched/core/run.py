"""The state of a run, and what can be asked of it; `moves.Moves` changes it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from math import inf

from hpcsched.core.actions import Action
from hpcsched.core.events import AttemptEvent
from hpcsched.core.jobs import Costs, Job
from hpcsched.core.learning import Key, Lessons
from hpcsched.core.model import Device, JobState
from hpcsched.core.plan import Plan
from hpcsched.core.processes import Program, Shape, shape_of
from hpcsched.core.profile import Profile, cost_at
from hpcsched.core.reasons import Reason, Why
from hpcsched.core.resources.background import Lanes
from hpcsched.core.resources.cpu import Cores
from hpcsched.core.resources.gpus import FreeGpus, Rooms
from hpcsched.core.resources.packing import Packs
from hpcsched.core.resources.proposals import Proposals
from hpcsched.core.resources.queue import WaitingQueue

DEFAULT_SUSPEND_S, DEFAULT_START_S, DEFAULT_RESIZE_S = 5.0, 10.0, 0.1
"""Assumed where neither the profile nor this run has measured them."""

LEAST_RESIZE_LIMIT_S = 60.0

PATIENCE = 10
"""So many times as long may a job take to leave that only gets what others leave of a CPU slot."""


@dataclass(frozen=True, slots=True)
class Life:
    """One agent's time with the run: the run clock and the wall clock when it began, and its GPUs."""

    at: float
    wall: float
    gpus: int


@dataclass(frozen=True, slots=True)
class NoSpace:
    """There was no room for a job in directory `where`, so many times in a row; it waits `until` then."""

    where: str
    tries: int
    until: float


class RunState:
    """All jobs, devices and leases of one run.

    Args:
        stories: keep each job's story for `explain`; off saves memory in large simulations.
    """

    def __init__(self, *, stories: bool) -> None:
        self._stories = stories
        self.now = 0.0
        self.grace_s = 30.0
        self.lives: list[Life] = []
        self.devices: dict[int, Device] = {}
        self.lost_devices: dict[int, str] = {}
        self.free = FreeGpus({}, ())
        self.holder: dict[int, int] = {}
        self.jobs: dict[int, Job] = {}
        self.by_name: dict[str, int] = {}
        self.dependents: dict[int, list[int]] = {}
        self.active: dict[int, Job] = {}
        self.spawned_on: dict[int, str] = {}
        """By job the host that the processes of its attempt were started from."""
        self.running: list[Job] = []
        """The active ones in the foreground, those that came first in front."""
        self.secondaries: list[Job] = []
        """Of these the secondaries: the only ones that MARBLE may promote."""
        self.queue = WaitingQueue()
        self.arrivals: list[tuple[float, int]] = []
        """A heap of (submit_s, id): the jobs that are still to come."""
        self.profiles: dict[tuple[str, int], Profile] = {}
        """By model and number of hosts."""
        self.parallel: set[Program] = set()
        """Programs that have said that they are parallel, in this run or an earlier one."""
        self.lessons = Lessons()
        self.lanes = Lanes()
        """The background lanes; `free`, `holder` and `queue` are of the foreground's."""
        self.packs = Packs()
        """Who trains on the GPU of another job, together with it."""
        self.proposals = Proposals()
        """What jobs have said of how many GPUs are good for them."""
        self.cores = Cores()
        """The CPU cores for jobs that need no GPU; `free`, `holder` and `queue` are of the GPUs."""
        self.costs: dict[str, Costs] = {}
        self.draining = False
        self.drain_cause = ""
        """What led to the drain of this life: a signal's name, an inbox command, "deadline", or "batch:" and
        the batch system's reason."""
        self.deadline: float | None = None
        self.reserve_s = 60.0
        self.late: set[int] = set()
        """Jobs that could start but for the time left: taken out of the queue until the deadline moves."""
        self.plan: Plan | None = None
        self.news = 0
        """What happened that no plan foresaw: counted, so that a plan can say how much of it it knows."""
        self.no_space: dict[int, NoSpace] = {}
        """By job: what had no room for it, and when it is tried again."""
        self.run_id = ""
        """What the run's processes are known by; "" where the journal does not say."""
        self.unfinished = 0
        self.kept: dict[int, tuple[str, ...]] = {}
        """By job: keys of which the job file last seen says otherwise than the run, which keeps its own."""
        self.updated: dict[int, tuple[str, ...]] = {}
        """By job that has ended: keys that were taken from a job file since it ran."""
        self.changed: set[int] = set()
        """Ids of jobs that changed since whoever reads this emptied it (the snapshot does)."""
        self.stale = 0
        """News of attempts that were over already."""
        self._actions: list[Action] = []
        self._cause = ""
        self._decide_after = False
        self._woken = False
        """A job for the foreground has come into the queue."""
        self._drain_due = -inf
        self._look_due = -inf
        self._lanes_due = -inf
        self._packs_due = -inf
        self._late_since = inf
        self._healthy: Mapping[str, int] = {}
        self._leave_window_s = 0.0

    # --- questions --------------------------------------------------------------------------

    def _running(self, event: AttemptEvent) -> Job | None:
        """The job, if this is news of its attempt that has a lease; else the event is stale."""
        job = self.active.get(event.job_id)
        if job is None or job.attempt != event.attempt:
            self.stale += 1
            return None
        return job

    @property
    def finished(self) -> bool:
        """Every job is in a final state."""
        return self.unfinished == 0

    @property
    def stopped(self) -> bool:
        """Drained: work may be left, but nothing runs and nothing will start."""
        return self.draining and not self.active

    @property
    def leave_by(self) -> float:
        """When a drain has to be over, whoever still hangs; infinite without a deadline."""
        if self.deadline is None or not self.draining:
            return inf
        return self.deadline - self._leave_window_s / 6

    @property
    def stuck(self) -> bool:
        """Jobs wait, but nothing runs, and on the devices and in the time that are left none can start."""
        waiting = len(self.queue) or self.late or len(self.lanes.queue) or len(self.cores.queue)
        if self.active or self.draining or not waiting:
            return False
        if any(self.jobs[i].state in (JobState.PENDING, JobState.SUSPENDED) for _, i in self.arrivals):
            return False
        return not self.queue.any_fits(self.capacity().fits)

    def job_of(self, key: str) -> Job | None:
        """The job of this id or name."""
        job = self.jobs.get(int(key)) if key.isdecimal() else None
        return self.jobs[self.by_name[key]] if job is None and key in self.by_name else job

    def profile(self, job: Job) -> Profile | None:
        """What the job has said of its next epoch; else what is known of its model: the profile loaded,
        corrected by what this run has seen, or just what it has seen. None on CPU cores: profiles are of
        GPUs."""
        if job.spec.cpus is not None:
            return None
        return self.proposals.profile(job.id) or _of_model(job, self.lessons.beliefs, self.profiles)

    def curve(self, job: Job) -> Profile | None:
        """The same, where counts that nobody has measured are estimated from those that were seen."""
        return self.proposals.profile(job.id) or _of_model(job, self.lessons.curves, self.profiles)

    def loaded(self, job: Job) -> Profile | None:
        """The profile of the job's model that was loaded, whatever was seen since."""
        return _of_model(job, {}, self.profiles)

    def shape(self, job: Job) -> Shape:
        """How many processes the job's next attempt is started as, and why."""
        return shape_of(job.spec, self.loaded(job), self.parallel)

    def rooms(self) -> Rooms:
        """The free GPUs, host by host; hosts with none are there too."""
        return Rooms(self.free.by_host())

    def capacity(self) -> Rooms:
        """All healthy GPUs, host by host."""
        return Rooms(self._healthy)

    def hosts_of(self, job: Job) -> Mapping[str, int]:
        """How many of the healthy GPUs of a running job's attempt lie on which host."""
        return self.places(job.current.gpus)

    def places(self, gpus: Iterable[int]) -> Mapping[str, int]:
        """How many of these GPUs, as far as they are healthy, lie on which host."""
        return Counter(self.devices[gpu].host for gpu in gpus if gpu in self.devices)

    def most_for(self, job: Job) -> int:
        """The GPUs that a job's hosts could each give it, were they all free."""
        return self.capacity().most(job.spec.nodes)

    def waiting_reason(self, job: Job) -> Reason | None:
        """Why a job that waits does so; None if it does not wait."""
        if job.state is JobState.HELD:
            return Reason(Why.HELD)
        if job.state not in (JobState.PENDING, JobState.SUSPENDED):
            return None
        if job.held:
            return Reason(Why.USER_SUSPENDED)
        if job.unmet:
            missing = [n for n in job.spec.after if not self._completed(n)]
            return Reason(Why.DEPENDENCY, {"after": ", ".join(missing)})
        if job.submit_s > self.now:
            return Reason(Why.BEGIN_TIME, {"at": job.submit_s})
        if (crowded := self.no_space.get(job.id)) and crowded.until > self.now:
            facts = {"where": crowded.where, "again": crowded.until, "tries": crowded.tries}
            return Reason(Why.NO_SPACE, facts)
        if self.draining:
            return Reason(Why.DRAINING)
        if job.spec.background:
            return self._too_late(job) or Reason(Why.NO_LANE)
        if job.id in self.late:
            return self._too_late(job)
        if job.spec.cpus is not None:
            return Reason(Why.NO_CORES if self.cores.queue.first() == job.id else Why.CORES_PRIORITY)
        planned = self.plan is not None and self.plan.rule != "marble" and job.id in self.plan.order
        if planned and self.rooms().fits(job.spec.gpus_min, job.spec.nodes):
            return Reason(Why.PLAN, {"free": len(self.free)})
        if self.queue.first() == job.id:
            hosts = f" on each of {job.spec.nodes} hosts" if job.spec.nodes > 1 else ""
            facts = {"need": job.spec.gpus_min, "hosts": hosts, "free": len(self.free)}
            return Reason(Why.RESOURCES, facts)
        return Reason(Why.PRIORITY)

    # --- the end of the allocation ----------------------------------------------------------

    def margin_s(self, *more: Job) -> float:
        """Seconds before the deadline at which saving begins: the reserve, and the longest saves known of
        all jobs that run (and of `more`) one after the other, as they share the file system. Those in the
        background have saved by then."""
        riders = (self.jobs[job_id] for job_id in self.packs.gpu_of)
        seated = (self.active[job_id] for job_id in self.cores.of if job_id in self.active)
        saving = (*self.running, *riders, *seated, *more)
        return self.reserve_s + sum(self._longest_save_s(job) for job in saving)

    def _longest_save_s(self, job: Job) -> float:
        """Of those that are durable when the job has left: quick ones say nothing of how long they take."""
        costs = self._known_costs(job)
        durable_s = _first(costs.durable_saves.median, self._suspend_s(job), DEFAULT_SUSPEND_S)
        return max(durable_s, costs.longest_suspend_s)

    def left_s(self, *more: Job) -> float:
        """Seconds until saving begins (with `more` running too); infinite without a deadline."""
        return inf if self.deadline is None else self.deadline - self.margin_s(*more) - self.now

    def background_until(self, *more: Job) -> float:
        """When the jobs in the background (and `more`) have to save, before the others do; maybe never."""
        guests = [self.jobs[job_id] for job_id in self.lanes.guests]
        return self._saving_begins() - sum(self._longest_save_s(job) for job in (*guests, *more))

    def first_checkpoint_s(self, job: Job) -> float:
        """Seconds that a job needs from its launch until it has done a step that can be saved."""
        least, profile = job.spec.gpus_min, self.profile(job)
        step_s = 1 / profile.rate(least) if profile else 0.0
        return self._launch_s(job, least, first=job.attempt == 0) + step_s

    def _too_late(self, job: Job, *others: Job) -> Reason | None:
        """Why a waiting job cannot be started any more in this allocation; None if it can.

        `others` start together with it.
        """
        if job.spec.background:
            left = self.background_until(job, *others) - self.now
        else:
            left = self.left_s(job, *others)
        need = self.first_checkpoint_s(job)
        facts = {"need": need, "left": max(0.0, left)}
        return Reason(Why.WALLTIME_TOO_SHORT, facts) if need > left or job.id in self.late else None

    def _saving_begins(self) -> float:
        return inf if self.deadline is None else self.deadline - self.margin_s()

    def _time_to_kill_s(self) -> float:
        """Seconds until what has not left must be killed, for us to leave in time; else infinite."""
        if self.deadline is None or not self.draining:
            return inf
        return max(1.0, self.deadline - self._leave_window_s / 3 - self.now)

    def _have(self, devices: dict[int, Device], free: Iterable[int]) -> None:
        """These are the healthy devices from now on, and which of them are free."""
        self.devices, self.free = devices, FreeGpus(devices, free)
        self._healthy = self.places(devices)

    # --- what things cost -------------------------------------------------------------------

    def _completed(self, name: str) -> bool:
        return self.jobs[self.by_name[name]].state is JobState.COMPLETED

    def _costs(self, job: Job) -> Costs:
        """What transitions of the job's model took, to be added to."""
        return self.costs.setdefault(_costs_of(job), Costs())

    def _known_costs(self, job: Job) -> Costs:
        return self.costs.get(_costs_of(job)) or Costs()

    def _grace(self, job: Job) -> float:
        """Seconds a worker has to save: thrice the longest save known of its model, at least `grace_s`.

        On the background lane of a CPU slot, where it hardly gets time and nobody wants its memory, more.
        """
        profile = self.profile(job)
        known = (profile and cost_at(profile.suspend_s, job.width)) or 0.0
        grace_s = max(self.grace_s, 3 * known, 3 * self._known_costs(job).longest_suspend_s)
        slow = job.spec.background and all(
            self.devices[g].kind == "cpu" for g in job.gpus if g in self.devices
        )
        return grace_s * PATIENCE if slow else grace_s

    def _in_place(self, job: Job, gpus: int, hosts: Collection[str] | None = None) -> bool:
        """Whether a resize to `gpus` GPUs on each of these hosts would go in place.

        That takes the host of the first rank to be one of them; without `hosts` it is taken to be.
        """
        if not job.in_place or gpus == job.width:
            return False
        return hosts is None or next(iter(self.hosts_of(job)), None) in hosts

    def _switch_s(self, job: Job, gpus: int, hosts: Collection[str] | None = None) -> float:
        """Seconds without training that it costs to bring `job` from where it runs to `gpus` GPUs on each
        of its hosts (`hosts`, as far as they are known): in place, or by a suspend and a resume."""
        if self._in_place(job, gpus, hosts):
            return self._stand_s(job, job.width, gpus)
        return self._save_s(job) + self._launch_s(job, gpus, first=False)

    def _stand_s(self, job: Job, old: int, gpus: int) -> float:
        """Seconds that training stands still for a resize in place: as measured, else by the profile."""
        profile, costs, grows = self.profile(job), self._known_costs(job), gpus >= old
        measured, cost = costs.grows if grows else costs.shrinks, None
        if profile:
            cost = profile.grow_s if grows else profile.shrink_s
        return _first(measured.median, cost_at(cost, gpus), DEFAULT_RESIZE_S)

    def _built_s(self, job: Job, gpus: int) -> float:
        """Seconds until ranks that are to join the job have started, while those it has train on."""
        return _first(self._known_costs(job).builds.median, self._launch_s(job, gpus, first=False))

    def _resize_left_s(self, job: Job) -> float:
        """Seconds until a resize in place that is under way is expected to be done."""
        new = job.becoming
        if new is None:
            return 0.0
        gpus = len(new.gpus) // job.spec.nodes
        built_s = self._built_s(job, gpus) if set(new.gpus) - set(job.current.gpus) else 0.0
        return max(0.0, new.since + built_s + self._stand_s(job, job.width, gpus) - self.now)

    def _resize_limit_s(self, job: Job, gpus: int) -> float:
        """Seconds that a resize in place may take: ample, as training goes on meanwhile."""
        profile, usage = self.profile(job), job.current.usage
        rate = usage.rate if usage else profile.rate(job.width) if profile else None
        step_s = 1 / rate if rate else 0.0
        return max(LEAST_RESIZE_LIMIT_S, 3 * (self._launch_s(job, gpus, first=False) + step_s))

    def _save_s(self, job: Job) -> float:
        """Seconds until the job has left when its devices are wanted: as measured, else by its profile."""
        costs = self._known_costs(job)
        return _first(
            costs.quick_saves.median, self._suspend_s(job), costs.durable_saves.median, DEFAULT_SUSPEND_S
        )

    def _suspend_s(self, job: Job) -> float | None:
        """What saving and leaving takes the job by its profile, else as last seen in this run."""
        profile = self.profile(job)
        known = cost_at(profile.suspend_s, job.width if job.attempts else 1) if profile else None
        return self._known_costs(job).suspend_s if known is None else known

    def _launch_s(self, job: Job, gpus: int, *, first: bool) -> float:
        """Seconds from a launch on `gpus` GPUs to the first step: as measured, else by the profile, else as
        last seen."""
        profile, costs = self.profile(job), self._known_costs(job)
        known = profile.launch_s(gpus, first=first) if profile else None
        return _first(costs.starts.median, known, costs.start_s, DEFAULT_START_S)

    def _start_left_s(self, job: Job) -> float:
        """Seconds until the job's attempt has paid its start or resume cost."""
        profile, measured = self.profile(job), self._known_costs(job).starts.median
        if job.current.in_place or (measured is not None and job.ready):
            return 0.0
        known = profile.launch_s(job.width, first=job.attempt == 1) if profile else None
        return max(0.0, job.current.start_s + _first(measured, known, 0.0) - self.now)


def _first(*values: float | None) -> float:
    """The first one that is known; the last is."""
    return next(value for value in values if value is not None)


def _costs_of(job: Job) -> str:
    """What a job does with what others leave of a GPU says nothing of a model's usual costs."""
    return f"{job.spec.model} in the background" if job.spec.background else job.spec.model


def _of_model(job: Job, first: Mapping[Key, Profile], then: Mapping[Key, Profile]) -> Profile | None:
    # How a model scales within a host says most of how it does on several with the same count each.
    model = job.spec.model
    for key in ((model, job.spec.nodes), (model, 1)):
        if found := first.get(key) or then.get(key):
            return found
    return None
