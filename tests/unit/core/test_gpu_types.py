"""GPUs of several types in one run: which a job gets, what is known of them, and why one waits."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from hpcsched.core import events as ev
from hpcsched.core.model import Device, JobSpec
from hpcsched.core.needs import Needs
from hpcsched.core.profile import Profile
from hpcsched.core.reasons import Why
from hpcsched.policy import POLICIES
from hpcsched.testing.builders import Planned, a_job, a_profile
from hpcsched.testing.invariants import check

A100, H100 = "NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3"
VSW = {"kind": "vsw", "local_batch": 8, "global_batch": [8, 64]}
PROFILE = a_profile("m", {1: 1.0, 2: 1.9, 4: 3.5})
FASTER = a_profile("m", {1: 3.0, 2: 5.0, 4: 5.5})


def gpus(**hosts: tuple[str, int]) -> tuple[Device, ...]:
    """So many GPUs of a type on each host."""
    there = [(host, kind) for host, (kind, count) in hosts.items() for _ in range(count)]
    return tuple(Device(index=i, host=h, kind=kind, handle=str(i)) for i, (h, kind) in enumerate(there))


def a_run(
    devices: tuple[Device, ...],
    *specs: JobSpec,
    others: Mapping[str, Profile] | None = None,
    policy: str = "marble",
    rules: int = ev.RULES,
) -> Planned:
    driver = Planned(gpus=1, policy=policy)
    about = {"policy": policy, "profiles": (PROFILE,), "rules": rules}
    driver.tell(ev.AgentStarted, wall=2e9, devices=devices, **about)
    for gpu_type, profile in (others or {}).items():
        driver.tell(ev.ProfilesLoaded, profiles=(profile,), gpu_type=gpu_type)
    driver.submit(*specs)
    return driver


def on(driver: Planned, job: str) -> list[str]:
    return [driver.machine.ledger.devices[gpu].kind for gpu in driver.job(job).gpus]


def story(driver: Planned, job: str) -> list[str]:
    return [str(note.reason) for note in driver.job(job).story]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_job_gets_the_fastest_type_that_is_free_and_the_next_one_what_is_left(policy: str) -> None:
    devices = gpus(old=(A100, 2), new=(H100, 2))
    jobs = [a_job(name, "m", gpus=2) for name in "abc"]
    driver = a_run(devices, *jobs, others={H100: FASTER}, policy=policy)
    assert (on(driver, "a"), on(driver, "b"), on(driver, "c")) == ([H100] * 2, [A100] * 2, [])
    assert f"it gets {H100}: of the types of GPU with enough free the fastest" in "\n".join(
        story(driver, "a")
    )


def test_the_count_is_the_best_one_on_that_type() -> None:
    driver = a_run(gpus(old=(A100, 4), new=(H100, 4)), a_job("a", "m"), others={H100: FASTER})
    assert on(driver, "a") == [H100] * 4
    driver = a_run(gpus(old=(A100, 4), new=(H100, 1)), a_job("a", "m"), others={H100: FASTER})
    assert on(driver, "a") == [A100] * 4, "one that is faster on each GPU, but has one alone, is slower"


def test_of_what_is_not_known_the_runs_own_type_comes_first() -> None:
    driver = a_run(gpus(old=(A100, 2), new=(H100, 2)), a_job("a", "m", gpus=1))
    assert on(driver, "a") == [A100]


def test_a_host_with_two_types_gives_each_job_one() -> None:
    mixed = tuple(
        Device(index=i, host="n1", kind=kind, handle=str(i)) for i, kind in enumerate([A100, H100] * 2)
    )
    driver = a_run(mixed, a_job("a", "m"), a_job("b", "m"), others={H100: FASTER})
    assert (on(driver, "a"), on(driver, "b")) == ([H100] * 2, [A100] * 2)


def test_who_needs_more_than_one_type_has_waits_and_says_so() -> None:
    wide = a_job("wide", "m", gpus=1, nodes=2)
    driver = a_run(gpus(old=(A100, 2), new=(H100, 1)), wide, a_job("next", "m", gpus=2))
    assert driver.states() == ["PENDING", "STARTING"]
    driver = a_run(gpus(old=(A100, 2), new=(H100, 1)), wide)
    reason = driver.machine.waiting_reason(driver.job("wide"))
    assert reason is not None and reason.why is Why.ONE_TYPE
    assert str(reason) == (
        f"waits for GPUs of one type: needs 1 on each of 2 hosts, free are 2 x {A100}, 1 x {H100}"
    )
    assert driver.machine.stuck
    joined = Device(index=9, host="late", kind=H100, handle="9")
    driver.tell(ev.HostsJoined, devices=(joined,))
    assert on(driver, "wide") == [H100] * 2


def test_who_can_mix_them_does() -> None:
    devices = gpus(old=(A100, 2), new=(H100, 2))
    adaptive = a_job("adaptive", "m", gpus=2, nodes=2, strategy=VSW)
    assert sorted(on(a_run(devices, adaptive), "adaptive")) == [A100] * 2 + [H100] * 2
    pinned = a_job("pinned", "m", gpus=2, nodes=2, strategy={"kind": "vsw", "workers": 2})
    assert on(a_run(devices, pinned), "pinned") == [], "each does as much as all others"


def test_a_kind_that_is_asked_for_is_left_to_who_asks() -> None:
    picky = a_job("picky", "m", gpus=1, needs=Needs(gpu_type="A100"))
    driver = a_run(gpus(old=(A100, 1), new=(H100, 1)), a_job("any", "m", gpus=1), picky)
    assert (on(driver, "any"), on(driver, "picky")) == ([H100], [A100])


def test_what_is_learnt_is_of_its_type() -> None:
    devices = gpus(old=(A100, 1), new=(H100, 1))
    driver = a_run(devices, a_job("a", "m", 10**6, gpus=1), a_job("b", "m", 10**6, gpus=1))
    assert (on(driver, "a"), on(driver, "b")) == ([A100], [H100])
    driver.runs("a", "b")
    driver.trains("b", 4.0)
    estimates = driver.machine.estimates
    assert estimates.observed.beliefs.keys() == {("m", 1, H100)}
    assert [estimates.profile(driver.job(job)).rate(1) for job in "ab"] == [1.0, pytest.approx(4.0, rel=0.1)]
    assert any(
        f"on 1 GPUs of type {H100}" in line or f"on 1 GPU of type {H100}" in line
        for line in story(driver, "b")
    )
    driver.submit(a_job("c", "m", gpus=1))
    driver.exits("a", 0, 100)
    driver.exits("b", 0, 100)
    driver.submit(a_job("d", "m", gpus=1))
    assert on(driver, "d") == [H100], "that is known to be faster now"


def test_what_was_learnt_stays_of_its_type_when_the_next_life_begins_on_another() -> None:
    driver = a_run(gpus(old=(A100, 1), new=(H100, 1)), *(a_job(job, "m", 10**6, gpus=1) for job in "ab"))
    driver.runs("a", "b")
    driver.trains("b", 4.0)
    devices = gpus(new=(H100, 1), old=(A100, 1))
    about = {"policy": "marble", "profiles": (PROFILE,), "rules": ev.RULES}
    driver.tell(ev.AgentStarted, wall=3e9, devices=devices, **about)
    assert on(driver, "a") == [H100]
    estimates = driver.machine.estimates
    assert estimates.observed.beliefs.keys() == {("m", 1, "")}
    assert [estimates.profile(driver.job(job)).rate(1) for job in "ab"] == [pytest.approx(4.0, rel=0.1)] * 2


def test_a_life_that_begins_without_hosts_has_the_own_type_of_the_one_before() -> None:
    driver = a_run(gpus(old=(A100, 1)), a_job("a", "m", 10**6, gpus=1))
    driver.runs("a")
    driver.trains("a", 4.0)
    about = {"policy": "marble", "profiles": (PROFILE,), "rules": ev.RULES}
    driver.tell(ev.AgentStarted, wall=3e9, devices=(), **about)
    driver.tell(ev.HostsJoined, devices=gpus(new=(H100, 1)))
    ledger, estimates = driver.machine.ledger, driver.machine.estimates
    assert (ledger.own_type, ledger.types, on(driver, "a")) == (A100, ("", H100), [H100])
    assert estimates.observed.beliefs.keys() == {("m", 1, "")}


def test_a_job_that_is_adopted_stays_on_its_type() -> None:
    driver = a_run(gpus(old=(A100, 1), new=(H100, 1)), *(a_job(job, "m", 10**6, gpus=1) for job in "ab"))
    driver.runs("a", "b")
    new = gpus(old=(A100, 1), new=(H100, 1))[1:]  # the host of the run's own type has gone
    about = {"policy": "marble", "profiles": (PROFILE,), "rules": ev.RULES}
    driver.tell(ev.AgentStarted, wall=3e9, devices=new, adopted=(driver.job("b").id,), **about)
    assert (on(driver, "a"), on(driver, "b")) == ([], [H100])
    driver.trains("b", 4.0)
    assert driver.machine.estimates.observed.beliefs.keys() == {("m", 1, "")}
    driver.tell(ev.HostsJoined, devices=gpus(old=(A100, 1), new=(H100, 1))[:1])
    assert on(driver, "a") == [A100]
    check(driver.machine)


def test_a_promoted_job_stays_on_its_type() -> None:
    devices = gpus(old=(A100, 4), new=(H100, 2))
    first = a_job("first", "m", gpus=3)
    driver = a_run(devices, first, a_job("x", "m", 10**6), others={H100: PROFILE})
    assert on(driver, "x") == [H100] * 2
    driver.runs("first", "x")
    driver.exits("first", 0, 100)
    assert on(driver, "x") == [H100] * 2


def test_a_life_by_earlier_rules_knows_no_types() -> None:
    wide = a_job("wide", "m", gpus=1, nodes=2)
    driver = a_run(gpus(old=(A100, 1), new=(H100, 1)), wide, rules=3)
    assert on(driver, "wide") == [A100, H100]
    assert driver.machine.ledger.one_type
