"""What a background job is told of the memory of its GPU."""

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
from hpcsched.errors import LaunchError
from hpcsched.store.rundir import RunDir
from hpcsched.testing.builders import Driver, a_job, a_profile


@pytest.mark.parametrize(("gpu_mib", "told"), [(24_000.0, "16000"), (None, None)])
def test_it_may_take_what_the_profile_of_its_foreground_leaves(tmp_path, gpu_mib, told):
    profiles = [
        replace(a_profile(name, [10.0]), memory_mib={1: mib}) for name, mib in (("front", 8e3), ("back", 6e3))
    ]
    run = Driver(gpus=1, profiles=profiles)
    devices = tuple(replace(device, memory_mib=gpu_mib) for device in run.machine.ledger.devices.values())
    run.tell(ev.AgentStarted, wall=1e9, devices=devices, policy="marble")
    run.submit(a_job("f", "front", gpus=1), a_job("b", "back", gpus=1, background=True))
    run.runs("f")
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
    front, back = plans
    assert "HPCSCHED_LANE_MEMORY_MIB" not in front.env
    assert back.env.get("HPCSCHED_LANE_MEMORY_MIB") == told
