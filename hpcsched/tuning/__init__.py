"""Search spaces, (packed) Hyperband and ASHA: a source of jobs. No clock, no processes, no hidden state."""

from hpcsched.tuning.asynchronous import AshaTuning
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


def source_of(search: Search) -> JobSource:
    """The source of jobs by the method of a search."""
    return AshaTuning(search) if search.method == "asha" else Tuning(search)


__all__ = [
    "Search",
    "parse_search",
    "read_search",
    "Tuning",
    "AshaTuning",
    "source_of",
    "JobSource",
    "RungJob",
    "TrialOutcome",
    "Outcomes",
    "Best",
    "TrialRow",
    "TrialProgress",
]
