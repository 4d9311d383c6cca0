"""What attempts tell: that they run, are ready, have saved, changed, failed or ended."""

from __future__ import annotations

from hpcsched.contract.exits import SUSPENDED
from hpcsched.core import events as ev
from hpcsched.core.exits import said_exit
from hpcsched.core.jobs import Job
from hpcsched.core.mechanisms.base import Handlers
from hpcsched.core.model import SIGNALS, Ended, JobState
from hpcsched.core.reasons import Reason, Why
from hpcsched.core.resources.ledger import Ledger
from hpcsched.core.run import Run
from hpcsched.core.transitions.attempts import TIME, Attempts
from hpcsched.core.transitions.endings import Endings
from hpcsched.core.transitions.estimates import Estimates
from hpcsched.core.transitions.losses import LOST, VOID, lost_gpu
from hpcsched.core.transitions.outcome import Outcome
from hpcsched.core.transitions.waiting import Waiting


class Reports:
    """Takes in what is told of attempts; what is told of one that is over counts as stale."""

    def __init__(
        self,
        run: Run,
        out: Outcome,
        ledger: Ledger,
        *,
        estimates: Estimates,
        waiting: Waiting,
        attempts: Attempts,
        endings: Endings,
    ) -> None:
        self._run, self._out, self._ledger, self._estimates = run, out, ledger, estimates
        self._waiting, self._attempts, self._endings = waiting, attempts, endings

    def handlers(self) -> Handlers:
        """The events that it handles."""
        return {
            ev.ProgressObserved: self._progress_observed,
            ev.WorkersSpawned: self._workers_spawned,
            ev.WorkersReady: self._workers_ready,
            ev.RestartSeen: self._restart_seen,
            ev.SavingSeen: self._saving_seen,
            ev.WorkersApart: self._workers_apart,
            ev.CheckpointSaved: self._checkpoint_saved,
            ev.WorkersResized: self._workers_resized,
            ev.ResizeFailed: self._resize_failed,
            ev.WorkersExited: self._workers_exited,
            ev.LaunchFailed: self._launch_failed,
        }

    def _progress_observed(self, event: ev.ProgressObserved) -> None:
        for seen in event.progress:
            job = self._run.active.get(seen.job_id)
            if job is None or job.attempt != seen.attempt:
                continue
            if seen.step != job.step:
                self._run.touch(job.id)
            self._endings.went_back(job, seen.again, seen.step)
            job.step, job.reports = max(job.step, seen.step), True
            if job.saves_by_itself:
                job.was_seen(seen.step, event.at if seen.done_s is None else seen.done_s)
            if seen.rate is not None and seen.rate > 0:
                job.rate = seen.rate
            if seen.total is not None and seen.total != job.traits.told_steps:
                job.has(told_steps=seen.total)
            if seen.done_s is None:
                continue
            for heard in self._ledger.hooks("heard"):
                heard(job, seen.step, seen.done_s)
            if job.state is JobState.RUNNING and not job.wanted and not job.resizing:
                self._out.ask_policy(self._estimates.learn(job, seen.step, seen.done_s))

    def _workers_spawned(self, event: ev.WorkersSpawned) -> None:
        job = self._run.about(event)
        if job:
            job.processes = event.processes
            self._run.spawned(job, event.host)
            if job.state is JobState.STARTING:
                self._out.set_state(job, JobState.RUNNING)

    def _workers_ready(self, event: ev.WorkersReady) -> None:
        job = self._run.about(event)
        if job is None or (job.ready and not job.saves_by_itself):
            return
        first = not job.ready
        if job.saves_by_itself:
            job.has_saved(by_contract=True)
        # Ranks that come and go are numbered by GPU: a process that sees several is none of them. ("one" is
        # in journals of 0.1.0, which did not mind.)
        numbered = job.traits.per_gpu or len(job.current.gpus) == 1 or job.spec.processes == "one"
        job.ready, job.in_place = True, event.in_place and numbered
        if event.in_place or event.parallel:
            self._estimates.is_parallel(job)
        if first:
            self._is_ready(job, event.took_s)
        self._out.ask_policy()

    def _is_ready(self, job: Job, took_s: float | None) -> None:
        """A job can be suspended from now on."""
        job.current.ready_s, job.current.launch_s = self._run.now, took_s
        self._estimates.disturb(job, job.current.gpus)
        self._waiting.has_room(job)
        self._estimates.learn_start(job, took_s)
        if job.wanted == "suspend" and job.state is not JobState.SUSPENDING:
            self._attempts.suspend(job)

    def _restart_seen(self, event: ev.RestartSeen) -> None:
        job = self._run.about(event)
        if job is None or not job.saves_by_itself:
            return
        before = job.traits.saves
        if event.step is not None or event.saved_at is not None:
            if event.step is not None and event.step < job.current.from_step:
                self._endings.fell_back(job, event.step)
            # Of a program that does not tell the step of what it has saved, all that was heard of counts.
            step, reports = job.step if event.step is None else event.step, job.reports
            newer_s = event.at if step > (job.saved_step or 0) and step > job.current.from_step else before.at
            self._endings.saved(job, step)
            if event.step is None and (event.saved_at or 0.0) > (before.at or 0.0) and self._run.rules >= 3:
                self._endings.has_progressed(job)
            job.reports = reports or event.step is not None
            job.has_saved(at=newer_s if event.saved_at is None else event.saved_at)
            if event.saved_at is not None:
                seen = job.step if event.step is None and reports else event.step
                job.was_seen(seen, event.saved_at, saved=not (before.handles or event.handles))
        job.has_saved(handles=event.handles)
        self._run.touch(job.id)
        if not job.ready:
            job.ready = True
            self._is_ready(job, None)
            self._out.ask_policy()
        # What a suspend costs it may have become little.
        self._out.ask_policy(job.traits.saves != before)

    def _saving_seen(self, event: ev.SavingSeen) -> None:
        job = self._run.about(event)
        if job is not None and job.timers:
            self._attempts.still_saves(job)

    def _workers_apart(self, event: ev.WorkersApart) -> None:
        job = self._run.about(event)
        if job is None:
            return
        self._run.touch(job.id)
        if event.met:
            job.reason = None
            return
        job.reason = Reason(Why.NOT_MET, {"processes": event.processes, "seconds": event.seconds})
        self._out.note(job, job.reason)

    def _checkpoint_saved(self, event: ev.CheckpointSaved) -> None:
        job = self._run.about(event)
        if job is None:
            return
        # Nobody knows the steps of its checkpoints.
        nameless = job.saves_by_itself and not job.reports and self._run.rules >= 3
        if event.step < job.current.from_step or nameless:
            self._endings.fell_back(job, event.step)
        self._endings.saved(job, event.step)
        job.reports = job.reports and not nameless

    def _workers_resized(self, event: ev.WorkersResized) -> None:
        job = self._run.about(event)
        if job is None or job.becoming is None:
            if job is not None:
                self._run.count_stale()
            return
        step = max(event.step, job.current.from_step)
        job.step, job.reports = max(job.step, step), True
        told_to_end = "term" in job.timers
        self._estimates.learn_resize(job, job.becoming, event.stopped_s, event.built_s)
        self._attempts.resized(job, job.becoming, step, event.stopped_s)
        self._out.ask_policy()
        if job.state is JobState.RUNNING and not job.wanted:
            job.target = None
            return
        # It was done when something else was asked of the attempt that is over by it: ask this one too.
        gone = [gpu for gpu in job.current.gpus if gpu not in self._ledger.devices]
        if gone and job.wanted in ("", "suspend"):
            job.wanted = lost_gpu(gone[0])
        if job.state is JobState.SUSPENDING:
            self._attempts.ask_to_save(job)
        if told_to_end:
            self._attempts.terminate(job)

    def _resize_failed(self, event: ev.ResizeFailed) -> None:
        job = self._run.about(event)
        if job is None or not job.resizing:
            if job is not None:
                self._run.count_stale()
            return
        gpus = len(job.becoming.gpus) // job.spec.nodes if job.becoming else 0
        settles = self._ledger.holds_by(job).settles
        if event.refused and gpus > job.width:
            job.has(most_gpus=max(job.width, gpus - 1))
            job.target = None
        elif settles:
            job.target = None  # it does well as it is: what else to try is for the policy to say
        self._attempts.stays(job, event.error, in_place=event.refused or settles)
        self._out.ask_policy()
        if job.state is JobState.RUNNING and job.target:
            self._attempts.suspend(job)

    # --- ends -------------------------------------------------------------------------------

    def _workers_exited(self, event: ev.WorkersExited) -> None:
        job = self._run.about(event)
        if job is None:
            return
        if event.step is not None:
            self._endings.went_back(job, event.again, event.step)
            job.step, job.reports = max(job.step, event.step), True
        if event.metrics:
            job.metrics = event.metrics
        self._endings.saved(job, event.saved_step)
        # Its last checkpoint may have been told before its exit: what counts is the whole attempt.
        moved = (job.saved_step or 0) > job.current.from_step
        told_saved = job.spec.restart is not None and event.code in job.spec.restart.saved_codes
        saved_code = SUSPENDED if told_saved else event.code
        job.exit = event.code
        self._out.ask_policy()
        # After our SIGTERM exit code 0 proves nothing: the program's handler may just call exit(0).
        asked_to_save = job.current.signalled_s is not None
        if event.unreadable:
            self._out.note(job, Reason(Why.BAD_RECORD, {"error": event.unreadable}))
        told_to_end = job.wanted == "cancel" or (job.wanted not in ("", "suspend") and not asked_to_save)
        # One that saves by itself is not known to be done when it leaves as it was asked to.
        # What a program tells of its whole work may be that of a part of it: the job file's word counts.
        done = job.spec.steps is not None and job.remaining == 0
        leaves = job.saves_by_itself and asked_to_save and not event.unasked and not done
        if event.code == 0 and not leaves and (event.unasked or not told_to_end or done):
            if job.spec.steps is not None and not job.reports:
                job.step = job.spec.steps
            self._endings.completed(job)
        elif job.wanted == "cancel":
            self._endings.cancelled(job)
        elif event.oom and event.code != SUSPENDED:
            self._endings.out_of_memory(job, event.oom, over_limit=event.over_limit)
        elif job.wanted == TIME:
            saved = event.code == SUSPENDED and not event.unreadable
            saved = saved or (leaves and _saved_and_left(job, event.code))
            self._endings.timed_out(job, Ended.SUSPENDED if saved else Ended.CANCELLED)
        elif event.no_room and event.code != 0:
            self._endings.no_room(job, event.saved_step, event.no_room)
        elif leaves and (_saved_and_left(job, event.code) or not job.wanted.startswith(LOST)):
            self._endings.left(job, event.code, event.took_s, not_taken=event.not_taken)
        elif event.code == SUSPENDED and event.unreadable:
            why = f"its STATE.json cannot be read: {event.unreadable}"
            self._endings.failed(job, event.code, why, event.lasted_s)
        elif saved_code == SUSPENDED and (asked_to_save or moved or job.target):
            if not (asked_to_save or job.wanted or job.target):
                self._left_unasked(job)
            self._endings.suspended(job, event.took_s, held=event.held)
        elif event.code == SUSPENDED and not told_to_end and (why := self._left_unasked(job)):
            self._endings.lost(job, None, why, counts=False)
        elif job.wanted or job.state is JobState.SUSPENDING:
            because = job.wanted.startswith(LOST)
            why = job.wanted if because else f"{said_exit(event.code)} while leaving"
            self._endings.lost(job, job.saved_step, why, counts=job.wanted in ("", VOID))
        else:
            detail = "; ".join(filter(None, (event.detail, event.not_taken)))
            self._endings.failed(job, event.code, detail, event.lasted_s)

    def _left_unasked(self, job: Job) -> str:
        """Why a job has saved and left unasked, as far as a mechanism can say; else ""."""
        return next((why for left in self._ledger.hooks("left_unasked") if (why := left(job))), "")

    def _launch_failed(self, event: ev.LaunchFailed) -> None:
        job = self._run.about(event)
        if job is None:
            return
        self._out.note(job, Reason(Why.LAUNCH_FAILED, {"error": event.error}))
        self._out.ask_policy()
        if event.no_room and job.wanted != "cancel":
            self._endings.no_room(job, None, event.no_room)
        elif job.wanted == TIME:
            self._endings.timed_out(job, Ended.CANCELLED)
        elif job.wanted not in ("", "suspend") or event.host_fault:
            self._endings.lost(job, None, job.wanted or event.error, counts=not job.wanted)
        else:
            again = event.transient and job.failures < job.spec.retries
            self._endings.launch_failed(job, event.error, again=again)


def _saved_and_left(job: Job, code: int) -> bool:
    """Whether such an exit code of a job that saves by itself, and was asked to, means that it has."""
    restart = job.spec.restart
    assert restart is not None
    by_signal = {128 + SIGNALS[name] for name in (restart.signal or "SIGTERM", "SIGTERM")}
    return code in (0, SUSPENDED, *by_signal, *restart.saved_codes)
