"""Jobs of stream workers over several hosts that give them unequally many GPUs."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcsched.core import events as ev
from hpcsched.core.actions import Resize
from hpcsched.core.model import Device, JobSpec
from hpcsched.core.needs import Needs
from hpcsched.core.resources.gpus import GpusByHost, shares
from hpcsched.policy import POLICIES
from hpcsched.testing.builders import Planned, a_job, a_profile
from hpcsched.testing.invariants import check

VSW = {"kind": "vsw", "local_batch": 8, "global_batch": [8, 64]}
PROFILES = (a_profile("m", {1: 1.0, 2: 1.9, 4: 3.5}), a_profile("e", {1: 1.0, 2: 0.9}))
SPREADING = sorted(set(POLICIES) - {"planner"})


def gpus(**hosts: int) -> tuple[Device, ...]:
    there = [host for host, count in hosts.items() for _ in range(count)]
    return tuple(Device(index=i, host=host, kind="A100", handle=str(i)) for i, host in enumerate(there))


def a_run(
    devices: tuple[Device, ...], *specs: JobSpec, policy: str = "marble", rules: int = ev.RULES
) -> Planned:
    driver = Planned(gpus=1, policy=policy)
    about = {"policy": policy, "profiles": PROFILES, "rules": rules}
    driver.tell(ev.AgentStarted, wall=2e9, devices=devices, **about)
    driver.submit(*specs)
    return driver


def adaptive(name: str = "a", model: str = "m", **keys: object) -> JobSpec:
    return a_job(name, model, 10**6, **{"nodes": 2, "strategy": VSW, **keys})


def on(driver: Planned, job: str) -> dict[str, int]:
    return dict(Counter(driver.machine.ledger.devices[gpu].host for gpu in driver.job(job).gpus))


@pytest.mark.parametrize("policy", SPREADING)
def test_a_job_gets_from_one_host_what_the_other_does_not_have(policy: str) -> None:
    driver = a_run(gpus(a=1, b=3), adaptive(gpus=2), policy=policy)
    assert on(driver, "a") == {"a": 1, "b": 3}
    assert driver.job("a").width == 2
    story = [str(note.reason) for note in driver.job("a").story]
    assert "its hosts have unequally many GPUs free: it gets 1 on a, 3 on b" in story
    check(driver.machine)


def test_hosts_give_equally_many_where_they_can() -> None:
    driver = a_run(gpus(a=1, b=2, c=4, d=2), adaptive(gpus=2))
    assert on(driver, "a") == {"b": 2, "d": 2}
    assert not any("unequally" in str(note.reason) for note in driver.job("a").story)


def test_what_is_left_over_of_a_division_stays_free() -> None:
    driver = a_run(gpus(a=1, b=2), adaptive(gpus=(1, None)))
    assert on(driver, "a") == {"a": 1, "b": 1}


def test_each_host_gives_at_least_one() -> None:
    driver = a_run(
        gpus(a=4, b=1), a_job("first", "m", gpus=1, needs=Needs(gpu_type="a100")), adaptive(gpus=2)
    )
    assert on(driver, "first") == {"b": 1} and on(driver, "a") == {}
    driver.exits("first", 0, 100)
    assert on(driver, "a") == {"a": 3, "b": 1}


@pytest.mark.parametrize(
    ("keys", "policy", "rules"),
    [
        ({"strategy": {"kind": "ddp"}}, "marble", ev.RULES),
        ({"strategy": {"kind": "vsw", "workers": 2}}, "marble", ev.RULES),
        ({}, "marble", 3),
        ({}, "planner", ev.RULES),
    ],
)
def test_all_others_wait_for_equally_many(keys: dict[str, object], policy: str, rules: int) -> None:
    driver = a_run(gpus(a=1, b=3), adaptive(gpus=2, **keys), policy=policy, rules=rules)
    assert driver.states() == ["PENDING"] and driver.machine.stuck


def test_it_goes_on_on_other_shares_when_it_was_suspended() -> None:
    driver = a_run(gpus(a=2, b=2), adaptive(gpus=2), adaptive("next", gpus=2))
    driver.tell(ev.HostsJoined, devices=(Device(index=8, host="c", kind="A100", handle="8"),))
    assert (on(driver, "a"), on(driver, "next")) == ({"a": 2, "b": 2}, {})
    more = tuple(Device(index=i, host="d", kind="A100", handle=str(i)) for i in (9, 10, 11))
    driver.tell(ev.HostsJoined, devices=more)
    assert on(driver, "next") == {"c": 1, "d": 3}
    check(driver.machine)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(1, 6), st.integers(1, 12), st.data())
def test_what_is_picked_is_there(free: list[int], nodes: int, wanted: int, data: st.DataObject) -> None:
    hosts = {f"h{i}": count for i, count in enumerate(free)}
    own = {host: data.draw(st.integers(0, 3)) for host in data.draw(st.sets(st.sampled_from(sorted(hosts))))}
    room = data.draw(st.none() | st.fixed_dictionaries(dict.fromkeys(hosts, st.integers(0, 9))))
    there = GpusByHost(hosts, spreads=True)
    count, chosen = there.pick(wanted, nodes, own, room, uneven=True)
    even, _ = there.pick(wanted, nodes, own, room)
    assert count >= even and count == min(wanted, there.most(nodes, own, room, uneven=True))
    if not count:
        assert chosen == ()
        return
    can = {
        host: min(hosts[host] + own.get(host, 0), room[host] if room is not None else 99) for host in chosen
    }
    given_each = shares(count, can)
    assert len(chosen) == nodes and sum(given_each.values()) == count * nodes
    assert all(1 <= given_each[host] <= can[host] for host in chosen)
    if even == count:
        assert set(given_each.values()) == {count}, "equally many where that is possible"
    if room is None:
        there.take(chosen, count, own)
        taken = {host: hosts[host] - there.by_host()[host] for host in hosts}
        assert taken == {h: max(0, given_each.get(h, 0) - own.get(h, 0)) for h in hosts}
        assert there.left == sum(there.by_host().values())


def grown() -> Planned:
    """`a` began with one on each host, and has grown in place to what both have."""
    driver = a_run(gpus(a=1, b=3), adaptive(model="e"))
    assert on(driver, "a") == {"a": 1, "b": 1}
    driver.runs("a", in_place=True)
    (resize,) = driver.tell(ev.ScalingProposed, "a", rates={1: 1.0, 2: 2.0, 3: 3.0}, batch=64.0)
    assert isinstance(resize, Resize) and resize.gpus == (0, 1, 2, 3)
    driver.resized("a", 500)
    assert on(driver, "a") == {"a": 1, "b": 3} and driver.job("a").width == 2
    check(driver.machine)
    return driver


def test_it_grows_in_place_by_what_is_there_and_gives_that_back() -> None:
    driver = grown()
    (resize,) = driver.submit(a_job("next", "e", gpus=2))
    assert isinstance(resize, Resize) and resize.gpus == (0, 1)
    driver.resized("a", 600)
    assert (on(driver, "a"), on(driver, "next")) == ({"a": 1, "b": 1}, {"b": 2})
    check(driver.machine)


def test_nothing_is_given_back_for_a_job_that_could_not_start_by_it() -> None:
    driver = grown()
    assert driver.submit(a_job("next", "e", gpus=3)) == []
    assert driver.submit(adaptive("wide", gpus=1)) == [], "its first host has none"
