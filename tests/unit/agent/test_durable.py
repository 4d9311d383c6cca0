"""States on their way from memory to disk: how long the end of a run waits for them."""

from __future__ import annotations

import signal
import time
from types import SimpleNamespace
from typing import Any

import pytest

from hpcsched.agent import durable
from hpcsched.agent.clock import RunClock
from hpcsched.agent.durable import Durability


class Wait:
    """A wait for one state, on a clock of its own, as seconds go by one by one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, takes_s: float, leave_by: float = 1e9) -> None:
        self.now, self.said, self.signals = 1000.0, list[str](), dict[float, bytes]()
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(time, "sleep", self._sleep)
        until = self.now + takes_s
        machine: Any = SimpleNamespace(deadline=SimpleNamespace(leave_by=leave_by))
        effects: Any = SimpleNamespace(keeping=lambda: {1} if self.now < until else set())
        self.clock = RunClock()
        self.durability = Durability(effects, machine, self.clock, self.said.append)

    def _sleep(self, _: float) -> None:
        self.now += 1.0

    def lasts_s(self) -> float:
        began = self.now
        self.durability.wait(lambda: self.signals.pop(self.now - began, b""), lambda: None)
        return self.now - began


def test_it_ends_when_all_is_on_disk(monkeypatch):
    wait = Wait(monkeypatch, takes_s=100.0)
    assert wait.lasts_s() == 100.0
    assert len(wait.said) == 1 and "waiting for that" in wait.said[0]


def test_nothing_is_said_where_nothing_is_to_be_waited_for(monkeypatch):
    wait = Wait(monkeypatch, takes_s=0.0)
    assert (wait.lasts_s(), wait.said) == (0.0, [])


@pytest.mark.parametrize(
    ("told", "lasts_s"),
    [
        ({5.0: bytes([signal.SIGINT])}, 6.0),
        ({5.0: bytes([signal.SIGTERM])}, 5.0 + durable.TOLD_TO_END_S + 1.0),
        ({5.0: bytes([signal.SIGHUP]), 9.0: bytes([signal.SIGTERM])}, 5.0 + durable.TOLD_TO_END_S + 1.0),
        ({5.0: bytes([signal.SIGCONT, signal.SIGUSR1])}, 100.0),
    ],
)
def test_who_asks_it_to_end_waits_no_longer_than_is_needed(monkeypatch, told, lasts_s):
    wait = Wait(monkeypatch, takes_s=100.0)
    wait.signals = told
    assert wait.lasts_s() == lasts_s
    assert ("leaving before all states were on disk" in wait.said[-1]) is (lasts_s < 100.0)


def test_it_has_an_end_by_itself_and_with_the_allocation(monkeypatch):
    assert Wait(monkeypatch, takes_s=1e9).lasts_s() == durable.WITHIN_S + 1.0
    clock = Wait(monkeypatch, takes_s=1e9, leave_by=20.0)
    assert clock.lasts_s() == 21.0


def test_its_time_begins_anew_after_something_else_was_to_be_done(monkeypatch):
    wait = Wait(monkeypatch, takes_s=1e9)
    assert not wait.durability.done()
    wait.now += durable.WITHIN_S - 10.0
    wait.durability.put_off()
    assert not wait.durability.done()
    wait.now += 20.0
    assert not wait.durability.done()
    wait.now += durable.WITHIN_S
    assert wait.durability.done()


def test_a_time_in_which_all_was_stopped_is_no_wait(monkeypatch):
    wait = Wait(monkeypatch, takes_s=2 * durable.WITHIN_S)
    assert not wait.durability.done()
    wait.now += 1.5 * durable.WITHIN_S
    wait.clock.skip(1.5 * durable.WITHIN_S)
    assert not wait.durability.done()
    assert wait.said == []
