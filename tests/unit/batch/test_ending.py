"""What follows from why a batch job ends, and how long there is; the batch system is a stand-in."""

from __future__ import annotations

import os
import signal
import threading
import time
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest

from hpcsched.agent.allocation import ending
from hpcsched.agent.allocation import watch as watch_module
from hpcsched.agent.allocation.ending import AllocationEnd, forced_s
from hpcsched.agent.allocation.watch import AllocationWatch, EndTimeAnswer, period_s
from hpcsched.agent.clock import RunClock
from hpcsched.agent.hosts import node_agent_times
from hpcsched.agent.loop import Agent
from hpcsched.agent.node.agent import NodeAgent
from hpcsched.batch.base import EndReason, Preemption
from hpcsched.core import events as ev
from hpcsched.errors import BatchError
from hpcsched.testing.builders import Driver, a_job, a_profile


@pytest.mark.parametrize(
    ("wait_s", "counted_s"), [(None, 25.0), (30.0, 25.0), (5.0, 4.0), (120.0, 100.0), (1.0, 0.5), (0.0, 0.0)]
)
def test_what_is_counted_on_of_the_time_before_sigkill(wait_s: float | None, counted_s: float) -> None:
    assert forced_s(wait_s) == counted_s


@pytest.mark.parametrize(("grace_s", "every_s"), [(300.0, 10.0), (40.0, 4.0), (5.0, 2.0), (None, 10.0)])
def test_the_end_is_asked_for_often_where_hosts_may_be_taken(grace_s: float | None, every_s: float) -> None:
    assert period_s(Preemption(grace_s=grace_s, requeues=True)) == every_s
    assert period_s(None) == 60.0


def test_the_batch_system_is_asked_ever_more_often_towards_the_end_and_bears_300_runs() -> None:
    """The later an end that moved is known, the more is left; and a site may ask for less."""
    hours = [period_s(None, left_s=3600 * h) for h in (48, 3, 1, 0.25, 0.01)]
    assert hours == [600, 540, 180, 60, 60] and period_s(None, left_s=inf) == 600
    left, asked = 4 * 3600.0, 0
    while left > 0:
        left, asked = left - period_s(None, left), asked + 1
    assert asked <= 100 and 300 * asked / (4 * 3600) <= 2.1, "questions a second of 300 runs of four hours"
    preempted = Preemption(grace_s=None, requeues=True)
    assert period_s(preempted, 60, least_s=30) == 30 and period_s(None, 7200, least_s=30) == 360


# --- what the agent makes of it --------------------------------------------------------------


class Watch:
    """A watch whose answers the test gives."""

    def __init__(self, kill_wait_s: float | None = 30.0) -> None:
        self.comment, self.kill_wait_s = "", kill_wait_s
        self.answers: list[EndTimeAnswer] = []
        self.why = 0

    def ask_now(self) -> None: ...

    def ask_why(self) -> None:
        self.why += 1

    def take(self) -> list[EndTimeAnswer]:
        answers, self.answers = self.answers, []
        return answers


class Scene:
    """A run with an hour left, and what it is told."""

    def __init__(self, *, deadline: float | None = 3600.0, kill_wait_s: float | None = 30.0) -> None:
        profile = a_profile("m", [1.0, 2.0], start_s=1.0, suspend_s=1.0)
        self.driver = Driver(a_job("a", "m"), gpus=2, profiles=(profile,), deadline=deadline)
        self.watch, self.said = Watch(kill_wait_s), []
        self.ending = AllocationEnd(
            self.driver.machine,
            RunClock(),
            watch=self.watch,  # type: ignore[arg-type]
            at=deadline,
            tell=self.said.append,
            publish=lambda at: None,
        )

    def agent(self, *, lent: bool = False) -> Agent:
        """What hears the signals, in a batch system that ends jobs by SIGTERM."""
        hand = SimpleNamespace(
            machine=self.driver.machine,
            clock=RunClock(),
            journal=None,
            effects=None,
            ending=self.ending,
            moving=SimpleNamespace(for_a_join=True) if lent else None,
            observer=SimpleNamespace(message=self.said.append),
            ends_by=frozenset({signal.SIGTERM}),
            signals_all=frozenset({signal.SIGTERM, signal.SIGINT}),
        )
        return Agent(hand)  # type: ignore[arg-type]

    def hears(self, *answers: EndTimeAnswer) -> list[ev.Event]:
        self.watch.answers += answers
        events = self.ending.events()
        for event in events:
            self.driver.handle(event)
        return events

    @property
    def cause(self) -> str:
        return self.driver.machine.deadline.cause

    @property
    def left_s(self) -> float:
        return self.driver.machine.deadline.at or 0.0


