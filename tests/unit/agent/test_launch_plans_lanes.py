"""What a job that uses a GPU beside others is told of its memory."""

from __future__ import annotations

import selectors
from dataclasses import replace
from types import SimpleNamespace

import pytest

from hpcsched.agent.clock import RunClock
from hpcsched.agent.effects import Effects
from hpcsched.agent.launch_plans import Site
from hpcsched.core import events as ev
from hpcsched.core.actions import Launch
from hpcsched.core.needs import Needs
from hpcsched.errors import LaunchError
from hpcsched.store.rundir import RunDir
from hpcsched.testing.builders import Driver, a_job, a_profile


@pytest.mark.parametrize(("gpu_mib", "told"), [(24_000.0, "16000"), (None, None)])
def test_it_may_take_what_the_profile_of_its_foreground_leaves(tmp_path, gpu_mib, told):
    profiles = [
        replace(a_profile(name, [10.0]), memory_mib={1: mib}) for name, mib in (("front", 8e3), ("back", 6e3))
    ]
    run = on_a_gpu(gpu_mib, profiles)
    run.submit(a_job("f", "front", gpus=1), a_job("b", "back", gpus=1, background=True))
    run.runs("f")
    front, back = plans_of(run, tmp_path)
    assert "HPCSCHED_LANE_MEMORY_MIB" not in front.env
    assert back.env.get("HPCSCHED_LANE_MEMORY_MIB") == told


def test_one_that_shares_may_take_what_it_asks_for_or_its_part(tmp_path):
    run = on_a_gpu(10_000.0, [a_profile("m", [10.0])])
    needs = [Needs(share=0.25, gpu_memory_mib=3000.5), Needs(share=0.5), Needs(share=0.0)]
    run.submit(*(a_job(f"j{i}", "m", gpus=1, needs=need) for i, need in enumerate(needs)))
    plans = plans_of(run, tmp_path)
    assert [plan.env.get("HPCSCHED_LANE_MEMORY_MIB") for plan in plans] == ["3000", "4750"]
    assert [plan.env["HPCSCHED_LANE"] for plan in plans] == ["shared", "shared"]


def on_a_gpu(mib, profiles=()):
    run = Driver(gpus=1, profiles=profiles)
    devices = tuple(replace(device, memory_mib=mib) for device in run.machine.ledger.devices.values())
    run.tell(ev.AgentStarted, wall=1e9, devices=devices, policy="marble")
    return run


def plans_of(run, tmp_path):
    """The launch plans of all that has been started."""
    plans = []

    def launch(plan):
        plans.append(plan)
        raise LaunchError("only asked for its plan", transient=False)

    (tmp_path / "jobs").mkdir()
    site = Site(rundir=RunDir(tmp_path), run_id="r", user="ada", speed=1.0, stand_ins=False)
    launcher = SimpleNamespace(ready_for=lambda plan: True, keeping=set, launch=launch)
    with selectors.DefaultSelector() as selector:
        effects = Effects(
            machine=run.machine, launcher=launcher, site=site, clock=RunClock(), selector=selector
        )
        for action in run.actions:
            if isinstance(action, Launch):
                effects._launch(action)
    return plans
