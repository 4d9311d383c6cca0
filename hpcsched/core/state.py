"""The state of a run, and the moves its jobs can make in it: leases, launches, ends of attempts.

Nothing here looks at events; `machine.Machine` says which event leads to which move.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from heapq import heappush
from math import floor, inf
from typing import Any

from hpcsched.core.actions import Action, Launch, SetTimer, Suspend, Terminate
from hpcsched.core.jobs import Costs, Job, Target
from hpcsched.core.model import Attempt, Device, Ended, JobState, Role
from hpcsched.core.profile import Profile, cost_at
from hpcsched.core.queue import WaitingQueue
from hpcsched.core.reasons import Reason, Why
from hpcsched.core.rooms import Rooms
from hpcsched.errors import InvalidTransition

DEFAULT_SUSPEND_S, DEFAULT_START_S = 5.0, 10.0
"""Assumed where neither the profile nor this run has measured them."""

DRAIN, HURRY = ("drain", 0, 0), ("hurry", 0, 0)
"""Keys of the run's own timers: when saving begins, and when what has not left is told to end."""

MOST_LOSSES = 3
"""Attempts lost in a row without a new checkpoint before a job is given up."""


@dataclass(frozen=True, slots=True)
class Life:
    """One agent's time with the run: the run clock and the wall clock when it began, and its GPUs."""

    at: float
    wall: float
    gpus: int


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
        self.free: set[int] = set()
        self.holder: dict[int, int] = {}
        self.jobs: dict[int, Job] = {}
        self.by_name: dict[str, int] = {}
        self.dependents: dict[int, list[int]] = {}
        self.active: dict[int, Job] = {}
        self.queue = WaitingQueue()
        self.arrivals: list[tuple[float, int]] = []
        """A heap of (submit_s, id): the jobs that are still to come."""
        self.profiles: dict[tuple[str, int], Profile] = {}
        """By model and number of hosts."""
        self.learned: dict[tuple[str, int], dict[int, float]] = {}
        self.costs: dict[str, Costs] = {}
        self.draining = False
        self.drain_cause = ""
        """What led to the drain of this life: a signal's name, an inbox command, or "deadline"."""
        self.deadline: float | None = None
        self.reserve_s = 60.0
        self.late: set[int] = set()
        """Jobs that could start but for the time left: taken out of the queue until the deadline moves."""
        self.unfinished = 0
        self.changed: set[int] = set()
        """Ids of jobs that changed since whoever reads this emptied it (the snapshot does)."""
        self._actions: list[Action] = []
        self._cause = ""
        self._drain_due = -inf
        self._late_since = inf
        self._leave_window_s = 0.0

    # --- questions --------------------------------------------------------------------------

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
        if self.active or self.draining or not (len(self.queue) or self.late):
            return False
        if any(self.jobs[i].state is JobState.PENDING for _, i in self.arrivals):
            return False
        return not self.queue.any_fits(self.rooms(self.devices).fits)

    def job_of(self, key: str) -> Job | None:
        """The job of this id or name."""
        job = self.jobs.get(int(key)) if key.isdecimal() else None
        return self.jobs[self.by_name[key]] if job is None and key in self.by_name else job

    def profile(self, job: Job) -> Profile | None:
        """What is known of the job's model: the profile loaded, else what this run has learnt."""
        # How a model scales within a host says most of how it does on several with the same count each:
        # more than the few counts that this run has seen.
        model = job.spec.model
        keys = ((model, job.spec.nodes), (model, 1))
        for key in keys:
            if key in self.profiles:
                return self.profiles[key]
        for key in keys:
            if key in self.learned:
                table = self.learned[key]
                return Profile(model=model, device="", nodes=key[1], throughput=table, source="learned")
        return None

    def rooms(self, gpus: Iterable[int]) -> Rooms:
        """These of the run's healthy GPUs, host by host; hosts with none of them are there too."""
        counts = dict.fromkeys((device.host for device in self.devices.values()), 0)
        for gpu in gpus:
            counts[self.devices[gpu].host] += 1
        return Rooms(counts)

    def hosts_of(self, job: Job) -> Mapping[str, int]:
        """How many of the healthy GPUs of a running job's attempt lie on which host."""
        return Counter(self.devices[gpu].host for gpu in job.current.gpus if gpu in self.devices)

    def most_for(self, job: Job) -> int:
        """The GPUs that a job's hosts could each give it, were they all free."""
        return self.rooms(self.devices).most(job.spec.nodes)

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
        if self.draining:
            return Reason(Why.DRAINING)
        if job.id in self.late:
            return self._too_late(job)
        if self.queue.first() == job.id:
            hosts = f" on each of {job.spec.nodes} hosts" if job.spec.nodes > 1 else ""
            facts = {"need": job.spec.gpus_min, "hosts": hosts, "free": len(self.free)}
            return Reason(Why.RESOURCES, facts)
        return Reason(Why.PRIORITY)

    # --- leases and launches ----------------------------------------------------------------

    def _lease(self, job: Job, gpus: tuple[int, ...]) -> None:
        """Let the job hold exactly these devices, its own or free ones."""
        for gpu in set(job.gpus) - set(gpus):
            del self.holder[gpu]
            if gpu in self.devices:
                self.free.add(gpu)
        for gpu in set(gpus) - set(job.gpus):
            if gpu not in self.free:
                raise self._invalid(job, f"GPU {gpu} is not free")
            self.free.remove(gpu)
            self.holder[gpu] = job.id
        job.gpus = gpus
        self.changed.add(job.id)

    def _launch(self, job: Job, gpus: tuple[int, ...], role: Role) -> None:
        self._dequeue(job)
        self._lease(job, gpus)
        job.attempt += 1
        job.role, job.target, job.ready, job.wanted = role, None, False, ""
        job.processes, job.rate, job.timers = (), None, {}
        if job.started_s is None:
            job.started_s = self.now
        attempt = Attempt(number=job.attempt, gpus=gpus, role=role, start_s=self.now, from_step=job.step)
        job.attempts.append(attempt)
        self._to(job, JobState.STARTING)
        self.active[job.id] = job
        self._do(Launch, job, gpus=gpus, role=role, resume=job.saved_step is not None)

    def _leave(self, job: Job, wanted: str) -> None:
        """Have a running job save and leave; one that has not said that it can is told to end."""
        job.wanted = wanted
        if job.ready:
            self._suspend(job)
        else:
            self._terminate(job)

    def _suspend(self, job: Job) -> None:
        self._to(job, JobState.SUSPENDING)
        job.current.signalled_s = self.now
        self._do(Suspend, job)
        self._timer("grace", job, self._grace(job))

    def _terminate(self, job: Job) -> None:
        self._do(Terminate, job)
        self._timer("term", job, min(self._grace(job) / 2, self._time_to_kill_s()))

    # --- how attempts and jobs end ----------------------------------------------------------

    def _saved(self, job: Job, step: int | None) -> None:
        if step is None:
            return
        if step > (job.saved_step or 0):
            job.failures = job.losses = 0
        job.saved_step = step
        job.step, job.reports = max(job.step, step), True

    def _fell_back(self, job: Job, step: int) -> None:
        """The attempt could not use the checkpoint it was to go on from, and took an older one."""
        expected = job.current.from_step
        self._note(job, Reason(Why.FELL_BACK, {"expected": expected, "step": step}))
        job.repeated += expected - step
        job.current.from_step = job.step = step

    def _suspended(self, job: Job) -> None:
        signalled = job.current.signalled_s
        if signalled is not None:
            costs = self.costs.setdefault(job.spec.model, Costs())
            costs.suspend_s = self.now - signalled
            costs.longest_suspend_s = max(costs.longest_suspend_s, costs.suspend_s)
        job.suspensions += 1
        self._note(job, Reason(Why.SAVED, {"step": job.saved_step or 0}))
        target = job.target
        self._end_attempt(job, Ended.SUSPENDED, keep=target)
        self._back_to_checkpoint(job)
        self._to(job, JobState.SUSPENDED)
        if target:
            self._launch(job, target.gpus, target.role)
        else:
            self._enqueue(job)

    def _failed(self, job: Job, code: int, detail: str) -> None:
        self._end_attempt(job, Ended.FAILED)
        self._note(job, Reason(Why.EXITED, {"code": code, "detail": f": {detail}" if detail else ""}))
        job.failures += 1
        if job.failures > job.spec.retries:
            self._finish(job, JobState.FAILED, Reason(Why.EXITED, {"code": code, "detail": ""}))
            return
        facts = {"code": code, "failures": job.failures, "retries": job.spec.retries}
        self._note(job, Reason(Why.RETRY, facts))
        self._back_to_waiting(job)

    def _attempt_lost(self, job: Job, saved_step: int | None, why: str, *, counts: bool) -> None:
        """An attempt ended through no fault of the job's: it goes on from its newest checkpoint.

        `counts`: too many in a row without a new checkpoint make the job FAILED.
        """
        self._saved(job, saved_step)
        if job.wanted == "cancel":
            self._end_attempt(job, Ended.CANCELLED)
            self._finish(job, JobState.CANCELLED, Reason(Why.CANCELLED))
            return
        self._end_attempt(job, Ended.LOST)
        facts = {"attempt": job.attempt, "why": why, "step": job.saved_step or 0}
        self._note(job, Reason(Why.LOST, facts))
        job.losses += counts
        if job.losses > MOST_LOSSES:
            self._finish(job, JobState.FAILED, Reason(Why.LOST, facts))
        else:
            self._back_to_waiting(job)

    def _back_to_checkpoint(self, job: Job) -> None:
        """Steps after the newest checkpoint are lost and will be done again."""
        job.repeated += max(0, job.step - (job.saved_step or 0))
        job.step = job.saved_step or 0

    def _back_to_waiting(self, job: Job) -> None:
        self._back_to_checkpoint(job)
        self._to(job, JobState.PENDING if job.saved_step is None else JobState.SUSPENDED)
        if job.held and job.state is JobState.PENDING:
            job.held = False
            self._to(job, JobState.HELD)
        self._enqueue(job)

    def _end_attempt(self, job: Job, ended: Ended, keep: Target | None = None) -> None:
        attempt = job.current
        attempt.end_s, attempt.ended, attempt.to_step = self.now, ended, job.step
        job.target, job.wanted = None, ""
        self._lease(job, keep.gpus if keep else ())
        del self.active[job.id]

    def _drop_target(self, job: Job) -> None:
        """Give up the larger lease a job was being suspended for."""
        job.target = None
        self._lease(job, tuple(gpu for gpu in job.current.gpus if self.holder.get(gpu) == job.id))

    def _enqueue(self, job: Job) -> None:
        ready = job.state in (JobState.PENDING, JobState.SUSPENDED) and not job.held and not job.unmet
        if ready and job.submit_s <= self.now:
            self.late.discard(job.id)
            self.queue.add(job.id, arrival=job.submit_s, need=job.spec.gpus_min, nodes=job.spec.nodes)
            self.changed.add(job.id)

    def _dequeue(self, job: Job) -> None:
        self.queue.remove(job.id)
        self.late.discard(job.id)

    def _finish(self, job: Job, state: JobState, reason: Reason) -> None:
        """End a job, and with one that did not complete all that wait for it."""
        self._end(job, state, reason)
        if state is JobState.COMPLETED:
            for other_id in self.dependents.pop(job.id, ()):
                other = self.jobs[other_id]
                other.unmet -= 1
                self.changed.add(other_id)
                self._enqueue(other)
            return
        broken = [job]  # not by recursion: a chain of dependents may be of any length
        for failed in broken:
            for other_id in self.dependents.pop(failed.id, ()):
                other = self.jobs[other_id]
                if not other.state.final:
                    after = {"after": failed.spec.name}
                    self._end(other, JobState.CANCELLED, Reason(Why.DEPENDENCY_NEVER_SATISFIED, after))
                    broken.append(other)

    def _end(self, job: Job, state: JobState, reason: Reason) -> None:
        self._dequeue(job)
        self._to(job, state)
        self.unfinished -= 1
        job.ended_s = self.now
        job.held, job.wanted = False, ""
        job.reason = None if state is JobState.COMPLETED else reason
        self._note(job, reason)

    def _never_satisfied(self, job: Job, name: str) -> None:
        self._finish(job, JobState.CANCELLED, Reason(Why.DEPENDENCY_NEVER_SATISFIED, {"after": name}))

    # --- the end of the allocation ----------------------------------------------------------

    def margin_s(self, *more: Job) -> float:
        """Seconds before the deadline at which saving begins: the reserve, and the longest saves known of
        all jobs that run (and of `more`) one after the other, as they share the file system."""
        saving = [*self.active.values(), *more]
        return self.reserve_s + sum(max(self._save_s(j), self._longest_save_s(j)) for j in saving)

    def _longest_save_s(self, job: Job) -> float:
        costs = self.costs.get(job.spec.model)
        return costs.longest_suspend_s if costs else 0.0

    def left_s(self, *more: Job) -> float:
        """Seconds until saving begins (with `more` running too); infinite without a deadline."""
        return inf if self.deadline is None else self.deadline - self.margin_s(*more) - self.now

    def first_checkpoint_s(self, job: Job) -> float:
        """Seconds that a job needs from its launch until it has done a step that can be saved."""
        least, profile = job.spec.gpus_min, self.profile(job)
        step_s = 1 / profile.rate(least) if profile else 0.0
        return self._launch_s(job, least, first=job.attempt == 0) + step_s

    def _too_late(self, job: Job, *others: Job) -> Reason | None:
        """Why a waiting job cannot be started any more in this allocation; None if it can.

        `others` start together with it.
        """
        need, left = self.first_checkpoint_s(job), self.left_s(job, *others)
        facts = {"need": need, "left": max(0.0, left)}
        return Reason(Why.WALLTIME_TOO_SHORT, facts) if need > left or job.id in self.late else None

    def _set_aside(self, job: Job, reason: Reason) -> None:
        """Take a job that cannot be started any more out of the queue."""
        self.queue.remove(job.id)
        self.late.add(job.id)
        self._late_since = self._saving_begins()
        if not job.story or job.story[-1].reason.why is not reason.why:
            self._note(job, reason)

    def _let_late_ones_in(self) -> None:
        for job_id in sorted(self.late):
            self._enqueue(self.jobs[job_id])

    def _look_again_at_late_ones(self) -> None:
        """Saving may begin later than when they were set aside, as other jobs have ended; and when nothing
        runs, what was learnt since may let one in."""
        if not self.active or self._saving_begins() > self._late_since + 1.0:
            self._late_since = self._saving_begins()
            self._let_late_ones_in()
            self._decide_after = True

    def _saving_begins(self) -> float:
        return inf if self.deadline is None else self.deadline - self.margin_s()

    def _time_to_kill_s(self) -> float:
        """Seconds until what has not left must be killed, for us to leave in time; else infinite."""
        if self.deadline is None or not self.draining:
            return inf
        return max(1.0, self.deadline - self._leave_window_s / 3 - self.now)

    def _watch_the_end(self) -> None:
        """Have saving begin in time, by what is known now; in whole seconds, so that it seldom changes."""
        if self.deadline is None or self.draining:
            return
        due = float(floor(self.deadline - self.margin_s()))
        if due != self._drain_due:
            self._drain_due = due
            self._actions.append(SetTimer(at=self.now, cause=self._cause, key=DRAIN, due=due))

    # --- small things -----------------------------------------------------------------------

    def _to(self, job: Job, state: JobState) -> None:
        if state not in _WAYS[job.state]:
            raise self._invalid(job, f"{job.state} -> {state}")
        job.state = state
        self.changed.add(job.id)

    def _invalid(self, job: Job, what: str) -> InvalidTransition:
        story = [f"{note.at:10.1f}  {note.reason}" for note in job.story]
        return InvalidTransition(f"job {job.id} ({job.spec.name}), on {self._cause}: {what}", story)

    def _note(self, job: Job, reason: Reason) -> None:
        self.changed.add(job.id)
        if self._stories:
            job.note(self.now, reason)

    def _do(self, action: type[Action], job: Job, **rest: Any) -> None:
        about: dict[str, Any] = {"job_id": job.id, "attempt": job.attempt}
        self._actions.append(action(at=self.now, cause=self._cause, **about, **rest))

    def _timer(self, kind: str, job: Job, delay_s: float) -> None:
        due = job.timers[kind] = self.now + delay_s
        self._set_timer(kind, job, due)

    def _set_timer(self, kind: str, job: Job, due: float) -> None:
        key = (kind, job.id, job.attempt)
        self._actions.append(SetTimer(at=self.now, cause=self._cause, key=key, due=due))

    def _expect(self, job: Job) -> None:
        """Let a job wait for its time."""
        heappush(self.arrivals, (job.submit_s, job.id))
        self._wake_at_arrival(job)

    def _wake_at_arrival(self, job: Job) -> None:
        # Exactly then: now + (then - now) may come out before it.
        if not job.state.final:
            self._set_timer("arrival", job, job.submit_s)

    def _completed(self, name: str) -> bool:
        return self.jobs[self.by_name[name]].state is JobState.COMPLETED

    def _grace(self, job: Job) -> float:
        """Seconds a worker has to save: thrice the longest save known of its model, at least `grace_s`."""
        profile, costs = self.profile(job), self.costs.get(job.spec.model)
        known = (profile and cost_at(profile.suspend_s, job.width)) or 0.0
        return max(self.grace_s, 3 * known, 3 * costs.longest_suspend_s if costs else 0.0)

    def _switch_s(self, job: Job, gpus: int) -> float:
        """Seconds to suspend `job` where it runs and resume it on `gpus` GPUs on each of its hosts."""
        return self._save_s(job) + self._launch_s(job, gpus, first=False)

    def _save_s(self, job: Job) -> float:
        """Seconds that saving and leaving takes `job`: by its profile, else as last seen in this run."""
        profile, costs = self.profile(job), self.costs.get(job.spec.model, Costs())
        known = cost_at(profile.suspend_s, job.width if job.attempts else 1) if profile else None
        if known is None:
            known = DEFAULT_SUSPEND_S if costs.suspend_s is None else costs.suspend_s
        return known

    def _launch_s(self, job: Job, gpus: int, *, first: bool) -> float:
        """Seconds from a launch on `gpus` GPUs to the first step: by the profile, else as last seen."""
        profile, costs = self.profile(job), self.costs.get(job.spec.model, Costs())
        known = profile.launch_s(gpus, first=first) if profile else None
        if known is None:
            known = DEFAULT_START_S if costs.start_s is None else costs.start_s
        return known

    def _start_left_s(self, job: Job) -> float:
        """Seconds until the job's attempt has paid its start or resume cost."""
        profile = self.profile(job)
        if profile is None:
            return 0.0
        cost = profile.launch_s(job.width, first=job.attempt == 1) or 0.0
        return max(0.0, job.current.start_s + cost - self.now)


_S = JobState
_WAYS: dict[JobState, frozenset[JobState]] = {
    _S.PENDING: frozenset({_S.STARTING, _S.HELD, _S.CANCELLED}),
    _S.HELD: frozenset({_S.PENDING, _S.CANCELLED}),
    _S.STARTING: frozenset(set(_S) - {_S.HELD, _S.STARTING}),
    _S.RUNNING: frozenset(set(_S) - {_S.HELD, _S.STARTING, _S.RUNNING}),
    _S.SUSPENDING: frozenset(set(_S) - {_S.HELD, _S.STARTING, _S.RUNNING, _S.SUSPENDING}),
    _S.SUSPENDED: frozenset({_S.STARTING, _S.CANCELLED}),
    _S.COMPLETED: frozenset(),
    _S.FAILED: frozenset(),
    _S.CANCELLED: frozenset(),
}
