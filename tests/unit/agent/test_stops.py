"""A stop of all processes is noticed wherever it strikes, and a slow disk is none."""

from __future__ import annotations

import selectors
from typing import Any

import pytest

from hpcsched.agent import stops
from hpcsched.agent.stops import Stops


class Clock:
    """A clock by hand, and a selector whose waits take as long as the test says."""

    def __init__(self) -> None:
        self.now, self.takes_s = 100.0, 0.0

    def monotonic(self) -> float:
        return self.now

    def select(self, timeout_s: float) -> list[Any]:
        self.now += self.takes_s
        return []


@pytest.mark.parametrize(
    ("works_s", "waits_s", "continued", "stopped_s"),
    [
        (0.1, 1.0, False, 0.0),
        (0.1, 21.0, False, 20.0),  # by a freezer: no signal tells
        (0.1, 21.0, True, 20.0),
        (0.1, 5.9, True, 0.0),  # Slurm adds SIGCONT to other signals
        (20.0, 1.0, True, 20.0),
        (20.0, 1.0, False, 0.0),  # a slow disk
        (4.9, 1.0, True, 0.0),
        (7.0, 31.0, True, 30.0),
    ],
)
def test_a_stop_is_noticed_wherever_it_strikes(
    works_s: float, waits_s: float, continued: bool, stopped_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock: Any = Clock()
    monkeypatch.setattr(stops, "time", clock)
    seen = Stops()
    clock.now += works_s
    clock.takes_s = waits_s
    assert seen.wait(clock, 1.0) == []
    assert seen.lasted_s(continued=continued) == pytest.approx(stopped_s)


def test_what_was_before_the_last_wait_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    clock: Any = Clock()
    monkeypatch.setattr(stops, "time", clock)
    seen = Stops()
    clock.now += 20.0
    seen.wait(clock, 0.0)
    seen.wait(clock, 0.0)
    assert seen.lasted_s(continued=True) == 0.0


def test_a_wait_gives_what_is_ready() -> None:
    with selectors.DefaultSelector() as selector:
        assert Stops().wait(selector, 0.0) == []
