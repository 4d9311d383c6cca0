"""What the policy decides, carried out: it sees a view of the run, and its decisions become transitions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf
from typing import Any

from hpcsched.core.actions import MakePlan
from hpcsched.core.events import AgentStarted, PlanMade
from hpcsched.core.jobs import Job, Target
from hpcsched.core.mechanisms.base import Handlers, Mechanism
from hpcsched.core.model import Role
from hpcsched.core.plan import Plan
from hpcsched.core.reasons import Reason, Why
from hpcsched.core.resources.gpus import Fits, shares
from hpcsched.core.resources.ledger import Ledger
from hpcsched.core.resources.rooms import Rooms
from hpcsched.core.run import Run
from hpcsched.core.transitions.attempts import Attempts
from hpcsched.core.transitions.deadline import Deadline
from hpcsched.core.transitions.estimates import Estimates
from hpcsched.core.transitions.host_ends import HostEnds
from hpcsched.core.transitions.outcome import LOOK, Outcome
from hpcsched.core.transitions.waiting import Waiting
from hpcsched.core.view import LookAgain, Planning, Policy, Preempt, Remark, Replan, Resize, Start, View

PolicyMaker = Callable[[str, Mapping[str, Any]], Policy]


class Decisions:
    """Asks the policy who gets GPUs, and does what it says.

    Args:
        make_policy: gives the policy of a name and its options; called at each agent start.
        own: the leases on whole GPUs; their queue is the one that the policy sees.
        rooms: where jobs' needs are met. A policy counts GPUs; a job gets those that suit it.
    """

    def __init__(
        self,
        run: Run,
        out: Outcome,
        ledger: Ledger,
        *,
        own: Mechanism,
        rooms: Rooms,
        make_policy: PolicyMaker,
        estimates: Estimates,
        waiting: Waiting,
        deadline: Deadline,
        ends: HostEnds,
        attempts: Attempts,
    ) -> None:
        self._run, self._out, self._ledger, self._own, self._rooms = run, out, ledger, own, rooms
        self._make_policy, self._estimates, self._waiting = make_policy, estimates, waiting
        self._deadline, self._ends, self._attempts = deadline, ends, attempts
        self.policy: Policy | None = None
        self.options: Mapping[str, Any] = {}
        """The policy's options."""
        self.plan_asked = False
        """A plan is being made: what depends on it waits."""
        self._look_due = -inf
        self._left_out = False
        """Needs of jobs have kept a decision from being carried out."""
        self._otherwise = False
        """A job has got other GPUs than the policy had counted for it: another's may be among them."""

    def handlers(self) -> Handlers:
        """The events that it handles."""
        return {PlanMade: self._plan_made}

    def begin_life(self, event: AgentStarted) -> None:
        """Go by the policy of another agent."""
        self.policy = self._make_policy(event.policy, event.policy_options)
        self.options = event.policy_options
        self.plan_asked = False
        if event.epoch:  # in journals without it the timer of an earlier agent was not set again
            self._look_due = -inf

    def _plan_made(self, event: PlanMade) -> None:
        self._run.follow(event.plan)
        self.plan_asked = False
        self._out.ask_policy()

    def make_plan(self, *, fallback: bool = False) -> Plan:
        """What the action MakePlan asks for: the policy's plan from the present state, or its fallback.

        It may take long; whoever is told to perform the action calls this, and sends PlanMade.
        """
        assert isinstance(self.policy, Planning), "only a policy that plans asks for a plan"
        return self.policy.fallback(self.view()) if fallback else self.policy.plan(self.view())

    def rule(self, mechanism: str) -> Any:
        """What the policy has to say of a mechanism (its rule, see there); None: nothing."""
        rules: Mapping[str, object] = getattr(self.policy, "rules", {})
        return rules.get(mechanism)

    def view(self) -> View:
        """The run as a policy sees it now."""
        free, estimates, rooms = self._ledger.free_by_host(), self._estimates, self._rooms
        return View(
            now=self._run.now,
            free=free,
            capacity=self._ledger.capacity(),
            hosts_of=self._ledger.hosts_of,
            places=self._ledger.by_host,
            left_s=self._deadline.left_s(),
            left_on=self._ends.left_on,
            running=list(self._run.running),
            secondaries=list(self._run.secondaries),
            waiting_count=len(self._own.queue),
            waiting=self._startable,
            jobs=self._run.jobs,
            queue=self._own.queue,
            blocked=self._waiting.blocked,
            unmet=self._waiting.unmet,
            in_time=self._deadline.in_time,
            profile=lambda job: estimates.profile(job, rooms.type_of(job, free)),
            curve=lambda job: estimates.curve(job, rooms.type_of(job, free)),
            launch_s=self._estimates.launch_s,
            save_s=self._estimates.save_s,
            switch_s=self._estimates.switch_s,
            in_place=self._estimates.in_place,
            unsaved_s=self._estimates.unsaved_s,
            worth_changing=self._estimates.worth_changing,
            stand_s=self._estimates.stand_s,
            built_s=self._estimates.built_s,
            resize_left_s=self._estimates.resize_left_s,
            start_left_s=self._estimates.start_left_s,
            plan=self._run.plan,
            news=self._run.news,
            room=rooms.now,
            most_for=lambda job: rooms.most_for(job, free),
        )

    def decide(self) -> None:
        """Ask the policy, and carry its decisions out in their order; once more, where jobs' needs kept some
        from being carried out after others had been, and where others may get GPUs of another type now."""
        while self._decide_once():
            pass

    def _decide_once(self) -> bool:
        """Whether to ask again: GPUs were handed out, and not all as the policy had counted them."""
        if self.policy is None or not (self._ledger.free or self.policy.acts_when_full):
            return False
        before, self._left_out, self._otherwise = len(self._ledger.free), False, False
        for decision in self.policy.decide(self.view()):
            match decision:
                case Replan():
                    if not self.plan_asked:
                        self._out.ask(MakePlan)
                    self.plan_asked = True
                case LookAgain(at=at):
                    if at != self._look_due:
                        self._look_due = at
                        self._out.set_timer(LOOK, at)
                case Remark(job=job, reason=reason):
                    self._out.note_news(job, reason)
                case Start():
                    self._start(decision.job, decision)
                case Resize() | Preempt():
                    self.change(decision.job, decision)
        again = self._left_out or not self._ledger.one_type
        return again and len(self._ledger.free) < before

    def _start(self, job: Job, decision: Start) -> None:
        count, gpus = decision.gpus, self._pick(job, decision.hosts, decision.gpus)
        room = self._rooms.now(job)
        if gpus is None and (room is not None or self._otherwise):
            # The policy has counted others' GPUs as this job's: it gets those that it can have, if enough.
            free = self._ledger.free_by_host()
            nodes, uneven = job.spec.nodes, job.spec.uneven
            count = job.fitting(free.pick(decision.gpus, nodes, room=room, uneven=uneven)[0])
            _, hosts = free.pick(count, nodes, room=room, uneven=uneven)
            gpus = self._pick(job, hosts, count) if count >= max(1, job.least) else None
            self._otherwise = True
            if gpus is None:
                self._left_out = True
                return
        if gpus and self._rooms.type_of(job) is not None:
            gpu_type = self._ledger.said_type(self._ledger.type_of(gpus))
            self._out.note(job, Reason(Why.ON_TYPE, {"type": gpu_type}))
        self._out.note(job, decision.reason)
        self._note_shares(job, gpus)
        least, most = job.limits(decision.gpus)
        allowed = least <= decision.gpus <= most and job.allows(decision.gpus)
        if job.id not in self._own.queue or not allowed or gpus is None:
            where = ", ".join(decision.hosts)
            raise self._out.invalid(job, f"cannot start on {decision.gpus} GPUs of hosts {where}")
        for started in self._ledger.hooks("started"):
            started(job)
        role = decision.role if count == decision.gpus else Role.SECONDARY
        self._attempts.launch(job, Target(gpus, role, self._run.now))

    def change(self, job: Job, decision: Resize | Preempt) -> None:
        """Have a running job go on with other GPUs, or wait. Raises InvalidTransition if it cannot."""
        if isinstance(decision, Preempt):
            self._out.note(job, decision.reason)
            if not job.settled:
                raise self._out.invalid(job, "cannot be suspended")
            self._attempts.suspend(job)
            return
        least, most = job.limits(decision.gpus)
        gpus = self._pick(job, decision.hosts, decision.gpus)
        if gpus is None and (self._otherwise or self._rooms.now(job) is not None):
            self._left_out = True  # as above: it stays as it is
            return
        self._out.note(job, decision.reason)
        self._note_shares(job, gpus)
        allowed = least <= decision.gpus <= most and job.allows(decision.gpus)
        if not job.settled or not allowed or gpus is None:
            raise self._out.invalid(job, f"cannot be resized to {decision.gpus} GPUs")
        if job.in_place and job.current.gpus[0] in gpus:
            stay = [gpu for gpu in job.current.gpus if gpu in gpus]
            ranks = (*stay, *(gpu for gpu in gpus if gpu not in stay))
            self._attempts.resize(job, Target(ranks, decision.role, self._run.now))
        else:
            self._attempts.restart(job, Target(gpus, decision.role, self._run.now))

    def _startable(self, fits: Fits) -> Iterator[Job]:
        offered: list[Job] = []  # those that start together will save together
        for job_id in self._own.queue.walk(fits, self._rooms.meets_now()):
            job = self._run.jobs[job_id]
            if self._deadline.in_time(job, offered):
                offered.append(job)
                yield job

    def _pick(self, job: Job, hosts: Sequence[str], count: int) -> tuple[int, ...] | None:
        """The job's own and free GPUs, `count` on each of these hosts; None if there are not so many.

        Of its own those of its first ranks, which then can stay. An uneven job gets so many in the mean.
        """
        room = self._rooms.now(job)
        if len(set(hosts)) != job.spec.nodes:
            return None
        there: dict[str, list[int]] = {}
        devices = self._ledger.devices
        mine = [gpu for gpu in job.current.gpus if gpu in devices] if job.gpus else []
        for host in hosts:
            own = [gpu for gpu in mine if devices[gpu].host == host]
            there[host] = [*own, *self._rooms.usable(job, host)][: None if room is None else room[host]]
        given = dict.fromkeys(hosts, count)
        if job.spec.uneven and self._ledger.spreads:
            given = shares(count, {host: len(gpus) for host, gpus in there.items()})
            self._otherwise |= room is not None and len(set(given.values())) > 1  # a policy knows no rooms
        chosen = [gpu for host in hosts for gpu in there[host][: given[host]]]
        if len(chosen) < count * len(hosts) or 0 in given.values():
            return None
        return tuple(sorted(chosen))

    def _note_shares(self, job: Job, gpus: tuple[int, ...] | None) -> None:
        by_host = self._ledger.by_host(gpus or ())
        if len(set(by_host.values())) > 1:
            said = ", ".join(f"{count} on {host}" for host, count in by_host.items())
            self._out.note(job, Reason(Why.UNEVEN, {"gpus": said}))
