"""What the head knows of a host by what its node agent says."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from hpcsched.batch.base import AllocatedHost
from hpcsched.devices import Sample
from hpcsched.launch.remote import protocol
from hpcsched.launch.remote.host import RemoteHost
from hpcsched.launch.remote.launcher import RemoteLauncher
from hpcsched.launch.remote.sessions import SLEW_S, STALL_S, HeadSessions
from hpcsched.testing.builders import some_devices


@pytest.fixture
def sessions() -> HeadSessions:
    return HeadSessions(["n1"], grace_s=1.0, say=lambda line: None)


def test_a_device_without_a_reading_counts_as_healthy() -> None:
    sick = protocol.Reading(healthy=False, why="test")
    host = RemoteHost("n1", readings=(sick,))
    assert [host.reading(device) for device in (0, 1)] == [sick, protocol.Reading()]


def test_samples_are_as_old_as_the_node_agent_says(tmp_path: Path) -> None:
    launcher = RemoteLauncher(
        hosts=[AllocatedHost(name="n1")],
        commands=lambda hosts, argv: [],
        run_id="r",
        run_dir=tmp_path,
        devices="cuda",
        address="127.0.0.1",
        make_sample=Sample,
        say=lambda line: None,
    )
    launcher._inventory = some_devices(1)
    launcher.skew_s["n1"] = 0.0
    readings = (protocol.Reading(0.5, 100.0),)
    for age_s in (0.0, 40.0):
        launcher._told(launcher._nodes["n1"], protocol.Beat(0.0, readings, age_s))
        assert launcher.sample() == [Sample(gpu=0, utilisation=0.5, memory_mib=100.0, age_s=age_s)]


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
