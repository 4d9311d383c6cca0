"""Whose processes may live where no node agent has come from: they wait."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from hpcsched.agent.taking_over import devices_before, ends_before, take_over
from hpcsched.core import events as ev
from hpcsched.core.model import Device
from hpcsched.testing.builders import Driver, a_job, a_profile


def a_run() -> Driver:
    """Job a on host n1, b on far and c on wide, which ends in ten minutes."""
    profile = a_profile("m", [1.0, 2.0], start_s=1.0, suspend_s=1.0)
    jobs = (a_job(name, "m", gpus=1) for name in "abc")
    driver = Driver(*jobs, gpus=1, profiles=(profile,), deadline=3600.0)
    for index, (host, ends) in enumerate({"far": {}, "wide": {"wide": 600.0}}.items(), 1):
        device = Device(index=index, host=host, kind="test", handle="0")
        driver.tell(ev.HostsJoined, devices=(device,), ends=ends)
    driver.runs("a", "b", "c")
    return driver


def test_states_that_go_to_disk_on_other_hosts_are_waited_for() -> None:
    pumps = list[int]()
    remote: Any = SimpleNamespace(
        survivors=[],
        silence_s=100.0,
        is_up=lambda host: True,
        guests=SimpleNamespace(ended_at=lambda ends: None),
        keeping=lambda: {1} if len(pumps) < 3 else set(),
        pump=lambda: pumps.append(1),
    )
    site: Any = SimpleNamespace(speed=1.0)
    take_over(a_run().machine, remote, site, grace_s=60.0, say=lambda line: None)
    assert len(pumps) == 3
    pumps.clear()
    take_over(a_run().machine, remote, site, grace_s=0.0, say=lambda line: None)
    assert not pumps, "no longer than there is to save"


def unsure(driver: Driver, *up: str) -> set[int]:
    remote: Any = SimpleNamespace(
        survivors=[],
        silence_s=100.0,
        is_up=lambda host: host in up,
        guests=SimpleNamespace(ended_at=lambda ends: None),
        keeping=set,
        pump=lambda: None,
    )
    site: Any = SimpleNamespace(speed=1.0)
    taken = take_over(driver.machine, remote, site, grace_s=1.0, say=lambda line: None)
    assert set(taken.unsure_s.values()) <= {100.0}
    return set(taken.unsure_s)


def test_jobs_on_hosts_that_have_not_come_wait() -> None:
    assert unsure(a_run(), "n1", "far", "wide") == set()
    assert unsure(a_run(), "wide") == {1, 2}


def test_so_do_those_on_hosts_that_the_agent_before_had_lost_already() -> None:
    driver = a_run()
    driver.lose(1)
    assert [device.host for device in devices_before(driver.machine)] == ["n1", "wide"]
    assert unsure(driver, "n1", "wide") == {2}


def test_each_host_ends_as_it_did() -> None:
    driver = a_run()
    life, now = driver.machine.run.lives[-1], time.time()
    since_s = now - time.monotonic()
    assert ends_before(driver.machine, 1.0) == {
        "n1": pytest.approx(life.wall + 3600.0 - since_s, abs=0.5),
        "wide": pytest.approx(life.wall + 600.0 - since_s, abs=0.5),
    }
