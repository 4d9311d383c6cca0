"""The state of a run and the only way it changes: `handle(event)` gives the actions to perform.

Pure: no clock, no file, no random source. The live agent, the simulator and a replay of the journal
drive the same machine, so what `simulate` shows is what `run` does.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop
from math import inf
from typing import Any

from hpcsched.contract.exits import SUSPENDED
from hpcsched.core import events as ev
from hpcsched.core.actions import Action, Kill
from hpcsched.core.jobs import Job
from hpcsched.core.model import Ended, JobState
from hpcsched.core.reasons import Reason, Why
from hpcsched.core.run import Life
from hpcsched.core.transitions.attempts import DRAIN, HURRY, LANES, LOOK, PACKS
from hpcsched.core.transitions.commands import Obeying
from hpcsched.core.transitions.decisions import PolicyMaker
from hpcsched.core.transitions.rerun import blocked_by

"""Exit code of a program that saved and left (EX_TEMPFAIL)."""

VOID = "void"
"""What is wanted of a job whose news could not be handled: that it ends."""


def _lost(gpu: int) -> str:
    return f"GPU {gpu} was lost"


class Machine(Obeying):
    """Handles events: changes the run's state and gives the actions to perform.

    Args:
        make_policy: gives the policy of a name and its options; called at each agent start.
        stories: keep each job's story for `explain`; off saves memory in large simulations.
    """

    def __init__(self, make_policy: PolicyMaker, *, stories: bool = True) -> None:
        super().__init__(stories=stories)
        self._make_policy = make_policy
        self._handlers: dict[type[ev.Event], Callable[[Any], None]] = {
            ev.AgentStarted: self._agent_started,
            ev.DeadlineMoved: self._deadline_moved,
            ev.ProfilesLoaded: self._profiles_loaded,
            ev.PlanMade: self._plan_made,
            ev.JobsSubmitted: self._jobs_submitted,
            ev.DefinitionsCompared: self._definitions_compared,
            ev.RetryRequested: self._retry_requested,
            ev.ProgressObserved: self._progress_observed,
            ev.CancelRequested: self._cancel_requested,
            ev.HoldRequested: self._hold_requested,
            ev.ReleaseRequested: self._resume_or_release,
            ev.SuspendRequested: self._suspend_requested,
            ev.ResumeRequested: self._resume_or_release,
            ev.DrainRequested: self._drain_requested,
            ev.WorkersSpawned: self._workers_spawned,
            ev.WorkersReady: self._workers_ready,
            ev.WorkersApart: self._workers_apart,
            ev.CheckpointSaved: self._checkpoint_saved,
            ev.WorkersResized: self._workers_resized,
            ev.ResizeFailed: self._resize_failed,
            ev.ScalingProposed: self._scaling_proposed,
            ev.UsageMeasured: self._usage_measured,
            ev.CoresLost: self._cores_lost,
            ev.WorkersExited: self._workers_exited,
            ev.LaunchFailed: self._launch_failed,
            ev.DeviceLost: self._device_lost,
            ev.TimerFired: self._timer_fired,
            ev.EventVoided: self._event_voided,
        }

    def become(self, other: Machine) -> None:
        """Take over the state of another machine: who holds this one goes on with that."""
        for name, value in vars(other).items():
            if name != "_handlers":
                setattr(self, name, value)
        self.changed.update(self.jobs)

    # --- the one way in ---------------------------------------------------------------------

    def handle(self, event: ev.Event) -> list[Action]:
        """Take an event in; returns what is to be done about it, in order.

        Raises InvalidTransition when a policy asks for what cannot be.
        """
        self.now = max(self.now, event.at)
        self._actions = []
        self._cause = type(event).__name__
        self._decide_after = self._woken = False
        arrived = self._let_arrive()
        self._handlers[type(event)](event)
        self._decide_after |= arrived
        if self._in_background(event):
            self._decide_after = arrived or self._woken  # else nothing has changed for the foreground
        elif self.late and not self.draining and self._look_again_at_late_ones():
            self._decide_after = True
        if self._decide_after and not self.draining:
            self._decide()
            self._fill_packs()
            self._reshape()
            self._allot()
        if not self.draining:
            self._fill_lanes()
        self._watch_the_end()
        return self._actions

    def _in_background(self, event: ev.Event) -> bool:
        """Whether an event is about jobs for background lanes alone."""
        if isinstance(event, ev.JobsSubmitted):
            return bool(event.jobs) and all(spec.background for spec in event.jobs)
        if isinstance(event, ev.TimerFired):
            return event.key == LANES or (event.key[1] in self.jobs and self._is_background(event.key[1]))
        return isinstance(event, ev.JobEvent) and self._is_background(event.job_id)

    def _is_background(self, job_id: int) -> bool:
        return self.jobs[job_id].spec.background

    # --- the run ----------------------------------------------------------------------------

    def _let_arrive(self) -> bool:
        """Whoever's time has come may start, whichever event it is that shows it: whether one comes to the
        foreground."""
        arrived = False
        while self.arrivals and self.arrivals[0][0] <= self.now:
            job = self.jobs[heappop(self.arrivals)[1]]
            self._enqueue(job)
            arrived |= not job.spec.background
        return arrived

    def _agent_started(self, event: ev.AgentStarted) -> None:
        self.lives.append(Life(event.at, event.wall, len(event.devices)))
        self.policy = self._make_policy(event.policy, event.policy_options)
        self.policy_options = event.policy_options
        self.grace_s, self.run_id = event.grace_s, event.run_id or self.run_id
        self._load(event.profiles, event.parallel)
        self.plan, self._plan_asked = None, False
        self.draining, self.drain_cause = False, ""
        self.deadline, self.reserve_s = event.deadline, event.reserve_s
        self._drain_due = self._lanes_due = self._packs_due = -inf
        self.packs.idle_s, self.packs.parted = None, set()
        for job in list(self.active.values()):
            if (seen := event.seen_steps.get(job.id, 0)) > job.step:
                job.step, job.reports = seen, True
            self._attempt_lost(job, event.saved_steps.get(job.id), "the agent was gone", counts=False)
        for job_id, step in event.saved_steps.items():
            self._never_on_disk(self.jobs[job_id], step)
        self._compared(event.updated, event.kept, event.again)
        devices = {d.index: d for d in event.devices}
        self.cores.hosts, self.cores.loans = {cores.host: cores for cores in event.cores}, {}
        self._have(devices, free=devices)
        self.lost_devices = {}
        self.holder = {}
        self._room_may_be_back()
        for at, job_id in sorted(self.arrivals):
            self._wake_at_arrival(self.jobs[job_id], at)
        self._let_late_ones_in()
        self._decide_after = True

    def _event_voided(self, event: ev.EventVoided) -> None:
        job = self.jobs.get(event.job_id) if event.job_id is not None else None
        if job is None:
            return
        facts = {"event": event.kind, "record": event.record, "error": event.error}
        self._note(job, Reason(Why.VOIDED, facts))
        if job.id not in self.active or job.attempt != event.attempt:
            return
        if event.ended:
            self._attempt_lost(job, None, f"its end ({event.kind}) could not be handled", counts=True)
            self._decide_after = True
        elif job.wanted in ("", "suspend"):
            job.wanted = VOID
            self._terminate(job)

    def _profiles_loaded(self, event: ev.ProfilesLoaded) -> None:
        self._load(event.profiles, event.parallel)
        self.news += 1
        self._decide_after = True

    def _plan_made(self, event: ev.PlanMade) -> None:
        self.plan, self._plan_asked = event.plan, False
        self._decide_after = True

    def _jobs_submitted(self, event: ev.JobsSubmitted) -> None:
        ids = range(event.first_id, event.first_id + len(event.jobs))
        for job_id, spec in zip(ids, event.jobs, strict=True):
            job = Job(id=job_id, spec=spec, submit_s=max(event.at, spec.submit_at))
            self.jobs[job_id], self.by_name[spec.name] = job, job_id
            self.unfinished += 1
            self._list_needs(spec)
            self._note(job, Reason(Why.SUBMITTED))
        # A job may wait for one that comes later in the same file.
        jobs = [self.jobs[job_id] for job_id in ids]
        self._size_up(jobs)
        for job in jobs:
            self._wait_for_others(job)
        for job in jobs:
            if job.submit_s > self.now:
                self._expect(job, job.submit_s)
            else:
                self._enqueue(job)
        for job in jobs:
            if not job.state.final and (broken := blocked_by(self, job, {})):
                self._never_satisfied(job, broken)
        self._decide_after = True

    def _progress_observed(self, event: ev.ProgressObserved) -> None:
        for seen in event.progress:
            job = self.active.get(seen.job_id)
            if job is None or job.attempt != seen.attempt:
                continue
            if seen.step != job.step:
                self.changed.add(job.id)
            job.step, job.reports = max(job.step, seen.step), True
            if seen.rate is not None and seen.rate > 0:
                job.rate = seen.rate
            if seen.done_s is not None and not job.spec.background:
                self.lanes.hear(job, seen.step, seen.done_s)
            steady = job.state is JobState.RUNNING and not job.wanted and not job.resizing
            if seen.done_s is not None and steady:
                self._decide_after |= self._learn(job, seen.step, seen.done_s)

    # --- what attempts tell -----------------------------------------------------------------

    def _workers_spawned(self, event: ev.WorkersSpawned) -> None:
        job = self._running(event)
        if job:
            job.processes, self.spawned_on[job.id] = event.processes, event.host
            if job.state is JobState.STARTING:
                self._to(job, JobState.RUNNING)

    def _workers_ready(self, event: ev.WorkersReady) -> None:
        job = self._running(event)
        if job is None or job.ready:
            return
        # Ranks that come and go are numbered by GPU: a process that sees several is none of them. ("one" is
        # in journals of 0.1.0, which did not mind.)
        numbered = job.traits.per_gpu or len(job.current.gpus) == 1 or job.spec.processes == "one"
        job.ready, job.in_place = True, event.in_place and numbered
        if event.in_place or event.parallel:
            self._is_parallel(job)
        job.current.ready_s, job.current.launch_s = self.now, event.took_s
        self._disturb(job, job.current.gpus)
        costs = self._costs(job)
        self.no_space.pop(job.id, None)
        costs.start_s = self.now - job.current.start_s
        costs.starts.add(event.took_s)
        if job.wanted == "suspend" and job.state is not JobState.SUSPENDING:
            self._suspend(job)
        self._decide_after = True

    def _workers_apart(self, event: ev.WorkersApart) -> None:
        job = self._running(event)
        if job is None:
            return
        self.changed.add(job.id)
        if event.met:
            job.reason = None
            return
        job.reason = Reason(Why.NOT_MET, {"processes": event.processes, "seconds": event.seconds})
        self._note(job, job.reason)

    def _checkpoint_saved(self, event: ev.CheckpointSaved) -> None:
        job = self._running(event)
        if job is None:
            return
        if event.step < job.current.from_step:
            self._fell_back(job, event.step)
        self._saved(job, event.step)

    def _workers_resized(self, event: ev.WorkersResized) -> None:
        job = self._running(event)
        if job is None or job.becoming is None:
            self.stale += job is not None
            return
        step = max(event.step, job.current.from_step)
        job.step, job.reports = max(job.step, step), True
        told_to_end = "term" in job.timers
        self._learn_resize(job, job.becoming, event.stopped_s, event.built_s)
        self._resized(job, job.becoming, step, event.stopped_s)
        self._decide_after = True
        if job.state is JobState.RUNNING and not job.wanted:
            job.target = None
            return
        # It was done when something else was asked of the attempt that is over by it: ask this one too.
        gone = [gpu for gpu in job.current.gpus if gpu not in self.devices]
        if gone and job.wanted in ("", "suspend"):
            job.wanted = _lost(gone[0])
        if job.state is JobState.SUSPENDING:
            self._ask_to_save(job)
        if told_to_end:
            self._terminate(job)

    def _resize_failed(self, event: ev.ResizeFailed) -> None:
        job = self._running(event)
        if job is None or not job.resizing:
            self.stale += job is not None
            return
        gpus = len(job.becoming.gpus) // job.spec.nodes if job.becoming else 0
        if event.refused and gpus > job.width:
            job.has(most_gpus=max(job.width, gpus - 1))
            job.target = None
        elif job.spec.cpus is not None:
            job.target = None  # it does well as it is: what else to try is for the policy to say
        self._stays(job, event.error, in_place=event.refused or job.spec.cpus is not None)
        self._decide_after = True
        if job.state is JobState.RUNNING and job.target:
            self._suspend(job)

    def _workers_exited(self, event: ev.WorkersExited) -> None:
        job = self._running(event)
        if job is None:
            return
        if event.step is not None:
            job.step, job.reports = max(job.step, event.step), True
        if event.metrics:
            job.metrics = event.metrics
        self._saved(job, event.saved_step)
        # Its last checkpoint may have been told before its exit: what counts is the whole attempt.
        moved = (job.saved_step or 0) > job.current.from_step
        job.exit = event.code
        self._decide_after = True
        # After our SIGTERM exit code 0 proves nothing: the program's handler may just call exit(0).
        asked_to_save = job.current.signalled_s is not None
        if event.unreadable:
            self._note(job, Reason(Why.BAD_RECORD, {"error": event.unreadable}))
        told_to_end = job.wanted == "cancel" or (job.wanted not in ("", "suspend") and not asked_to_save)
        if event.code == 0 and (not told_to_end or job.remaining == 0):
            if job.spec.steps is not None and not job.reports:
                job.step = job.spec.steps
            self._end_attempt(job, Ended.COMPLETED)
            self._finish(job, JobState.COMPLETED, Reason(Why.COMPLETED))
        elif job.wanted == "cancel":
            self._end_attempt(job, Ended.CANCELLED)
            self._finish(job, JobState.CANCELLED, Reason(Why.CANCELLED))
        elif event.no_room and event.code != 0:
            self._no_room(job, event.saved_step, event.no_room)
        elif event.code == SUSPENDED and event.unreadable:
            self._failed(
                job, event.code, f"its STATE.json cannot be read: {event.unreadable}", event.lasted_s
            )
        elif event.code == SUSPENDED and (asked_to_save or moved or job.target):
            if not (asked_to_save or job.wanted or job.target):
                self._leaves_pack(job)
            self._suspended(job, event.took_s, held=event.held)
        elif event.code == SUSPENDED and not told_to_end and self._leaves_pack(job):
            self._attempt_lost(job, None, "its pack had no room for it", counts=False)
        elif job.wanted or job.state is JobState.SUSPENDING:
            why = (
                job.wanted
                if job.wanted.startswith(("GPU", "the cores"))
                else f"exit code {event.code} while leaving"
            )
            self._attempt_lost(job, job.saved_step, why, counts=job.wanted in ("", VOID))
        else:
            self._failed(job, event.code, event.detail, event.lasted_s)

    def _launch_failed(self, event: ev.LaunchFailed) -> None:
        job = self._running(event)
        if job is None:
            return
        self._note(job, Reason(Why.LAUNCH_FAILED, {"error": event.error}))
        self._decide_after = True
        if event.no_room and job.wanted != "cancel":
            self._no_room(job, None, event.no_room)
        elif job.wanted not in ("", "suspend") or event.host_fault:
            self._attempt_lost(job, None, job.wanted or event.error, counts=not job.wanted)
        elif event.transient and job.failures < job.spec.retries:
            job.failures += 1
            self._end_attempt(job, Ended.FAILED)
            self._back_to_waiting(job)
        else:
            self._end_attempt(job, Ended.FAILED)
            self._finish(job, JobState.FAILED, Reason(Why.LAUNCH_FAILED, {"error": event.error}))

    def _device_lost(self, event: ev.DeviceLost) -> None:
        if event.gpu not in self.devices:
            return
        left = {index: device for index, device in self.devices.items() if index != event.gpu}
        self._have(left, self.free - {event.gpu})
        self.lost_devices[event.gpu] = event.why
        self.news += 1
        self._decide_after = True
        held = [lane.get(event.gpu, -1) for lane in (self.holder, self.lanes.holder)]
        for job_id in (*held, *self.packs.on((event.gpu,))):
            if job := self.active.get(job_id):
                self._lost_under(job, event)
        if loan := self.cores.loans.pop(event.gpu, None):
            self._cores_gone(*loan, event.why)

    def _lost_under(self, job: Job, event: ev.DeviceLost) -> None:
        """A job has lost a GPU that it holds."""
        self._note(job, Reason(Why.DEVICE_LOST, {"gpu": event.gpu, "why": event.why}))
        if job.target:
            self._drop_target(job)
        if event.gpu in job.current.gpus and job.wanted in ("", "suspend"):
            # One that is saving may still manage to; its grace timer is set.
            job.wanted = _lost(event.gpu)
            if job.state is not JobState.SUSPENDING:
                self._terminate(job)
        elif job.resizing and job.state is JobState.RUNNING and not job.wanted:
            self._suspend(job)  # the ranks it has are well, and must not be joined by one that is not

    def _timer_fired(self, event: ev.TimerFired) -> None:
        if event.key == DRAIN:
            if not self.draining and self.deadline is not None and event.at >= self._drain_due:
                self._drain("deadline")
            return
        if event.key == HURRY:
            self._hurry(event.at)
            return
        if event.key in (LOOK, LANES, PACKS):
            self._decide_after = True
            return
        kind, job_id, attempt = event.key
        job = self.active.get(job_id)
        if job is None or job.attempt != attempt or event.at < job.timers.get(kind, event.at):
            return
        if kind == "grace":
            self._note(job, Reason(Why.ESCALATED, {"grace": self._grace(job), "how": "SIGTERM"}))
            self._terminate(job)
        elif kind == "term":
            self._note(job, Reason(Why.ESCALATED, {"grace": self._grace(job) / 2, "how": "SIGKILL"}))
            self._do(Kill, job)
        elif kind == "resize" and job.state is JobState.RUNNING and not job.wanted and job.becoming:
            limit_s = self.now - job.becoming.since
            self._note(job, Reason(Why.RESIZE_FAILED, {"error": f"not done within {limit_s:.0f} s"}))
            self.news += 1
            self._suspend(job)