def why(reason: EndReason) -> EndTimeAnswer:
    return EndTimeAnswer(reason=reason, of_end=False)


@pytest.mark.parametrize(
    "reason",
    [EndReason.LIMIT, EndReason.CANCELLED, EndReason.PREEMPTED, EndReason.REQUEUED, EndReason.NODE_FAIL],
)
def test_a_sigterm_is_asked_about_before_anything_is_done(reason: EndReason) -> None:
    scene = Scene(kill_wait_s=120.0)
    assert scene.ending.told_to_end() == [] and scene.watch.why == 1
    assert scene.hears() == []
    scene.hears(why(reason))
    assert scene.cause == f"batch:{reason}"
    assert 95 < scene.left_s <= 101


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_head_in_a_lent_allocation_leaves_signals_to_the_join(number: signal.Signals) -> None:
    scene = Scene()
    assert scene.agent(lent=True)._signal(number) == [] and scene.watch.why == 0 and not scene.said
    assert scene.agent()._signal(number) or scene.watch.why or scene.said


def test_an_end_that_comes_near_is_not_put_off_by_asking_again() -> None:
    scene = Scene(deadline=12.0)
    end = time.time() + 12.0
    assert scene.hears(EndTimeAnswer(deadline=end)) == []
    scene.hears(EndTimeAnswer(deadline=end - 8.0))
    assert scene.left_s == pytest.approx(12.0, abs=0.5), "sooner than a SIGKILL can follow"
    scene.hears(EndTimeAnswer(deadline=end + 60.0))
    assert scene.left_s == pytest.approx(72.0, abs=0.5)
    scene.hears(EndTimeAnswer(deadline=end))
    assert scene.left_s == pytest.approx(25.0, abs=0.5)


def test_a_warning_before_it_does_not_make_a_cancel_the_end_of_the_time() -> None:
    scene = Scene()
    assert scene.ending.warned("SIGUSR2") == []
    scene.hears(EndTimeAnswer(deadline=time.time() + 3600))
    scene.ending.told_to_end()
    scene.hears(why(EndReason.CANCELLED))
    assert scene.cause == "batch:CANCELLED"


def test_a_cancel_while_it_saves_for_the_end_counts() -> None:
    scene = Scene()
    scene.driver.tell(ev.DrainRequested, cause="deadline")
    scene.ending.told_to_end()
    scene.hears(why(EndReason.CANCELLED))
    assert scene.cause == "batch:CANCELLED" and scene.left_s < 30


def test_a_sigterm_of_a_job_that_goes_on_is_a_warning() -> None:
    scene = Scene()
    scene.ending.told_to_end()
    end = EndTimeAnswer(deadline=time.time() + 3600)
    assert scene.hears(why(EndReason.NONE), end) == []
    assert any("SIGTERM from the batch system; saving begins in" in text for text in scene.said)
    scene.ending.told_to_end()  # the real one
    scene.hears(why(EndReason.LIMIT))
    assert scene.cause == "batch:LIMIT"


def test_an_interrupt_is_its_users_where_no_job_ends_by_it() -> None:
    scene = Scene()
    agent = scene.agent()
    assert [event.cause for event in agent._signal(signal.SIGINT)] == ["SIGINT"]  # type: ignore[attr-defined]
    assert scene.watch.why == 0 and "interrupt again to kill them" in scene.said[0]
    assert scene.left_s == 3600.0
    agent._signal(signal.SIGINT)
    assert agent.killed


def test_a_second_sigterm_is_asked_about_too() -> None:
    scene = Scene()
    scene.ending.told_to_end()
    to_the_first = why(EndReason.NONE)
    scene.ending.told_to_end()
    assert scene.watch.why == 2
    assert scene.hears(to_the_first) == [] and scene.ending.awaits_why
    scene.hears(why(EndReason.CANCELLED))
    assert scene.cause == "batch:CANCELLED" and scene.left_s < 26


def test_two_sigterms_of_a_job_that_goes_on_are_somebodys() -> None:
    scene = Scene()
    scene.ending.told_to_end()
    scene.hears(why(EndReason.NONE), EndTimeAnswer(deadline=time.time() + 3600))
    assert "a second within 10 s" in scene.said[-1]
    scene.ending.told_to_end()
    scene.hears(why(EndReason.NONE))
    assert scene.cause == "SIGTERM" and scene.left_s == 3600.0


@pytest.mark.parametrize(
    ("end", "cause"),
    [(EndTimeAnswer(), "SIGTERM"), (EndTimeAnswer(error="squeue failed"), "batch:NONE")],
)
def test_without_a_limit_there_is_no_warning_of_it(end: EndTimeAnswer, cause: str) -> None:
    scene = Scene(deadline=None)
    scene.ending.told_to_end()
    scene.hears(why(EndReason.NONE))
    scene.hears(end)
    assert scene.cause == cause


