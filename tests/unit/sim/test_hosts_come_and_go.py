"""Hosts join a simulated run and end before it does: each step is done once, nothing is there too late."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from hpcsched.core import events as ev
from hpcsched.core.machine import Machine
from hpcsched.core.model import Device, JobSpec, JobState
from hpcsched.policy import make_policy
from hpcsched.sim.engine import Simulation
from hpcsched.store.journal import Journal
from hpcsched.store.replay import replay
from hpcsched.testing.builders import a_job, a_profile, state_of
from hpcsched.testing.invariants import check

PROFILES = (
    a_profile("m", [1.0, 1.9, 2.7, 3.3], start_s=10.0, suspend_s=5.0, resume_s=8.0),
    a_profile("slow", [0.1, 0.19], start_s=30.0, suspend_s=20.0, resume_s=25.0),
    a_profile("in place", [1.0, 1.9, 2.7, 3.3], start_s=5.0, suspend_s=5.0, grow_s=1.0, shrink_s=1.0),
)


def jobs_of(rng: random.Random) -> list[JobSpec]:
    jobs = []
    for i in range(12):
        model = rng.choice(["m", "m", "slow", "in place", "in place"])
        steps = rng.randint(50, 400) // (10 if model == "slow" else 1)
        nodes = rng.choice([1, 1, 1, 2]) if model != "slow" else 1
        gpus = rng.choice([(1, None), (1, None), (2, 2), (1, 1)])
        jobs.append(
            a_job(f"j{i}", model, steps, gpus=gpus, nodes=nodes, submit_at=float(rng.randint(0, 300)))
        )
    return jobs


def devices_of(host: str, first: int, count: int, gpu_type: str = "") -> tuple[Device, ...]:
    return tuple(
        Device(index=first + k, host=host, kind="simulated", handle=str(k), stands_for=gpu_type)
        for k in range(count)
    )


def hosts_of(rng: random.Random, count: int) -> tuple[list[ev.Event], dict[str, tuple[float, float]]]:
    """Events of hosts that come, end after 120 to 400 s, and in part have their end moved; and from when to
    when each is there."""
    events: list[ev.Event] = []
    there: dict[str, tuple[float, float]] = {}
    index = 2
    for i in range(count):
        host, at = f"far{i}", float(rng.randint(0, 600))
        end, gpus = at + rng.randint(120, 400), rng.choice([1, 2, 4])
        devices = devices_of(host, index, gpus)
        index += gpus
        events.append(ev.HostsJoined(at=at, devices=devices, ends={host: end}))
        if rng.random() < 0.3:
            moved = at + rng.randint(20, 100)
            end = max(moved + 60, end + rng.choice([-80.0, 100.0]))
            events.append(ev.HostEndMoved(at=moved, host=host, end=end))
        there[host] = at, end
    return events, there


def host_of(machine: Machine, gpu: int) -> str:
    return next(device.host for device in machine.hosts.devices[-1] if device.index == gpu)


@pytest.mark.long
@pytest.mark.parametrize("policy", ["marble", "planner", "exclusive", "equal", "optimus"])
@pytest.mark.parametrize("seed", range(4))
def test_every_step_is_done_once_and_nothing_is_there_too_late(policy: str, seed: int) -> None:
    rng = random.Random(seed)
    events, there = hosts_of(rng, rng.randint(1, 5))

    def watch(event: ev.Event, actions: Sequence[object], machine: Machine) -> None:
        check(machine)

    jobs = jobs_of(rng)
    if max(job.nodes for job in jobs) > 1:  # two hosts that stay
        events.append(ev.HostsJoined(at=0.0, devices=devices_of("stays", 100, 2)))
    machine = Simulation(jobs, PROFILES, gpus=2, policy=policy, happenings=events, watch=watch).run()
    for job in machine.run.jobs.values():
        assert job.state is JobState.COMPLETED, f"{job.spec.name}: {job.state}"
        steps = [(attempt.from_step, attempt.to_step) for attempt in job.attempts]
        assert [begin for begin, _ in steps] == [0, *(end for _, end in steps[:-1])], "each step once"
        for attempt in job.attempts:
            for host in {host_of(machine, gpu) for gpu in attempt.gpus} & there.keys():
                assert there[host][0] <= attempt.start_s
                assert attempt.end_s is not None and attempt.end_s <= there[host][1]


def test_a_replay_decides_alike_whoever_asked_in_between(tmp_path: Path) -> None:
    """What people look at (why a job waits) must not change what is decided later."""
    rng = random.Random(3)
    events, _ = hosts_of(rng, 5)
    journal = Journal(tmp_path / "journal")

    def watch(event: ev.Event, actions: Sequence[object], machine: Machine) -> None:
        journal.append([event])
        for job in machine.run.jobs.values():
            machine.waiting_reason(job)

    jobs = [job for job in jobs_of(rng) if job.nodes == 1]
    machine = Simulation(jobs, PROFILES, gpus=2, happenings=events, watch=watch).run()
    journal.close()
    again = replay(tmp_path / "journal", make_policy)
    assert state_of(again.machine) == state_of(machine)
