"""After a stop with work left: whether this run comes back in another allocation, and how."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hpcsched.batch.base import BatchSystem, EndReason
from hpcsched.contract.exits import WORK_LEFT
from hpcsched.core.machine import Machine
from hpcsched.core.model import JobState
from hpcsched.core.transitions.deadline import CANCELLED, FROM_BATCH
from hpcsched.errors import BatchError, StoreError
from hpcsched.store.rundir import RunDir
from hpcsched.store.snapshot import name_successor

TIME_IS_UP = frozenset(
    {
        "deadline",
        "stuck",
        "SIGUSR1",
        "SIGUSR2",
        *(FROM_BATCH + reason for reason in EndReason if reason is not EndReason.CANCELLED),
    }
)
"""Causes of a drain after which the run goes on elsewhere; after all others somebody wanted it to stop."""
HOSTS_TAKEN = frozenset(FROM_BATCH + reason for reason in (EndReason.PREEMPTED, EndReason.NODE_FAIL))
"""After these that nothing advanced says nothing of the next allocation."""

BACK_ALREADY = "work is left: this batch job was put back into its queue, and goes on by itself"
KEEP_TRYING_S, TRY_AGAIN_S = 30.0, 5.0
"""How long a batch system that does not answer is asked again: it may be restarting."""
_PASSING = re.compile(
    r"contact|connect|did not answer|tim(ed )?e?out|temporar|unavailable|busy", re.IGNORECASE
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How far a run is: jobs that have ended, saves seen, and by job the steps on disk."""

    ended: int
    suspensions: int
    saved_steps: Mapping[int, int]

    @classmethod
    def of(cls, machine: Machine) -> Standing:
        jobs = machine.run.jobs.values()
        return cls(
            ended=sum(job.state.final for job in jobs),
            # A program that does not tell its steps may have got further all the same when it saved.
            suspensions=sum(job.suspensions for job in jobs if job.saved_step is None),
            saved_steps={job.id: job.saved_step or 0 for job in jobs},
        )

    def is_past(self, before: Standing) -> bool:
        """Whether more is done than `before`."""
        return (
            self.ended > before.ended
            or self.suspensions > before.suspensions
            or any(step > before.saved_steps.get(job_id, 0) for job_id, step in self.saved_steps.items())
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How to come back: "requeue" or "chain", at most `most` times in all."""

    how: str
    most: int
    script: Path | None = None


def why_not(machine: Machine, plan: Plan, *, before: Standing, short_of_hosts: bool = False) -> str | None:
    """Why a run that was stopped with work left does not come back by itself; None if it does.

    `short_of_hosts`: not all hosts of this allocation could be used.
    """
    if machine.deadline.cause not in TIME_IS_UP:
        who = "`hpcsched drain`" if machine.deadline.cause.startswith("inbox:") else machine.deadline.cause
        if who == CANCELLED:
            return "its batch job was cancelled"
        return f"it was asked to stop by {who or 'its user'}"
    waiting = [job for job in machine.run.jobs.values() if not job.state.final]
    if all(job.held or job.state is JobState.HELD for job in waiting):
        return "all that is left is held by the user"
    taken = short_of_hosts or machine.deadline.cause in HOSTS_TAKEN
    if not taken and not Standing.of(machine).is_past(before):
        return "nothing advanced in this allocation, so nothing would in another of its kind"
    restarts = len(machine.run.lives) - 1
    if restarts >= plan.most:
        return f"it has come back {restarts} of {plan.most} times it may (--max-restarts)"
    return None


def come_back(batch: BatchSystem, plan: Plan, rundir: RunDir, say: Callable[[str], None]) -> int:
    """Put the batch job back into its queue, or submit the one that follows; the exit code to leave with.

    WORK_LEFT also when that fails: the run can be gone on with by hand. The id of the job that follows is put
    into the snapshot, where `status` finds it. A job that was cancelled, or put back into its queue, while
    the run came to its end is left at that: it is asked before each try, and where there is no answer, asked
    again before the first.
    """
    deadline = time.monotonic() + KEEP_TRYING_S
    while True:
        reason = batch.reason()
        if reason is EndReason.REQUEUED:
            say(BACK_ALREADY)
            return WORK_LEFT
        if reason is EndReason.CANCELLED:
            say("stopped with work left, and its batch job was cancelled; go on with `hpcsched run --resume`")
            return WORK_LEFT
        over = time.monotonic() > deadline
        if reason is EndReason.UNKNOWN and batch.says_none and not over:
            say("the batch system does not say whether this job was cancelled; trying again")
        else:
            try:
                return _once(batch, plan, rundir, say)
            except BatchError as error:
                if over or not _PASSING.search(str(error)):
                    say(f"{error}; go on by hand with `hpcsched run --resume`")
                    return WORK_LEFT
                say(f"{error}; trying again")
        time.sleep(TRY_AGAIN_S)


def _once(batch: BatchSystem, plan: Plan, rundir: RunDir, say: Callable[[str], None]) -> int:
    try:
        if plan.how == "requeue":
            code = batch.requeue()
            say("work is left and time is up: this batch job is back in the queue, and goes on by itself")
            return code
        job_id = batch.submit_next(plan.script)
        say(f"work is left and time is up: batch job {job_id} goes on when this one has ended")
        name_successor(rundir, job_id)
    except StoreError as error:
        say(f"{error}; `hpcsched status` will not know of the job that follows")
    return WORK_LEFT