def test_a_job_that_goes_on_has_its_time_back_when_that_is_said_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending, "REASON_WAIT_S", -1.0)
    scene = Scene()
    scene.ending.told_to_end()
    end = EndTimeAnswer(deadline=time.time() + 300)
    scene.hears(end)
    assert scene.left_s < 26
    scene.hears(why(EndReason.NONE))
    scene.hears(end)
    assert scene.cause == "batch:NONE" and 290 < scene.left_s < 301
    scene.hears(EndTimeAnswer(deadline=time.time() + 900))  # as ever, while all is saved
    assert scene.left_s < 301


@pytest.mark.parametrize(("deadline", "cause"), [(3600.0, "SIGTERM"), (None, "SIGTERM"), (0.5, "deadline")])
def test_without_a_word_all_is_saved_and_the_word_counts_when_it_comes(
    monkeypatch: pytest.MonkeyPatch, deadline: float | None, cause: str
) -> None:
    monkeypatch.setattr(ending, "REASON_WAIT_S", -1.0)
    scene = Scene(deadline=deadline)
    scene.ending.told_to_end()
    scene.hears()
    assert scene.cause == cause and scene.left_s < 26
    scene.hears(why(EndReason.UNKNOWN))
    assert scene.cause == cause
    scene.hears(why(EndReason.REQUEUED))
    assert scene.cause == "batch:REQUEUED"


def test_a_preemption_is_the_end_when_its_grace_is_over() -> None:
    scene = Scene()
    end = time.time() + 40
    scene.hears(EndTimeAnswer(deadline=end, reason=EndReason.PREEMPTED))
    assert scene.cause == "batch:PREEMPTED"
    assert 60 < scene.left_s < 66  # SIGKILL comes later than the end by KillWait
    assert [text for text in scene.said if "hosts are wanted" in text]


class Preempting:
    """A batch system that takes the hosts away at the second question."""

    def __init__(self) -> None:
        self.ends = [10_000.0, 9_000.0]
        self.reasons = 0

    def end_time(self) -> float:
        return self.ends.pop(0) if len(self.ends) > 1 else self.ends[0]

    def reason(self) -> EndReason:
        self.reasons += 1
        return EndReason.PREEMPTED

    def kill_wait(self) -> float:
        return 7.0

    def comment(self, text: str) -> None: ...


@pytest.mark.parametrize("preemption", [Preemption(grace_s=40.0, requeues=True), None])
def test_an_end_that_comes_sooner_is_asked_about_where_hosts_may_be_taken(
    preemption: Preemption | None,
) -> None:
    batch = Preempting()
    watch = AllocationWatch(batch, deadline=10_000.0, preemption=preemption)  # type: ignore[arg-type]
    answers: list[EndTimeAnswer] = []
    try:
        for wanted in (1, 2):
            watch.ask_now()
            deadline = time.monotonic() + 20
            while len(answers) < wanted:
                assert time.monotonic() < deadline
                answers += watch.take()
                time.sleep(0.01)
    finally:
        watch.close()
    assert [answer.reason for answer in answers] == [None, EndReason.PREEMPTED if preemption else None]
    assert watch.kill_wait_s == 7.0


