"""What users ask for, and what becomes of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from hpcsched.core import events as ev
from hpcsched.core.definitions import differing
from hpcsched.core.jobs import Job
from hpcsched.core.model import NOTHING, JobSpec, JobState
from hpcsched.core.reasons import Reason, Why
from hpcsched.core.resources.packing import is_packed
from hpcsched.core.transitions.cpu_decisions import Allotting
from hpcsched.core.transitions.rerun import blocked_by, coming_back, from_its_beginning


class Obeying(Allotting):
    """A run's state that does what users ask for."""

    def _cancel_requested(self, event: ev.CancelRequested) -> None:
        job = self.jobs[event.job_id]
        if job.state.final or job.wanted == "cancel":
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
            self._dequeue(job)
            self._to(job, JobState.HELD)
            self._note(job, Reason(Why.HELD))
            self._decide_after = True  # who came later may have waited for it
        elif job.state is JobState.SUSPENDED:
            self._dequeue(job)
            job.held = True
            self._note(job, Reason(Why.USER_SUSPENDED))
            self._decide_after = True

    def _suspend_requested(self, event: ev.SuspendRequested) -> None:
        job = self.jobs[event.job_id]
        if job.state is JobState.SUSPENDED:
            self._dequeue(job)
            job.held = True
            self._note(job, Reason(Why.USER_SUSPENDED))
            self._decide_after = True
        elif job.state.active and job.wanted != "cancel":
            # Whatever else it is leaving for, it stays away.
            job.held = True
            if job.target:
                self._drop_target(job)
                self._decide_after = True
            if job.state is not JobState.SUSPENDING and job.wanted == "":
                # A program that is not ready yet is suspended when it is; one that never is, never.
                job.wanted = "suspend"
                if job.ready:
                    self._suspend(job)

    def _resume_or_release(self, event: ev.ResumeRequested | ev.ReleaseRequested) -> None:
        """Undo a hold or a suspend: a job suspended before it had saved anything is HELD."""
        job = self.jobs[event.job_id]
        job.held = False
        if job.wanted == "suspend" and job.state is not JobState.SUSPENDING:
            job.wanted = ""
        if job.state is JobState.HELD:
            self._to(job, JobState.PENDING)
        if not any(job.id in line for line in (self.queue, self.cores.queue, self.late)):
            self._enqueue(job)
            self._decide_after = True

    # --- once more ----------------------------------------------------------------------------

    def _retry_requested(self, event: ev.RetryRequested) -> None:
        self._run_again(event.job_ids, from_scratch=event.from_scratch)

    def _definitions_compared(self, event: ev.DefinitionsCompared) -> None:
        self._compared(event.updated, event.kept, event.again)

    def _compared(
        self, updated: Mapping[int, JobSpec], kept: Mapping[int, tuple[str, ...]], again: Collection[int]
    ) -> None:
        """A job file was compared with the run: these definitions are its own from now on, those are not."""
        for job_id, keys in kept.items():
            self.kept[job_id] = keys
            if not keys:
                del self.kept[job_id]
            self.changed.add(job_id)
        for job_id, spec in updated.items():
            self._define(self.jobs[job_id], spec)
        self._run_again(again, from_scratch=False)

    def _define(self, job: Job, spec: JobSpec) -> None:
        """Give a job that does not run another definition."""
        keys = differing(job.spec, spec)
        self._wait_no_more(job)
        job.spec = spec
        job.has(most_gpus=None)
        self._size_up([job])
        self._list_needs(spec)
        self.kept.pop(job.id, None)
        self._note(job, Reason(Why.UPDATED, {"keys": ", ".join(keys)}))
        if job.state.final:
            self.updated[job.id] = tuple(dict.fromkeys((*self.updated.get(job.id, ()), *keys)))
            return
        self.news += 1
        self._dequeue(job)
        if "strategy" in keys:
            self.cores.of.pop(job.id, None)
        if job.submit_s > self.now or ("submit_at" in keys and spec.submit_at > self.now):
            job.submit_s = max(self.now, spec.submit_at)
            self._expect(job, job.submit_s)
        self._wait_for_others(job)
        self._enqueue(job)
        if name := blocked_by(self, job, {}):
            self._never_satisfied(job, name)
        self._decide_after = True

    def _list_needs(self, spec: JobSpec) -> None:
        """Remember what kinds of jobs there are."""
        self.lanes.used |= spec.background
        self.packs.used |= is_packed(spec)
        self.cores.used |= spec.cpus is not None

    def _wait_no_more(self, job: Job) -> None:
        """Nobody's end changes anything for the job: one that was cancelled may still be in the line."""
        for name in job.spec.after:
            line = self.dependents.get(self.by_name[name], [])
            if job.id in line:
                line.remove(job.id)

    def _wait_for_others(self, job: Job) -> None:
        """Have a job wait for those named in its `after` that have not completed."""
        before = [self.jobs[self.by_name[name]] for name in job.spec.after]
        waits_for = [other for other in before if other.state is not JobState.COMPLETED]
        job.unmet = len(waits_for)
        for other in waits_for:
            self.dependents.setdefault(other.id, []).append(job.id)

    def _run_again(self, ids: Collection[int], *, from_scratch: bool) -> None:
        """Have jobs that have ended wait once more, with those that were cancelled for their sake."""
        back = coming_back(self, ids)
        jobs = [self.jobs[job_id] for job_id in back]
        completed = [job for job in jobs if job.state is JobState.COMPLETED]
        for job, because in zip(jobs, back.values(), strict=True):
            if job.id in ids and (from_scratch or from_its_beginning(job)):
                job.repeated += job.step
                job.step, job.saved_step = 0, None
                job.has(anew=True)
            self._back_to_checkpoint(job)
            job.failures = job.losses = 0
            job.has(failed_fast=None, most_gpus=None)
            job.ended_s = job.reason = None
            job.metrics = NOTHING
            self.updated.pop(job.id, None)
            self.unfinished += 1
            self._to(job, JobState.PENDING if job.saved_step is None else JobState.SUSPENDED)
            facts = {
                "how": f"from step {job.step}" if job.step else "from its beginning",
                "because": "" if because is None else f", with {self.jobs[because].spec.name}",
            }
            self._note(job, Reason(Why.RETRIED, facts))
        self._size_up(jobs)
        for job in completed:
            # Who waited for it and has not begun waits for it once more.
            for other in self.jobs.values():
                waits = job.spec.name in other.spec.after and other.id not in back
                if waits and not other.state.final and not other.attempt:
                    self._dequeue(other)
                    other.unmet += 1
                    self.dependents.setdefault(job.id, []).append(other.id)
        for job in jobs:
            self._wait_no_more(job)
            self._wait_for_others(job)
            self.news += not job.spec.background
            self._enqueue(job)
        self._decide_after |= bool(jobs)
