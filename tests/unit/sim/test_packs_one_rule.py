"""`run`, `simulate` and `plan pack` choose packs by one rule: what was measured, where it was."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcsched.core import events as ev
from hpcsched.core.mechanisms.packing.mechanism import Packing
from hpcsched.planning.packing.joining import costs_of
from hpcsched.planning.packing.problem import PackProblem
from hpcsched.planning.packing.speeds import PackMember, Speeds
from hpcsched.planning.packing.strategies import as_run
from hpcsched.sim.engine import Simulation
from hpcsched.testing.builders import Driver, a_job, a_profile
from hpcsched.testing.invariants import check

CNN = replace(a_profile("cnn", [32.0]), packed_s={1: 0.031, 2: 0.0668})
MLP = replace(a_profile("mlp", [192.0]), packed_s={1: 0.0052, 2: 0.0079, 8: 0.0126})
SLOW = replace(a_profile("slow", [10.0]), packed_s={2: 0.25})
STEPS = st.sampled_from([100, 200]) | st.integers(10, 400)
"""Of several jobs the same, often: packs that are as good as others are chosen alike too."""
PROFILES = (CNN, MLP, SLOW, a_profile("unknown", [10.0]))


def packed(name, model, steps=1000):
    return a_job(name, model, steps, gpus=1, strategy={"kind": "packed"})


def packs_of(jobs, gpus):
    """Who trains with whom once all have been taken in, by GPU, as a simulation has it."""
    found = {}

    def watch(event, actions, machine):
        check(machine)
        if isinstance(event, ev.JobsSubmitted):
            packs = machine.mechanism(Packing).packs
            for gpu, holder in sorted(machine.own.holder.items()):
                ids = (holder, *packs.on((gpu,)))
                found[gpu] = sorted(machine.run.jobs[i].spec.name for i in ids)

    Simulation(jobs, PROFILES, gpus=gpus, watch=watch).run()
    return found


def planned(jobs, gpus):
    """The same as `plan pack` shows it: the packs that begin at once."""
    costs = [costs for profile in PROFILES if (costs := costs_of(profile))]
    members = tuple(PackMember(name=j.name, model=j.model, batch=1, steps=j.steps) for j in jobs)
    packs = as_run(PackProblem(members=members, speeds=Speeds(costs), devices=gpus))
    return {gpu: sorted(member.name for member in pack) for gpu, pack in enumerate(packs[:gpus])}


@given(
    models=st.lists(st.tuples(st.sampled_from(["cnn", "mlp"]), STEPS), min_size=1, max_size=12),
    gpus=st.integers(1, 4),
)
def test_a_simulation_packs_as_the_plan_shows(models, gpus) -> None:
    jobs = [packed(f"j{i}", model, steps) for i, (model, steps) in enumerate(models)]
    assert packs_of(jobs, gpus) == planned(jobs, gpus)


def test_what_was_measured_to_be_slower_together_stays_apart() -> None:
    """Two of these take 0.25 s a step, one 0.1 s; that one takes so long was measured alone only."""
    assert packs_of([packed("a", "slow"), packed("b", "slow")], 1) == {0: ["a"]}


def test_what_was_not_measured_goes_by_the_simple_rule() -> None:
    jobs = [packed("a", "unknown"), packed("b", "mlp"), packed("c", "unknown")]
    assert packs_of(jobs, 2) == {0: ["a", "c"], 1: ["b"]}


@pytest.mark.parametrize(("rules", "apart"), [(1, False), (ev.RULES, True)])
def test_a_life_is_replayed_by_the_rules_that_it_had(rules: int, apart: bool) -> None:
    """By the first rules growth was taken from packs alone: 0.25 s for one too, so that two "gain"."""
    jobs = packed("a", "slow"), packed("b", "slow")
    driver = Driver(*jobs, gpus=1, profiles=PROFILES, rules=rules, kind="simulated")
    assert (driver.job("b").role is None) is apart
