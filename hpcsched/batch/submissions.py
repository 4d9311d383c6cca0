"""The seam to a batch system that is to be given jobs, from a login node: submit, find again, cancel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from hpcsched.batch.base import BatchJobState


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """A batch job as the batch system shows it. `word` is its own word for the state; `start` (of one that
    waits: as planned) and `end` are Unix times, None where they are not known. `reason`: why it waits."""

    job_id: str
    name: str
    state: BatchJobState
    word: str
    start: float | None = None
    end: float | None = None
    reason: str = ""


class Submissions(Protocol):
    """Each method is one command, ends after at most COMMAND_TIMEOUT_S and raises BatchError on failure."""

    kind: str

    def submit(self, script: str) -> str:
        """Submit a batch script's text; the job's id."""
        ...

    def found(self, names: Sequence[str]) -> tuple[Submitted, ...]:
        """The user's own jobs of these names that the batch system still shows, also such as have ended."""
        ...

    def accounted(self, job_id: str, name: str) -> Submitted | None:
        """A job that is no longer shown, by the accounting; None where there is none, or it does not know."""
        ...

    def cancel(self, job_ids: Sequence[str]) -> None:
        """End jobs: what runs in them gets its time to save."""
        ...
