"""Search spaces and (packed) Hyperband: a source of jobs. No clock, no processes, no hidden state."""

from hpcsched.tuning.search import Search, parse_search, read_search
from hpcsched.tuning.source import (
    Best,
    JobSource,
    Outcomes,
    RungJob,
    TrialOutcome,
    TrialProgress,
    TrialRow,
    Tuning,
)

__all__ = [
    "Search",
    "parse_search",
    "read_search",
    "Tuning",
    "JobSource",
    "RungJob",
    "TrialOutcome",
    "Outcomes",
    "Best",
    "TrialRow",
    "TrialProgress",
]
