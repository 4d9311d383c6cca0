"""The columns of `status`: order, widths, bars, arrays."""

from __future__ import annotations

import pytest
from rundirs import a_status

from hpcsched.cli.jobs import about_arrays
from hpcsched.cli.jobs.columns import columns_of, in_order, table
from hpcsched.core.model import JobState
from hpcsched.errors import ConfigError
from hpcsched.store.status import JobStatus


def some_jobs(count: int) -> list[JobStatus]:
    """1 has completed, 2 runs, the others wait."""
    return sorted(a_status(count).jobs, key=lambda job: job.id)


def lines(jobs: list[JobStatus], format_: str, **rest: object) -> list[str]:
    return table(jobs, columns_of(format_), header=False, **rest).splitlines()  # type: ignore[arg-type]


def test_widths_are_squeues() -> None:
    jobs = some_jobs(2)
    assert lines(jobs, "%.6i %t") == ["     1  CD", "     2  R"]
    assert lines(jobs, "%8j %t") == ["a-traini  CD", "a-traini  R"]
    assert lines(jobs, "%.40j %i")[0] == f"{'a-training-with-quite-a-long-name-1':>40}  1"


def test_parsable_cuts_nothing() -> None:
    assert lines(some_jobs(2), "%i %j %R", parsable=True) == [
        "1|a-training-with-quite-a-long-name-1|",
        "2|a-training-with-quite-a-long-name-2|node0",
    ]


@pytest.mark.parametrize(
    ("keys", "order"),
    [("-i", [3, 2, 1]), ("-M,i", [2, 3, 1]), ("%t,-i", [3, 2, 1]), ("+L", [2, 1, 3]), ("b,-i", [3, 1, 2])],
)
def test_order(keys: str, order: list[int]) -> None:
    jobs = some_jobs(3)
    for job, elapsed_s in zip(jobs, (0.0, 900.0, 60.0), strict=True):
        job.elapsed_s = elapsed_s
    assert [job.id for job in in_order(jobs, keys)] == order


@pytest.mark.parametrize("format_", ["", " ", ",", "%", "i", "%q", "%.i8", "%.1234i", "%i%j"])
def test_wrong_columns_are_refused(format_: str) -> None:
    with pytest.raises(ConfigError, match="--format"):
        columns_of(format_)


def test_what_cannot_be_sorted_by_is_refused() -> None:
    with pytest.raises(ConfigError, match="--sort"):
        in_order(a_status(1).jobs, "Z")


def test_an_array_is_one_line() -> None:
    jobs = some_jobs(5)
    for number, job in enumerate(jobs[:4], 1):
        job.array, job.array_index = "train", number
    shown = [job for job in jobs if not job.state.final]
    rows = about_arrays.rows(shown, jobs)
    assert lines(shown, "%i %.8j %t %b %s %L %K %R", rows=rows) == [
        "2-4     train  R   0,1,2,3  50/300  -  -  node0 (4 jobs: 1 R, 2 PD, 1 CD; Resources)",
        "  5  a-traini  PD  -         -/100  -  -  (Resources)",
    ]
    jobs[1].state = JobState.SUSPENDED
    assert lines(shown, "%t", rows=rows)[0] == "S"
