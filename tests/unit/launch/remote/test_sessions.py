"""What the head knows of a host by what its node agent says."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hpcsched.launch.remote import protocol
from hpcsched.launch.remote.host import RemoteHost
from hpcsched.launch.remote.sessions import SLEW_S, STALL_S, HeadSessions


@pytest.fixture
def sessions() -> HeadSessions:
    return HeadSessions(["n1"], grace_s=1.0, say=lambda line: None)


def test_a_device_without_a_reading_counts_as_healthy() -> None:
    sick = protocol.Reading(healthy=False, why="test")
    host = RemoteHost("n1", readings=(sick,))
    assert [host.reading(device) for device in (0, 1)] == [sick, protocol.Reading()]


def test_how_far_a_clock_is_ahead_falls_slowly_and_rises_at_once(sessions: HeadSessions) -> None:
    host = RemoteHost("n1")
    sessions.skew_s["n1"] = 5.0
    sessions._told(host, protocol.Beat(wall=0.0, readings=()))  # a message that took long
    assert sessions.skew_s["n1"] == 5.0 - SLEW_S
    sessions._told(host, protocol.Beat(wall=1e12, readings=()))
    assert sessions.skew_s["n1"] > 1e9


@pytest.mark.parametrize(("away_s", "counted_s"), [(STALL_S + 9, 0.0), (STALL_S / 2, STALL_S / 2)])
def test_the_time_that_nobody_listened_is_no_silence(
    sessions: HeadSessions, monkeypatch: pytest.MonkeyPatch, away_s: float, counted_s: float
) -> None:
    clock = SimpleNamespace(monotonic=lambda: 100.0)
    monkeypatch.setattr("hpcsched.launch.remote.sessions.time", clock)
    host = sessions._nodes["n1"]
    sessions._pumped, host.heard_at = 100.0 - away_s, 99.0 - away_s
    sessions._timers_due = 200.0
    sessions._head_socket = SimpleNamespace(receive=list, broken=list)
    sessions.pump()
    assert 100.0 - host.heard_at == pytest.approx(1.0 + counted_s)
