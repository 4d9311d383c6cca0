"""The result of an agent's life, and the exit code that follows."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcsched.agent.admission import JobEdits
from hpcsched.agent.allocation.requeue import RunProgress
from hpcsched.agent.loop import RunOutcome
from hpcsched.contract.exits import WORK_LEFT
from hpcsched.core.machine import Machine
from hpcsched.store.rundir import RunRecord


@dataclass(frozen=True, kw_only=True)
class LifeResult:
    """The result of an agent's life: its outcome, the machine, and what the report needs besides."""

    outcome: RunOutcome
    machine: Machine
    run: RunRecord
    speed: float
    device_kind: str
    outputs: Mapping[int, Path]
    checkpoints: Mapping[int, Path]
    """The folder of each job's checkpoints."""
    folders: Mapping[int, Path]
    """Each job's folder in the run directory."""
    before: RunProgress
    """The progress of the run when this life began."""
    edits: JobEdits
    """The jobs of the job file that the run had already, and what became of their differences."""
    attempts_before: int
    """The number of attempts of all jobs before this life."""
    short_of_hosts: bool = False
    """Whether hosts of the allocation did not join, or were lost."""
    requeued_when_preempted: bool = False
    """Whether the batch system requeues this job by itself when it preempts it."""
    killed: bool = False
    refused: Sequence[str] = ()
    """Why commands were refused that had waited for this agent, such as submits of jobs that do not fit."""

    @property
    def moved(self) -> bool:
        """Whether the run is led by another agent now."""
        return self.outcome is RunOutcome.MOVED

    @property
    def downtime_s(self) -> float:
        """Real seconds between the lives of the run's agents."""
        lives = self.machine.run.lives
        return sum(
            max(0.0, new.wall - old.wall - (new.at - old.at) / self.speed)
            for old, new in itertools.pairwise(lives)
        )

    @property
    def exit_code(self) -> int:
        """The exit code of `hpcsched run`.

        0: all jobs completed; 1: a job failed, its time or its memory did not do; 2: an edit of the job file
        was not taken, or what had been submitted before; WORK_LEFT: stopped with work left; 130: killed by
        the user. An edit that was not taken goes before a 0, and before a 1 if this life ran nothing.
        """
        if self.killed:
            return 128 + signal.SIGINT
        if self.outcome is not RunOutcome.FINISHED and not self.machine.run.finished:
            return WORK_LEFT
        failed = any(state.failed for state in self.machine.run.jobs.counts())
        idle = self.machine.run.attempts == self.attempts_before
        if (idle and self.edits.said) or ((self.edits.ignored or self.refused) and not failed):
            return 2
        return int(failed)
