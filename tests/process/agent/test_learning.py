"""Throughput learnt in a real run: told by `explain`, kept in the database, and gone by in the next run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from livebench import PATIENCE_S, Agent, Bench, job

OFTEN = """
import hpcsched.agent.loop
from hpcsched.cli.main import main
hpcsched.agent.loop.PROGRESS_PERIOD_S = 0.25
main()
"""
"""The command line, with an agent that looks at its jobs' progress often, so that no test takes a minute."""

TRAINS = """
import json, os, sys, time
from pathlib import Path
# Goes by the clock, as nothing else is the same pace on a busy machine.
pace = {1: 50.0, 2: 80.0}[len(os.environ["HPCSCHED_DEVICES"].split(","))]
begun, go = time.time(), Path(sys.argv[1])
while not go.exists():
    now = time.time()
    line = json.dumps({"step": int((now - begun) * pace), "t": now}) + "\\n"
    os.write(int(os.environ["HPCSCHED_PROGRESS_FD"]), line.encode())
    time.sleep(0.02)
"""
"""A training of 50 steps a second on one GPU and 80 on two, until the file named exists."""


@pytest.fixture
def program(bench: Bench) -> list[str]:
    path = bench.folder / "train.py"
    path.write_text(TRAINS)
    return [sys.executable, str(path), str(bench.folder / "go")]


def run(bench: Bench, *words: object) -> Agent:
    """`hpcsched run` in the background, with an agent that looks often."""
    told = bench.folder / f"often-{len(bench.agents)}.err"
    argv = [sys.executable, "-c", OFTEN, "run", *map(str, words)]
    with told.open("wb") as out:
        process = subprocess.Popen(argv, env=bench.env, cwd=bench.folder, stdout=out, stderr=out)
    bench.agents.append(Agent(process, told))
    return bench.agents[-1]


def learnt(bench: Bench) -> dict[int, float]:
    """What the journal, as far as it goes, says of the model `new`."""
    if not bench.rundir.journal.exists():
        return {}
    machine, _ = bench.replayed()
    belief = machine.estimates.observed.beliefs.get(("new", 1, ""))
    return dict(belief.throughput) if belief else {}


def story(bench: Bench, name: str) -> list[tuple[str, str]]:
    """The codes and sentences of a job's story."""
    done = bench("explain", name, "--json")
    assert done.returncode == 0, done.stderr
    return [(note["code"], note["text"]) for note in json.loads(done.stdout)["story"]]


def test_what_a_run_learns_is_told_kept_and_used(bench: Bench, program: list[str]) -> None:
    jobs = [
        job(f"on{gpus}", command=program, processes="one", model="new", gpus=gpus, steps=99_999)
        for gpus in (1, 2)
    ]
    agent = run(bench, bench.set_of(*jobs), "--devices", "cpu:3")
    bench.until(lambda: len(learnt(bench)) == 2, "both counts learnt")
    Path(program[-1]).touch()
    assert agent.wait() == 0, agent.said

    machine, _ = bench.replayed()
    profile = machine.estimates.observed.beliefs["new", 1, ""]
    # The program keeps its pace; how long after a line its time is compared with ours, a busy machine says.
    for gpus, pace in {1: 50.0, 2: 80.0}.items():
        assert 0.5 * pace < profile.throughput[gpus] < 2 * pace
        seen = machine.estimates.observed.seen["new", 1, ""][gpus]
        assert len(seen.rates) >= 3 and seen.told
        text = next(text for code, text in story(bench, f"on{gpus}") if code == "Learned")
        assert text.startswith("new does ") and f" steps/s on {gpus} CPU slot" in text
        assert "(3 samples of " in text and "spread" in text
        assert text in bench("explain", f"on{gpus}").stdout
        assert bench.job(f"on{gpus}")["step"] == machine.run.jobs[gpus].step > 0

    page = json.loads(bench("profile", "show", "new", "--json").stdout)
    (kept,) = page["profiles"]
    assert (kept["model"], kept["device"], kept["source"]) == ("new", "cpu", "learned")
    assert kept["throughput"] == {str(gpus): rate for gpus, rate in profile.throughput.items()}
    assert kept["spread"].keys() == {"1", "2"}

    again = bench.set_of(job("next", "true", model="new"), name="next.toml")
    done = bench("--dir", bench.folder / "next", "run", again, "--devices", "cpu:3", "-q")
    assert done.returncode == 0, done.stderr
    done = bench("--dir", bench.folder / "next", "explain", "next", "--json")
    texts = [note["text"] for note in json.loads(done.stdout)["story"] if note["code"] == "Optimal"]
    assert len(texts) == 1 and texts[0].startswith("2 CPU slots is the fastest count of new (")
    assert texts[0].endswith(" steps/s; learned profile)")


@pytest.mark.slow
def test_stand_ins_teach_nothing(bench: Bench) -> None:
    profile = {"model": "new", "device": "cpu", "throughput": {"1": 10.0, "2": 15.0}, "source": "measured"}
    profiles = bench.folder / "profiles.json"
    profiles.write_text(json.dumps({"schema": 1, "profiles": [profile]}))
    jobs = bench.set_of(job("a", replay=True, model="new", steps=1200))
    agent = run(bench, jobs, "--devices", "replay:2@40", "--profiles", profiles)
    assert agent.wait(2 * PATIENCE_S) == 0, agent.said
    machine, _ = bench.replayed()
    assert machine.run.jobs[1].reports and machine.estimates.observed.seen == {}
    assert json.loads(bench("profile", "list", "--json").stdout)["profiles"] == []
