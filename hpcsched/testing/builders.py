"""Short ways to say what a test is about: jobs, profiles, a machine driven by hand, a run as a story."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from math import floor
from typing import Any

from hpcsched.contract.exits import SUSPENDED
from hpcsched.core import events as ev
from hpcsched.core.actions import Action, Launch, MakePlan, Resize, SetTimer, Suspend
from hpcsched.core.jobs import Job
from hpcsched.core.machine import Machine
from hpcsched.core.mechanisms.background.mechanism import Background
from hpcsched.core.mechanisms.packing.mechanism import Packing
from hpcsched.core.model import Device, HostCores, JobSpec, Kind, Progress
from hpcsched.core.profile import Cost, Profile
from hpcsched.core.transitions.outcome import LOOK
from hpcsched.policy import make_policy
from hpcsched.sim.engine import Simulation
from hpcsched.testing.invariants import check


def a_job(name: str, model: str | None = None, steps: int | None = 100, **rest: Any) -> JobSpec:
    """A stand-in job of `steps` steps; `gpus` may be a number or (fewest, most)."""
    gpus = rest.pop("gpus", (1, None))
    least, most = (gpus, gpus) if isinstance(gpus, int) else gpus
    kind = rest.pop("kind", Kind.REPLAY)
    return JobSpec(
        name=name, kind=kind, model=model or name, steps=steps, gpus_min=least, gpus_max=most, **rest
    )


def a_profile(
    model: str,
    rates: Sequence[float] | Mapping[int, float],
    *,
    start_s: Cost | None = 0.0,
    suspend_s: Cost | None = 0.0,
    resume_s: Cost | None = None,
    grow_s: Cost | None = None,
    shrink_s: Cost | None = None,
) -> Profile:
    """Steps per second on 1, 2, 3 ... GPUs, or by GPU count."""
    return Profile(
        model=model,
        device="test",
        throughput=rates if isinstance(rates, Mapping) else dict(enumerate(rates, 1)),
        start_s=start_s,
        suspend_s=suspend_s,
        resume_s=resume_s,
        grow_s=grow_s,
        shrink_s=shrink_s,
    )


def a_core_job(name: str, cpus: float, *, steps: int = 100_000, **options: Any) -> JobSpec:
    """A training on CPU cores with this budget; `options` of its strategy."""
    rest = {key: options.pop(key) for key in ("after", "retries", "submit_at") if key in options}
    return JobSpec(
        name=name,
        kind=Kind.TRAINER,
        model=name,
        trainer="some.module:Name",
        steps=steps,
        gpus_min=0,
        gpus_max=0,
        strategy={"kind": "ps", "cpus": cpus, **options},
        **rest,
    )


def a_program(name: str, cpus: float, **rest: Any) -> JobSpec:
    """A program on so many CPU cores."""
    return JobSpec(
        name=name,
        kind=Kind.COMMAND,
        model=name,
        command=("prepare",),
        gpus_min=0,
        gpus_max=0,
        strategy={"kind": "cpu", "cpus": cpus},
        **rest,
    )


def some_devices(count: int, hosts: int = 1, kind: str = "test") -> tuple[Device, ...]:
    """`count` GPUs (or CPU slots of one core, kind "cpu") on each of `hosts` hosts n1, n2, ..."""
    return tuple(
        Device(index=i, host=f"n{i // count + 1}", kind=kind, handle=str(i % count))
        for i in range(count * hosts)
    )


class Driver:
    """A machine, and the outside world played by hand; the invariants are checked after every event.

    Jobs are named by id (from 1) or by name. `events` and `actions` hold all that has happened.
    """

    def __init__(
        self,
        *specs: JobSpec,
        gpus: int = 6,
        hosts: int = 1,
        policy: str = "marble",
        profiles: Iterable[Profile] = (),
        grace_s: float = 30.0,
        deadline: float | None = None,
        reserve_s: float = 60.0,
        kind: str = "test",
        cores: Sequence[int] = (),
        rules: int = ev.RULES,
        release_after_s: float | None = None,
        **options: Any,
    ) -> None:
        self.machine = Machine(make_policy)
        self.events: list[ev.Event] = []
        self.actions: list[Action] = []
        self.now = 0.0
        self._policy, self._options, self._grace_s = policy, options, grace_s
        self._reserve_s, self._kind, self._cores, self._rules = reserve_s, kind, tuple(cores), rules
        self._release_after_s = release_after_s
        self.start_agent(gpus, hosts=hosts, deadline=deadline)
        if profiles := tuple(profiles):
            self.tell(ev.ProfilesLoaded, profiles=profiles)
        if specs:
            self.submit(*specs)

    def job(self, key: int | str) -> Job:
        job = self.machine.run.job_of(str(key))
        assert job is not None, key
        return job

    def handle(self, event: ev.Event) -> list[Action]:
        """Let an event happen; returns the actions asked for, timers left out."""
        self.now = max(self.now, event.at)
        self.events.append(event)
        actions = self.machine.handle(event)
        self.actions += actions
        check(self.machine)
        return [action for action in actions if not isinstance(action, SetTimer)]

    def tell(self, kind: type[ev.Event], job: int | str | None = None, **rest: Any) -> list[Action]:
        """An event now; one about an attempt is about the job's newest, unless `attempt` is given."""
        if job is not None:
            rest["job_id"] = self.job(job).id
            if issubclass(kind, ev.AttemptEvent):
                rest.setdefault("attempt", self.job(job).attempt)
        return self.handle(kind(at=self.now, **rest))

    def start_agent(
        self,
        gpus: int,
        saved: Mapping[int, int] | None = None,
        *,
        hosts: int = 1,
        deadline: float | None = None,
        devices: Sequence[Device] = (),
        reads_inbox: bool = False,
        **rest: Any,
    ) -> list[Action]:
        """An agent begins with so many GPUs on each host, or with these `devices`."""
        return self.tell(
            ev.AgentStarted,
            wall=1e9 + self.now,
            devices=tuple(devices) or some_devices(gpus, hosts, self._kind),
            cores=tuple(HostCores(host=f"n{i + 1}", own=self._cores) for i in range(hosts)),
            deadline=deadline,
            reserve_s=self._reserve_s,
            policy=self._policy,
            policy_options=self._options,
            grace_s=self._grace_s,
            saved_steps=saved or {},
            rules=self._rules,
            release_after_s=self._release_after_s,
            reads_inbox=reads_inbox,
            stays="n1",
            **rest,
        )

    def take_over(
        self, *adopted: int | str, unsure: Mapping[int, float] | None = None, hosts: int = 1, **rest: Any
    ) -> list[Action]:
        """An agent begins on the same devices, under which these jobs go on."""
        ids = tuple(self.job(job).id for job in adopted)
        devices = self.machine.hosts.devices[-1]
        epoch = self.machine.run.epoch + 1
        more: dict[str, Any] = {"unsure": unsure or {}, "epoch": epoch, **rest}
        return self.start_agent(0, devices=devices, hosts=hosts, adopted=ids, **more)

    def submit(self, *specs: JobSpec) -> list[Action]:
        return self.tell(ev.JobsSubmitted, first_id=len(self.machine.run.jobs) + 1, jobs=specs)

    def runs(self, *jobs: int | str, in_place: bool = False) -> None:
        """The jobs' processes exist and have said that they can be suspended (and resized `in_place`)."""
        for job in jobs:
            self.tell(ev.WorkersSpawned, job, processes=((100, 1),))
            self.tell(ev.WorkersReady, job, in_place=in_place)

    def resized(self, job: int | str, step: int, **rest: Any) -> list[Action]:
        """The job has been resized in place, as it was asked to, after this step."""
        return self.tell(ev.WorkersResized, job, step=step, **rest)

    def stays(self, job: int | str, **rest: Any) -> list[Action]:
        """The job has not been resized in place, as it was asked to."""
        return self.tell(ev.ResizeFailed, job, error="no memory", **rest)

    def uses(
        self,
        job: int | str,
        rate: float,
        share: float | Sequence[float] = 1.0,
        *,
        full: float = 0.0,
        **rest: Any,
    ) -> list[Action]:
        """The job is measured: its processes use this share of their cores (each, or all), and its first
        server's link was full for so much of the time."""
        seats = self.job(job).current.seats
        shares = [share] * len(seats) if isinstance(share, float) else share
        cpu = tuple(part * seat.share for part, seat in zip(shares, seats, strict=True))
        net = (full, *(0.0 for _ in seats[1:]))
        return self.tell(ev.UsageMeasured, job, rate=rate, cpu=cpu, net=net, samples=30, stable=True, **rest)

    def reports(
        self, job: int | str, step: int, rate: float | None = None, *, again: int = 0
    ) -> list[Action]:
        about = self.job(job)
        news = Progress(job_id=about.id, attempt=about.attempt, step=step, rate=rate, again=again)
        return self.tell(ev.ProgressObserved, progress=(news,))

    def trains(self, job: int | str, rate: float, seconds: float = 40.0) -> list[Action]:
        """The job does `rate` steps a second for so long, and is looked at every 10 s, as agents do."""
        about, begun = self.job(job), self.now
        first, actions = about.step, []
        for look in range(round(seconds / 10) + 1):
            self.now = begun + 10 * look
            step = first + floor(10 * look * rate)
            done_s = begun + (step - first) / rate
            news = Progress(job_id=about.id, attempt=about.attempt, step=step, rate=rate, done_s=done_s)
            actions += self.tell(ev.ProgressObserved, progress=(news,))
        return actions

    def saves(self, job: int | str, step: int) -> list[Action]:
        return self.tell(ev.CheckpointSaved, job, step=step)

    def exits(
        self, job: int | str, code: int, step: int | None = None, saved: int | None = None, **rest: Any
    ) -> list[Action]:
        return self.tell(ev.WorkersExited, job, code=code, step=step, saved_step=saved, **rest)

    def leaves(self, job: int | str, step: int) -> list[Action]:
        """The job saves and leaves, as it was asked to."""
        return self.exits(job, SUSPENDED, step, step)

    def cancel(self, job: int | str) -> list[Action]:
        return self.tell(ev.CancelRequested, job)

    def hold(self, job: int | str) -> list[Action]:
        return self.tell(ev.HoldRequested, job)

    def release(self, job: int | str) -> list[Action]:
        return self.tell(ev.ReleaseRequested, job)

    def suspend(self, job: int | str) -> list[Action]:
        return self.tell(ev.SuspendRequested, job)

    def resume(self, job: int | str) -> list[Action]:
        return self.tell(ev.ResumeRequested, job)

    def retry(self, *jobs: int | str, from_scratch: bool = False) -> list[Action]:
        ids = tuple(self.job(job).id for job in jobs)
        return self.tell(ev.RetryRequested, job_ids=ids, from_scratch=from_scratch)

    def define(self, *specs: JobSpec, again: Iterable[int | str] = ()) -> list[Action]:
        """The jobs of these names are defined anew, and some of them run again."""
        updated = {self.job(spec.name).id: spec for spec in specs}
        return self.tell(
            ev.DefinitionsCompared, updated=updated, again=tuple(self.job(job).id for job in again)
        )

    def drain(self) -> list[Action]:
        return self.tell(ev.DrainRequested)

    def lose(self, gpu: int) -> list[Action]:
        return self.tell(ev.DeviceLost, gpu=gpu, why="Xid 79")

    def find(self, gpu: int) -> list[Action]:
        return self.tell(ev.DeviceFound, gpu=gpu, why="well for 30 s")

    def due(self, kind: str, job: int | str) -> float:
        """The time at which the newest timer of a kind, for a job's newest attempt, runs out."""
        about = self.job(job)
        attempt = 0 if kind == "arrival" else about.attempt
        key = (kind, about.id, attempt)
        return [a.due for a in self.actions if isinstance(a, SetTimer) and a.key == key][-1]

    def ring(self, kind: str, job: int | str, attempt: int | None = None) -> list[Action]:
        """Let that timer run out."""
        self.now = max(self.now, self.due(kind, job))
        number = (0 if kind == "arrival" else self.job(job).attempt) if attempt is None else attempt
        return self.tell(ev.TimerFired, key=(kind, self.job(job).id, number))

    def states(self) -> list[str]:
        """The state of each job, in the order of ids."""
        return [str(job.state) for job in self.machine.run.jobs.values()]


