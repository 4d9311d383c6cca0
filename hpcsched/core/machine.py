"""The state of a run and the only way it changes: `handle(event)` gives the actions to perform.

Pure: no clock, no file, no random source. The live agent, the simulator and a replay of the journal
drive the same machine, so what `simulate` shows is what `run` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hpcsched.core import events as ev
from hpcsched.core.actions import Action, Kill, Launch, SetTimer, Suspend, Terminate
from hpcsched.core.jobs import Costs, Job, Target
from hpcsched.core.model import Attempt, Device, Ended, JobState, Role
from hpcsched.core.profile import Profile, cost_at
from hpcsched.core.queue import WaitingQueue
from hpcsched.core.reasons import Reason, Why
from hpcsched.core.view import Policy, Remark, Resize, Start, View
from hpcsched.errors import InvalidTransition

PolicyMaker = Callable[[str, Mapping[str, Any]], Policy]

SAVED_AND_LEFT = 75
"""Exit code of a program that saved and left (EX_TEMPFAIL)."""

DEFAULT_SUSPEND_S, DEFAULT_START_S = 5.0, 10.0
"""Assumed where neither the profile nor this run has measured them."""

MOST_LOSSES = 3
"""Attempts lost in a row without a new checkpoint before a job is given up."""


@dataclass(frozen=True, slots=True)
class Life:
    """One agent's time with the run: the run clock and the wall clock when it began."""

    at: float
    wall: float


