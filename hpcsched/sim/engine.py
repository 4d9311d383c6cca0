"""A virtual clock around the machine: the same decisions as live, in milliseconds instead of hours.

Workers follow `planning.jobs.course.Course`, which the live stand-in program follows too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from itertools import groupby, islice
from operator import attrgetter
from typing import Any

from hpcsched import mechanisms
from hpcsched.contract.exits import SUSPENDED
from hpcsched.contract.seats import Seat
from hpcsched.core import events as ev
from hpcsched.core.actions import (
    Action,
    Kill,
    Launch,
    MakePlan,
    ReleaseHosts,
    Resize,
    SetTimer,
    Suspend,
    Terminate,
)
from hpcsched.core.jobs import Job
from hpcsched.core.machine import Machine
from hpcsched.core.mechanisms.background.mechanism import Background
from hpcsched.core.mechanisms.packing.mechanism import Packing
from hpcsched.core.mechanisms.sharing.mechanism import Sharing
from hpcsched.core.model import JobSpec, JobState, Progress, Role
from hpcsched.core.processes import Program
from hpcsched.core.profile import Profile
from hpcsched.core.transitions.decisions import PolicyMaker
from hpcsched.core.transitions.outcome import HOSTS, LOOK, RELEASE
from hpcsched.planning.jobs.course import PAUSED_RATE_SHARE
from hpcsched.planning.ps.training import PsTraining
from hpcsched.policy import make_policy
from hpcsched.sim.blocks import Block, placed
from hpcsched.sim.interference import Interference
from hpcsched.sim.truth import Truth
from hpcsched.sim.under_way import UnderWay

PROGRESS_PERIOD_S = 10.0
"""Seconds between looks at the progress of all jobs, where that can teach something: as the agent does."""
USAGE_PERIOD_S = 600.0
"""Seconds between reports of what a training uses of CPU cores while nothing changes: as live ones do."""
SIGTERM_EXIT_CODE = 128 + 15
"""The exit code of a process that SIGTERM has ended, as shells say it."""
_ARRIVAL = attrgetter("submit_at")


class Simulation:
    """Runs job specs through the machine on a virtual clock.

    Args:
        jobs, gpus, nodes, policy, options: what a run from the beginning is made of; `gpus` on each
            of `nodes` hosts.
        on_types: the profiles of models on other types of GPU than that of the first host.
        machine: go on from this state instead, which is changed (pass a copy to keep it): what runs
            in it goes on from its last known step. The arguments above are not looked at then.
        stories: off leaves out what only people look at; large simulations take less time and memory then.
            Unless something speaks of them earlier, jobs are then submitted, and numbered, as they come.
        truth: how fast jobs really run, where that differs from the profiles the run goes by: it learns.
        interference: what jobs that share a GPU cost each other.
        happenings: events from outside, such as commands and lost devices, each at its time.
        source: gives the jobs that are to be there by now and are not, whenever a job has ended.
        metrics: what the evaluation of a job that is done gives.
        parallel: programs that have said that they are. cpus: cores for jobs without GPUs on each host.
        trainings: how the models behave that are trained on CPU cores, by name.
        release_after_s: see `AgentStarted`. make: gives the policy of a name.
        watch: called with each event and the actions it led to (tests compare them with a live run).
    Raises ConfigError for a job that has no profile or no step count.
    """

    def __init__(
        self,
        jobs: Sequence[JobSpec],
        profiles: Iterable[Profile],
        *,
        gpus: int = 0,
        nodes: int = 1,
        policy: str = "marble",
        options: Mapping[str, Any] | None = None,
        stories: bool = True,
        watch: Callable[[ev.Event, list[Action], Machine], None] | None = None,
        machine: Machine | None = None,
        truth: Iterable[Profile] | None = None,
        interference: Interference | None = None,
        happenings: Iterable[ev.Event] = (),
        source: Callable[[Machine], Sequence[JobSpec]] | None = None,
        metrics: Callable[[JobSpec], Mapping[str, float]] | None = None,
        parallel: Iterable[Program] = (),
        cpus: int = 0,
        trainings: Mapping[str, PsTraining] | None = None,
        release_after_s: float | None = None,
        make: PolicyMaker = make_policy,
        on_types: Mapping[str, Sequence[Profile]] | None = None,
    ) -> None:
        mechanisms.load()
        self.machine = machine or Machine(make, stories=stories)
        self._background = self.machine.mechanism(Background)
        self._sharing = self.machine.mechanism(Sharing)
        self._packing = self.machine.mechanism(Packing)
        self._from_state = machine is not None
        self._stories = stories
        jobs, self._profiles = tuple(jobs), tuple(profiles)
        self._on_types = dict(on_types or {})
        [there] = placed([Block(gpus=gpus, nodes=nodes)])
        now: dict[str, Any] = {"rules": ev.RULES, "at": 0.0, "wall": 0.0}
        self._started = ev.AgentStarted(
            **now,
            devices=tuple(there.devices),
            policy=policy,
            policy_options=dict(options or {}),
            parallel=tuple(parallel),
            cores=there.cores(cpus),
            release_after_s=release_after_s,
            stays=next(iter(there.hosts)),
        )
        self._truth = Truth(self.machine, truth, trainings)
        self._watch, self._source, self._metrics = watch, source, metrics
        self._interference, self._sequence = interference or Interference(), 0
        self._agenda: list[tuple[float, int, ev.Event | None]] = []
        """What is to come; None is a look at how far the jobs are."""
        self._observed_at = -1.0
        timers = (one.timer for one in self.machine.ledger.mechanisms)
        self._dues = dict.fromkeys([LOOK, RELEASE, HOSTS, *(key for key in timers if key)], -1.0)
        self._looks = False
        self._slowed = False
        """Whether some job does not have all of its own speed."""
        self._runs: dict[int, UnderWay] = {}
        self._watched: dict[int, UnderWay] = {}
        """Those of the runs whose progress can change a decision; with stories, all."""
        happenings = tuple(happenings)
        spoken_of = stories or happenings or any(job.after for job in jobs)
        self._at_once = jobs if spoken_of else ()
        self._coming = groupby(() if spoken_of else sorted(jobs, key=_ARRIVAL), key=_ARRIVAL)
        for event in happenings:
            self._schedule(event)
        left = [job.spec for job in machine.run.jobs.values() if not job.state.final] if machine else jobs
        self._truth.check(left, [*(machine.estimates.profiles.values() if machine else ()), *self._profiles])

    def run(self, *, until: float = math.inf) -> Machine:
        """Go on until nothing is left to happen, or until then; returns the machine in its last state."""
        if self._from_state:
            self._take_over()
        else:
            self._begin()
        while self._agenda and self._agenda[0][0] <= until:
            at, ticket, event = heappop(self._agenda)
            if event is None:
                self._observe(at)
                self._look_later()
                continue
            if isinstance(event, (ev.WorkersExited, ev.WorkersResized)):
                run = self._runs.get(event.job_id)
                if run is None or run.ticket != ticket:
                    continue
                self._observe(at, without=event.job_id)
                del self._runs[event.job_id]
                self._watched.pop(event.job_id, None)
                if isinstance(event, ev.WorkersResized):
                    self._goes_on(run, event)
            elif not self._still_so(event):
                continue
            elif isinstance(event, ev.RestartSeen):
                self._observe(at)
                event = self._seen_saving(event)
            elif isinstance(event, ev.UsageMeasured):
                self._observe(at)
                job = self.machine.run.jobs[event.job_id]
                self._measure(job, self._runs[job.id], job.current.seats, USAGE_PERIOD_S)
            elif not isinstance(event, ev.WorkersSpawned):
                self._observe(at)
            self._feed(event)
            if isinstance(event, ev.JobsSubmitted):
                self._await_jobs()
            elif isinstance(event, ev.WorkersExited):
                self._ask_for_jobs()
        if self._agenda:
            self._observe(until)
        return self.machine

    def _begin(self) -> None:
        self._feed(self._started)
        self._feed(ev.ProfilesLoaded(at=0.0, profiles=self._profiles))
        for gpu_type, profiles in self._on_types.items():
            self._feed(ev.ProfilesLoaded(at=0.0, profiles=tuple(profiles), gpu_type=gpu_type))
        self._feed(ev.JobsSubmitted(at=0.0, first_id=1, jobs=self._at_once))
        self._await_jobs()
        self._ask_for_jobs()

    def _ask_for_jobs(self) -> None:
        """Submit what the jobs that have ended lead to."""
        if self._source is not None and (new := tuple(self._source(self.machine))):
            first_id = len(self.machine.run.jobs) + 1
            self._feed(ev.JobsSubmitted(at=self.machine.run.now, first_id=first_id, jobs=new))

    def _await_jobs(self) -> None:
        """Have the jobs that come next submitted when they do, before all else that happens then."""
        for at, jobs in islice(self._coming, 1):
            event = ev.JobsSubmitted(at=at, first_id=len(self.machine.run.jobs) + 1, jobs=tuple(jobs))
            heappush(self._agenda, (at, 0, event))

    def _take_over(self) -> None:
        """Let what runs in the given state go on, and what is to come come."""
        machine, now = self.machine, self.machine.run.now
        for submit_s, job_id in sorted(machine.waiting.arrivals):
            self._schedule(ev.TimerFired(at=submit_s, key=("arrival", job_id, 0)))
        for job in list(machine.run.active.values()):
            course = self._truth.course(job, job.width, job.current.seats)
            begun = course.start_s if job.current.in_place else min(now - job.current.start_s, course.start_s)
            course = replace(course, start_s=course.start_s - begun)
            run = self._now_runs(job, UnderWay(job.attempt, now, course, 0))
            if job.state is JobState.SUSPENDING:
                free_s = (job.current.signalled_s or now) + course.suspend_s
                run.course = replace(course, steps=course.from_step)
                at, saved = max(now, free_s), not job.saves_by_itself
                self._will_exit(job.id, run, at, SUSPENDED, course.from_step, saved=saved)
            elif job.wanted not in ("", "suspend", "drain"):
                self._end_now(job.id, run)
            else:
                self._set_off(job.id, run)
                if job.becoming:
                    about: Any = {"job_id": job.id, "attempt": job.attempt}
                    new = job.becoming
                    seats: Any = {"seats": new.seats, "keep": tuple(range(len(job.current.seats)))}
                    again = Resize(at=now, cause="", gpus=new.gpus, role=new.role, **seats, **about)
                    self._resize(again, run)
        self._interfere()

    @property
    def _measured(self) -> bool:
        """Whether what jobs do says something, so that it is looked at."""
        return self._truth.teaches or self._background.busy or self._sharing.used

    def _look_later(self) -> None:
        self._sequence += 1
        self._looks = bool(self._runs) and self._measured
        if self._looks:
            heappush(self._agenda, (self.machine.run.now + PROGRESS_PERIOD_S, self._sequence, None))

    def _still_so(self, event: ev.Event) -> bool:
        """Whether an event is to happen by now: what was measured of processes that are not there any more is
        not, and a grace timer of an attempt that is over need not be looked at."""
        if isinstance(event, (ev.UsageMeasured, ev.RestartSeen, ev.DeviceUseMeasured)):
            run = self._runs.get(event.job_id)
            return run is not None and run.attempt == event.attempt and not (run.leaves or run.whole)
        return not isinstance(event, ev.TimerFired) or self._still_wanted(event)

    def _still_wanted(self, event: ev.TimerFired) -> bool:
        kind, job_id, attempt = event.key
        if event.key in self._dues:
            return event.at == self._dues[event.key]
        run = self._runs.get(job_id)
        return kind in ("arrival", "drain", "hurry") or (run is not None and run.attempt == attempt)

    def _observe(self, at: float, without: int = -1) -> None:
        if at == self._observed_at:
            return
        self._observed_at = at
        runs = self._runs if self._background.busy or self._sharing.used else self._watched
        progress = tuple(self._progress(i, run, at) for i, run in runs.items() if i != without)
        if progress:
            self._feed(ev.ProgressObserved(at=at, progress=progress))

    def _progress(self, job_id: int, run: UnderWay, at: float) -> Progress:
        course = run.course
        step = course.step_at(at - run.launched)
        if not self._measured or step == course.from_step:
            return Progress(job_id=job_id, attempt=run.attempt, step=step)
        done_s = run.launched + course.start_s + (step - course.from_step) / course.rate
        return Progress(job_id=job_id, attempt=run.attempt, step=step, done_s=done_s)

    def _feed(self, event: ev.Event) -> None:
        if isinstance(event, ev.AgentStarted):
            self._runs = {job_id: run for job_id, run in self._runs.items() if job_id in event.adopted}
            self._watched = {job_id: run for job_id, run in self._watched.items() if job_id in self._runs}
        actions = self.machine.handle(event)
        self.machine.run.take_changed()  # nobody reads it here
        if self._watch:
            self._watch(event, actions, self.machine)
        # What a plan asks for comes after all that was asked for before it was made.
        for action in sorted(actions, key=lambda action: isinstance(action, MakePlan)):
            self._perform(action)
        if self._background.busy or self._slowed or self._packing.packs.gpu_of or self._sharing.used:
            self._interfere()
            if not self._looks:
                self._look_later()

    def _interfere(self) -> None:
        """Let jobs go at the speed that those they share GPUs with leave them."""
        for job_id, run in self._runs.items():
            job = self.machine.run.jobs[job_id]
            if not (run.leaves or run.whole) and run.attempt == job.attempt and job.state.active:
                factor = self._interference.factor(self.machine, job) or PAUSED_RATE_SHARE
                if factor != run.factor:
                    self._change_speed(job_id, run, factor)
        self._slowed = any(run.factor != 1 for run in self._runs.values())

    def _change_speed(self, job_id: int, run: UnderWay, factor: float) -> None:
        rate = run.course.rate / run.factor * factor
        run.course, after_s = run.course.at_rate(self.machine.run.now - run.launched, rate)
        run.launched += after_s
        run.factor = factor
        self._will_exit(job_id, run, run.launched + run.course.end_s, 0, run.course.steps)

    def _perform(self, action: Action) -> None:
        match action:
            case SetTimer(key=key, due=due):
                if key in self._dues:
                    self._dues[key] = due
                self._schedule(ev.TimerFired(at=due, key=key))
            case Launch():
                self._launch(action)
            case MakePlan():
                self._feed(ev.PlanMade(at=self.machine.run.now, plan=self.machine.make_plan()))
            case ReleaseHosts(hosts=hosts):
                self._schedule(ev.HostsReleased(at=self.machine.run.now, hosts=hosts))
            case Resize():
                self._resize(action, self._runs[action.job_id])
            case Suspend(job_id=job_id):
                self._suspend(job_id, self._runs[job_id])
            case Terminate(job_id=job_id) | Kill(job_id=job_id):
                self._end_now(job_id, self._runs[job_id])

    def _launch(self, action: Launch) -> None:
        assert action.job_id not in self._runs, f"job {action.job_id} is launched while it runs"
        job = self.machine.run.jobs[action.job_id]
        course = self._truth.course(job, len(action.gpus) // job.spec.nodes, action.seats)
        run = self._now_runs(job, UnderWay(action.attempt, self.machine.run.now, course, 0))
        self._set_off(action.job_id, run)

    def _now_runs(self, job: Job, run: UnderWay) -> UnderWay:
        self._runs[job.id] = run
        if (self._truth.teaches or self._sharing.used) and not self._looks:
            self._look_later()
        policy = self.machine.decisions.policy
        always = self._stories or self._truth.teaches
        if always or policy is None or policy.watches(job) or job.role is Role.PACKED:
            self._watched[job.id] = run
        return run

    def _set_off(self, job_id: int, run: UnderWay) -> None:
        now = self.machine.run.now
        self._will_exit(job_id, run, run.launched + run.course.end_s, 0, run.course.steps)
        self._schedule(ev.WorkersSpawned(at=now, job_id=job_id, attempt=run.attempt, processes=()))
        job = self.machine.run.jobs[job_id]
        about: dict[str, Any] = {"job_id": job_id, "attempt": run.attempt}
        if job.saves_by_itself:
            self._schedule(ev.RestartSeen(at=now, handles=False, **about))
        else:
            in_place = self._truth.resizes_in_place(job)
            self._schedule(ev.WorkersReady(at=now, in_place=in_place, **about))
        if job.spec.cpus is not None:
            self._measure(job, run, job.current.seats)
        if use := self._truth.device_use(job):
            at = now + run.course.start_s + PROGRESS_PERIOD_S
            self._schedule(ev.DeviceUseMeasured(at=at, **about, **use))

    def _seen_saving(self, event: ev.RestartSeen) -> ev.RestartSeen:
        """What is seen of a program that saves by itself each time that `checkpoint_every` is over."""
        job, run = self.machine.run.jobs[event.job_id], self._runs[event.job_id]
        begins, step = run.launched + run.course.start_s, run.course.step_at(event.at - run.launched)
        self._schedule(replace(event, at=max(event.at, begins) + job.spec.checkpoint_every_s))
        newer = step > job.current.from_step
        return replace(event, step=step, saved_at=event.at) if newer else event

    def _resize(self, action: Resize, run: UnderWay) -> None:
        """It trains on while ranks that join are started, stands still at the next step boundary, and goes on
        with its new rate; unless it is done or asked to leave before."""
        job, now = self.machine.run.jobs[action.job_id], self.machine.run.now
        change, course = self._truth.change(job, action), run.course
        step, stops_s = course.boundary_at(max(now + change.built_s - run.launched, course.start_s))
        if step >= course.steps:
            return
        run.course, run.whole = replace(course, steps=step), course
        at = run.launched + stops_s + change.stand_s
        run.ticket = self._sequence + 1
        self._schedule(ev.WorkersResized(at=at, job_id=job.id, attempt=run.attempt, step=step))

    def _goes_on(self, run: UnderWay, event: ev.WorkersResized) -> None:
        """The attempt is the next one now."""
        job = self.machine.run.jobs[event.job_id]
        assert job.becoming and run.whole, "it was told what to become"
        course = self._truth.course(job, len(job.becoming.gpus) // job.spec.nodes, job.becoming.seats)
        course = replace(course, from_step=event.step, steps=run.whole.steps, start_s=0.0)
        seats = job.becoming.seats
        run = self._now_runs(job, UnderWay(run.attempt + 1, event.at, course, 0))
        self._will_exit(job.id, run, event.at + course.end_s, 0, course.steps)
        if seats:
            self._measure(job, run, seats)

    def _measure(
        self, job: Job, run: UnderWay, seats: tuple[Seat, ...], after_s: float | None = None
    ) -> None:
        """What its processes use will be known once it is steady, and then again and again."""
        steady = run.launched + run.course.start_s + self._truth.stable_s(job)
        at = steady if after_s is None else self.machine.run.now + after_s
        about: dict[str, Any] = {"job_id": job.id, "attempt": run.attempt}
        self._schedule(ev.UsageMeasured(at=at, **about, **self._truth.measured(job, seats)))

    def _suspend(self, job_id: int, run: UnderWay) -> None:
        whole, since_s = run.whole or run.course, self.machine.run.now - run.launched
        step, free_s = whole.suspend_at(since_s)
        by_itself = self.machine.run.jobs[job_id].saves_by_itself
        if run.factor == PAUSED_RATE_SHARE or by_itself:
            step, free_s = whole.step_at(since_s), since_s + whole.suspend_s
        run.leaves = True
        if run.whole and step > run.course.steps:  # it stands still
            step, free_s = run.course.steps, since_s + whole.suspend_s
        code = 0 if step >= whole.steps else SIGTERM_EXIT_CODE if by_itself else SUSPENDED
        run.course, run.whole = replace(whole, steps=step), None
        self._will_exit(job_id, run, run.launched + free_s, code, step, saved=not by_itself)

    def _end_now(self, job_id: int, run: UnderWay) -> None:
        """What was not saved is lost."""
        now, run.leaves = self.machine.run.now, True
        self._will_exit(
            job_id, run, now, SIGTERM_EXIT_CODE, run.course.step_at(now - run.launched), saved=False
        )

    def _will_exit(
        self, job_id: int, run: UnderWay, at: float, code: int, step: int, *, saved: bool = True
    ) -> None:
        """Schedule the run's end; the one scheduled before counts no more."""
        spec = self.machine.run.jobs[job_id].spec
        metrics = self._metrics(spec) if self._metrics and code == 0 else {}
        run.ticket = self._sequence + 1
        self._schedule(
            ev.WorkersExited(
                at=at,
                job_id=job_id,
                attempt=run.attempt,
                code=code,
                step=step,
                saved_step=step if saved else None,
                metrics=metrics,
            )
        )

    def _schedule(self, event: ev.Event) -> None:
        self._sequence += 1
        heappush(self._agenda, (event.at, self._sequence, event))
