"""What a policy decides, carried out: it sees a view of the run, and its decisions become moves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from hpcsched.core.actions import MakePlan, SetTimer
from hpcsched.core.jobs import Job, Target
from hpcsched.core.model import JobState
from hpcsched.core.plan import Plan
from hpcsched.core.resources.gpus import Fits
from hpcsched.core.transitions.attempts import LOOK
from hpcsched.core.transitions.deadline import Leaving
from hpcsched.core.view import LookAgain, Planning, Policy, Preempt, Remark, Replan, Resize, Start, View

PolicyMaker = Callable[[str, Mapping[str, Any]], Policy]


class Deciding(Leaving):
    """A run's state with a policy that changes it."""

    def __init__(self, *, stories: bool) -> None:
        super().__init__(stories=stories)
        self.policy: Policy | None = None
        self.policy_options: Mapping[str, Any] = {}
        self._plan_asked = False

    def make_plan(self) -> Plan:
        """What the action MakePlan asks for: the policy's plan from the present state.

        It may take long; whoever is told to perform the action calls this, and sends PlanMade.
        """
        assert isinstance(self.policy, Planning), "only a policy that plans asks for a plan"
        return self.policy.plan(self.view())

    def view(self) -> View:
        """The run as a policy sees it now."""
        return View(
            now=self.now,
            rooms=self.rooms(),
            capacity=self.capacity(),
            hosts_of=self.hosts_of,
            places=self.places,
            left_s=self.left_s(),
            running=list(self.running),
            secondaries=list(self.secondaries),
            waiting_count=len(self.queue),
            waiting=self._waiting,
            jobs=self.jobs,
            queue=self.queue,
            blocked=self._blocked,
            unmet=self._unmet,
            in_time=self._in_time,
            profile=self.profile,
            curve=self.curve,
            launch_s=self._launch_s,
            save_s=self._save_s,
            switch_s=self._switch_s,
            in_place=self._in_place,
            stand_s=self._stand_s,
            built_s=self._built_s,
            resize_left_s=self._resize_left_s,
            start_left_s=self._start_left_s,
            plan=self.plan,
            news=self.news,
            proposals=self.proposals,
        )

    def _decide(self) -> None:
        if self.policy is None or not (self.free or self.policy.acts_when_full):
            return
        for decision in self.policy.decide(self.view()):
            if isinstance(decision, Replan):
                if not self._plan_asked:
                    self._actions.append(MakePlan(at=self.now, cause=self._cause))
                self._plan_asked = True
            elif isinstance(decision, LookAgain):
                self._look_again(decision.at)
            elif isinstance(decision, Remark):
                story = decision.job.story
                if not story or story[-1].reason.why is not decision.reason.why:
                    self._note(decision.job, decision.reason)
            elif isinstance(decision, Start):
                self._start(decision.job, decision)
            else:
                self._change(decision.job, decision)

    def _start(self, job: Job, decision: Start) -> None:
        self._note(job, decision.reason)
        least, most = job.limits(decision.gpus)
        gpus = self._pick(job, decision.hosts, decision.gpus)
        if job.id not in self.queue or not least <= decision.gpus <= most or gpus is None:
            where = ", ".join(decision.hosts)
            raise self._invalid(job, f"cannot start on {decision.gpus} GPUs of hosts {where}")
        self.proposals.grown.pop(job.id, None)
        self._launch(job, gpus, decision.role)

    def _change(self, job: Job, decision: Resize | Preempt) -> None:
        self._note(job, decision.reason)
        if isinstance(decision, Preempt):
            if not job.settled:
                raise self._invalid(job, "cannot be suspended")
            self._suspend(job)
            return
        least, most = job.limits(decision.gpus)
        gpus = self._pick(job, decision.hosts, decision.gpus)
        if not job.settled or not least <= decision.gpus <= most or gpus is None:
            raise self._invalid(job, f"cannot be resized to {decision.gpus} GPUs")
        if job.in_place and job.current.gpus[0] in gpus:
            stay = [gpu for gpu in job.current.gpus if gpu in gpus]
            ranks = (*stay, *(gpu for gpu in gpus if gpu not in stay))
            self._resize(job, Target(ranks, decision.role, self.now))
        else:
            job.target = Target(gpus, decision.role, self.now)
            self._lease(job, tuple(sorted({*job.gpus, *gpus})))
            self._suspend(job)

    def _look_again(self, at: float) -> None:
        if at != self._look_due:
            self._look_due = at
            self._actions.append(SetTimer(at=self.now, cause=self._cause, key=LOOK, due=at))

    def _blocked(self) -> Iterator[Job]:
        """Jobs that are here and wait for others to complete."""
        seen = {job_id for waiting in self.dependents.values() for job_id in waiting}
        for job_id in sorted(seen):
            job = self.jobs[job_id]
            if job.state is JobState.PENDING and job.submit_s <= self.now and not job.spec.background:
                yield job

    def _unmet(self, job: Job) -> list[str]:
        return [name for name in job.spec.after if not self._completed(name)]

    def _waiting(self, fits: Fits) -> Iterator[Job]:
        offered: list[Job] = []  # those that start together will save together
        for job_id in self.queue.walk(fits):
            job = self.jobs[job_id]
            if self._in_time(job, offered):
                offered.append(job)
                yield job

    def _in_time(self, job: Job, others: Sequence[Job]) -> bool:
        reason = None if self.deadline is None else self._too_late(job, *others)
        if reason:
            self._set_aside(job, reason)
        return reason is None

    def _pick(self, job: Job, hosts: Sequence[str], count: int) -> tuple[int, ...] | None:
        """The job's own and free GPUs, `count` on each of these hosts; None if there are not so many.

        Of its own those of its first ranks, which then can stay.
        """
        if len(set(hosts)) != job.spec.nodes:
            return None
        chosen: list[int] = []
        mine = [gpu for gpu in job.current.gpus if gpu in self.devices] if job.gpus else []
        for host in hosts:
            own = [gpu for gpu in mine if self.devices[gpu].host == host]
            chosen += [*own, *self.free.on(host)][:count]
        return tuple(sorted(chosen)) if len(chosen) == count * len(hosts) else None
