"""What jobs have said of how many GPUs are good for them (JABAS, section 6.3)."""

from __future__ import annotations

from dataclasses import dataclass, field

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
    grown: dict[int, tuple[int, str]] = field(default_factory=dict)
