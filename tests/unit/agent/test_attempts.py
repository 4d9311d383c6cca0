"""Attempts of several crews: whose end counts, and when a resize is done."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hpcsched.agent.attempts import Resizing, WatchedAttempt
from hpcsched.contract.orders import Forget, Resize
from hpcsched.contract.words import Ready
from hpcsched.testing.launch import FIRST_PID, FakeWorkers, Script

ORDER = Resize(attempt=2, world_size=3, keep=(0,), one_host=True)


def crew(*pids: int) -> FakeWorkers:
    return FakeWorkers([FIRST_PID + pid for pid in pids], Script())


@pytest.fixture
def attempt(tmp_path: Path) -> WatchedAttempt:
    return WatchedAttempt(
        job_id=1,
        attempt=1,
        workers=crew(0),
        gpus=(4,),
        ranks=1,
        folder=tmp_path,
        output=tmp_path / "output",
        measured=True,
    )


@pytest.fixture
def joining(attempt: WatchedAttempt) -> FakeWorkers:
    """Two ranks that are to join it."""
    workers = crew(1, 2)
    attempt.resize(Resizing(2, (4, 0, 1), 3, workers), ORDER)
    return workers


def says(attempt: WatchedAttempt, **facts: object) -> None:
    (attempt.folder / "ready.2").write_text(json.dumps(facts))


def test_a_resize_is_done_when_rank_0_says_so(attempt: WatchedAttempt, joining: FakeWorkers) -> None:
    assert attempt.workers.told == [ORDER]
    assert attempt.resized() is None
    says(attempt, in_place=True, step=7, stopped_s=0.5)
    assert attempt.resized() == Ready(in_place=True, step=7, stopped_s=0.5)
    assert (attempt.attempt, attempt.gpus, attempt.resizing) == (2, (4, 0, 1), None)
    attempt.workers.end(0, 0)
    assert attempt.reap() is None, "those that joined still live"
    joining.end(0, 0)
    joining.end(1, 0)
    assert attempt.reap() == 0


def test_a_shrink_is_done_when_those_who_leave_have_left(attempt: WatchedAttempt) -> None:
    attempt.workers = workers = crew(0, 1, 2)
    attempt.resize(Resizing(2, (4,), 1, None), ORDER)
    says(attempt, step=7)
    assert attempt.resized() is None
    workers.end(1, 0)
    assert attempt.resized() is None
    workers.end(2, 0)
    assert attempt.resized() == Ready(step=7)
    workers.end(0, 75)
    assert attempt.reap() == 75


def test_a_job_that_ends_before_anybody_has_looked_has_not_failed_to_resize(
    attempt: WatchedAttempt, joining: FakeWorkers
) -> None:
    says(attempt, step=7)
    joining.end(0, 0)
    joining.end(1, 0)
    assert attempt.reap() is None, "rank 0 evaluates"
    assert attempt.resized() == Ready(step=7)
    attempt.workers.end(0, 0)
    assert attempt.reap() == 0


def test_a_joining_rank_that_fails_takes_only_those_that_join_with_it(
    attempt: WatchedAttempt, joining: FakeWorkers
) -> None:
    joining.end(0, 1)
    assert attempt.reap() is None
    assert joining.signals == [signal.SIGKILL]
    assert attempt.workers.signals == []
    assert attempt.workers.told[-1] == Forget(2)
    assert attempt.resized() is None, "one of them still lives"
    joining.end(1, 137)
    assert attempt.reap() is None
    failed = attempt.resized()
    assert isinstance(failed, Resizing) and not failed.refused
    assert attempt.resizing is None and attempt.ended == [joining]


def test_what_rank_0_refuses_is_told_once_nobody_waits_to_join(
    attempt: WatchedAttempt, joining: FakeWorkers
) -> None:
    (attempt.folder / "refused.2").write_text("too few samples")
    assert attempt.resized() is None
    assert joining.signals == [signal.SIGKILL]
    joining.end(0, 137)
    joining.end(1, 137)
    assert attempt.reap() is None
    failed = attempt.resized()
    assert isinstance(failed, Resizing) and failed.refused and failed.failed == "too few samples"


def test_whoever_waits_to_join_is_not_left_behind(attempt: WatchedAttempt, joining: FakeWorkers) -> None:
    attempt.workers.end(0, 75)
    assert attempt.reap() is None, "their GPUs are not free yet"
    assert joining.signals == [signal.SIGKILL]
    joining.end(0, 137)
    joining.end(1, 137)
    assert attempt.reap() == 75


def test_nobody_asks_how_a_resize_ends_that_was_given_up(
    attempt: WatchedAttempt, joining: FakeWorkers
) -> None:
    attempt.give_up_resizing(signal.SIGTERM)
    assert joining.signals == [signal.SIGTERM]
    says(attempt, step=7)
    assert attempt.resized() is None


def test_a_rank_that_has_joined_and_fails_ends_the_attempt(
    attempt: WatchedAttempt, joining: FakeWorkers
) -> None:
    says(attempt, step=7)
    attempt.resized()
    joining.end(1, 1)
    assert attempt.reap() is None
    assert attempt.workers.signals == [signal.SIGTERM]
    joining.end(0, 75)
    attempt.workers.end(0, 75)
    assert attempt.reap() == 1


def test_the_state_of_a_quick_suspend_is_that_of_the_newest_attempt(
    attempt: WatchedAttempt, joining: FakeWorkers
) -> None:
    assert attempt.held_step() is None
    (attempt.folder / "held.1").write_text('{"step": 5, "samples": 10}')
    assert attempt.held_step() == 5
    (attempt.folder / "held.2").write_text('{"step": 8}')
    assert attempt.held_step() == 8


@pytest.mark.parametrize("asked", [False, True])
def test_ranks_that_save_by_themselves_leave_each_in_its_own_time(
    attempt: WatchedAttempt, asked: bool
) -> None:
    """One that ends by the signal that it was asked by is no failure that ends the others."""
    attempt.workers = crew(0, 1)
    attempt.self_saving = cast(Any, SimpleNamespace(asked_at=1.0 if asked else None))
    attempt.workers.end(0, 143)
    assert attempt.reap() is None
    assert attempt.workers.signals == ([] if asked else [signal.SIGTERM])
    attempt.workers.end(1, 0)
    assert attempt.reap() == 143
