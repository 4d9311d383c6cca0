"""Jobs get the GPUs that suit them, on hosts that have their cores and their memory: under every policy."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from hpcsched.core import events as ev
from hpcsched.core.machine import Machine
from hpcsched.core.model import Device, HostCores, JobState
from hpcsched.core.needs import Needs, is_type
from hpcsched.core.resources.gpus import suits
from hpcsched.policy import POLICIES, make_policy
from hpcsched.testing.builders import Planned, a_job, a_profile

A100, V100 = "NVIDIA A100-SXM4-80GB", "Tesla V100-SXM2-16GB"
PROFILE = a_profile("m", {1: 1.0, 2: 1.9, 4: 3.5})


def gpus(*kinds: str, host: str = "n1", first: int = 0) -> tuple[Device, ...]:
    memory = {A100: 81920.0, V100: 16160.0}
    return tuple(
        Device(index=first + i, host=host, kind=kind, handle=str(i), memory_mib=memory.get(kind))
        for i, kind in enumerate(kinds)
    )


def a_run(devices, *specs, policy="marble", kept=0, memory_mib=None):
    """A driver with these devices; each host has so many cores for GPU jobs, and so much memory."""
    driver = Planned(gpus=1, policy=policy, profiles=[PROFILE])
    hosts = dict.fromkeys(device.host for device in devices)
    driver.tell(
        ev.AgentStarted,
        wall=2e9,
        devices=devices,
        cores=tuple(HostCores(host=host, kept=kept, memory_mib=memory_mib) for host in hosts),
        policy=policy,
        profiles=(PROFILE,),
        rules=ev.RULES,
    )
    driver.submit(*specs)
    return driver


def on(driver, job):
    return [driver.machine.ledger.devices[gpu].kind for gpu in driver.job(job).gpus]


@pytest.mark.parametrize(
    ("wanted", "kind", "found"),
    [
        ("a100", A100, True),
        ("A100-SXM4", A100, True),
        ("a10", A100, False),
        ("NVIDIA A100", A100, True),
        ("80gb", A100, True),
        ("h100", A100, False),
        ("v100", V100, True),
    ],
)
def test_types_are_words_of_the_name(wanted, kind, found):
    assert is_type(wanted, kind) is found


def test_memory_of_a_gpu_is_at_least_what_is_sold_as_that():
    needs = Needs(gpu_memory_mib=40 * 1024.0)
    assert needs.suits("x", 40442.0)  # an A100 40GB, as NVML has it
    assert not needs.suits("x", 24576.0)
    assert not needs.suits("x", None)
    pretended = Device(index=0, host="n1", kind="replay", handle="0")
    assert suits(needs, pretended)


@pytest.mark.parametrize("policy", POLICIES)
class TestEveryPolicy:
    def test_gives_only_gpus_that_suit(self, policy):
        """On a host with both kinds, on hosts with one, whoever came first."""
        devices = (*gpus(V100, A100), *gpus(A100, A100, host="n2", first=2))
        typed = Needs(gpu_type="a100")
        jobs = [
            a_job("any", "m", gpus=1),
            a_job("typed", "m", gpus=1, needs=typed),
            a_job("two", "m", gpus=2),
        ]
        driver = a_run(devices, *jobs, policy=policy)
        for _ in range(6):
            running = [job for job in driver.machine.run.jobs.values() if job.state.active]
            for job in running:
                if job.spec.needs:
                    assert set(on(driver, job.id)) == {A100}
            if not running:
                break
            driver.runs(*(job.id for job in running if not job.ready))
            driver.exits(running[0].id, 0, 100)
        assert driver.states() == ["COMPLETED"] * 3

    @pytest.mark.long
    def test_random_jobs_on_random_nodes_all_complete(self, policy):
        for seed in range(12):
            rng = random.Random(seed)
            devices, first = [], 0
            for host in ("n1", "n2"):
                kinds = rng.choices([A100, V100], k=rng.randint(1, 4))
                devices += gpus(*kinds, host=host, first=first)
                first += len(kinds)
            devices += gpus(A100, V100, host="n3", first=first)
            choices = [
                None,
                Needs(gpu_type="a100"),
                Needs(gpu_type="V100", memory_mib=30000.0),
                Needs(gpu_memory_mib=40960.0, cpus_per_gpu=9),
                Needs(cpus_per_gpu=4, memory_mib=50000.0),
            ]
            jobs = [
                a_job(f"j{i}", "m", gpus=rng.choice([1, (1, 2), (1, None)]), needs=rng.choice(choices))
                for i in range(9)
            ]
            driver = a_run(tuple(devices), *jobs, policy=policy, kept=12, memory_mib=64000.0)
            machine = driver.machine
            for _ in range(60):
                active = list(machine.run.active.values())
                self._rules_hold(machine)
                if not active:
                    break
                driver.runs(*(job.id for job in active if not job.ready and not job.wanted))
                active = list(machine.run.active.values())
                job = rng.choice(active)
                if job.state is JobState.SUSPENDING:
                    driver.leaves(job.id, job.step + 1)
                else:
                    driver.exits(job.id, 0, 100)
            assert machine.run.finished, (policy, seed, driver.states())

    @staticmethod
    def _rules_hold(machine: Machine) -> None:
        cores, memory = dict.fromkeys("123", 0), dict.fromkeys("123", 0.0)
        for job in machine.run.active.values():
            needs = job.spec.needs or Needs()
            hosts = set()
            for gpu in job.gpus:
                device = machine.ledger.devices[gpu]
                assert suits(job.spec.needs, device)
                hosts.add(device.host[1])
                share = 12 // machine.ledger.gpus_on(device.host)
                cores[device.host[1]] += share if needs.cpus_per_gpu is None else needs.cpus_per_gpu
            for host in hosts:
                memory[host] += needs.memory_mib or 0
        assert max(cores.values()) <= 12
        assert max(memory.values()) <= 64000


def test_who_does_not_care_takes_what_nobody_asks_for():
    driver = a_run(
        gpus(A100, V100), a_job("any", "m", gpus=1), a_job("typed", "m", gpus=1, needs=Needs(gpu_type="a100"))
    )
    assert (on(driver, "any"), on(driver, "typed")) == ([V100], [A100])


def test_who_waits_for_a_kind_of_gpu_says_so_and_holds_nobody_up():
    typed = Needs(gpu_type="A100")
    jobs = (
        a_job("a", "m", gpus=1, needs=typed),
        a_job("b", "m", gpus=1, needs=typed),
        a_job("c", "m", gpus=1),
    )
    driver = a_run(gpus(A100, V100), *jobs)
    assert driver.states() == ["STARTING", "PENDING", "STARTING"]
    reason = driver.machine.waiting_reason(driver.job("b"))
    assert str(reason) == "waits for GPUs: needs 1 (A100), 0 free"
    driver.runs("a")
    driver.exits("a", 0, 100)
    assert driver.states() == ["COMPLETED", "STARTING", "STARTING"]


def test_it_grows_onto_suitable_gpus_only():
    job = a_job("x", "m", needs=Needs(gpu_type="a100"), steps=10**6)
    driver = a_run(
        gpus(V100, A100, V100, A100, V100), a_job("first", "m", gpus=1, needs=Needs(gpu_type="a100")), job
    )
    assert on(driver, "x") == [A100]
    driver.runs("first", "x")
    driver.exits("first", 0, 100)
    if driver.job("x").state is JobState.SUSPENDING:
        driver.leaves("x", 10)
    assert set(on(driver, "x")) == {A100}
    assert len(on(driver, "x")) == 2


def test_cores_are_counted_with_an_equal_share_for_who_says_nothing():
    needs = Needs(cpus_per_gpu=12)
    jobs = [a_job("wide", "m", gpus=1, needs=needs), *(a_job(f"j{i}", "m", gpus=1) for i in range(4))]
    driver = a_run(gpus(*[A100] * 4), *jobs, kept=16)
    # 12 of 16 cores are taken: there is room for one of the others, 4 cores each.
    assert driver.states() == ["STARTING", "STARTING", "PENDING", "PENDING", "PENDING"]
    driver.runs("wide")
    driver.exits("wide", 0, 100)
    assert driver.states() == ["COMPLETED", "STARTING", "STARTING", "STARTING", "STARTING"]


def test_memory_is_counted_on_each_host():
    needs = Needs(memory_mib=40000.0)
    devices = (*gpus(A100, A100), *gpus(A100, A100, host="n2", first=2))
    driver = a_run(devices, *(a_job(f"j{i}", "m", gpus=1, needs=needs) for i in range(4)), memory_mib=64000.0)
    assert driver.states() == ["STARTING", "STARTING", "PENDING", "PENDING"]
    hosts = {driver.machine.ledger.devices[driver.job(i).gpus[0]].host for i in (1, 2)}
    assert hosts == {"n1", "n2"}
    assert "(39.06G of the host's memory)" in str(driver.machine.waiting_reason(driver.job(3)))


def test_a_run_whose_last_suitable_gpu_is_lost_does_not_wait_for_ever():
    driver = a_run(gpus(A100, V100), a_job("x", "m", gpus=1, needs=Needs(gpu_type="a100")))
    driver.runs("x")
    driver.tell(ev.DeviceLost, gpu=0, why="Xid 79")
    assert not driver.machine.stuck
    driver.exits("x", 143)
    assert driver.machine.stuck


def test_without_needs_nothing_is_asked_for():
    driver = a_run(gpus(A100, A100), a_job("x", "m", gpus=1, needs=Needs(time_s=5.0)))
    assert driver.machine.rooms.now(driver.job("x")) is None
    machine = Machine(make_policy)
    assert replace(HostCores(host="n1"), kept=0) == HostCores(host="n1")
    assert machine.run.finished