class Planned(Driver):
    """A driver that has plans made as soon as they are asked for."""

    def handle(self, event: ev.Event) -> list[Action]:
        actions = super().handle(event)
        for action in [a for a in actions if isinstance(a, MakePlan)]:
            actions += self.handle(ev.PlanMade(at=action.at, plan=self.machine.make_plan()))
        return actions

    def look_again(self) -> list[Action]:
        """Go on to when the policy wanted to be asked again."""
        self.now = [a.due for a in self.actions if isinstance(a, SetTimer) and a.key == LOOK][-1]
        return self.tell(ev.TimerFired, key=LOOK)

    def counts(self) -> dict[str, int]:
        """GPUs by name of the jobs that hold any."""
        return {job.spec.name: len(job.gpus) for job in self.machine.run.active.values()}


class Story:
    """The story of a simulation, a line for each thing; give `Story.watch` to it as `watch`."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def watch(self, event: ev.Event, actions: Sequence[Action], machine: Machine) -> None:
        check(machine)

        def name(job_id: int) -> str:
            return machine.run.jobs[job_id].spec.name

        if isinstance(event, ev.WorkersExited):
            what = {0: "is done", SUSPENDED: "has left"}.get(event.code, f"exits {event.code}")
            self.lines.append(f"{event.at:.0f}: {name(event.job_id)} {what}")
        elif isinstance(event, ev.WorkersResized):
            gpus = ",".join(map(str, machine.run.jobs[event.job_id].current.gpus))
            self.lines.append(f"{event.at:.0f}: {name(event.job_id)} goes on on {gpus}")
        for action in actions:
            if isinstance(action, Launch):
                verb = "resume" if action.resume else "start"
                gpus = ",".join(map(str, action.gpus))
                self.lines.append(f"{action.at:.0f}: {verb} {name(action.job_id)} {action.role} on {gpus}")
            elif isinstance(action, Suspend):
                self.lines.append(f"{action.at:.0f}: suspend {name(action.job_id)}")
            elif isinstance(action, Resize):
                gpus = ",".join(map(str, action.gpus))
                self.lines.append(f"{action.at:.0f}: resize {name(action.job_id)} {action.role} to {gpus}")


def simulate(
    specs: Sequence[JobSpec],
    profiles: Iterable[Profile],
    *,
    gpus: int = 6,
    nodes: int = 1,
    policy: str = "marble",
    happenings: Iterable[ev.Event] = (),
    **options: Any,
) -> tuple[Machine, list[str]]:
    """The machine at the end, and the story."""
    story = Story()
    simulation = Simulation(
        specs,
        profiles,
        gpus=gpus,
        nodes=nodes,
        policy=policy,
        options=options,
        watch=story.watch,
        happenings=happenings,
    )
    return simulation.run(), story.lines


def makespan(machine: Machine) -> float:
    """When the last job ended."""
    return max(job.ended_s or 0.0 for job in machine.run.jobs.values())


def state_of(machine: Machine) -> dict[str, Any]:
    """All of a run's state that matters, comparable with ==."""
    jobs = {
        job.id: {field.name: getattr(job, field.name) for field in fields(job)}
        for job in machine.run.jobs.values()
    }
    return {
        "jobs": jobs,
        "now": machine.run.now,
        "devices": machine.ledger.devices,
        "lost": machine.ledger.lost,
        "free": machine.ledger.free,
        "holder": machine.own.holder,
        "active": sorted(machine.run.active),
        "waiting": list(machine.own.queue.walk()),
        "arrivals": sorted(machine.waiting.arrivals),
        "profiles": machine.estimates.profiles,
        "observed": machine.estimates.observed,
        "plan": machine.run.plan,
        "news": machine.run.news,
        "costs": machine.estimates.costs,
        "lanes": _lanes(machine),
        "packs": machine.mechanism(Packing).packs,
        "leftover": (machine.leftover.idle(), machine.hosts.given_back),
        "draining": machine.deadline.draining,
        "deadline": machine.deadline.at,
        "late": machine.waiting.late,
        "delays": machine.waiting.delays,
        "guests": machine.hosts.guests,
        "epoch": machine.run.epoch,
        "unfinished": machine.run.unfinished,
        "dependents": {i: sorted(waiting) for i, waiting in machine.waiting.dependents.items() if waiting},
        "edits": (machine.run.kept, machine.run.updated),
        "stale": machine.run.stale,
    }


def _lanes(machine: Machine) -> dict[str, Any]:
    """The background lanes, comparable with ==."""
    background = machine.mechanism(Background)
    kept = {field.name: getattr(background.lanes, field.name) for field in fields(background.lanes)}
    return {**kept, "waiting": list(background.queue.walk())}
