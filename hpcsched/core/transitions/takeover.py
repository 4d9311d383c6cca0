"""What becomes of the attempts of an earlier life: those that are adopted go on, all others are over."""

from __future__ import annotations

from hpcsched.core.events import AgentStarted
from hpcsched.core.jobs import Job
from hpcsched.core.model import JobState
from hpcsched.core.resources.ledger import Ledger
from hpcsched.core.run import Run
from hpcsched.core.transitions.attempts import Attempts
from hpcsched.core.transitions.endings import Endings


class Takeover:
    """Hands the attempts of one agent to the next."""

    def __init__(self, run: Run, ledger: Ledger, *, attempts: Attempts, endings: Endings) -> None:
        self._run, self._ledger, self._attempts, self._endings = run, ledger, attempts, endings

    def adoptable(self) -> tuple[int, ...]:
        """Ids of the jobs whose attempts can go on under another agent: they run on healthy GPUs of their
        own, and nothing is under way with them that the earlier agent alone knew how to end."""
        return tuple(job.id for job in self._run.active.values() if self._can_go_on(job))

    def _can_go_on(self, job: Job) -> bool:
        under_way = job.wanted or job.target or job.resizing
        if job.state is not JobState.RUNNING or under_way or not job.gpus:
            return False
        return self._ledger.owns(job) and self._ledger.devices.keys() >= set(job.gpus)

    def check(self, event: AgentStarted) -> None:
        """Raises ValueError for attempts that cannot go on so."""
        can, there = self.adoptable(), {device.index: device for device in event.devices}
        for job_id in event.adopted:
            if job_id not in can or job_id in event.updated or job_id in event.unsure:
                raise ValueError(f"job {job_id} cannot be adopted")
            for gpu in self._run.jobs[job_id].gpus:
                old, new = self._ledger.devices[gpu], there.get(gpu)
                if new is None or (new.host, new.handle) != (old.host, old.handle):
                    raise ValueError(
                        f"job {job_id} cannot be adopted: GPU {gpu} is not there, or another one"
                    )
        if unknown := sorted(event.unsure.keys() - self._run.jobs.keys()):
            raise ValueError(f"there are no jobs {unknown}")

    def end_others(self, event: AgentStarted) -> None:
        """End the attempts that are not adopted."""
        for job in list(self._run.active.values()):
            seen = event.seen_steps.get(job.id, 0)
            if seen > job.step and not job.current.again:  # it may be of before its program went back
                job.step, job.reports = seen, True
            if job.id not in event.adopted:
                why = "the agent was gone"
                why += ", and its host has not been heard of" * (job.id in event.unsure)
                saved = event.saved_steps.get(job.id)
                if saved == 0 and job.saved_step and self._run.rules >= 4:
                    saved = None  # of what it was to go on from nothing came to disk: `never_on_disk`
                self._endings.lost(job, saved, why, counts=False)
        for job_id, step in event.saved_steps.items():
            if job_id not in event.adopted:
                self._endings.never_on_disk(self._run.jobs[job_id], step)

    def go_on(self, event: AgentStarted) -> None:
        """Have those that are adopted go on; called once the devices of the new life are known."""
        for job_id in event.adopted:
            self._attempts.go_on(self._run.jobs[job_id])
