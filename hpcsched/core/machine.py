"""The state of a run and the only way it changes: `handle(event)` gives the actions to perform.

Pure: no clock, no file, no random source. The live agent, the simulator and a replay of the journal
drive the same machine, so what `simulate` shows is what `run` does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from hpcsched.core import events as ev
from hpcsched.core.actions import Action, Kill
from hpcsched.core.jobs import Job
from hpcsched.core.mechanisms.base import Handlers, Mechanism
from hpcsched.core.mechanisms.registry import Make, added, registered
from hpcsched.core.model import JobState
from hpcsched.core.parts import make_parts
from hpcsched.core.plan import Plan
from hpcsched.core.reasons import Reason, Why
from hpcsched.core.resources.gpus import own_type
from hpcsched.core.transitions.attempts import TIME
from hpcsched.core.transitions.commands import Commands
from hpcsched.core.transitions.decisions import PolicyMaker
from hpcsched.core.transitions.drain import Drain
from hpcsched.core.transitions.hosts import Hosts
from hpcsched.core.transitions.leftover import Leftover
from hpcsched.core.transitions.losses import Losses
from hpcsched.core.transitions.outcome import DRAIN, HOSTS, HURRY, LOOK, RELEASE
from hpcsched.core.transitions.reports import Reports
from hpcsched.core.transitions.submissions import Submissions
from hpcsched.core.transitions.takeover import Takeover

M = TypeVar("M", bound=Mechanism)


class _Part(Protocol):
    def handlers(self) -> Handlers: ...


class Machine:
    """Handles events: which part takes which, and in what order decisions follow.

    `run` are the jobs, `ledger` who holds what, `rooms` where jobs' needs are met, `waiting` what jobs wait
    for, `estimates` speeds and costs, `deadline` the end of the allocation, `decisions` the policy,
    `hosts` which hosts come and go, `leftover` the GPUs that nothing can use any more. These are for
    reading.

    Args:
        make_policy: gives the policy of a name and its options; called at each agent start.
        stories: keep each job's story for `explain`; off saves memory in large simulations.
        mechanisms: what makes each mechanism beside GPUs of one's own; default: all that are registered.
    """

    def __init__(
        self, make_policy: PolicyMaker, *, stories: bool = True, mechanisms: Sequence[Make] | None = None
    ) -> None:
        parts = make_parts(make_policy, stories=stories)
        made = [make(parts) for make in (registered() if mechanisms is None else mechanisms)]
        parts.ledger.install(parts.own, made)
        self.run, self.ledger, self.own, self.waiting = parts.run, parts.ledger, parts.own, parts.waiting
        self.rooms = parts.rooms
        self.estimates, self.deadline, self.decisions = parts.estimates, parts.deadline, parts.decisions
        self._out, self._attempts = parts.out, parts.attempts
        self._ends = parts.ends
        about: dict[str, Any] = {"waiting": parts.waiting, "endings": parts.endings}
        base = (parts.run, parts.out, parts.ledger)
        self._drain = Drain(
            parts.run, parts.out, waiting=parts.waiting, deadline=parts.deadline, attempts=parts.attempts
        )
        self.hosts = Hosts(
            *base,
            rooms=parts.rooms,
            ends=parts.ends,
            deadline=parts.deadline,
            attempts=parts.attempts,
        )
        self.leftover = Leftover(
            *base, own=parts.own, rooms=parts.rooms, deadline=parts.deadline, hosts=self.hosts
        )
        self._takeover = Takeover(parts.run, parts.ledger, attempts=parts.attempts, endings=parts.endings)
        self._submissions = Submissions(*base, estimates=parts.estimates, **about)
        self._handlers: dict[type[ev.Event], Callable[[Any], None]] = {
            ev.AgentStarted: self._agent_started,
            ev.InboxRead: self._inbox_read,
            ev.ProfilesLoaded: self._profiles_loaded,
            ev.StartWaited: self._start_waited,
            ev.TimerFired: self._timer_fired,
        }
        handling: tuple[_Part, ...] = (
            self._submissions,
            Commands(*base, attempts=parts.attempts, **about),
            Reports(*base, estimates=parts.estimates, attempts=parts.attempts, **about),
            Losses(*base, attempts=parts.attempts, endings=parts.endings),
            self._drain,
            self.hosts,
            parts.decisions,
            *made,
        )
        for part in handling:
            if taken := self._handlers.keys() & part.handlers().keys():
                names = ", ".join(sorted(kind.__name__ for kind in taken))
                raise ValueError(f"{type(part).__name__} handles what is handled already: {names}")
            self._handlers.update(part.handlers())
        self._foreground = [one for one in made if one.foreground]
        self._background = [one for one in made if not one.foreground]
        self._policy_keys = {LOOK, *(one.timer for one in made if one.timer)}
        self._background_keys = {one.timer for one in self._background}

    def become(self, other: Machine) -> None:
        """Take over the state of another machine, which nobody uses any more."""
        vars(self).update(vars(other))
        self.run.touch_all()

    # --- the one way in ---------------------------------------------------------------------

    def handle(self, event: ev.Event) -> list[Action]:
        """Take an event in; returns what is to be done about it, in order.

        Raises InvalidTransition when a policy asks for what cannot be.
        """
        out, deadline = self._out, self.deadline
        self.run.advance(event.at)
        out.begin(event)
        self._ends.begin_event()
        arrived = self.waiting.let_arrive()
        self._handlers[type(event)](event)
        out.ask_policy(arrived)
        if not self._about_foreground(event):
            out.only_ask_if(arrived or out.woken)  # else nothing has changed for the foreground
        elif self.waiting.late and not deadline.draining and deadline.look_again_at_late():
            out.ask_policy()
        if out.decide and self.decides:
            self.decisions.decide()
            for mechanism in self._foreground:
                mechanism.decide()
        if self.decides:
            for mechanism in self._background:
                mechanism.decide()
        deadline.watch()
        self.hosts.watch()
        self.leftover.watch()
        return out.actions

    def _about_foreground(self, event: ev.Event) -> bool:
        """Whether an event is about anything else than jobs in the background."""
        if not self._background:
            return True
        if isinstance(event, ev.JobsSubmitted):
            return not event.jobs or not all(self._is_background(spec) for spec in event.jobs)
        if isinstance(event, ev.TimerFired):
            if event.key in self._background_keys:
                return False
            job = self.run.jobs.get(event.key[1])
            return job is None or self.ledger.waits_by(job).foreground
        if isinstance(event, ev.JobEvent):
            return self.ledger.waits_by(self.run.jobs[event.job_id]).foreground
        return True

    def _is_background(self, spec: Any) -> bool:
        return any(one.needed_by(spec) for one in self._background)

    # --- events of the run as a whole ---------------------------------------------------------

    def _agent_started(self, event: ev.AgentStarted) -> None:
        self._takeover.check(event)
        self.run.begin_life(event)
        self.decisions.begin_life(event)
        own, before = own_type(event.devices), self.ledger.own_type
        if event.rules >= 4 and own != before and own and before:
            self.estimates.observed.own_type_is(own, before)
        self.estimates.load(event.profiles, event.parallel)
        self.deadline.begin_life(event)
        for begin_life in self.ledger.hooks("begin_life"):
            begin_life(event)
        self._takeover.end_others(event)
        self._submissions.compared(event)
        spreads = event.rules >= 4 and bool(getattr(self.decisions.policy, "spreads", False))
        self.ledger.begin_life(event.devices, event.cores, by_type=event.rules >= 4, spreads=spreads)
        self.hosts.begin_life(event)
        self.leftover.begin_life(event)
        self._takeover.go_on(event)
        self.waiting.begin_life(event.unsure)
        self._out.ask_policy()

    def _inbox_read(self, event: ev.InboxRead) -> None:
        self.run.has_read_inbox()
        self._out.ask_policy()

    def _profiles_loaded(self, event: ev.ProfilesLoaded) -> None:
        self.estimates.load(event.profiles, event.parallel, gpu_type=event.gpu_type)
        self.run.count_news()
        self._out.ask_policy()

    def _start_waited(self, event: ev.StartWaited) -> None:
        if job := self.run.about(event):
            self._attempts.waited(job, event.seconds)

    def _timer_fired(self, event: ev.TimerFired) -> None:
        if event.key == DRAIN:
            self._drain.due()
        elif event.key == HURRY:
            self._drain.hurry(event.at)
        elif event.key == RELEASE:
            self.leftover.due()
        elif event.key == HOSTS:
            self.hosts.due()
        elif event.key in self._policy_keys:
            self._out.ask_policy()
        else:
            self._attempt_timer_fired(*event.key, event.at)

    def _attempt_timer_fired(self, kind: str, job_id: int, attempt: int, at: float) -> None:
        job = self.run.active.get(job_id)
        if job is None or job.attempt != attempt or at < job.timers.get(kind, at):
            return
        if kind == "grace":
            facts = {"grace": self._attempts.grace_s(job), "how": "SIGTERM"}
            self._out.note(job, Reason(Why.ESCALATED, facts))
            self._attempts.terminate(job)
        elif kind == "term":
            facts = {"grace": self._attempts.grace_s(job) / 2, "how": "SIGKILL"}
            self._out.note(job, Reason(Why.ESCALATED, facts))
            self._out.do(Kill, job)
        elif kind == TIME:
            self._attempts.time_is_up(job)
            self._out.ask_policy()
        elif kind == "resize" and job.state is JobState.RUNNING and not job.wanted and job.becoming:
            limit_s = self.run.now - job.becoming.since
            self._out.note(job, Reason(Why.RESIZE_FAILED, {"error": f"not done within {limit_s:.0f} s"}))
            self.run.count_news()
            self._attempts.suspend(job)

    # --- questions --------------------------------------------------------------------------

    @property
    def decides(self) -> bool:
        """Whether jobs may start: not while all is saved, nor before the commands that waited are done."""
        return not (self.deadline.draining or self.run.reads_inbox)

    @property
    def stopped(self) -> bool:
        """Drained: work may be left, but nothing runs and nothing will start."""
        return self.deadline.draining and not self.run.active

    @property
    def stuck(self) -> bool:
        """Jobs wait, but nothing runs, and on the devices and in the time that are left none can start."""
        waiting = self.ledger.waiting or self.waiting.late
        if self.run.active or self.deadline.draining or not waiting:
            return False
        jobs = self.run.jobs
        if any(jobs[i].state in (JobState.PENDING, JobState.SUSPENDED) for _, i in self.waiting.arrivals):
            return False
        return not self.own.queue.any_fits(self.ledger.capacity().fits, self.rooms.meets_at_all())

    @property
    def decides_by(self) -> dict[str, Any]:
        """What a life that begins now decides by: for AgentStarted."""
        return {"rules": ev.RULES, "mechanisms": added()}

    def adoptable(self) -> tuple[int, ...]:
        """Ids of the jobs whose attempts can go on in the next life, as far as their processes do and their
        GPUs are there: for AgentStarted."""
        return self._takeover.adoptable()

    def mechanism(self, kind: type[M]) -> M:
        """The mechanism of this class. Raises KeyError if it is not there."""
        return self.ledger.mechanism(kind)

    def make_plan(self, *, fallback: bool = False) -> Plan:
        """What the action MakePlan asks for: see `Decisions.make_plan`."""
        return self.decisions.make_plan(fallback=fallback)

    def waiting_reason(self, job: Job) -> Reason | None:
        """Why a job that waits does so, or has no processes yet; None if it does not wait."""
        if job.state is JobState.HELD:
            return Reason(Why.HELD)
        if job.state is JobState.STARTING and job.spec.needs and job.spec.needs.modules:
            return Reason(Why.MODULES, {"modules": ", ".join(job.spec.needs.modules)})
        if job.state not in (JobState.PENDING, JobState.SUSPENDED):
            return None
        if job.held:
            return Reason(Why.USER_SUSPENDED)
        if job.unmet:
            return Reason(Why.DEPENDENCY, {"after": ", ".join(self.waiting.unmet(job))})
        if job.submit_s > self.run.now:
            return Reason(Why.BEGIN_TIME, {"at": job.submit_s})
        if self.waiting.arrays.outside(job):
            return Reason(Why.ARRAY_LIMIT, {"n": self.waiting.arrays.limit_of(job)})
        if (delay := self.waiting.delays.get(job.id)) and delay.until > self.run.now:
            return delay.reason
        if self.deadline.draining:
            return Reason(Why.DRAINING)
        if job.id in self.waiting.late:
            return self.deadline.too_late(job)
        return self.ledger.waits_by(job).waiting_reason(job)
