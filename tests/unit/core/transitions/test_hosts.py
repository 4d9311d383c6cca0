"""Hosts that join a run which lives, and end before it does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from hpcsched.core import events as ev
from hpcsched.core.actions import Launch, ReleaseHosts, Resize, SetTimer, Suspend, Terminate
from hpcsched.core.model import Device, HostCores, JobState
from hpcsched.core.reasons import Why
from hpcsched.core.transitions.hosts import Joined
from hpcsched.core.transitions.outcome import HOSTS
from hpcsched.report.idle import idle_of, most_gpus, there_gpu_s
from hpcsched.testing.builders import Driver, a_core_job, a_job, a_profile

MODEL = a_profile("m", [1.0, 2.0, 3.0, 4.0], start_s=10.0, suspend_s=5.0, resume_s=8.0)


def joins(
    driver: Driver, host: str = "far", gpus: int = 2, end: float | None = 1000.0, **rest: Any
) -> Sequence[Any]:
    """A host joins, with an end of its own."""
    first = max(device.index for device in driver.machine.hosts.devices[-1]) + 1
    devices = [Device(index=first + i, host=host, kind="test", handle=str(i)) for i in range(gpus)]
    ends = {} if end is None else {host: end}
    return driver.tell(ev.HostsJoined, devices=tuple(devices), ends=ends, **rest)


def due(driver: Driver) -> float:
    return [action.due for action in driver.actions if isinstance(action, SetTimer) and action.key == HOSTS][
        -1
    ]


def rings(driver: Driver) -> Sequence[Any]:
    driver.now = due(driver)
    return driver.tell(ev.TimerFired, key=HOSTS)


def kinds(actions: Sequence[Any]) -> list[type]:
    return [type(action) for action in actions if not isinstance(action, SetTimer)]


def test_a_job_that_waits_starts_on_a_host_that_joins() -> None:
    driver = Driver(a_job("a", "m", gpus=2), a_job("b", "m", gpus=2), gpus=2, profiles=(MODEL,))
    driver.runs("a")
    driver.now = 50.0
    (launch,) = [action for action in joins(driver) if isinstance(action, Launch)]
    assert (launch.job_id, launch.gpus) == (driver.job("b").id, (2, 3))
    assert driver.machine.hosts.joined == [Joined("far", (2, 3), 50.0)]
    assert [device.host for device in driver.machine.hosts.there_at_first] == ["n1", "n1"]


def test_devices_that_are_there_already_cannot_join() -> None:
    driver = Driver(gpus=2, profiles=(MODEL,))
    with pytest.raises(ValueError, match=r"\[1\] are there already"):
        driver.tell(ev.HostsJoined, devices=(Device(index=1, host="far", kind="test", handle="0"),))


def test_saving_begins_in_time_on_a_host_that_ends_and_its_jobs_go_on_elsewhere() -> None:
    driver = Driver(a_job("a", "m", gpus=2), a_job("b", "m", gpus=2), gpus=2, profiles=(MODEL,))
    driver.runs("a")
    joins(driver)
    driver.runs("b")
    assert due(driver) == 1000 - 60 - 5, "the reserve, and the save of the one job there"
    (asked,) = [action for action in rings(driver) if isinstance(action, Suspend)]
    assert (asked.job_id, asked.quick) == (driver.job("b").id, False), "the memory of that host will be gone"
    assert driver.job("b").story[-1].reason.why is Why.HOST_ENDS
    assert driver.job("a").state is JobState.RUNNING, "its host goes on"
    left = driver.leaves("b", 100)
    assert [action.hosts for action in left if isinstance(action, ReleaseHosts)] == [("far",)]
    assert driver.job("b").state is JobState.SUSPENDED
    driver.tell(ev.HostsReleased, hosts=("far",))
    assert driver.machine.hosts.joined == [Joined("far", (2, 3), 0.0, left=driver.now)]
    (again,) = [action for action in driver.exits("a", 0) if isinstance(action, Launch)]
    assert (again.job_id, again.gpus, again.resume) == (driver.job("b").id, (0, 1), True)


def test_nothing_starts_where_it_would_not_reach_a_checkpoint() -> None:
    driver = Driver(gpus=1, profiles=(MODEL,))
    joins(driver, gpus=4, end=75.0)
    actions = driver.submit(a_job("a", "m", gpus=1), a_job("b", "m", gpus=1))
    assert [action.gpus for action in actions if isinstance(action, Launch)] == [(0,)]
    assert driver.job("b").state is JobState.PENDING
    actions = driver.tell(ev.HostEndMoved, host="far", end=500.0)
    assert [action.gpus for action in actions if isinstance(action, Launch)] == [(1,)]


def test_a_job_on_two_hosts_goes_on_in_place_where_its_first_rank_stays() -> None:
    driver = Driver(a_job("a", "m", gpus=2, nodes=2), gpus=2, profiles=(MODEL,))
    joins(driver)
    driver.runs("a", in_place=True)
    joins(driver, "third", end=None)
    (resize,) = [action for action in rings(driver) if isinstance(action, Resize)]
    assert resize.gpus == (0, 1, 4, 5)
    driver.resized("a", 50)
    assert driver.job("a").current.gpus == (0, 1, 4, 5)
    assert [a.hosts for a in driver.actions if isinstance(a, ReleaseHosts)] == [("far",)]


def test_an_uneven_job_goes_on_with_as_many_of_another_host_as_it_loses() -> None:
    strategy = {"kind": "vsw", "local_batch": 8, "global_batch": [8, 64]}
    driver = Driver(gpus=1, profiles=(MODEL,))
    joins(driver, gpus=3)
    driver.submit(a_job("a", "m", gpus=2, nodes=2, strategy=strategy))
    assert driver.job("a").gpus == (0, 1, 2, 3)
    driver.runs("a", in_place=True)
    joins(driver, "third", gpus=2, end=None)
    joins(driver, "fourth", gpus=3, end=None)
    (resize,) = [action for action in rings(driver) if isinstance(action, Resize)]
    assert resize.gpus == (0, 6, 7, 8)


def test_a_job_whose_first_rank_is_there_saves_and_waits() -> None:
    driver = Driver(gpus=2, profiles=(MODEL,))
    joins(driver)
    driver.submit(a_job("a", "m", gpus=2), a_job("b", "m", gpus=2))
    driver.runs("a", "b", in_place=True)
    assert kinds(rings(driver)) == [Suspend]


def test_an_end_that_moves_away_lets_the_host_be_used_again() -> None:
    driver = Driver(a_job("a", "m", gpus=2), a_job("b", "m", gpus=2), gpus=2, profiles=(MODEL,))
    driver.runs("a")
    joins(driver)
    driver.runs("b")
    rings(driver)
    driver.tell(ev.HostEndMoved, host="far", end=5000.0)
    assert set(driver.machine.ledger.devices) == {0, 1, 2, 3}
    (again,) = [action for action in driver.leaves("b", 100) if isinstance(action, Launch)]
    assert again.gpus == (2, 3)
    assert not [action for action in driver.actions if isinstance(action, ReleaseHosts)]


def test_an_end_that_comes_at_once_has_jobs_leave_at_once_and_then_end() -> None:
    driver = Driver(a_job("a", "m", gpus=2), a_job("b", "m", gpus=2), gpus=2, profiles=(MODEL,))
    driver.runs("a")
    joins(driver, end=None)
    driver.runs("b")
    driver.now = 100.0
    driver.tell(ev.HostEndMoved, host="far", end=130.0)
    assert kinds(rings(driver)) == [Suspend] and driver.now == 100.0
    assert kinds(rings(driver)) == [Terminate] and driver.now == 120.0, "of half the time left a third"
    assert driver.job("b").story[-1].reason.why is Why.TIME_IS_UP


def test_a_program_that_is_not_ready_is_told_to_end_and_starts_elsewhere() -> None:
    driver = Driver(a_job("a", "m", gpus=2), a_job("b", "m", gpus=2), gpus=2, profiles=(MODEL,))
    driver.runs("a")
    joins(driver)
    assert kinds(rings(driver)) == [Terminate]
    driver.exits("b", 143)
    assert driver.job("b").state is JobState.PENDING and driver.job("b").failures == 0


def test_cores_come_and_go_too() -> None:
    driver = Driver(a_core_job("c", 2.0), gpus=1, kind="test", profiles=(MODEL,))
    joins(driver, gpus=1, cores=(HostCores(host="far", own=(0, 1, 2, 3)),))
    job = driver.job("c")
    assert {seat.host for seat in job.current.seats} == {"far"}
    driver.runs("c")
    assert kinds(rings(driver)) == [Suspend]
    driver.leaves("c", 10)
    assert job.state is JobState.SUSPENDED
    assert [a.hosts for a in driver.actions if isinstance(a, ReleaseHosts)] == [("far",)]


def test_a_run_that_drains_has_all_leave_anyway() -> None:
    driver = Driver(a_job("a", "m", gpus=2), a_job("b", "m", gpus=2), gpus=2, profiles=(MODEL,))
    driver.runs("a")
    joins(driver)
    driver.runs("b")
    driver.tell(ev.DrainRequested, cause="SIGINT")
    assert kinds(rings(driver)) == []


def test_the_next_agent_begins_without_them() -> None:
    driver = Driver(a_job("a", "m", gpus=2), gpus=2, profiles=(MODEL,))
    joins(driver)
    driver.start_agent(gpus=2)
    assert set(driver.machine.ledger.devices) == {0, 1}
    assert driver.machine.hosts.end_of("far") is None


def test_idle_time_counts_from_when_a_host_came_until_it_left() -> None:
    driver = Driver(a_job("a", "m", gpus=2), gpus=2, profiles=(MODEL,))
    driver.runs("a")
    driver.now = 3600.0
    joins(driver, end=9000.0)
    rings(driver)
    driver.tell(ev.HostsReleased, hosts=("far",))
    hours = (driver.now - 3600) / 3600
    driver.now = 20_000.0
    driver.exits("a", 0)
    idle = idle_of(driver.machine)
    assert idle.hosts["far"].gpu_hours == pytest.approx(2 * hours)
    assert idle.hosts["n1"].gpu_hours == 0.0
    assert sum(there_gpu_s(driver.machine, 20_000.0).values()) == pytest.approx(2 * 20_000 + 2 * hours * 3600)
    assert most_gpus(driver.machine) == 4


def test_saving_begins_by_what_is_known_of_saves_now_whoever_asked_before() -> None:
    driver = Driver(a_job("a", "m", gpus=2), a_job("b", "m", gpus=2), gpus=2, profiles=(MODEL,))
    driver.submit(a_job("c", "m", gpus=2))
    driver.runs("a")
    joins(driver)
    driver.runs("b")
    assert due(driver) == 1000 - 60 - 5
    driver.machine.rooms.starts_now(driver.job("c"))  # as `status` asks, between two events
    slower = a_profile("m", [1.0, 2.0, 3.0, 4.0], start_s=10.0, suspend_s=50.0)
    driver.tell(ev.ProfilesLoaded, profiles=(slower,))
    assert due(driver) == 1000 - 60 - 50
