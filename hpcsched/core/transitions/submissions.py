"""Jobs that come into the run, are defined anew, or run once more."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from hpcsched.core import events as ev
from hpcsched.core.definitions import differing
from hpcsched.core.jobs import Job, Saves
from hpcsched.core.mechanisms.base import Handlers
from hpcsched.core.model import NOTHING, JobSpec, JobState
from hpcsched.core.reasons import Reason, Why
from hpcsched.core.resources.ledger import Ledger
from hpcsched.core.run import Run
from hpcsched.core.transitions.endings import Endings
from hpcsched.core.transitions.estimates import Estimates
from hpcsched.core.transitions.outcome import Outcome
from hpcsched.core.transitions.rerun import blocked_by, coming_back, from_its_beginning
from hpcsched.core.transitions.waiting import Waiting


class Submissions:
    """Takes jobs in, and those that have ended once more."""

    def __init__(
        self,
        run: Run,
        out: Outcome,
        ledger: Ledger,
        *,
        estimates: Estimates,
        waiting: Waiting,
        endings: Endings,
    ) -> None:
        self._run, self._out, self._ledger = run, out, ledger
        self._estimates, self._waiting, self._endings = estimates, waiting, endings

    def handlers(self) -> Handlers:
        """The events that it handles."""
        return {
            ev.JobsSubmitted: self._submitted,
            ev.DefinitionsCompared: self.compared,
            ev.RetryRequested: self._retry_requested,
        }

    def _submitted(self, event: ev.JobsSubmitted) -> None:
        jobs = [
            Job(id=event.first_id + i, spec=spec, submit_s=max(event.at, spec.submit_at))
            for i, spec in enumerate(event.jobs)
        ]
        for job in jobs:
            self._run.add(job)
            self._ledger.use(job.spec)
            self._out.note(job, Reason(Why.SUBMITTED))
        # A job may wait for one that comes later in the same file.
        self._estimates.size_up(jobs)
        for job in jobs:
            self._waiting.wait_for_others(job)
        for job in jobs:
            if job.submit_s > self._run.now:
                self._waiting.expect(job, job.submit_s)
            else:
                self._waiting.enqueue(job)
        for job in jobs:
            if job.id in event.cancelled and not job.state.final:
                self._endings.finish(job, JobState.CANCELLED, Reason(Why.CANCELLED))
        for job in jobs:
            if not job.state.final and (broken := blocked_by(self._run, job, {})):
                self._endings.never_satisfied(job, broken)
        self._out.ask_policy()

    # --- other definitions --------------------------------------------------------------------

    def compared(self, event: ev.DefinitionsCompared | ev.AgentStarted) -> None:
        """A job file was compared with the run: these definitions are its own from now on, those are not."""
        for job_id, keys in event.kept.items():
            self._run.keep(job_id, keys)
        for job_id, spec in event.updated.items():
            self._define(self._run.jobs[job_id], spec)
        self._run_again(event.again, from_scratch=False)

    def _define(self, job: Job, spec: JobSpec) -> None:
        """Give a job that does not run another definition."""
        keys = differing(job.spec, spec)
        self._waiting.wait_no_more(job)
        if not job.state.final and (not job.attempt or _array(job.spec) != _array(spec)):
            self._waiting.leave_array(job)
        job.spec = spec
        job.has(most_gpus=None)
        self._estimates.size_up([job])
        self._ledger.use(spec)
        self._run.agrees(job)
        self._out.note(job, Reason(Why.UPDATED, {"keys": ", ".join(keys)}))
        if job.state.final:
            self._run.update(job, keys)
            return
        if self._run.rules >= 4:  # it has been seen to
            self._waiting.has_room(job)
            job.has(failed_fast=None, waits=0)
        self._run.count_news()
        self._waiting.dequeue(job)
        if "strategy" in keys:
            for redefined in self._ledger.hooks("redefined"):
                redefined(job)
        if job.submit_s > self._run.now or ("submit_at" in keys and spec.submit_at > self._run.now):
            job.submit_s = max(self._run.now, spec.submit_at)
            self._waiting.expect(job, job.submit_s)
        self._waiting.wait_for_others(job)
        self._waiting.enqueue(job)
        if name := blocked_by(self._run, job, {}):
            self._endings.never_satisfied(job, name)
        self._out.ask_policy()

    # --- once more ----------------------------------------------------------------------------

    def _retry_requested(self, event: ev.RetryRequested) -> None:
        self._run_again(event.job_ids, from_scratch=event.from_scratch)

    def _run_again(self, ids: Collection[int], *, from_scratch: bool) -> None:
        """Have jobs that have ended wait once more, with those that were cancelled for their sake."""
        back = coming_back(self._run, ids)
        jobs = [self._run.jobs[job_id] for job_id in back]
        completed = [job for job in jobs if job.state is JobState.COMPLETED]
        for job, because in zip(jobs, back.values(), strict=True):
            if job.id in ids and (from_scratch or from_its_beginning(job)):
                job.has(repeated=job.repeated + job.step)
                job.step, job.saved_step = 0, None
                job.has(anew=True, saves=Saves())
            self._reopen(job, None if because is None else self._run.jobs[because])
        self._estimates.size_up(jobs)
        for job in completed:
            self._wait_again_for(job, back)
        for job in jobs:
            self._waiting.wait_no_more(job)
            self._waiting.wait_for_others(job)
            self._run.count_news(self._ledger.waits_by(job).foreground)
            self._waiting.enqueue(job)
        self._out.ask_policy(bool(jobs))

    def _reopen(self, job: Job, because: Job | None) -> None:
        self._endings.back_to_checkpoint(job)
        job.failures = 0
        untimed = len(job.attempts) if job.spec.needs else 0
        job.has(failed_fast=None, most_gpus=None, untimed=untimed, unstarted_s=0.0, losses=0, waits=0)
        job.ended_s = job.reason = None
        job.metrics = NOTHING
        self._run.reopened(job)
        self._out.set_state(job, JobState.PENDING if job.saved_step is None else JobState.SUSPENDED)
        facts = {
            "how": f"from step {job.step}" if job.step else "from its beginning",
            "because": "" if because is None else f", with {because.spec.name}",
        }
        self._out.note(job, Reason(Why.RETRIED, facts))

    def _wait_again_for(self, job: Job, back: Mapping[int, int | None]) -> None:
        """Have the jobs that waited for this one, and have not begun, wait for it once more."""
        for other in self._run.jobs.left():
            if job.spec.name in other.spec.after and other.id not in back and not other.attempt:
                self._waiting.dequeue(other)
                self._waiting.leave_array(other)
                other.unmet += 1
                self._waiting.wait_for(other, job)


def _array(spec: JobSpec) -> str | None:
    return spec.array.name if spec.array else None
