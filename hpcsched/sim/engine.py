"""A virtual clock around the machine: the same decisions as live, in milliseconds instead of hours.

Workers follow `planning.standin.Course`, which the live stand-in program follows too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

from hpcsched.core import events as ev
from hpcsched.core.actions import Action, Kill, Launch, SetTimer, Suspend, Terminate
from hpcsched.core.machine import SAVED_AND_LEFT, Machine
from hpcsched.core.model import Device, JobSpec, Progress
from hpcsched.core.profile import Profile
from hpcsched.planning.costs import course_of, require_profiles
from hpcsched.planning.standin import Course
from hpcsched.policy import make_policy

SIM_HOST = "sim"


@dataclass(slots=True)
class _Run:
    """One attempt under way: its course, when it began, and which scheduled exit still counts."""

    attempt: int
    launched: float
    course: Course
    ticket: int


class Simulation:
    """Runs job specs through the machine on a virtual clock.

    Args:
        watch: called with each event and the actions it led to (tests compare them with a live run).
    Raises ConfigError for a job that has no profile or no step count.
    """

    def __init__(
        self,
        jobs: Sequence[JobSpec],
        profiles: Iterable[Profile],
        *,
        gpus: int,
        policy: str = "marble",
        options: Mapping[str, Any] | None = None,
        stories: bool = True,
        watch: Callable[[ev.Event, list[Action], Machine], None] | None = None,
    ) -> None:
        self.machine = Machine(make_policy, stories=stories)
        self._jobs = tuple(jobs)
        self._profiles = tuple(profiles)
        self._devices = tuple(
            Device(index=i, host=SIM_HOST, kind="simulated", handle=str(i)) for i in range(gpus)
        )
        self._policy, self._options = policy, dict(options or {})
        self._watch = watch
        self._agenda: list[tuple[float, int, ev.Event]] = []
        self._sequence = 0
        self._runs: dict[int, _Run] = {}
        require_profiles(self._jobs, self._profiles)

    def run(self) -> Machine:
        """Go on until nothing is left to happen; returns the machine in its last state."""
        profiles = self._profiles
        self._feed(
            ev.AgentStarted(
                at=0.0, wall=0.0, devices=self._devices, policy=self._policy, policy_options=self._options
            )
        )
        self._feed(ev.ProfilesLoaded(at=0.0, profiles=profiles))
        self._feed(ev.JobsSubmitted(at=0.0, first_id=1, jobs=self._jobs))
        while self._agenda:
            at, ticket, event = heappop(self._agenda)
            if isinstance(event, ev.WorkersExited):
                run = self._runs.get(event.job_id)
                if run is None or run.ticket != ticket:
                    continue
                self._observe(at, without=event.job_id)
                del self._runs[event.job_id]
            elif isinstance(event, ev.TimerFired) and not self._still_wanted(event):
                continue
            elif not isinstance(event, ev.WorkersSpawned):
                self._observe(at)
            self._feed(event)
        return self.machine

    def _still_wanted(self, event: ev.TimerFired) -> bool:
        """A grace timer of an attempt that is over need not be looked at."""
        kind, job_id, attempt = event.key
        run = self._runs.get(job_id)
        return kind == "arrival" or (run is not None and run.attempt == attempt)

    def _observe(self, at: float, without: int = -1) -> None:
        progress = tuple(
            Progress(job_id=i, attempt=r.attempt, step=r.course.step_at(at - r.launched))
            for i, r in self._runs.items()
            if i != without
        )
        if progress:
            self._feed(ev.ProgressObserved(at=at, progress=progress))

    def _feed(self, event: ev.Event) -> None:
        actions = self.machine.handle(event)
        if self._watch:
            self._watch(event, actions, self.machine)
        for action in actions:
            self._perform(action)

    def _perform(self, action: Action) -> None:
        now = self.machine.now
        match action:
            case SetTimer(key=key, due=due):
                self._schedule(ev.TimerFired(at=due, key=key))
            case Launch(job_id=job_id, attempt=attempt, gpus=gpus):
                job = self.machine.jobs[job_id]
                profile = self.machine.profile(job)
                if profile is None or job.spec.steps is None:
                    raise AssertionError(f"job {job_id} was checked to have a profile and steps")
                course = course_of(
                    profile, len(gpus), from_step=job.step, steps=job.spec.steps, first=attempt == 1
                )
                self._runs[job_id] = _Run(attempt, now, course, self._sequence + 1)
                end = now + course.end_s
                done = job.spec.steps
                self._schedule(
                    ev.WorkersExited(
                        at=end, job_id=job_id, attempt=attempt, code=0, step=done, saved_step=done
                    )
                )
                self._schedule(ev.WorkersSpawned(at=now, job_id=job_id, attempt=attempt, processes=()))
                self._schedule(ev.WorkersReady(at=now, job_id=job_id, attempt=attempt))
            case Suspend(job_id=job_id, attempt=attempt):
                self._suspend(job_id, attempt, now)
            case Terminate() | Kill():
                raise AssertionError("nothing is ended by force in a simulation")

    def _suspend(self, job_id: int, attempt: int, now: float) -> None:
        run = self._runs[job_id]
        step, free_s = run.course.suspend_at(now - run.launched)
        code = 0 if step >= run.course.steps else SAVED_AND_LEFT
        run.ticket = self._sequence + 1
        self._schedule(
            ev.WorkersExited(
                at=run.launched + free_s,
                job_id=job_id,
                attempt=attempt,
                code=code,
                step=step,
                saved_step=step,
            )
        )

    def _schedule(self, event: ev.Event) -> None:
        self._sequence += 1
        heappush(self._agenda, (event.at, self._sequence, event))