class Machine:
    """All jobs, devices and leases of one run.

    Args:
        make_policy: gives the policy of a name and its options; called at each agent start.
        stories: keep each job's story for `explain`; off saves memory in large simulations.
    """

    def __init__(self, make_policy: PolicyMaker, *, stories: bool = True) -> None:
        self._make_policy = make_policy
        self._stories = stories
        self.now = 0.0
        self.policy: Policy | None = None
        self.policy_options: Mapping[str, Any] = {}
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
        self.profiles: dict[str, Profile] = {}
        self.learned: dict[str, dict[int, float]] = {}
        self.costs: dict[str, Costs] = {}
        self.draining = False
        self.unfinished = 0
        self.changed: set[int] = set()
        """Ids of jobs that changed since whoever reads this emptied it (the snapshot does)."""
        self.stale = 0
        self._handlers: dict[type[ev.Event], Callable[[Any], None]] = {
            ev.AgentStarted: self._agent_started,
            ev.ProfilesLoaded: self._profiles_loaded,
            ev.JobsSubmitted: self._jobs_submitted,
            ev.ProgressObserved: self._progress_observed,
            ev.CancelRequested: self._cancel_requested,
            ev.HoldRequested: self._hold_requested,
            ev.ReleaseRequested: self._release_requested,
            ev.SuspendRequested: self._suspend_requested,
            ev.ResumeRequested: self._resume_requested,
            ev.DrainRequested: self._drain_requested,
            ev.WorkersSpawned: self._workers_spawned,
            ev.WorkersReady: self._workers_ready,
            ev.CheckpointSaved: self._checkpoint_saved,
            ev.WorkersExited: self._workers_exited,
            ev.LaunchFailed: self._launch_failed,
            ev.DeviceLost: self._device_lost,
            ev.TimerFired: self._timer_fired,
        }
        self._actions: list[Action] = []
        self._cause = ""
        self._decide_after = False

    # --- the one way in ---------------------------------------------------------------------

    def handle(self, event: ev.Event) -> list[Action]:
        """Take an event in; returns what is to be done about it, in order.

        Raises InvalidTransition when a policy asks for what cannot be.
        """
        self.now = max(self.now, event.at)
        self._actions = []
        self._cause = type(event).__name__
        self._decide_after = False
        self._handlers[type(event)](event)
        if self._decide_after and not self.draining:
            self._decide()
        return self._actions

    @property
    def finished(self) -> bool:
        """Every job is in a final state."""
        return self.unfinished == 0

    @property
    def stopped(self) -> bool:
        """Drained: work may be left, but nothing runs and nothing will start."""
        return self.draining and not self.active

    @property
    def stuck(self) -> bool:
        """Jobs wait, but nothing runs and none of them can ever start on the devices that are left."""
        if self.active or self.draining or not len(self.queue):
            return False
        need = self.queue.smallest_need()
        return need is not None and need > len(self.devices)

    def job_of(self, key: str) -> Job | None:
        """The job of this id or name."""
        if key in self.by_name:
            return self.jobs[self.by_name[key]]
        return self.jobs.get(int(key)) if key.isdecimal() else None

    def profile(self, job: Job) -> Profile | None:
        """What is known of the job's model: the profile loaded, else what this run has learnt."""
        model = job.spec.model
        if model in self.profiles:
            return self.profiles[model]
        table = self.learned.get(model)
        return Profile(model=model, device="", throughput=table, source="learned") if table else None

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
        if self._arrival(job) > self.now:
            return Reason(Why.BEGIN_TIME, {"at": job.spec.submit_at})
        if self.draining:
            return Reason(Why.DRAINING)
        if self.queue.first() == job.id:
            facts = {"need": job.limits(len(self.devices))[0], "free": len(self.free)}
            return Reason(Why.RESOURCES, facts)
        return Reason(Why.PRIORITY)

    # --- the run ----------------------------------------------------------------------------

    def _agent_started(self, event: ev.AgentStarted) -> None:
        self.lives.append(Life(event.at, event.wall))
        self.policy = self._make_policy(event.policy, event.policy_options)
        self.policy_options = event.policy_options
        self.grace_s = event.grace_s
        self.draining = False
        for job in list(self.active.values()):
            self._attempt_lost(job, event.saved_steps.get(job.id), "the agent was gone", counts=False)
        self.devices = {d.index: d for d in event.devices}
        self.lost_devices = {}
        self.free = set(self.devices)
        self.holder = {}
        for job in self.jobs.values():
            if not job.state.final and self._arrival(job) > self.now:
                self._wake_at_arrival(job)
        self._decide_after = True

    def _profiles_loaded(self, event: ev.ProfilesLoaded) -> None:
        self.profiles.update({p.model: p for p in event.profiles})
        self._decide_after = True

    def _jobs_submitted(self, event: ev.JobsSubmitted) -> None:
        ids = range(event.first_id, event.first_id + len(event.jobs))
        self.by_name.update({spec.name: job_id for job_id, spec in zip(ids, event.jobs, strict=True)})
        for job_id, spec in zip(ids, event.jobs, strict=True):
            job = Job(id=job_id, spec=spec, submit_s=max(event.at, spec.submit_at))
            self.jobs[job_id] = job
            self.unfinished += 1
            self._note(job, Reason(Why.SUBMITTED))
            for name in spec.after:
                if not self._completed(name):
                    job.unmet += 1
                    self.dependents.setdefault(self.by_name[name], []).append(job_id)
        for job_id in ids:
            job = self.jobs[job_id]
            broken = [n for n in job.spec.after if self.jobs[self.by_name[n]].state in _NEVER]
            if broken:
                self._never_satisfied(job, broken[0])
            elif job.submit_s > event.at:
                self._wake_at_arrival(job)
            else:
                self._enqueue(job)
        self._decide_after = True

    def _progress_observed(self, event: ev.ProgressObserved) -> None:
        for seen in event.progress:
            job = self.active.get(seen.job_id)
            if job is None or job.attempt != seen.attempt:
                continue
            if seen.step != job.step:
                self.changed.add(job.id)
            job.step, job.reports = max(job.step, seen.step), True
            if seen.rate is not None:
                job.rate = seen.rate
                if job.spec.model not in self.profiles and not job.target:
                    self.learned.setdefault(job.spec.model, {})[len(job.gpus)] = seen.rate

    def _drain_requested(self, event: ev.DrainRequested) -> None:
        self.draining = True
        for job in list(self.active.values()):
            if job.target:
                self._drop_target(job)
            if job.state is not JobState.SUSPENDING and not job.wanted:
                self._leave(job, "drain")

    # --- what users ask for -----------------------------------------------------------------

    def _cancel_requested(self, event: ev.CancelRequested) -> None:
        job = self.jobs[event.job_id]
        if job.state.final:
            return
        if job.state.active:
            job.wanted = "cancel"
            if job.target:
                self._drop_target(job)
            self._terminate(job)
        else:
            self._finish(job, JobState.CANCELLED, Reason(Why.CANCELLED))
        self._decide_after = True

    def _hold_requested(self, event: ev.HoldRequested) -> None:
        job = self.jobs[event.job_id]
        if job.state is JobState.PENDING:
            self.queue.remove(job.id)
            self._to(job, JobState.HELD)
            self._note(job, Reason(Why.HELD))
        elif job.state is JobState.SUSPENDED:
            self.queue.remove(job.id)
            job.held = True
            self._note(job, Reason(Why.USER_SUSPENDED))

    def _release_requested(self, event: ev.ReleaseRequested) -> None:
        job = self.jobs[event.job_id]
        if job.state is JobState.HELD:
            self._to(job, JobState.PENDING)
            self._enqueue(job)
        elif job.state is JobState.SUSPENDED:
            self._resume(job)

    def _suspend_requested(self, event: ev.SuspendRequested) -> None:
        job = self.jobs[event.job_id]
        if job.state is JobState.SUSPENDED:
            self.queue.remove(job.id)
            job.held = True
        elif job.state.active and job.wanted in ("", "suspend"):
            job.held = True
            if job.target:
                self._drop_target(job)
                self._decide_after = True
            if job.state is not JobState.SUSPENDING:
                # A program that is not ready yet is suspended when it is; one that never is, never.
                job.wanted = "suspend"
                if job.ready:
                    self._suspend(job)

    def _resume_requested(self, event: ev.ResumeRequested) -> None:
        job = self.jobs[event.job_id]
        if job.state is JobState.SUSPENDED:
            self._resume(job)
        elif job.state.active:
            job.held = False
            if job.wanted == "suspend" and job.state is not JobState.SUSPENDING:
                job.wanted = ""

    def _resume(self, job: Job) -> None:
        job.held = False
        self._enqueue(job)
        self._decide_after = True

    # --- what attempts tell -----------------------------------------------------------------

    def _running(self, event: ev.AttemptEvent) -> Job | None:
        """The job, if this is news of its attempt that has a lease; else the event is stale."""
        job = self.active.get(event.job_id)
        if job is None or job.attempt != event.attempt:
            self.stale += 1
            return None
        return job

    def _workers_spawned(self, event: ev.WorkersSpawned) -> None:
        job = self._running(event)
        if job:
            job.processes = event.processes
            if job.state is JobState.STARTING:
                self._to(job, JobState.RUNNING)

    def _workers_ready(self, event: ev.WorkersReady) -> None:
        job = self._running(event)
        if job is None or job.ready:
            return
        job.ready = True
        job.current.ready_s = self.now
        costs = self.costs.setdefault(job.spec.model, Costs())
        costs.start_s = self.now - job.current.start_s
        if job.wanted in ("suspend", "drain") and job.state is JobState.RUNNING:
            self._suspend(job)
        self._decide_after = True

    def _checkpoint_saved(self, event: ev.CheckpointSaved) -> None:
        job = self._running(event)
        if job:
            self._saved(job, event.step)

    def _saved(self, job: Job, step: int | None) -> None:
        if step is None:
            return
        if step > (job.saved_step or 0):
            job.failures = job.losses = 0
        job.saved_step = step
        job.step, job.reports = max(job.step, step), True

    def _workers_exited(self, event: ev.WorkersExited) -> None:
        job = self._running(event)
        if job is None:
            return
        if event.step is not None:
            job.step, job.reports = max(job.step, event.step), True
        if event.metrics:
            job.metrics = event.metrics
        before = job.saved_step or 0
        self._saved(job, event.saved_step)
        moved = (job.saved_step or 0) > before
        job.exit = event.code
        self._decide_after = True
        if event.code == 0:
            if job.spec.steps is not None and not job.reports:
                job.step = job.spec.steps
            self._end_attempt(job, Ended.COMPLETED)
            self._finish(job, JobState.COMPLETED, Reason(Why.COMPLETED))
        elif job.wanted == "cancel":
            self._end_attempt(job, Ended.CANCELLED)
            self._finish(job, JobState.CANCELLED, Reason(Why.CANCELLED))
        elif event.code == SAVED_AND_LEFT and (job.current.signalled_s is not None or moved):
            self._suspended(job)
        elif job.wanted or job.state is JobState.SUSPENDING:
            why = job.wanted if job.wanted.startswith("GPU") else f"exit code {event.code} while leaving"
            self._attempt_lost(job, job.saved_step, why, counts=not job.wanted)
        else:
            self._failed(job, event.code, event.detail)

    def _suspended(self, job: Job) -> None:
        signalled = job.current.signalled_s
        if signalled is not None:
            costs = self.costs.setdefault(job.spec.model, Costs())
            costs.suspend_s = self.now - signalled
            costs.longest_suspend_s = max(costs.longest_suspend_s, costs.suspend_s)
        job.suspensions += 1
        self._note(job, Reason(Why.SAVED, {"step": job.saved_step}))
        target = job.target
        self._end_attempt(job, Ended.SUSPENDED, keep=target)
        self._to(job, JobState.SUSPENDED)
        if target and not self.draining:
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

    def _back_to_waiting(self, job: Job) -> None:
        """Steps after the newest checkpoint are lost and will be done again."""
        job.repeated += max(0, job.step - (job.saved_step or 0))
        job.step = job.saved_step or 0
        self._to(job, JobState.PENDING if job.saved_step is None else JobState.SUSPENDED)
        if job.held and job.state is JobState.PENDING:
            job.held = False
            self._to(job, JobState.HELD)
        self._enqueue(job)

    def _launch_failed(self, event: ev.LaunchFailed) -> None:
        job = self._running(event)
        if job is None:
            return
        self._note(job, Reason(Why.LAUNCH_FAILED, {"error": event.error}))
        if job.wanted == "cancel":
            self._end_attempt(job, Ended.CANCELLED)
            self._finish(job, JobState.CANCELLED, Reason(Why.CANCELLED))
        elif event.transient and job.failures < job.spec.retries:
            job.failures += 1
            self._end_attempt(job, Ended.FAILED)
            self._back_to_waiting(job)
        else:
            self._end_attempt(job, Ended.FAILED)
            self._finish(job, JobState.FAILED, Reason(Why.LAUNCH_FAILED, {"error": event.error}))
        self._decide_after = True

    def _device_lost(self, event: ev.DeviceLost) -> None:
        device = self.devices.pop(event.gpu, None)
        if device is None:
            return
        self.lost_devices[event.gpu] = event.why
        self.free.discard(event.gpu)
        job = self.active.get(self.holder.get(event.gpu, -1))
        if job:
            self._note(job, Reason(Why.DEVICE_LOST, {"gpu": event.gpu, "why": event.why}))
            if job.target:
                self._drop_target(job)
            if not job.wanted:
                job.wanted = f"GPU {event.gpu} was lost"
                self._terminate(job)
        self._decide_after = True

    def _timer_fired(self, event: ev.TimerFired) -> None:
        kind, job_id, attempt = event.key
        job = self.jobs[job_id]
        if kind == "arrival":
            self._enqueue(job)
            self._decide_after = True
            return
        if not job.state.active or job.attempt != attempt:
            return
        if kind == "grace":
            self._note(job, Reason(Why.ESCALATED, {"grace": self._grace(job), "how": "SIGTERM"}))
            self._terminate(job)
        elif kind == "term":
            self._note(job, Reason(Why.ESCALATED, {"grace": self._grace(job) / 2, "how": "SIGKILL"}))
            self._do(Kill, job)

    # --- moves ------------------------------------------------------------------------------

    def _decide(self) -> None:
        if self.policy is None or not self.free:
            return
        view = View(
            now=self.now,
            total=len(self.devices),
            free=len(self.free),
            running=sorted(self.active.values(), key=lambda j: (j.submit_s, j.id)),
            waiting_count=len(self.queue),
            waiting=self._waiting,
            profile=self.profile,
            switch_s=self._switch_s,
            start_left_s=self._start_left_s,
        )
        for decision in self.policy.decide(view):
            job = decision.job
            if isinstance(decision, Remark):
                if not job.story or job.story[-1].reason.why is not decision.reason.why:
                    self._note(job, decision.reason)
                continue
            self._note(job, decision.reason)
            if isinstance(decision, Start):
                if job.id not in self.queue or decision.gpus > len(self.free):
                    raise self._invalid(job, f"cannot start on {decision.gpus} GPUs, {len(self.free)} free")
                self._launch(job, self._pick(decision.gpus), decision.role)
            else:
                self._resize(job, decision)

    def _resize(self, job: Job, decision: Resize) -> None:
        extra = decision.gpus - len(job.gpus)
        if job.state is not JobState.RUNNING or not job.ready or job.target or extra > len(self.free):
            raise self._invalid(job, f"cannot be resized to {decision.gpus} GPUs")
        gpus = job.gpus[: decision.gpus] if extra <= 0 else tuple(sorted(job.gpus + self._pick(extra)))
        job.target = Target(gpus, decision.role)
        self._lease(job, tuple(sorted({*job.gpus, *gpus})))
        self._suspend(job)

    def _waiting(self, free: Callable[[], int]) -> Iterator[Job]:
        return (self.jobs[job_id] for job_id in self.queue.walk(free))

    def _pick(self, count: int) -> tuple[int, ...]:
        return tuple(sorted(self.free)[:count])

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
        self.queue.remove(job.id)
        self._lease(job, gpus)
        job.attempt += 1
        job.role, job.target, job.ready, job.wanted = role, None, False, ""
        job.processes, job.rate = (), None
        if job.started_s is None:
            job.started_s = self.now
        attempt = Attempt(number=job.attempt, gpus=gpus, role=role, start_s=self.now, from_step=job.step)
        job.attempts.append(attempt)
        self._to(job, JobState.STARTING)
        self.active[job.id] = job
        self._do(Launch, job, gpus=gpus, role=role, resume=job.saved_step is not None)

    def _leave(self, job: Job, wanted: str) -> None:
        """Have a running job save and leave; one that cannot is ended after the grace period."""
        job.wanted = wanted
        if job.ready:
            self._suspend(job)
        else:
            self._timer("grace", job, self._grace(job))

    def _suspend(self, job: Job) -> None:
        self._to(job, JobState.SUSPENDING)
        job.current.signalled_s = self.now
        self._do(Suspend, job)
        self._timer("grace", job, self._grace(job))

    def _terminate(self, job: Job) -> None:
        self._do(Terminate, job)
        self._timer("term", job, self._grace(job) / 2)

    def _end_attempt(self, job: Job, ended: Ended, keep: Target | None = None) -> None:
        attempt = job.current
        attempt.end_s, attempt.ended, attempt.to_step = self.now, ended, job.step
        if keep and not all(gpu in self.devices for gpu in keep.gpus):
            keep = None
        job.target = keep
        self._lease(job, keep.gpus if keep else ())
        del self.active[job.id]

    def _drop_target(self, job: Job) -> None:
        """Give up the larger lease a job was being suspended for."""
        job.target = None
        self._lease(job, tuple(gpu for gpu in job.current.gpus if self.holder.get(gpu) == job.id))

    def _enqueue(self, job: Job) -> None:
        ready = job.state in (JobState.PENDING, JobState.SUSPENDED) and not job.held and not job.unmet
        if ready and self._arrival(job) <= self.now:
            self.queue.add(job.id, arrival=job.submit_s, need=job.spec.gpus_min)
            self.changed.add(job.id)

    def _finish(self, job: Job, state: JobState, reason: Reason) -> None:
        self.queue.remove(job.id)
        self._to(job, state)
        self.unfinished -= 1
        job.ended_s = self.now
        job.held, job.wanted = False, ""
        job.reason = None if state is JobState.COMPLETED else reason
        self._note(job, reason)
        for other_id in self.dependents.pop(job.id, ()):
            other = self.jobs[other_id]
            if other.state.final:
                continue
            if state is JobState.COMPLETED:
                other.unmet -= 1
                if not other.unmet:
                    self._enqueue(other)
            else:
                self._never_satisfied(other, job.spec.name)

    def _never_satisfied(self, job: Job, name: str) -> None:
        self._finish(job, JobState.CANCELLED, Reason(Why.DEPENDENCY_NEVER_SATISFIED, {"after": name}))

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
        if self._stories:
            job.note(self.now, reason)

    def _do(self, action: type[Action], job: Job, **rest: Any) -> None:
        about: dict[str, Any] = {"job_id": job.id, "attempt": job.attempt}
        self._actions.append(action(at=self.now, cause=self._cause, **about, **rest))

    def _timer(self, kind: str, job: Job, delay_s: float) -> None:
        key, due = (kind, job.id, job.attempt), self.now + delay_s
        self._actions.append(SetTimer(at=self.now, cause=self._cause, key=key, due=due))

    def _wake_at_arrival(self, job: Job) -> None:
        self._timer("arrival", job, self._arrival(job) - self.now)

    @staticmethod
    def _arrival(job: Job) -> float:
        return job.submit_s

    def _completed(self, name: str) -> bool:
        return self.jobs[self.by_name[name]].state is JobState.COMPLETED

    def _grace(self, job: Job) -> float:
        """Seconds a worker has to save: thrice the longest save known of its model, at least `grace_s`."""
        profile, costs = self.profile(job), self.costs.get(job.spec.model)
        known = (profile and cost_at(profile.suspend_s, len(job.gpus))) or 0.0
        return max(self.grace_s, 3 * known, 3 * costs.longest_suspend_s if costs else 0.0)

    def _switch_s(self, job: Job, gpus: int) -> float:
        """Seconds to suspend `job` where it runs and resume it on `gpus` GPUs: profile, else seen here."""
        profile, costs = self.profile(job), self.costs.get(job.spec.model, Costs())
        suspend = cost_at(profile.suspend_s, len(job.gpus)) if profile else None
        resume = profile.launch_s(gpus, first=False) if profile else None
        if suspend is None:
            suspend = DEFAULT_SUSPEND_S if costs.suspend_s is None else costs.suspend_s
        if resume is None:
            resume = DEFAULT_START_S if costs.start_s is None else costs.start_s
        return suspend + resume

    def _start_left_s(self, job: Job) -> float:
        """Seconds until the job's attempt has paid its start or resume cost."""
        profile = self.profile(job)
        if profile is None:
            return 0.0
        cost = profile.launch_s(len(job.gpus), first=job.attempt == 1) or 0.0
        return max(0.0, job.current.start_s + cost - self.now)


_NEVER = (JobState.FAILED, JobState.CANCELLED)
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
