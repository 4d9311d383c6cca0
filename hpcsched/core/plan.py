"""What a planning policy means to do: a fact once made, kept in the journal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One allocation of a plan that goes by stages: the jobs' GPU counts, until `until` (run clock)."""

    until: float
    gpus: Mapping[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A plan for the jobs in `order`, made at `at` (seconds of the run's clock).

    `rule` says how it is followed; the policy that made it knows its rules. `caps` is the GPU count that
    each job starts on at most, on each of its hosts; `strict`: it starts on no fewer. `shrink` are the
    running jobs that go down to their caps. `ends` is when each job is expected to end, `slack_s` by how
    much it may miss that before that is news, `latest` when it has to end at the latest. `news` is the
    count of news that the plan knows of. `facts` tell people what it was chosen for.
    """

    at: float
    rule: str
    order: tuple[int, ...]
    caps: Mapping[int, int]
    strict: bool = False
    shrink: tuple[int, ...] = ()
    stages: tuple[Stage, ...] = ()
    ends: Mapping[int, float]
    slack_s: Mapping[int, float]
    latest: Mapping[int, float]
    news: int
    facts: Mapping[str, Any] = field(default_factory=dict)

    def foresaw(self, job_id: int, end_s: float) -> bool:
        """Whether a job that ends at `end_s` does so as planned; True for a job that is not in the plan."""
        return job_id not in self.ends or abs(end_s - self.ends[job_id]) <= self.slack_s[job_id]
