"""Whether a run that stopped with work left comes back by itself."""

from __future__ import annotations

import pytest

from hpcsched.agent.allocation import requeue as comeback
from hpcsched.agent.allocation.requeue import Plan, Standing, come_back, why_not
from hpcsched.batch.base import EndReason
from hpcsched.core import events as ev
from hpcsched.core.transitions.outcome import DRAIN
from hpcsched.errors import BatchError
from hpcsched.store.rundir import RunDir
from hpcsched.testing.builders import Driver, a_job, a_profile

MODEL = a_profile("m", [1.0, 2.0], start_s=1.0, suspend_s=1.0)
REQUEUE = Plan(how="requeue", most=3)


def stopped(*, saves: int = 10) -> tuple[Driver, Standing]:
    """A run whose time was up: job a has saved, b has not begun; and its standing before."""
    driver = Driver(a_job("a", "m", 1000), a_job("b", "m"), gpus=2, profiles=(MODEL,), deadline=500.0)
    before = Standing.of(driver.machine)
    driver.runs("a")
    driver.now = 450.0
    driver.tell(ev.TimerFired, key=DRAIN)
    driver.leaves("a", saves)
    assert driver.machine.stopped
    return driver, before


def test_it_comes_back_when_time_was_up_and_something_advanced():
    driver, before = stopped()
    assert why_not(driver.machine, REQUEUE, before=before) is None


def test_not_when_nothing_advanced():
    driver, before = stopped(saves=0)
    assert "nothing advanced" in why_not(driver.machine, REQUEUE, before=before)


def test_one_job_that_fell_back_does_not_hide_that_another_advanced():
    driver, _ = stopped(saves=10)
    before = Standing(ended=0, suspensions=0, saved_steps={1: 5, 2: 500})
    assert Standing.of(driver.machine).is_past(before)


def test_not_when_all_that_is_left_is_held():
    driver, before = stopped()
    driver.hold("a")
    assert why_not(driver.machine, REQUEUE, before=before) is None  # b may still run
    driver.hold("b")
    assert "held by the user" in why_not(driver.machine, REQUEUE, before=before)


def test_not_for_ever():
    driver, before = stopped()
    for lives in range(2, 5):
        driver.start_agent(2)
        driver.runs("a")
        driver.tell(ev.DrainRequested, cause="SIGUSR2")
        driver.leaves("a", 10 * lives)
        reason = why_not(driver.machine, REQUEUE, before=before)
        assert (reason is None) == (lives - 1 < REQUEUE.most), lives
    assert "3 of 3 times" in reason


@pytest.mark.parametrize("cause", ["SIGTERM", "SIGINT", "inbox:1", "batch:CANCELLED"])
def test_not_when_somebody_wanted_it_to_stop(cause):
    driver, before = stopped()
    driver.machine.deadline.cause = cause
    assert ("cancelled" if ":C" in cause else "asked to stop") in why_not(
        driver.machine, REQUEUE, before=before
    )


def test_hosts_that_were_lost_or_taken_away_are_no_reason_to_stay_away():
    driver, before = stopped(saves=0)
    assert why_not(driver.machine, REQUEUE, before=before, short_of_hosts=True) is None
    driver.machine.deadline.cause = "batch:PREEMPTED"
    assert why_not(driver.machine, REQUEUE, before=before) is None


@pytest.mark.parametrize("first", ["deadline", "SIGUSR2", "SIGTERM", "batch:PREEMPTED"])
def test_who_cancels_the_batch_job_does_not_get_it_back_whenever_it_comes(first):
    driver, before = stopped()
    driver.machine.deadline.cause = first
    driver.tell(ev.DrainRequested, cause="batch:CANCELLED")
    driver.tell(ev.DrainRequested, cause="batch:LIMIT")
    assert "was cancelled" in why_not(driver.machine, REQUEUE, before=before)


def test_the_batch_systems_word_counts_more_than_a_signal_and_less_than_a_person():
    driver, before = stopped()
    for cause, then in (
        ("SIGTERM", "SIGTERM"),
        ("deadline", "SIGTERM"),  # as in journals of 0.1
        ("batch:PREEMPTED", "batch:PREEMPTED"),
        ("SIGTERM", "batch:PREEMPTED"),
        ("inbox:1", "inbox:1"),
        ("batch:LIMIT", "inbox:1"),
    ):
        if cause == then == "SIGTERM":
            driver.machine.deadline.cause = cause
        driver.tell(ev.DrainRequested, cause=cause)
        assert driver.machine.deadline.cause == then
    driver.machine.deadline.cause = "batch:PREEMPTED"
    assert why_not(driver.machine, REQUEUE, before=before) is None


class Fate:
    """A batch system that knows what becomes of the job, by question; and refuses this many requeues."""

    def __init__(self, *reasons: EndReason, says_none: bool = True, refuses: int = 0) -> None:
        self._reasons, self.says_none, self._refuses, self.requeued = [*reasons], says_none, refuses, False

    def reason(self) -> EndReason:
        return self._reasons.pop(0) if len(self._reasons) > 1 else self._reasons[0]

    def requeue(self) -> int:
        self._refuses -= 1
        if self._refuses >= 0:
            raise BatchError("scontrol did not answer within 15 s")
        self.requeued = True
        return 99


@pytest.mark.parametrize(
    ("batch", "code", "says"),
    [
        (Fate(EndReason.CANCELLED), 75, "cancelled"),
        (Fate(EndReason.REQUEUED), 75, "was put back"),
        (Fate(EndReason.NONE), 99, "is back"),
        # Silence is not "go on": it is asked again, for a while.
        (Fate(EndReason.UNKNOWN, EndReason.CANCELLED), 75, "cancelled"),
        (Fate(EndReason.UNKNOWN), 99, "is back"),
        (Fate(EndReason.NONE, EndReason.CANCELLED, refuses=1), 75, "cancelled"),
        # LSF answers so as long as nobody has asked for its end.
        (Fate(EndReason.UNKNOWN, EndReason.CANCELLED, says_none=False), 99, "is back"),
    ],
)
def test_a_job_that_was_cancelled_at_the_last_moment_is_not_requeued(
    batch, code, says, tmp_path, monkeypatch
):
    monkeypatch.setattr(comeback, "KEEP_TRYING_S", 0.05)
    monkeypatch.setattr(comeback, "TRY_AGAIN_S", 0.01)
    said: list[str] = []
    assert come_back(batch, REQUEUE, RunDir(tmp_path), said.append) == code
    assert batch.requeued == (code == 99) and says in said[-1]
