"""Requeue or chain after a stop with work left: whether the run goes on in another allocation, and how."""

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
from hpcsched.patience import passes
from hpcsched.store.run_folders import go_on
from hpcsched.store.rundir import RunDir
from hpcsched.store.snapshot import name_successor

ALLOCATION_OVER_CAUSES = frozenset(
    {
        "deadline",
        "stuck",
        "SIGUSR1",
        "SIGUSR2",
        *(FROM_BATCH + reason for reason in EndReason if reason is not EndReason.CANCELLED),
    }
)
"""Causes of a drain after which the run goes on elsewhere; after all others somebody wanted it to stop."""
TIME_OVER_CAUSES = ALLOCATION_OVER_CAUSES - {"stuck"}
"""Of these those after which an allocation that has joined the run goes on with it."""
HOSTS_LOST_CAUSES = frozenset(FROM_BATCH + reason for reason in (EndReason.PREEMPTED, EndReason.NODE_FAIL))
"""After these that nothing advanced says nothing of the next allocation."""

ALREADY_REQUEUED = "work is left: this batch job was put back into its queue, and goes on by itself"
RETRY_FOR_S, RETRY_EVERY_S = 30.0, 5.0
"""How long and how often a batch system that does not answer is asked again (chosen): it may restart."""

_PASSING = re.compile(
    r"contact|connect|did not answer|tim(ed )?e?out|temporar|unavailable|busy|stale file|input/output error",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProgress:
    """How far a run is: jobs that have ended; of the others the saves seen, and by job the steps on disk."""

    ended: int
    suspensions: int
    saved_steps: Mapping[int, int]

    @classmethod
    def of(cls, machine: Machine) -> RunProgress:
        jobs = machine.run.jobs.left()
        return cls(
            ended=len(machine.run.jobs) - len(jobs),
            # A program that does not tell its steps may have got further all the same when it saved.
            suspensions=sum(job.suspensions for job in jobs if job.saved_step is None),
            saved_steps={job.id: job.saved_step or 0 for job in jobs},
        )

    def is_past(self, before: RunProgress) -> bool:
        """Whether more is done than `before`."""
        return (
            self.ended > before.ended
            or self.suspensions > before.suspensions
            or any(step > before.saved_steps.get(job_id, 0) for job_id, step in self.saved_steps.items())
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RequeuePlan:
    """How the run goes on: `how` is "requeue" or "chain", at most `most` times in all."""

    how: str
    most: int
    script: Path | None = None


def why_not_requeued(
    machine: Machine, plan: RequeuePlan, *, before: RunProgress, short_of_hosts: bool = False
) -> str | None:
    """The reason why a run that was stopped with work left does not go on by itself; None if it does.

    `before`: its progress when this allocation began. `short_of_hosts`: not all hosts could be used.
    """
    if machine.deadline.cause not in ALLOCATION_OVER_CAUSES:
        who = "`hpcsched drain`" if machine.deadline.cause.startswith("inbox:") else machine.deadline.cause
        if who == CANCELLED:
            return "its batch job was cancelled"
        return f"it was asked to stop by {who or 'its user'}"
    waiting = machine.run.jobs.left()
    if all(job.held or job.state is JobState.HELD for job in waiting):
        return "all that is left is held by the user"
    taken = short_of_hosts or machine.deadline.cause in HOSTS_LOST_CAUSES
    if not taken and not RunProgress.of(machine).is_past(before):
        return "nothing advanced in this allocation, so nothing would in another of its kind"
    restarts = len(machine.run.lives) - 1
    if restarts >= plan.most:
        return f"it has come back {restarts} of {plan.most} times it may (--max-restarts)"
    return None


def requeue_or_chain(
    batch: BatchSystem, plan: RequeuePlan, rundir: RunDir, say: Callable[[str], None]
) -> int:
    """Requeue the batch job, or submit the one that follows; returns the exit code to leave with.

    That is WORK_LEFT also when it fails: the run can be resumed by hand. The id of the job that follows is
    put into the snapshot, where `status` finds it. The batch system is asked before each try whether the job
    was cancelled or requeued meanwhile; then nothing is done.
    """
    deadline = time.monotonic() + RETRY_FOR_S
    while True:
        reason = batch.reason()
        if reason is EndReason.REQUEUED:
            say(ALREADY_REQUEUED)
            return WORK_LEFT
        if reason is EndReason.CANCELLED:
            say(f"stopped with work left, and its batch job was cancelled; go on with `{go_on(rundir.root)}`")
            return WORK_LEFT
        over = time.monotonic() > deadline
        if reason is EndReason.UNKNOWN and batch.says_none and not over:
            say("the batch system does not say whether this job was cancelled; trying again")
        else:
            try:
                return _once(batch, plan, rundir, say)
            except (BatchError, OSError) as error:
                if over or not (_PASSING.search(str(error)) or passes(error)):
                    say(f"{error}; go on by hand with `{go_on(rundir.root)}`")
                    return WORK_LEFT
                say(f"{error}; trying again")
        time.sleep(RETRY_EVERY_S)


def _once(batch: BatchSystem, plan: RequeuePlan, rundir: RunDir, say: Callable[[str], None]) -> int:
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
