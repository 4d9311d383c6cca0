"""Search spaces and (packed) Hyperband: a source of jobs. No clock, no processes, no hidden state."""

from hpcsched.tuning.search import Search, parse_search, read_search
from hpcsched.tuning.source import Best, JobSource, Outcome, Outcomes, Progress, RungJob, TrialRow, Tuning

__all__ = [
    "Search",
    "parse_search",
    "read_search",
    "Tuning",
    "JobSource",
    "RungJob",
    "Outcome",
    "Outcomes",
    "Best",
    "TrialRow",
    "Progress",
]
