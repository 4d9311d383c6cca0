"""Jobs that take turns by the stages of a plan, with real processes and signals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from livebench import Bench, job, placements

from hpcsched import jobfile
from hpcsched.sim.engine import Simulation
from hpcsched.store.profiles import load_profiles

pytest.importorskip("scipy", reason="the patterns are an LP: it needs scipy, the extra plan")

TWO = {"1": 10.0, "2": 20.0, "3": 20.0, "4": 20.0}
PROFILE = {
    "model": "two",
    "device": "test",
    "throughput": TWO,
    "start_s": 10.0,
    "suspend_s": 5.0,
    "source": "measured",
}


@pytest.mark.slow  # slowly, as a plan that reality is late for is made anew
def test_a_stage_plan_goes_live_as_in_the_simulator(bench: Bench) -> None:
    profiles = bench.folder / "profiles.json"
    profiles.write_text(json.dumps({"schema": 1, "profiles": [PROFILE]}))
    jobs = bench.set_of(*(job(f"j{i}", replay=True, model="two", steps=4000, gpus=2) for i in range(3)))
    words = ["--policy", "planner", "--policy-option", "goal=makespan", "--policy-option", "eps=inf"]
    done = bench("run", jobs, "--devices", "replay:4@5", "--profiles", profiles, "--json", "-q", *words)
    assert done.returncode == 0, done.stderr

    wanted = []
    simulated = Simulation(
        jobfile.load(Path(jobs), workdir=bench.folder).jobs,
        load_profiles(profiles),
        gpus=4,
        policy="planner",
        options={"goal": "makespan", "eps": "inf"},
        watch=lambda event, actions, machine: wanted.extend(actions),
    ).run()
    assert simulated.run.plan.rule == "stages"
    assert simulated.run.now < 0.85 * 420  # two at a time, then the third
    machine, actions = bench.replayed()
    assert placements(actions) == placements(wanted)
    for one in json.loads(done.stdout)["jobs"]:
        assert (one["state"], one["steps"], one["steps_repeated"]) == ("COMPLETED", 4000, 0)
    assert sum(one.suspensions for one in machine.run.jobs.values()) == 1
    assert "of the 3 planned" in bench("explain", "j0").stdout + bench("explain", "j1").stdout
