"""The head's own allocation ends: what that means while others last longer, and while none does."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from hpcsched.agent.allocation.moving import LEAVE_S, LONGER_S, Moving
from hpcsched.agent.clock import RunClock
from hpcsched.core import events as ev
from hpcsched.core.model import Device
from hpcsched.testing.builders import Driver, a_job, a_profile

NOW = 1000.0


class Nodes:
    """The head's host n1, and hosts that others have lent: when they end (run's clock) and who is up."""

    def __init__(self) -> None:
        self.end: dict[str, float | None] = {}
        self.lent: dict[str, Sequence[str]] = {"": ["n1"]}
        self.down: set[str] = set()
        self.with_us: Sequence[str] = ()

    def ends(self) -> dict[str, float | None]:
        now = time.monotonic()
        return {host: None if end is None else now + end - NOW for host, end in self.end.items()}

    def lent_by(self, token: str) -> Sequence[str]:
        return self.lent.get(token, ())

    def end_of(self, host: str) -> float | None:
        return None if (end := self.end.get(host)) is None else time.monotonic() + end - NOW

    def is_up(self, host: str) -> bool:
        return host not in self.down

    def ends_with_us(self, hosts: Sequence[str]) -> None:
        self.with_us = hosts


class Scene:
    def __init__(self, *, deadline: float | None, token: str = "", lent: Sequence[str] = ()) -> None:
        profile = a_profile("m", [1.0, 2.0], start_s=1.0, suspend_s=1.0)
        self.driver = Driver(a_job("a", "m"), gpus=1, profiles=(profile,), deadline=deadline)
        self.nodes, self.said = Nodes(), list[str]()
        self.ending: Any = SimpleNamespace(at=deadline, told_end=None)
        self.driver.now = NOW
        clock = RunClock()
        clock.now = lambda: self.driver.now  # type: ignore[method-assign]
        self.moving = Moving(
            self.nodes, self.driver.machine, clock, self.ending, token=token, lent=lent, tell=self.said.append
        )

    def joins(self, end: float | None, host: str = "far") -> None:
        self.nodes.end[host] = end
        device = Device(index=len(self.driver.machine.ledger.devices), host=host, kind="test", handle="0")
        self.tell(
            ev.HostsJoined(at=self.driver.now, devices=(device,), ends={} if end is None else {host: end})
        )

    def tell(self, *events: ev.Event) -> None:
        for event in events:
            self.driver.machine.handle(event)

    def look(self) -> list[ev.Event]:
        events = self.moving.events()
        self.tell(*events)
        return events

    @property
    def ends(self) -> tuple[float | None, float | None]:
        """Of the run, and of the head's own host before it."""
        return self.driver.machine.deadline.at, self.driver.machine.hosts.end_of("n1")


def near(at: float) -> Any:
    return pytest.approx(at, abs=1.0)


def test_while_others_last_longer_the_run_ends_with_them_and_the_own_hosts_before() -> None:
    scene = Scene(deadline=NOW + 600)
    assert scene.look() == [] and scene.ends == (NOW + 600, None)
    scene.joins(NOW + 600 + LONGER_S / 2)
    assert scene.look() == [], "not worth a move"
    scene.nodes.end["far"] = NOW + 3600
    assert len(scene.look()) == 2 and scene.ends == (near(NOW + 3600), NOW + 600)
    assert scene.nodes.with_us == ["n1"] and scene.look() == []
    scene.nodes.end["far"] = None
    assert len(scene.look()) == 1 and scene.ends == (None, NOW + 600)


def test_when_the_others_have_gone_the_run_ends_with_the_head_again() -> None:
    scene = Scene(deadline=NOW + 600)
    scene.joins(NOW + 3600)
    scene.look()
    del scene.nodes.end["far"]
    scene.look()
    assert scene.ends == (NOW + 600, None) and scene.nodes.with_us == ()
    scene.driver.now = NOW + 599
    assert not scene.moving.due()


def test_it_leaves_when_nothing_is_left_on_its_hosts_or_the_time_is_up() -> None:
    scene = Scene(deadline=NOW + 600)
    scene.joins(NOW + 3600)
    scene.look()
    assert not scene.moving.due()
    scene.driver.now = NOW + 600 - LEAVE_S / 2
    scene.nodes.end["far"] = NOW + 4200  # as the clock here goes by leaps
    assert scene.moving.due()
    scene.driver.now = NOW
    assert not scene.moving.due()
    scene.nodes.down.add("n1")
    assert scene.moving.due()


def test_a_drain_of_the_batch_system_is_of_its_own_hosts_alone() -> None:
    scene = Scene(deadline=NOW + 600)
    drain = ev.DrainRequested(at=NOW, cause="batch: preempted")
    assert scene.moving.instead([drain]) == [drain]
    scene.joins(NOW + 3600)
    scene.look()
    assert scene.moving.instead([drain]) == [] and "go there" in scene.said[0]
    scene.look()
    own = scene.driver.machine.hosts.end_of("n1")
    assert own is not None and own < NOW + 600


def test_its_hosts_take_nothing_new_from_a_signal_on_that_may_mean_the_end() -> None:
    scene = Scene(deadline=NOW + 600)
    scene.joins(NOW + 3600)
    scene.look()
    scene.ending.told_end = NOW + 25.0
    scene.look()
    assert scene.driver.machine.hosts.end_of("n1") == NOW + 25.0
    scene.driver.tell(ev.TimerFired, key=("hosts", 0, 0))
    assert "n1" in scene.driver.machine.hosts.closing
    scene.ending.told_end = None
    scene.look()
    assert scene.ends == (near(NOW + 3600), NOW + 600) and "n1" not in scene.driver.machine.hosts.closing


@pytest.mark.parametrize("token", ["t", "other"])
def test_a_head_in_an_allocation_that_joined_goes_by_the_ends_that_it_tells(token: str) -> None:
    scene = Scene(deadline=None, token=token)
    scene.joins(NOW + 600)
    scene.nodes.lent["t"] = ["far"]
    if token == "other":  # its own has not spoken yet
        assert scene.look() == [] and not scene.moving.due()
        return
    scene.look()
    assert scene.ends == (near(NOW + 600), None)
    scene.joins(NOW + 3600, "wide")
    scene.look()
    assert scene.ends[0] == near(NOW + 3600)
    assert not scene.moving.due()
    scene.nodes.down.add("far")
    assert scene.moving.due()


def test_a_head_whose_hosts_left_as_it_began_leaves_too() -> None:
    scene = Scene(deadline=None, token="t", lent=["far"])
    scene.joins(NOW + 600)
    scene.joins(NOW + 3600, "wide")
    scene.nodes.down.add("far")
    assert scene.moving.due()
    assert not Scene(deadline=None, token="t", lent=["far"]).moving.due()
