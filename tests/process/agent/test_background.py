"""A background job beside a foreground one on the same CPU slot, with real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from livebench import FOREVER, SLOW_AT_FIRST, Agent, Bench, job, launched_once, saves

from hpcsched.core import events as ev
from hpcsched.core.actions import Pace
from hpcsched.core.mechanisms.background.mechanism import Background
from hpcsched.store import journal

OFTEN = """
import hpcsched.agent.loop
from hpcsched.cli.main import main
hpcsched.agent.loop.PROGRESS_PERIOD_S = 0.25
main()
"""
"""The command line, with an agent that looks at its jobs' progress often, so that no test takes a minute."""

TRAINS = """
import json, os, time
begun = time.time()
while True:  # by the clock, as nothing else is the same pace on a busy machine
    now = time.time()
    line = json.dumps({"step": int((now - begun) * 50), "t": now}) + "\\n"
    os.write(int(os.environ["HPCSCHED_PROGRESS_FD"]), line.encode())
    time.sleep(0.02)
"""
"""A training of 50 steps a second that does not end."""

CPU = ["--devices", "cpu:1", "--grace", "5"]


def profiles(bench: Bench, **rates: float) -> list[object]:
    """`--profiles` with the steps a second of these models on one slot."""
    path = bench.folder / "profiles.json"
    table = [
        {"model": model, "device": "cpu", "throughput": {"1": rate}, "source": "measured"}
        for model, rate in rates.items()
    ]
    path.write_text(json.dumps({"schema": 1, "profiles": table}))
    return ["--profiles", path]


def process_of(bench: Bench, name: str) -> int:
    """The process of a job's newest attempt."""
    job_id = bench.job(name)["id"]
    events = [event for event, _ in journal.read(bench.rundir.journal)]
    return [e for e in events if isinstance(e, ev.WorkersSpawned) and e.job_id == job_id][-1].processes[0][0]


def environment(pid: int) -> dict[str, str]:
    words = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(word.split("=", 1) for word in words if "=" in word)


def step(bench: Bench, name: str) -> int:
    return int(bench.job(name).get("step") or 0)


def test_it_takes_what_the_foreground_leaves_and_saves_goes_on_and_ends_like_any_job(bench: Bench) -> None:
    known = profiles(bench, front=50.0, back=100.0)
    front = saves("front", steps=40, pause=SLOW_AT_FIRST, model="front", gpus=1, max_foreground_slowdown=1.0)
    back = job("back", replay=True, model="back", steps=3000, background=True)
    agent = bench.start(bench.set_of(front, back), *CPU, *known)
    bench.ready("front", "back")
    ahead, behind = process_of(bench, "front"), process_of(bench, "back")
    assert os.sched_getaffinity(ahead) == os.sched_getaffinity(behind)
    assert os.sched_getscheduler(ahead) == os.SCHED_OTHER
    assert os.sched_getscheduler(behind) == os.SCHED_IDLE
    assert environment(ahead)["HPCSCHED_LANE"] == "foreground"
    assert environment(behind)["HPCSCHED_LANE"] == "background"
    page = bench.status()
    assert [(gpu["index"], gpu["lane"], gpu["job"]) for gpu in page["gpus"]] == [
        (0, "foreground", 1),
        (0, "background", 2),
    ]
    assert bench.job("back")["role"] == "background"
    assert "background" in bench("status", "-o", "%i %p").stdout
    assert "it has the background of CPU slot 0, beside job 1 (front)" in bench("explain", "back").stdout
    assert "job 2 (back) is in the background of CPU slot 0" in bench("explain", "front").stdout

    agent.kill(signal.SIGINT)
    assert agent.wait() == 75, agent.said
    assert set(bench.states().values()) == {"SUSPENDED"}
    assert 0 < step(bench, "back") < 3000

    known = profiles(bench, front=50.0, back=1000.0)  # enough has been seen of it
    done = bench("run", "--resume", "--json", "-q", *CPU, *known)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert {one["state"] for one in result["jobs"]} == {"COMPLETED"}
    assert [one["steps_repeated"] for one in result["jobs"]] == [0, 0]
    assert (result["background_total"], result["background_completed"]) == (1, 1)
    assert {a["role"] for a in result["jobs"][1]["attempts"]} == {"background"}
    assert launched_once(bench.replayed()[1])
    assert bench.all_gone()


def often(bench: Bench, *words: object) -> Agent:
    """`hpcsched run` that goes on, with an agent that looks often."""
    told = bench.folder / "often.err"
    argv = [sys.executable, "-c", OFTEN, "run", *map(str, words)]
    with told.open("wb") as out:
        process = subprocess.Popen(argv, env=bench.env, cwd=bench.folder, stdout=out, stderr=out)
    bench.agents.append(Agent(process, told))
    return bench.agents[-1]


@pytest.mark.slow
def test_it_pauses_while_the_speed_of_the_foreground_is_measured(bench: Bench) -> None:
    """The profile promises twice the speed that the program has: it is no guest's fault."""
    known = profiles(bench, front=100.0, back=100.0)
    program = bench.folder / "train.py"
    program.write_text(TRAINS)
    front = job("front", command=[sys.executable, str(program)], model="front", steps=FOREVER, gpus=1)
    back = job("back", replay=True, model="back", steps=FOREVER, background=True)
    agent = often(bench, bench.set_of(front, back), *CPU, *known)

    def ordered() -> list[Any]:
        if not bench.rundir.journal.exists():
            return []
        return [action.share for action in bench.replayed()[1] if isinstance(action, Pace)]

    bench.until(lambda: ordered() == [0.0], "it is told to pause")
    bench.until(lambda: step(bench, "back") > 0, "its steps")
    still = step(bench, "back")
    bench.until(lambda: ordered() == [0.0, 1.0], "it is told to go on")
    assert step(bench, "back") - still < 300, "in these six seconds it would have done 600"
    paused = step(bench, "back")
    bench.until(lambda: step(bench, "back") > paused + 100, "it gets on again")
    machine, _ = bench.replayed()
    speed = machine.mechanism(Background).lanes.speeds[1]
    assert speed.own is not None and 35 < speed.own < 65
    assert not machine.mechanism(Background).lanes.costly
    agent.kill(signal.SIGINT)
    agent.kill(signal.SIGINT)
    agent.wait()