class Slow(Preempting):
    """A batch system whose first answer to why comes after somebody has asked again."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.may_answer = threading.Event(), threading.Event()

    def reason(self) -> EndReason:
        self.reasons += 1
        self.asked.set()
        assert self.may_answer.wait(20)
        return EndReason.NONE if self.reasons == 1 else EndReason.CANCELLED


class Busy:
    """A batch system whose controller is busy for some questions."""

    def __init__(self, fails: int) -> None:
        self.fails, self.asked = fails, 0

    def end_time(self) -> float:
        self.asked += 1
        if self.asked <= self.fails:
            raise BatchError("squeue: no answer within 15 s")
        return 5_000.0

    def kill_wait(self) -> float:
        return 30.0

    def comment(self, text: str) -> None: ...


def test_who_was_warned_asks_again_until_there_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "RETRY_S", 0.01)
    batch = Busy(fails=3)
    watch = AllocationWatch(batch, deadline=10_000.0)  # type: ignore[arg-type]
    try:
        watch.ask_now()
        answers, until = list[EndTimeAnswer](), time.monotonic() + 20.0
        while not any(answer.deadline for answer in answers) and time.monotonic() < until:
            answers += watch.take()
            time.sleep(0.005)
        time.sleep(0.1)
        answers += watch.take()
    finally:
        watch.close()
    assert [answer.deadline for answer in answers] == [None, None, None, 5_000.0], "and not any more then"


def test_who_asks_why_while_that_is_being_asked_gets_an_answer_too() -> None:
    batch = Slow()
    watch = AllocationWatch(batch, deadline=10_000.0)  # type: ignore[arg-type]
    reasons: list[EndReason] = []
    try:
        watch.ask_why()
        assert batch.asked.wait(20)
        between = time.monotonic()
        watch.ask_why()
        batch.may_answer.set()
        deadline = time.monotonic() + 20
        while EndReason.CANCELLED not in reasons and time.monotonic() < deadline:
            for answer in watch.take():
                if answer.reason:
                    reasons.append(answer.reason)
                    assert (answer.asked_at > between) == (answer.reason is EndReason.CANCELLED)
            time.sleep(0.01)
    finally:
        watch.close()
    assert reasons == [EndReason.NONE, EndReason.CANCELLED]


# --- node agents -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grace_s", "notice_s"), [(None, 3600.0), (40.0, 40.0)], ids=["by QOS", "by partition"]
)
def test_node_agents_serve_on_in_a_time_of_grace(
    grace_s: float | None, notice_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = SimpleNamespace(preemption=Preemption(grace_s=grace_s, requeues=True))
    batch: Any = SimpleNamespace(kill_wait=lambda: 60.0)
    assert node_agent_times(batch, taken) == {"serve_on_s": 50.0, "notice_s": notice_s}  # type: ignore[arg-type]
    assert node_agent_times(batch, SimpleNamespace(preemption=None))["notice_s"] == 0.0  # type: ignore[arg-type]

    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    agent = NodeAgent.__new__(NodeAgent)
    agent._name, agent._terms, agent._told_at, agent._serve_until = "b", 0, 0.0, float("inf")
    agent._join = SimpleNamespace(shielded=(), serve_on_s=50.0, notice_s=notice_s)  # type: ignore[assignment]
    left: list[str] = []
    agent._go = lambda why, grace_s: left.append(why)  # type: ignore[method-assign]

    def told() -> float:
        reader, writer = os.pipe()
        os.write(writer, bytes([signal.SIGTERM]))
        agent._signalled(reader)
        os.close(reader)
        os.close(writer)
        return agent._serve_until - 1000.0

    assert told() == 50.0 + notice_s
    now = 1005.0
    assert told() == 55.0 and not left  # the end of the grace, or a cancel within it
    assert told() == 55.0 and left == ["third SIGTERM"]


# --- pyslurm in a process of its own ---------------------------------------------------------


# --- all processes were stopped --------------------------------------------------------------


def test_of_an_end_that_may_have_passed_in_a_stop_the_batch_system_is_asked_first() -> None:
    scene = Scene()
    assert scene.ending.after_a_stop(7200.0) == [] and scene.hears() == []
    old = EndTimeAnswer(time.time() - 3600, asked_at=time.monotonic() - 60)
    assert scene.hears(old) == [], "it was asked before"
    (moved,) = scene.hears(EndTimeAnswer(time.time() + 1800))
    assert isinstance(moved, ev.DeadlineMoved) and moved.deadline == pytest.approx(1800, abs=2)
    assert scene.hears() == [] and not scene.driver.machine.deadline.draining


@pytest.mark.parametrize("silent", [False, True])
def test_without_an_answer_after_a_stop_all_is_saved_in_the_time_that_there_is_at_least(
    silent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(kill_wait_s=30.0)
    scene.ending.after_a_stop(7200.0)
    if silent:
        late = time.monotonic() + ending.COMMAND_TIMEOUT_S + 2
        monkeypatch.setattr(time, "monotonic", lambda: late)
    moved, drain = scene.hears(*(() if silent else (EndTimeAnswer(error="no answer"),)))
    assert isinstance(moved, ev.DeadlineMoved) and moved.deadline == pytest.approx(25, abs=2)
    assert isinstance(drain, ev.DrainRequested) and drain.cause == "deadline"
    assert "the batch system does not say when the allocation ends now" in scene.said[-1]


def test_after_a_stop_the_end_is_the_worst_that_it_can_be_where_there_is_time_enough() -> None:
    scene = Scene()
    (moved,) = scene.ending.after_a_stop(600.0)
    assert moved.deadline == pytest.approx(3000.0)
    scene.driver.handle(ev.DrainRequested(at=scene.driver.now, cause="SIGINT"))
    (moved,) = scene.ending.after_a_stop(36000.0)
    assert moved.deadline == pytest.approx(25, abs=2), "it saves, and is not cut off at once"
