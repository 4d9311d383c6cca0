"""GPU time that nobody used: by host, over lives, and what of it was left over."""

from __future__ import annotations

import pytest
from msgspec import UNSET

from hpcsched.cli.run.results import result_of
from hpcsched.core import events as ev
from hpcsched.core.transitions.outcome import RELEASE
from hpcsched.report.idle import idle_of
from hpcsched.report.tables import headline
from hpcsched.testing.builders import Driver, a_job, a_profile

PROFILES = (a_profile("m", [1.0, 2.0]),)


def test_idle_and_held_time_make_up_all_of_it() -> None:
    driver = Driver(a_job("a", "m", gpus=1), a_job("b", "m", gpus=2), gpus=2, hosts=2, profiles=PROFILES)
    driver.runs("a", "b")
    driver.now = 1800.0
    driver.submit(a_job("c", "m", gpus=1))
    driver.runs("c")
    driver.now = 3600.0
    for name in ("a", "b", "c"):
        driver.exits(name, 0)
    idle, result = idle_of(driver.machine), result_of(driver.machine)
    assert idle.gpu_hours == pytest.approx(0.5), "one GPU until c came"
    assert idle.gpu_hours + result.gpu_hours == pytest.approx(4.0)
    assert idle.left_over_gpu_hours == pytest.approx(0.5), "nothing waited for it"
    assert {host: (one.gpus, one.gpu_hours) for host, one in idle.hosts.items()} == {
        "n1": (2, pytest.approx(0.5)),
        "n2": (2, 0.0),
    }
    assert result.idle == idle and result_of(driver.machine, keep_jobs=False).idle is UNSET


def test_gpus_that_wait_for_a_larger_job_are_idle_and_not_left_over() -> None:
    driver = Driver(a_job("a", "m", gpus=1), a_job("b", "m", gpus=2), gpus=2, profiles=PROFILES)
    driver.runs("a")
    driver.now = 3600.0
    driver.exits("a", 0)
    driver.runs("b")
    driver.now = 7200.0
    driver.exits("b", 0)
    idle = idle_of(driver.machine)
    assert (idle.gpu_hours, idle.left_over_gpu_hours) == (pytest.approx(1.0), 0.0)


def test_what_was_given_back_is_no_idle_time_and_counts_not_for_utilisation() -> None:
    jobs = (a_job(name, "m", gpus=2) for name in ("a", "b"))
    driver = Driver(*jobs, gpus=2, hosts=2, profiles=PROFILES, release_after_s=600.0)
    driver.runs("a", "b")
    driver.now = 3000.0
    driver.exits("b", 0)
    driver.now = 3600.0
    driver.tell(ev.TimerFired, key=RELEASE)
    driver.tell(ev.HostsReleased, hosts=("n2",))
    driver.now = 7200.0
    driver.exits("a", 0)
    idle, result = idle_of(driver.machine), result_of(driver.machine)
    assert idle.hosts["n2"].gpu_hours == pytest.approx(2 * 600 / 3600)
    assert idle.hosts["n2"].given_back_s == 3600.0
    assert idle.given_back_gpu_hours == pytest.approx(2.0)
    assert result.gpus == 4 and result.utilisation == pytest.approx((4 + 2 * 3000 / 3600) / 6)
    assert ", utilisation 94%, 2.00 GPU-hours given back" in headline(result)
    assert result.lower_bound_s == pytest.approx(100 / 2.0), "of all the GPUs that there were"
