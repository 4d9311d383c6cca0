"""What a policy would do from the present state on, by the profiles: a planner's measure and fallback.

The policy is the real one; only the jobs are copies, and time is a `Problem`'s timeline of the future.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import inf

from hpcsched.core.jobs import Job
from hpcsched.core.model import Attempt, JobState, Role
from hpcsched.core.resources.gpus import Fits
from hpcsched.core.resources.queue import WaitingQueue
from hpcsched.core.view import Policy, Resize, Start, View
from hpcsched.planning.jobs.problem import Problem
from hpcsched.planning.jobs.timeline import Timeline, rooms_of


def rollout(problem: Problem, policy: Policy) -> Timeline:
    """The future under a policy that starts and resizes jobs (it must not preempt)."""
    return _Rollout(problem, policy).run()


class _Rollout:
    def __init__(self, problem: Problem, policy: Policy) -> None:
        self._problem, self._policy = problem, policy
        self._timeline = Timeline(problem)
        self._jobs = [self._copy(i) for i in range(len(problem))]
        self._index = {job.id: i for i, job in enumerate(self._jobs)}
        self._queue = WaitingQueue()
        self._capacity = problem.view.capacity.by_host()
        self._starting: set[int] = set()
        """Jobs started at this moment: not ready before all else that happens at it."""
        for i in range(len(problem)):
            if i not in problem.running and not problem.works[i].after:
                self._enqueue(i)

    def run(self) -> Timeline:
        self._decide()
        now = self._timeline.now
        while (happened := self._timeline.next()) is not None:
            if happened[0] == -2 or self._timeline.now > now:
                self._starting.clear()
            now = self._timeline.now
            for i in happened[1]:
                self._enqueue(i)
            self._decide()
        return self._timeline

    def _copy(self, i: int) -> Job:
        job = self._problem.works[i].job
        copy = Job(id=job.id, spec=job.spec, submit_s=job.submit_s, step=job.step, attempt=job.attempt)
        copy.saved_step, copy.ready, copy.state = job.saved_step, True, JobState.RUNNING
        copy.traits = job.traits  # how many GPUs it can use
        if i in self._problem.running:
            copy.in_place, copy.gpus = self._problem.works[i].in_place, job.gpus
            copy.role = job.target.role if job.target else job.role
            self._attempt(copy, self._problem.works[i].width)
        return copy

    def _attempt(self, job: Job, width: int) -> None:
        gpus = tuple(range(width * job.spec.nodes))
        now, role = self._timeline.now, job.role or Role.PRIMARY
        job.attempts = [Attempt(number=job.attempt, gpus=gpus, role=role, start_s=now, from_step=job.step)]

    def _enqueue(self, i: int) -> None:
        work, job = self._problem.works[i], self._jobs[i]
        self._queue.add(
            job.id, arrival=job.submit_s, need=work.least, nodes=work.nodes, priority=job.spec.priority
        )

    def _decide(self) -> None:
        timeline = self._timeline
        if not timeline.rooms.left:
            return
        for decision in self._policy.decide(self._view()):
            if isinstance(decision, (Start, Resize)):
                job = decision.job
                i = self._index[job.id]
                if isinstance(decision, Start):
                    self._queue.remove(job.id)
                    timeline.start(i, decision.gpus, decision.hosts)
                    self._starting.add(i)
                    timeline.look_at(timeline.now)
                else:
                    timeline.resize(i, decision.gpus, decision.hosts)
                job.attempt += 1
                job.role = decision.role
                self._attempt(job, decision.gpus)

    def _view(self) -> View:
        timeline, view = self._timeline, self._problem.view
        running = []
        for i in timeline.active:
            job = self._jobs[i]
            job.step = timeline.step_of(i)
            job.state = JobState.RUNNING if timeline.resizable(i) else JobState.SUSPENDING
            if i in self._starting:
                job.state = JobState.STARTING
            running.append(job)
        running.sort(key=lambda job: (job.submit_s, job.id))
        return replace(
            view,
            now=timeline.now,
            free=rooms_of(timeline.rooms.by_host()),
            capacity=rooms_of(self._capacity),
            running=running,
            secondaries=[job for job in running if job.role is Role.SECONDARY],
            hosts_of=lambda job: timeline.own(self._index[job.id]),
            waiting_count=len(self._queue),
            waiting=self._waiting,
            queue=self._queue,
            # Copies lie on no real GPUs: whether their first rank can stay is not known.
            switch_s=lambda job, gpus, hosts=None: view.switch_s(job, gpus),
            in_place=lambda job, gpus, hosts: view.in_place(job, gpus, None),
            start_left_s=lambda job: max(0.0, timeline.begin(self._index[job.id]) - timeline.now),
            left_s=inf,
            room=lambda job, free: None,
        )

    def _waiting(self, fits: Fits) -> Iterator[Job]:
        for job_id in self._queue.walk(fits):
            yield self._jobs[self._index[job_id]]
