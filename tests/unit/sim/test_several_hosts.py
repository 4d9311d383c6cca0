"""Several hosts: which ones a job gets, the same count on each (MARBLE section VII-B.2), and losing one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hpcsched.core.actions import Launch, Suspend, Terminate
from hpcsched.core.model import JobState, Role
from hpcsched.core.resources.gpus import GpusByHost
from hpcsched.sim.bounds import BoundJob, lower_bound_s
from hpcsched.testing.builders import Driver, a_job, a_profile, makespan, simulate

THREE = a_profile("three", [4.0, 6.0, 7.0, 6.5, 6.0, 5.5])
FOUR = a_profile("four", [4.0, 6.0, 7.0, 8.0, 7.0, 6.0])
SIX = a_profile("six", [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
PROFILES = (THREE, FOUR, SIX)


def launches(driver: Driver) -> dict[str, tuple[int, ...]]:
    found = [action for action in driver.actions if isinstance(action, Launch)]
    return {driver.job(action.job_id).spec.name: action.gpus for action in found}


def two_hosts(*jobs, **rest):
    return Driver(*jobs, gpus=6, hosts=2, profiles=PROFILES, **rest)


def test_jobs_fill_the_hosts_in_the_order_they_came():
    driver = two_hosts(a_job("a", "three"), a_job("b", "four"), a_job("c", "three"), a_job("d", "six"))
    # b does not fit beside a, c does; d gets what is left on one host, not pieces of both.
    assert launches(driver) == {"a": (0, 1, 2), "b": (6, 7, 8, 9), "c": (3, 4, 5), "d": (10, 11)}
    assert driver.job("d").role is Role.SECONDARY


def test_a_job_on_two_hosts_gets_the_same_count_on_each():
    driver = two_hosts(a_job("a", "three"), a_job("wide", "four", nodes=2), a_job("b", "three"))
    # Three are left beside a, so three on the other host as well: a secondary.
    assert launches(driver) == {"a": (0, 1, 2), "wide": (3, 4, 5, 6, 7, 8), "b": (9, 10, 11)}
    assert driver.job("wide").role is Role.SECONDARY
    driver.runs("a", "wide", "b")
    assert driver.exits("a", 0, 100, 100) == []  # b still holds what wide would need on the second host
    actions = driver.exits("b", 0, 100, 100)
    assert [type(action) for action in actions] == [Suspend]
    (launch,) = driver.leaves("wide", 10)
    assert launch.gpus == (0, 3, 4, 5, 6, 7, 8, 9)
    assert driver.job("wide").role is Role.PRIMARY


def test_a_job_on_two_hosts_waits_for_room_on_both():
    driver = two_hosts(
        a_job("a", "six"), a_job("b", "three"), a_job("wide", "three", nodes=2, gpus=(2, None))
    )
    assert driver.job("wide").state is JobState.PENDING
    reason = driver.machine.waiting_reason(driver.job("wide"))
    assert str(reason) == "waits for GPUs: needs 2 on each of 2 hosts, 3 free"


def test_a_secondary_moves_to_another_host_where_its_best_count_is_free():
    driver = two_hosts(a_job("a", "four"), a_job("b", "six"), a_job("c", "three"), promote="always")
    assert launches(driver)["c"] == (4, 5)
    driver.runs("a", "b", "c")
    actions = driver.exits("b", 0, 100, 100)
    assert [type(action) for action in actions] == [Suspend]
    assert driver.job("c").target.gpus == (6, 7, 8)
    (launch,) = driver.leaves("c", 10)
    assert launch.gpus == (6, 7, 8)
    assert driver.machine.ledger.free == {4, 5, 9, 10, 11}


def test_a_secondary_stays_on_its_host_when_that_can_give_what_it_wants():
    driver = two_hosts(a_job("a", "four"), a_job("b", "six"), a_job("c", "three"), promote="always")
    driver.runs("a", "b", "c")
    driver.exits("a", 0, 100, 100)
    assert driver.job("c").target.gpus == (0, 4, 5)


def test_a_lost_host_costs_only_its_jobs():
    driver = two_hosts(a_job("a", "six"), a_job("b", "three"), a_job("c", "three"))
    driver.runs("a", "b", "c")
    driver.saves("b", 40)
    driver.reports("b", 55)
    for gpu in range(6, 12):
        actions = driver.lose(gpu)
        assert all(isinstance(action, Terminate) for action in actions)
    assert driver.job("a").state is JobState.RUNNING
    driver.exits("b", 255, saved=40)
    driver.exits("c", 255)
    assert (driver.job("b").state, driver.job("b").step, driver.job("b").repeated) == (
        JobState.SUSPENDED,
        40,
        15,
    )
    assert driver.job("c").state is JobState.PENDING
    driver.exits("a", 0, 100, 100)
    assert driver.job("b").current.gpus == (0, 1, 2)
    assert driver.job("c").current.gpus == (3, 4, 5)


def test_a_job_that_no_set_of_hosts_can_take_any_more_ends_the_run():
    driver = two_hosts(a_job("wide", "three", nodes=2))
    driver.runs("wide")
    for gpu in range(6, 12):
        driver.lose(gpu)
    driver.exits("wide", 255)
    assert driver.machine.stuck


def test_the_profile_for_that_many_hosts_counts():
    both = a_profile("three", [1.0, 2.0, 3.0, 4.0, 3.0, 2.0])
    object.__setattr__(both, "nodes", 2)
    driver = Driver(
        a_job("a", "three"), a_job("w", "three", nodes=2), gpus=8, hosts=2, profiles=(THREE, both)
    )
    assert len(driver.job("a").gpus) == 3
    assert len(driver.job("w").gpus) == 8


def test_exclusive_takes_whole_hosts_one_job_at_a_time():
    driver = Driver(
        a_job("a", "three"),
        a_job("w", "three", nodes=2),
        gpus=6,
        hosts=2,
        policy="exclusive",
        profiles=PROFILES,
    )
    assert launches(driver) == {"a": tuple(range(6))}
    driver.exits("a", 0, 100, 100)
    assert launches(driver)["w"] == tuple(range(12))


def test_simulated_on_two_hosts():
    jobs = [a_job(f"j{i}", "six", 600) for i in range(4)]
    machine, _ = simulate(jobs, PROFILES, gpus=6, nodes=2)
    assert makespan(machine) == 200.0
    bound = BoundJob(profile=SIX, steps=600)
    assert lower_bound_s([bound] * 4, 6, 2) == 200.0
    wide = BoundJob(profile=SIX, steps=600, nodes=2)
    assert lower_bound_s([wide] * 4, 6, 2) == 400.0


@given(
    free=st.lists(st.integers(0, 6), min_size=1, max_size=4),
    own=st.lists(st.integers(0, 3), min_size=4, max_size=4),
    wanted=st.integers(1, 8),
    nodes=st.integers(1, 4),
)
def test_rooms_give_the_most_there_is(free, own, wanted, nodes):
    rooms = GpusByHost({f"h{i}": count for i, count in enumerate(free)})
    mine = {f"h{i}": count for i, count in enumerate(own) if count and i < len(free)}
    count, hosts = rooms.pick(wanted, nodes, mine)
    sums = sorted((f + mine.get(f"h{i}", 0) for i, f in enumerate(free)), reverse=True)
    best = sums[nodes - 1] if nodes <= len(sums) else 0
    assert count == min(wanted, best)
    assert len(set(hosts)) == len(hosts) == (nodes if count else 0)
    before = rooms.left
    rooms.take(hosts, count, mine)
    assert before - rooms.left == sum(max(0, count - mine.get(host, 0)) for host in hosts)


def test_of_the_hosts_that_fit_its_own_come_first_then_the_fullest_then_the_first():
    assert GpusByHost({"a": 6, "b": 3, "c": 4}).pick(3, 1) == (3, ("b",))
    assert GpusByHost({"a": 6, "b": 6}).pick(3, 1) == (3, ("a",))
    assert GpusByHost({"a": 3, "b": 2}).pick(3, 1, {"b": 1}) == (3, ("b",))
    assert GpusByHost({"a": 6, "b": 3, "c": 4}).pick(3, 2) == (3, ("b", "c"))
