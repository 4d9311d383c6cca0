"""A run from beginning to end with real processes: what it does, what it leaves, what others see."""

from __future__ import annotations

import json
import stat
import time
from pathlib import Path

import pytest
from livebench import PATIENCE_S, Bench, job, placements
from places import ROOT

from hpcsched import jobfile
from hpcsched.core.actions import Action
from hpcsched.core.machine import Machine
from hpcsched.sim.engine import Simulation
from hpcsched.store.profiles import load_profiles

SETS = ROOT / "jobscripts" / "marble"
PROFILES = ROOT / "profiles" / "marble-summit.json"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "options"), [("marble", {"promote": "always"}), ("planner", {"goal": "jct", "eps": 3})]
)
def test_a_replayed_set_does_what_the_simulator_shows(
    bench: Bench, policy: str, options: dict[str, object]
) -> None:
    words = ["--profiles", "marble-summit", "--policy", policy]
    words += [word for key, value in options.items() for word in ("--policy-option", f"{key}={value}")]
    done = bench("run", SETS / "set2.toml", "--devices", "replay:6@40", "--json", "-q", *words)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)

    wanted: list[Action] = []

    def watch(event: object, actions: list[Action], machine: Machine) -> None:
        wanted.extend(actions)

    specs = jobfile.load(SETS / "set2.toml", workdir=Path.cwd()).jobs
    simulation = Simulation(
        specs, load_profiles(PROFILES), gpus=6, policy=policy, options=options, watch=watch
    )
    simulated = simulation.run()
    machine, actions = bench.replayed()
    assert placements(actions) == placements(wanted)
    # How near the two clocks are is measured in benchmarks/; here a busy machine may stand for 3 s.
    for now in (machine.run.now, result["makespan_s"]):
        assert 0.97 * simulated.run.now <= now <= 1.03 * simulated.run.now + 40 * 3.0
    for one, spec in zip(result["jobs"], specs, strict=True):
        assert (one["steps"], one["steps_repeated"], one["state"]) == (spec.steps, 0, "COMPLETED")
        attempts = machine.run.jobs[one["id"]].attempts
        assert attempts[0].from_step == 0
        assert attempts[-1].to_step == spec.steps
        assert [a.to_step for a in attempts[:-1]] == [a.from_step for a in attempts[1:]]


def test_only_the_user_can_look_into_the_run_directory(bench: Bench) -> None:
    done = bench("run", bench.set_of(job("a", "echo hello", gpus=1)), "--devices", "cpu:1", "-q")
    assert done.returncode == 0, done.stderr
    assert stat.S_IMODE(bench.dir.stat().st_mode) == 0o700
    for path in bench.dir.rglob("*"):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), f"{path}: {mode:o}"
    names = {path.name for path in bench.dir.iterdir()}
    assert names == {"agent.lock", "inbox", "jobs", "journal.jsonl", "run.json", "status.json"}


def test_a_program_that_never_says_it_is_ready_runs_rigidly(bench: Bench) -> None:
    told = "trap 'echo STOPPED' TSTP; echo begins; while [ ! -e {go} ]; do sleep 0.02; done; echo ends"
    rigid = told.format(go=bench.folder / "go")
    profile = {"model": "m", "device": "cpu", "nodes": 1, "throughput": {"1": 1.0, "2": 2.0, "3": 3.0}}
    profiles = bench.folder / "profiles.json"
    profiles.write_text(json.dumps({"schema": 1, "profiles": [{**profile, "source": "measured"}]}))
    # Three GPUs: the first job has one, the other two; when the first ends, rigid would be promoted.
    first = bench.set_of(job("first", "sleep 0.5", gpus=1), job("rigid", rigid, model="m", steps=9000))
    words = ["--profiles", profiles, "--policy-option", "promote=always"]
    agent = bench.start(first, "--devices", "cpu:3", *words)
    bench.until(lambda: bench.states().get("first") == "COMPLETED", "the first ended")
    bench.until(lambda: bench("submit", "--gpus", "1", "--name", "next", "--", "true").returncode == 0)
    bench.until(lambda: bench.states().get("next") == "COMPLETED", "another runs beside it")
    (bench.folder / "go").touch()
    assert agent.wait() == 0, agent.said
    assert bench.output(2) == "begins\nends\n"
    assert bench.job("rigid")["attempt"] == 1


def test_a_rigid_job_is_ended_and_put_back_on_drain(bench: Bench) -> None:
    script = "if [ $HPCSCHED_ATTEMPT = 1 ]; then trap 'echo STOPPED' TSTP; sleep 600; fi; echo again"
    words = ["--devices", "cpu:1", "--grace", "0.3"]
    agent = bench.start(bench.set_of(job("a", script, gpus=1)), *words)
    bench.until(lambda: bench.states().get("a") == "RUNNING")
    assert bench("drain").returncode == 0
    assert agent.wait() == 75, agent.said
    assert bench.all_gone()
    assert bench.status()["run"]["state"] == "STOPPED"
    assert bench("run", "--resume", *words).returncode == 0
    assert bench.output() == "again\n"


def test_the_snapshot_is_whole_at_any_time_and_grows(bench: Bench) -> None:
    go = bench.folder / "go"
    counts = f"""
        step=0
        while [ ! -e {go} ]; do
            sleep 0.02; step=$((step + 1)); echo "{{\\"step\\": $step, \\"t\\": 0}}" >&$HPCSCHED_PROGRESS_FD
        done
    """
    agent = bench.start(bench.set_of(job("a", counts, gpus=1)), "--devices", "cpu:1")
    seen = [bench.until(lambda: bench.status()["run"].get("seq"))]
    states = set()
    deadline = time.monotonic() + PATIENCE_S
    while agent.process.poll() is None:
        assert time.monotonic() < deadline, (seen[-1], states)
        page = bench.status()  # raises for a torn one
        seen.append(page["run"]["seq"])
        states.add(page["run"]["state"])
        if len(set(seen)) >= 3 and "RUNNING" in states:
            go.touch()
    assert agent.wait() == 0, agent.said
    assert seen == sorted(seen)
    assert bench.status()["run"]["state"] == "FINISHED"
    bench.set_of(job("b", "true", gpus=1))
    assert bench("run", "set.toml", "--resume", "-q", "--devices", "cpu:1").returncode == 0
    assert bench.status()["run"]["seq"] > seen[-1], "numbers go on growing in the next life"


def test_an_idle_agent_is_not_taken_for_dead(bench: Bench) -> None:
    agent = bench.start(bench.set_of(job("a", "sleep 600", gpus=1)), "--devices", "cpu:1")
    bench.until(lambda: bench.states().get("a") == "RUNNING")
    seq = bench.status()["run"]["seq"]
    bench.until(lambda: bench.status()["run"]["seq"] > seq + 1, "a sign of life")
    page = json.loads(bench("status", "--json").stdout)
    assert page["run"]["stale"] is False
    agent.kill()
    agent.wait()
    done = bench("status", "--json")
    assert json.loads(done.stdout)["run"]["stale"] is True
    table = bench("status")
    assert "is gone" in table.stderr
    seen = {*(bench(*words).returncode for words in (["explain", "a"], ["logs", "a"], ["top", "-n", "1"]))}
    assert {done.returncode, table.returncode, *seen} == {3}
