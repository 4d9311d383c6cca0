"""What jobs that find out themselves how many GPUs are good for them have said (JABAS, section 6.3)."""

from __future__ import annotations

from dataclasses import dataclass, field

from hpcsched.core.model import Role
from hpcsched.core.profile import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """What a job expects of its next epoch: its speed by the number of GPUs on each of its hosts, and the
    mean of its global batches there."""

    profile: Profile
    batch: float


@dataclass(slots=True)
class Proposals:
    """The newest proposal of each job that made one.

    `grown` are the jobs that have GPUs only because nobody waited: how many they had before, and as what.
    """

    of: dict[int, Proposal] = field(default_factory=dict)
    grown: dict[int, tuple[int, Role]] = field(default_factory=dict)

    def profile(self, job_id: int) -> Profile | None:
        """The speed that a job expects of itself; None if it has said nothing."""
        proposal = self.of.get(job_id)
        return proposal.profile if proposal else None

    def forget(self, job_id: int) -> None:
        """The job has come to its end."""
        self.of.pop(job_id, None)
        self.grown.pop(job_id, None)
