"""The seam to processes: how an attempt's workers are started, signalled, and seen to end."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from hpcsched.core.model import Device

SUSPENDED = 75
"""Exit code (EX_TEMPFAIL) of a program that saved and left."""

LOST = 255
"""Stands for the exit code of a process that somebody else has reaped: not known, so never success."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """What to start for one attempt.

    `env` is laid over the launcher's own environment: the job's variables and those of the contract
    that all ranks share. The launcher adds what differs by rank, and the rendezvous address.
    `output` is opened for appending, created with mode 0600, missing folders made. `per_rank` True:
    one process a device, each pinned to its device's cores; False: one process that sees them all.
    """

    job_id: int
    attempt: int
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: Path
    output: Path
    devices: tuple[Device, ...]
    per_rank: bool = True


class Workers(Protocol):
    """The processes of one attempt, from launch until `close`; rank 0 first."""

    @property
    def processes(self) -> tuple[tuple[int, int], ...]:
        """(pid, start time in clock ticks since boot) of each rank."""

    @property
    def pidfds(self) -> tuple[int, ...]:
        """One descriptor a rank, readable for good once the rank has ended."""

    @property
    def progress_fd(self) -> int | None:
        """Non-blocking read end of what rank 0 writes to HPCSCHED_PROGRESS_FD; None if there is none."""

    def signal(self, sig: signal.Signals) -> None:
        """Send `sig` to each rank's process group; to nothing that is not surely ours."""

    def failed_early(self) -> bool:
        """Whether a rank has ended with other than 0 or 75 while others live. Never blocks."""

    def reap(self) -> int | None:
        """None while a rank lives; else the attempt's exit code (see `attempt_code`). Never blocks.

        When the last rank has ended, what the ranks left behind in their process groups is killed:
        the devices go to the next job.
        """

    def close(self) -> None:
        """Close the descriptors; ends no process; may be called twice."""


class Launcher(Protocol):
    """Starts workers on one kind of place."""

    def launch(self, plan: LaunchPlan) -> Workers:
        """Start all ranks, or none.

        Raises LaunchError: transient when a resource was short for a moment, not transient when the
        command, the directory or the output cannot be used as they are.
        """


def attempt_code(codes: Sequence[int]) -> int:
    """One exit code for all ranks, from theirs in order of time: the first failure, else 75, else 0."""
    failures = (code for code in codes if code not in (0, SUSPENDED))
    return next(failures, SUSPENDED if SUSPENDED in codes else 0)
