"""Programs that share devices in real runs: side by side, measured, and each one's memory its own."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from livebench import Bench, job, placements, saves
from mpsstandin import mps_host
from places import DATA

from hpcsched.core.mechanisms.sharing.mechanism import Sharing
from hpcsched.core.reasons import Why
from hpcsched.policy import make_policy
from hpcsched.store.replay import replay

TOGETHER = "touch $HPCSCHED_JOB_NAME; until [ -e a ] && [ -e b ] && [ -e c ]; do sleep 0.05; done"


def test_programs_with_a_share_run_side_by_side(bench: Bench) -> None:
    jobs = [job(name, f"cd {bench.folder}; {TOGETHER}", gpus=0.3) for name in "abc"]
    done = bench("run", bench.set_of(*jobs), "--devices", "cpu:1")
    assert done.returncode == 0, done.stderr
    assert (
        "job 2 (b) starts on CPU slot 0 as shared: shares CPU slot 0 with job 1 (a): they ask for 0.6"
        in done.stderr
    )
    _, actions = bench.replayed()
    assert [one[4] for one in placements(actions)] == ["primary", "shared", "shared"]


@pytest.mark.slow
def test_one_that_is_not_done_when_the_holder_is_has_the_slot_from_then_on(bench: Bench) -> None:
    short = job("short", "until [ -e go ]; do sleep 0.05; done", gpus=0.5)
    agent = bench.start(bench.set_of(short, saves("long", steps=200, gpus=0.5)), "--devices", "cpu:1")
    bench.ready("long")
    (bench.folder / "go").touch()
    bench.until(lambda: bench.states()["short"] == "COMPLETED")
    bench.until(lambda: bench.job("long")["role"] == "primary", "it holds the slot")
    assert "job 2 (long) is RUNNING on CPU slot 0 as primary" in bench("explain", "long").stdout
    assert bench("suspend", "long").returncode == 0
    bench.until(lambda: bench.states()["long"] == "SUSPENDED")
    assert bench("resume", "long").returncode == 0
    assert agent.wait() == 0


@pytest.mark.slow
def test_one_comes_when_those_who_are_there_have_been_measured(bench: Bench) -> None:
    jobs = [saves(name, model="m", steps=1100, pause=0.01, gpus="share") for name in "ab"]
    agent = bench.start(bench.set_of(*jobs), "--devices", "cpu:1")
    bench.until(lambda: bench.states().get("b") == "RUNNING", "b comes")
    assert "job 2 (b) starts on CPU slot 0 as shared" in agent.said
    assert agent.wait() == 0
    machine, _ = bench.replayed()
    a, b = machine.run.jobs.values()
    assert a.started_s is not None and b.started_s is not None and a.ended_s is not None
    assert b.started_s - a.started_s > 2 and b.started_s < a.ended_s
    seen = machine.mechanism(Sharing).shares.models["m"]
    assert 1 < (seen.memory_mib or 0) < 100
    again = bench.set_of(job("next", "true", model="m", gpus="share"), name="next.toml")
    done = bench("--dir", bench.folder / "next", "run", again, "--devices", "cpu:1", "-q")
    assert done.returncode == 0, done.stderr
    machine = replay(bench.folder / "next" / "journal.jsonl", make_policy).machine
    assert machine.mechanism(Sharing).shares.before["m"] == seen


GREEDY = f"{sys.executable} -c \"x = bytearray(300 << 20); open('begun', 'w'); import time; time.sleep(60)\""


def test_a_greedy_program_does_not_harm_its_neighbour(bench: Bench) -> None:
    quiet = job("quiet", "until [ -e go ]; do sleep 0.05; done", gpus=0.5)
    greedy = job("greedy", GREEDY, gpus=0.5, memory="100M", retries=0)
    agent = bench.start(bench.set_of(quiet, greedy), "--devices", "cpu:1")
    bench.until(lambda: bench.states().get("greedy") == "OUT_OF_MEMORY")
    assert bench.states()["quiet"] == "RUNNING"
    (bench.folder / "go").touch()
    assert agent.wait() == 1
    assert bench.states()["quiet"] == "COMPLETED"


@pytest.fixture
def used(bench: Bench) -> Path:
    """NVML is played: what is in use on its GPU of 80 GiB stands in this file."""
    folder = bench.folder / "nvml"
    folder.mkdir()
    path = os.pathsep.join(filter(None, [str(DATA / "gpu"), bench.env.get("PYTHONPATH")]))
    bench.env |= {"PYTHONPATH": path, "NVML_PLAYED": str(folder)}
    bench.env.pop("CUDA_VISIBLE_DEVICES", None)
    return folder / "used"


def test_they_are_clients_of_one_daemon_where_they_ask_for_mps(bench: Bench, used: Path) -> None:
    del used
    env = {"HPCSCHED_LANE_MODE": "mps"}
    says = "echo $CUDA_MPS_PIPE_DIRECTORY $CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
    jobs = [
        job(name, f"cd {bench.folder}; {says}; {TOGETHER}", gpus=0.3, env=env, **more)
        for name, more in (("a", {"gpu_memory": "2G"}), ("b", {}), ("c", {}))
    ]
    with mps_host(["GPU-0"]) as host:
        bench.env["PATH"] = f"{host.folder}:{bench.env['PATH']}"
        done = bench("run", bench.set_of(*jobs), "--devices", "cuda:1")
    assert done.returncode == 0, done.stderr
    said = [Path(bench.job(name)["output"]).read_text().split() for name in "abc"]
    assert len({pipe for pipe, _ in said}) == 1
    assert [limit for _, limit in said] == ["0=2048M", "0=23347M", "0=23347M"]
    assert not Path(said[0][0]).exists(), "it ends with the run"


@pytest.mark.slow
def test_the_memory_of_a_gpu_is_learnt_and_keeps_others_out(bench: Bench, used: Path) -> None:
    first = f"echo 50000 > {used}; until [ -e go ]; do sleep 0.05; done; rm {used}"
    jobs = [
        job("first", first, model="large", gpus=0.5),
        job("same", "exit 0", model="large", gpus=0.3, submit_at=16),
        job("small", "exit 0", gpus=0.2, gpu_memory="1G", submit_at=16),
    ]
    args = ["--devices", "cuda:1", "--monitor", "0.2"]
    agent = bench.start(bench.set_of(*jobs), *args)
    bench.until(lambda: bench.states().get("small") == "COMPLETED", "a small one comes beside it")
    said = bench("explain", "same").stdout
    assert "55000 of its 81920 MiB are needed there, and 55000 by this job" in said
    (bench.folder / "go").touch()
    assert agent.wait() == 0
    machine, _ = bench.replayed()
    small = machine.run.jobs[3]
    assert [note.reason.why for note in small.story if note.reason.why is Why.SHARED] == [Why.SHARED]
