"""Simulated hosts with GPUs of several types: each step is done once, no lease mixes types it must not."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from hpcsched.core import events as ev
from hpcsched.core.machine import Machine
from hpcsched.core.model import Ended, JobSpec, JobState
from hpcsched.core.needs import Needs
from hpcsched.policy import POLICIES, make_policy
from hpcsched.sim.blocks import Block, joining, placed
from hpcsched.sim.engine import Simulation
from hpcsched.store.journal import Journal
from hpcsched.store.replay import replay
from hpcsched.testing.builders import a_job, a_profile, state_of
from hpcsched.testing.invariants import check

SLOW, FAST = "slow one", "fast one"
COSTS = {"start_s": 5.0, "suspend_s": 3.0, "resume_s": 4.0}
OWN = (
    a_profile("m", [1.0, 1.9, 2.7, 3.3], **COSTS),
    a_profile("in place", [1.0, 1.9, 2.7, 3.3], grow_s=1.0, shrink_s=1.0, **COSTS),
    a_profile("new", [2.0, 3.0], **COSTS),
)
ON_FAST = tuple(replace(p, throughput={n: 3 * r for n, r in p.throughput.items()}) for p in OWN[:2])
ON_SLOW = tuple(replace(p, throughput={n: r / 2 for n, r in p.throughput.items()}) for p in OWN[:1])
VSW = {"kind": "vsw", "local_batch": 8, "global_batch": [8, 64]}


def jobs_of(rng: random.Random) -> list[JobSpec]:
    jobs = []
    for i in range(14):
        model = rng.choice(["m", "m", "in place", "new"])
        gpus = rng.choice([(1, None), (1, None), (2, 2), (1, 1)])
        needs = Needs(gpu_type=rng.choice(["slow", "fast"])) if rng.random() < 0.2 else None
        strategy = VSW if rng.random() < 0.3 else {"kind": "ddp"}
        nodes = 1 if needs else rng.choice([1, 1, 1, 2])
        about = {"gpus": gpus, "nodes": nodes, "needs": needs, "strategy": strategy}
        jobs.append(
            a_job(f"j{i}", model, rng.randint(50, 500), submit_at=float(rng.randint(0, 300)), **about)
        )
    return jobs


def a_simulation(seed: int, policy: str, watch: object) -> Simulation:
    """Two hosts with GPUs of the run's own type, one or two of each other, and some that come and go."""
    rng = random.Random(seed)
    jobs = jobs_of(rng)
    blocks = [
        Block(nodes=2, gpus=2, gpu_type="own one"),
        Block(nodes=rng.choice([1, 2]), gpus=2, gpu_type=FAST),
        Block(gpus=4, gpu_type=SLOW),
    ]
    for _ in range(rng.randint(0, 3)):
        start_s, lasts_s = float(rng.randint(10, 400)), float(rng.randint(120, 400))
        gpu_type = rng.choice(["own one", SLOW, FAST])
        blocks.append(Block(gpus=2, gpu_type=gpu_type, start_s=start_s, lasts_s=lasts_s))
    events: list[ev.Event] = [*joining(placed(blocks))]
    if rng.random() < 0.5:
        events.append(ev.DeviceLost(at=60.0, gpu=rng.randrange(8), why="Xid 79"))
        events.append(ev.DeviceFound(at=200.0, gpu=events[-1].gpu, why="well"))
    on_types = {FAST: ON_FAST, SLOW: ON_SLOW}
    return Simulation(jobs, OWN, on_types=on_types, policy=policy, happenings=events, watch=watch)


def types(machine: Machine, gpus: Sequence[int]) -> set[str]:
    there = {device.index: device for device in machine.hosts.devices[-1]}
    return {there[gpu].stands_for for gpu in gpus}


@pytest.mark.long
@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("seed", range(6))
def test_every_step_is_done_once_and_no_lease_mixes_types(policy: str, seed: int) -> None:
    def watch(event: ev.Event, actions: Sequence[object], machine: Machine) -> None:
        check(machine)

    machine = a_simulation(seed, policy, watch).run()
    for job in machine.run.jobs.values():
        assert job.state is JobState.COMPLETED, f"{job.spec.name}: {job.state}"
        for before, after in pairwise(job.attempts):
            once = after.from_step == before.to_step
            assert once or (before.ended is Ended.LOST and not after.from_step), "each step once"
        for attempt in job.attempts:
            assert job.spec.strategy is VSW or len(types(machine, attempt.gpus)) == 1
            if job.spec.needs:
                assert job.spec.needs.gpu_type in types(machine, attempt.gpus).pop()


def test_a_lease_of_one_that_can_mix_them_does() -> None:
    found = [
        types(machine, attempt.gpus)
        for seed in range(6)
        for machine in [a_simulation(seed, "marble", None).run()]
        for job in machine.run.jobs.values()
        for attempt in job.attempts
    ]
    assert any(len(kinds) > 1 for kinds in found)


def test_jobs_run_at_the_speed_of_their_type() -> None:
    there = joining(placed([Block(gpus=1), Block(gpus=1, gpu_type=FAST)]))
    jobs = [a_job(name, "m", 300, gpus=1) for name in "ab"]
    machine = Simulation(jobs, OWN, on_types={FAST: ON_FAST}, happenings=there).run()
    assert [job.ended_s for job in machine.run.jobs.values()] == [5.0 + 100.0, 5.0 + 300.0]


@pytest.mark.long
def test_a_replay_decides_alike(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    machine = a_simulation(3, "planner", lambda event, actions, machine: journal.append([event])).run()
    journal.close()
    assert state_of(replay(tmp_path / "journal", make_policy).machine) == state_of(machine)
