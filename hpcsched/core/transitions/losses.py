"""What is lost under jobs, and found again: devices; and events that could not be handled."""

from __future__ import annotations

from hpcsched.core import events as ev
from hpcsched.core.jobs import Job
from hpcsched.core.mechanisms.base import Handlers
from hpcsched.core.model import JobState
from hpcsched.core.reasons import Reason, Why
from hpcsched.core.resources.ledger import Ledger
from hpcsched.core.run import Run
from hpcsched.core.transitions.attempts import Attempts
from hpcsched.core.transitions.endings import Endings
from hpcsched.core.transitions.outcome import Outcome

VOID = "void"
"""What is wanted of a job about which an event could not be handled: that it ends."""

LOST = ("GPU", "the cores")
"""What is wanted of a job that has lost what it runs on begins so."""


def lost_gpu(gpu: int) -> str:
    """What is wanted of a job that has lost a GPU."""
    return f"GPU {gpu} was lost"


class Losses:
    """Ends the attempts that have lost what they need."""

    def __init__(
        self, run: Run, out: Outcome, ledger: Ledger, *, attempts: Attempts, endings: Endings
    ) -> None:
        self._run, self._out, self._ledger = run, out, ledger
        self._attempts, self._endings = attempts, endings
        self._under: dict[int, list[int]] = {}
        """By lost device, the jobs that had it."""

    def handlers(self) -> Handlers:
        """The events that it handles."""
        return {
            ev.DeviceLost: self._device_lost,
            ev.DeviceFound: self._device_found,
            ev.EventVoided: self._event_voided,
        }

    def _device_lost(self, event: ev.DeviceLost) -> None:
        if event.gpu not in self._ledger.devices:
            return
        self._ledger.lose(event.gpu, event.why)
        self._run.count_news()
        self._out.ask_policy()
        self._under[event.gpu] = self._ledger.on(event.gpu)
        for job_id in self._under[event.gpu]:
            if job := self._run.active.get(job_id):
                self._lost_under(job, event)
        for lost in self._ledger.hooks("lost"):
            lost(event.gpu, event.why)

    def _device_found(self, event: ev.DeviceFound) -> None:
        """Use a lost device again. A job that still ends because of it does so all the same."""
        if event.gpu not in self._ledger.lost:
            return
        self._ledger.find(event.gpu)
        self._run.count_news()
        self._out.ask_policy()
        for job_id in self._under.pop(event.gpu):
            if not (job := self._run.jobs[job_id]).state.final:
                self._out.note(job, Reason(Why.DEVICE_FOUND, {"gpu": event.gpu, "why": event.why}))

    def _lost_under(self, job: Job, event: ev.DeviceLost) -> None:
        """End the attempt of a job that has lost a GPU that it holds, or what it was to change to."""
        self._out.note(job, Reason(Why.DEVICE_LOST, {"gpu": event.gpu, "why": event.why}))
        if job.target:
            self._attempts.drop_target(job)
        if event.gpu in job.current.gpus and job.wanted in ("", "suspend"):
            # One that is saving may still manage to; its grace timer is set.
            job.wanted = lost_gpu(event.gpu)
            if job.state is not JobState.SUSPENDING:
                self._attempts.terminate(job)
        elif job.resizing and job.state is JobState.RUNNING and not job.wanted:
            self._attempts.suspend(job)  # its ranks are well, and must not be joined by one that is not

    def _event_voided(self, event: ev.EventVoided) -> None:
        job = self._run.jobs.get(event.job_id) if event.job_id is not None else None
        if job is None:
            return
        facts = {"event": event.kind, "record": event.record, "error": event.error}
        self._out.note(job, Reason(Why.VOIDED, facts))
        if job.id not in self._run.active or job.attempt != event.attempt:
            return
        if event.ended:
            why = f"its end ({event.kind}) could not be handled"
            self._endings.lost(job, None, why, counts=True)
            self._out.ask_policy()
        elif job.wanted in ("", "suspend"):
            job.wanted = VOID
            self._attempts.terminate(job)
