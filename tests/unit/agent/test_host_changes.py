"""What node agents tell of their hosts becomes events: who has come, and whose end has moved."""

from __future__ import annotations

import time
from typing import Any

import pytest

from hpcsched.agent.clock import RunClock
from hpcsched.agent.host_changes import HostChanges
from hpcsched.core import events as ev
from hpcsched.core.model import Device
from hpcsched.testing.builders import Driver, a_profile


class Nodes:
    """Hosts that come, and when each ends (monotonic)."""

    def __init__(self) -> None:
        self.new: list[Any] = []
        self.known: dict[str, float | None] = {}

    def lost(self) -> dict[str, str]:
        return {}

    def come(self) -> list[Any]:
        new, self.new = self.new, []
        return new

    def ends(self) -> dict[str, float | None]:
        return self.known


@pytest.mark.parametrize("speed", [1.0, 50.0])
def test_who_comes_and_when_they_end(speed: float) -> None:
    driver, nodes = Driver(gpus=1), Nodes()
    clock = RunClock(speed=speed)
    clock.now = lambda: 100.0  # type: ignore[method-assign]
    known = ev.ProfilesLoaded(at=100.0, profiles=(a_profile("m", [1.0]),), gpu_type="test")
    changes = HostChanges(nodes, driver.machine, clock, lambda devices, at: (known,))  # type: ignore[arg-type]
    assert changes.events() == []
    device = Device(index=1, host="far", kind="test", handle="0")
    nodes.new, nodes.known = [((device,), ())], {"far": None}
    loaded, joined = changes.events()
    assert loaded is known, "before somebody starts there"
    assert joined == ev.HostsJoined(at=100.0, devices=(device,))
    driver.machine.handle(joined)
    assert changes.events() == []
    nodes.known = {"far": time.monotonic() + 60.0}
    (moved,) = changes.events()
    assert isinstance(moved, ev.HostEndMoved) and moved.host == "far"
    assert moved.end == pytest.approx(100.0 + 60.0 * speed, abs=5.0 * speed)
    driver.machine.handle(moved)
    nodes.known = {"far": time.monotonic() + 59.5}
    assert changes.events() == [], "messages take their time"
    nodes.known = {"far": None}
    assert changes.events() == [ev.HostEndMoved(at=100.0, host="far", end=None)]
