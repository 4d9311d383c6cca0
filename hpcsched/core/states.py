"""The states of jobs: apart from `core.model`, which takes as long to import as Python takes to start."""

from __future__ import annotations

from enum import StrEnum


class JobState(StrEnum):
    """Where a job is in its life. The last five are final."""

    PENDING = "PENDING"
    HELD = "HELD"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    SUSPENDING = "SUSPENDING"
    SUSPENDED = "SUSPENDED"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    TIMEOUT = "TIMEOUT"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    CANCELLED = "CANCELLED"

    @property
    def final(self) -> bool:
        return self in _FINAL

    @property
    def failed(self) -> bool:
        """Over, without having completed, and not because somebody wanted that."""
        return self in _FAILED

    @property
    def active(self) -> bool:
        """Has processes, and a lease on devices."""
        return self in _ACTIVE

    @property
    def code(self) -> str:
        """Slurm's short code, as squeue prints it (a held job is pending there)."""
        return _CODES[self]


FAILURES = (JobState.FAILED, JobState.TIMEOUT, JobState.OUT_OF_MEMORY)
"""Those of jobs that have failed."""
_FAILED = frozenset(FAILURES)
ENDS = (JobState.COMPLETED, *FAILURES, JobState.CANCELLED)
"""The final ones."""
_FINAL = frozenset(ENDS)
_CODES = {
    JobState.PENDING: "PD",
    JobState.HELD: "PD",
    JobState.STARTING: "CF",
    JobState.RUNNING: "R",
    JobState.SUSPENDING: "SI",
    JobState.SUSPENDED: "S",
    JobState.COMPLETED: "CD",
    JobState.FAILED: "F",
    JobState.CANCELLED: "CA",
    JobState.TIMEOUT: "TO",
    JobState.OUT_OF_MEMORY: "OOM",
}
_ACTIVE = frozenset({JobState.STARTING, JobState.RUNNING, JobState.SUSPENDING})
