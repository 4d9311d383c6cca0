"""Jobs whose checkpoints could not be told apart."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from hpcsched.agent.shared_checkpoints import (
    MOST_SIGNS,
    Places,
    in_the_way,
    may_name_the_same,
    sharing,
)
from hpcsched.core.jobs import Job
from hpcsched.core.model import Attempt, JobSpec, JobState, Kind, Restart

Times = tuple[float, float | None]
"""When an attempt began and ended (None: it goes on)."""


def job(
    number: int,
    times: Sequence[Times],
    state: JobState = JobState.RUNNING,
    *,
    patterns: Sequence[str] = ("out/checkpoint-*",),
    workdir: str = "/w",
    ready: bool = True,
) -> Job:
    spec = JobSpec(
        name=f"j{number}",
        kind=Kind.COMMAND,
        model="m",
        command=("train",),
        workdir=workdir,
        restart=Restart(checkpoints=tuple(patterns)) if patterns else None,
    )
    attempts = [
        Attempt(
            number=n,
            gpus=(0,),
            role="primary",
            start_s=begin,
            end_s=end,
            ready_s=begin + 1 if ready else None,
        )
        for n, (begin, end) in enumerate(times, 1)
    ]
    return Job(id=number, spec=spec, submit_s=0.0, state=state, attempts=attempts)


def refused(one: Job, other: Job, *, began_s: float | None = None) -> bool:
    """`began_s`: when it is known to have begun; None: it begins."""
    began_s = one.current.start_s if began_s is None else began_s
    return sharing(Places.of(one), in_the_way(one, [one, other], began_s=began_s)) is not None


def test_the_one_that_began_later_is_refused() -> None:
    first, second = job(2, [(5, None)]), job(1, [(9, None)], ready=False)
    found = in_the_way(second, [second, first], began_s=9)
    assert sharing(Places.of(second), found) == (Places.of(first), "out/checkpoint-*")


def test_one_that_goes_on_as_the_other_begins_is_not_refused_for_it() -> None:
    first, second = job(1, [(1, 5), (9, None)]), job(2, [(9, None)], ready=False)
    assert not refused(first, second, began_s=1)
    assert refused(second, first)


def test_of_two_that_begin_at_once_only_the_second_is_refused() -> None:
    first, second = job(1, [(5, None)], ready=False), job(2, [(5, None)], ready=False)
    assert not refused(first, second)
    assert refused(second, first)


@pytest.mark.parametrize("state", [JobState.SUSPENDED, JobState.PENDING, JobState.HELD])
def test_who_may_go_on_keeps_its_folder(state: JobState) -> None:
    assert refused(job(2, [(9, None)], ready=False), job(1, [(1, 3)], state))


@pytest.mark.parametrize("state", [JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED])
def test_what_is_over_before_it_begins_is_in_nobodys_way(state: JobState) -> None:
    first, second = job(1, [(1, 3)], state), job(2, [(9, None)], ready=False)
    assert not refused(second, first)
    again = job(2, [(9, 12), (20, None)])
    assert not refused(again, first, began_s=9)


def test_who_has_not_begun_is_in_nobodys_way() -> None:
    assert not refused(job(2, [(9, None)], ready=False), job(1, [], JobState.PENDING))


def test_a_failed_job_that_is_tried_again_does_not_take_what_another_has_saved_since() -> None:
    """By `retry`; the other has begun when it was over."""
    again = job(1, [(1, 3), (30, None)])
    for other in (
        job(2, [(9, 12)], JobState.COMPLETED),
        job(2, [(9, 12)], JobState.SUSPENDED),
        job(2, [(29, None)], JobState.STARTING, ready=False),
    ):
        assert refused(again, other, began_s=1)


def test_one_that_begins_anew_has_only_those_in_its_way_that_are_not_over() -> None:
    """By `retry --from-scratch`, or as it was done."""
    again = job(1, [(1, 3), (30, None)])
    assert not refused(again, job(2, [(9, 12)], JobState.COMPLETED))
    assert refused(again, job(2, [(9, 12)], JobState.SUSPENDED))


def test_an_attempt_that_never_came_to_run_has_saved_nothing() -> None:
    """The one that was refused is not in the way of the one that it was refused for, nor has it begun."""
    rightful, late = job(1, [(1, 3), (30, None)]), job(2, [(9, 9)], JobState.FAILED, ready=False)
    assert not refused(rightful, late, began_s=1)
    third = job(3, [(20, None)])
    assert refused(job(2, [(9, 9), (30, None)], ready=False), third)
    assert not refused(third, job(2, [(9, 9), (30, 30)], JobState.FAILED, ready=False), began_s=20)


def test_two_names_of_a_folder_by_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "alias").symlink_to("real")
    late = job(2, [(9, None)], ready=False, workdir=str(tmp_path), patterns=["alias/c-*"])
    assert refused(late, job(1, [(1, None)], workdir=str(tmp_path / "real"), patterns=["c-*"]))
    assert not refused(late, job(1, [(1, None)], workdir=str(tmp_path), patterns=["c-*"]))


def test_only_what_saves_by_itself_counts_and_only_in_the_same_place() -> None:
    late = job(2, [(9, None)], ready=False)
    assert not refused(late, job(1, [(1, None)], patterns=()))
    assert not refused(job(2, [(9, None)], patterns=()), job(1, [(1, None)]))
    assert not refused(late, job(1, [(1, None)], workdir="/v"))
    assert refused(late, job(1, [(1, None)], workdir="/w/./x/..", patterns=["a", "/w/out//checkpoint-*"]))


ALPHABET = "ab"
PARTS = ["".join(letters) for n in (1, 2, 3) for letters in itertools.product(f"{ALPHABET}*?", repeat=n)]
NAMES = ["".join(letters) for n in range(1, 7) for letters in itertools.product(ALPHABET, repeat=n)]


def test_two_patterns_may_name_the_same_where_a_name_matches_both() -> None:
    """All patterns of up to three signs, by all names of up to six."""
    matched = {part: {name for name in NAMES if fnmatchcase(name, part)} for part in PARTS}
    for one, other in itertools.combinations_with_replacement(PARTS, 2):
        expected = not matched[one].isdisjoint(matched[other])
        assert may_name_the_same(f"/w/{one}", f"/w/{other}") == expected, (one, other)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("/w/out", "/w/out/checkpoint-*", True),
        ("/w/*", "/w/a/b/c", True),
        ("/w/a/x*", "/w/b/x*", False),
        ("/w/v[0-9]*", "/w/v1_*", True),
        ("/w/a[", "/w/a[", True),
        ("/w/" + "*a" * MOST_SIGNS, "/w/" + "*b" * MOST_SIGNS, True),
    ],
)
def test_folders_sets_and_what_is_too_long(one: str, other: str, same: bool) -> None:
    assert may_name_the_same(one, other) is may_name_the_same(other, one) is same
