"""Simulated hosts with unequally many GPUs: jobs of stream workers take them, all others do not."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from hpcsched.core import events as ev
from hpcsched.core.machine import Machine
from hpcsched.core.model import JobSpec, JobState
from hpcsched.policy import POLICIES, make_policy
from hpcsched.sim.blocks import Block, joining, placed
from hpcsched.sim.bounds import BoundJob, lower_bound_s
from hpcsched.sim.engine import Simulation
from hpcsched.store.journal import Journal
from hpcsched.store.replay import replay
from hpcsched.testing.builders import a_job, a_profile, state_of
from hpcsched.testing.invariants import check

COSTS = {"start_s": 5.0, "suspend_s": 3.0, "resume_s": 4.0}
PROFILES = (
    a_profile("m", [1.0, 1.9, 2.7, 3.3], **COSTS),
    a_profile("in place", [1.0, 1.9, 2.7, 3.3], grow_s=1.0, shrink_s=1.0, **COSTS),
)
VSW = {"kind": "vsw", "local_batch": 8, "global_batch": [8, 64]}
SEEDS = range(8)


def a_simulation(
    seed: int, policy: str, watch: object = None
) -> tuple[Simulation, list[JobSpec], list[Block]]:
    """Two to four hosts with one to five GPUs each, and one that comes and goes."""
    rng = random.Random(seed)
    jobs = [
        a_job(
            f"j{i}",
            rng.choice(["m", "in place"]),
            rng.randint(50, 500),
            submit_at=float(rng.randint(0, 300)),
            gpus=rng.choice([(1, None), (1, None), (1, 1)]),
            nodes=rng.choice([1, 2, 2]),
            strategy=rng.choice([VSW, VSW, {"kind": "ddp"}]),
        )
        for i in range(14)
    ]
    blocks = [Block(gpus=rng.randint(1, 5)) for _ in range(rng.randint(2, 4))]
    start_s, lasts_s = float(rng.randint(10, 400)), float(rng.randint(120, 400))
    blocks.append(Block(gpus=rng.randint(1, 5), start_s=start_s, lasts_s=lasts_s))
    happenings = joining(placed(blocks))
    return Simulation(jobs, PROFILES, policy=policy, happenings=happenings, watch=watch), jobs, blocks


def counts(machine: Machine, gpus: Sequence[int]) -> list[int]:
    """How many of these GPUs each host has."""
    return list(Counter(machine.ledger.host_of(gpu) for gpu in gpus).values())


@pytest.mark.long
@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("seed", SEEDS)
def test_every_step_is_done_once_and_no_sooner_than_can_be(policy: str, seed: int) -> None:
    def watch(event: ev.Event, actions: Sequence[object], machine: Machine) -> None:
        check(machine)

    simulation, specs, blocks = a_simulation(seed, policy, watch)
    machine = simulation.run()
    for job in machine.run.jobs.values():
        assert job.state is JobState.COMPLETED, f"{job.spec.name}: {job.state}"
        for before, after in pairwise(job.attempts):
            assert after.from_step == before.to_step, "each step once"
    profiles = {profile.model: profile for profile in PROFILES}
    asked = [
        BoundJob(
            profile=replace(profiles[spec.model], **dict.fromkeys(COSTS, 0.0)),
            steps=spec.steps,
            submit_s=spec.submit_at or 0.0,
            gpus_max=spec.gpus_max,
            nodes=spec.nodes,
            mixes=spec.mixes_types,
        )
        for spec in specs
    ]
    ended_s = max(job.ended_s or 0.0 for job in machine.run.jobs.values())
    assert ended_s >= lower_bound_s(asked, 0, blocks=blocks) > 0


def unequal(policy: str) -> set[str]:
    """The strategies of the jobs that have had unequally many GPUs of their hosts."""
    return {
        job.spec.strategy["kind"]
        for seed in SEEDS
        for machine in [a_simulation(seed, policy)[0].run()]
        for job in machine.run.jobs.values()
        for attempt in job.attempts
        if len(set(counts(machine, attempt.gpus))) > 1
    }


@pytest.mark.long
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_leases_of_stream_workers_alone_are_unequal(policy: str) -> None:
    assert unequal(policy) == (set() if policy == "planner" else {"vsw"})


@pytest.mark.parametrize("policy", ["marble", "equal"])
def test_a_replay_decides_alike(policy: str, tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    simulation, *_ = a_simulation(3, policy, lambda event, actions, machine: journal.append([event]))
    machine = simulation.run()
    journal.close()
    assert state_of(replay(tmp_path / "journal", make_policy).machine) == state_of(machine)
