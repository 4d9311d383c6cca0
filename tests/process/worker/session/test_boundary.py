"""Suspended, moved to other rank counts, damaged and killed, a training ends as if nothing happened."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from budget import slow

from hpcsched.contract import files
from hpcsched.contract.words import Versions

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from rankjobs import Job, same, wait, woken_by  # noqa: E402


@pytest.mark.parametrize("world", [slow(1), 2, slow(3)])
def test_suspended_and_resumed_is_equal_to_the_last_bit(tmp_path: Path, world: int) -> None:
    plain = Job(tmp_path / "plain")
    assert plain.run(world) == [0] * world

    job = Job(tmp_path / "elastic")
    assert job.run(world, at=4, rank=str(world - 1)) == [75] * world
    assert (job.dir / "ready.1").exists()
    told = Versions.decode((job.dir / files.VERSIONS).read_bytes())
    assert (told.python, told.packages["torch"]) == (platform.python_version(), torch.__version__)
    assert (job.state["step"], job.state["samples"], job.state["attempt"]) == (5, 35, 1)
    assert job.run(world, at=2, signal="SIGTERM") == [75] * world
    assert (job.state["step"], job.state["attempt"]) == (8, 2)
    assert job.run(world) == [0] * world
    assert (job.state["step"], job.state["samples"], job.state["attempt"]) == (12, 84, 3)
    assert job.state["metrics"] == {"training": 0.0}
    assert same(job.final(), plain.final())


def test_other_rank_counts_change_rounding_only(tmp_path: Path) -> None:
    plain = Job(tmp_path / "plain", trainer="training:Exact", steps=20)
    assert plain.run() == [0]
    job = Job(tmp_path / "elastic", trainer="training:Exact", steps=20)
    assert job.run(1, at=4) == [75]
    assert job.run(2, at=6, rank="1") == [75, 75]
    assert job.run(1) == [0]
    assert (job.state["step"], job.state["samples"]) == (20, 140)
    torch.testing.assert_close(job.final()["model"], plain.final()["model"], rtol=1e-10, atol=1e-12)
    assert job.final()["sampler"] == plain.final()["sampler"]


@pytest.mark.parametrize(
    ("trainer", "world", "args", "strategy"),
    [
        ("Exact", 1, {}, '{"kind": "ddp", "micro_batch": 3}'),
        ("Exact", 2, {}, '{"kind": "ddp", "micro_batch": 2}'),
        ("Mapped", 2, {}, '{"kind": "ddp"}'),
        slow("Mapped", 1, {"loaders": 1}, '{"kind": "ddp", "micro_batch": 5}'),
        ("Branches", 2, {}, '{"kind": "ddp"}'),
    ],
)
def test_every_way_to_split_a_batch_gives_the_same_training(
    tmp_path: Path, trainer: str, world: int, args: dict[str, int], strategy: str
) -> None:
    plain = Job(
        tmp_path / "plain", trainer="training:Exact" if trainer != "Branches" else "training:Branches"
    )
    assert plain.run() == [0]
    job = Job(tmp_path / "other", trainer=f"training:{trainer}", env={"HPCSCHED_STRATEGY": strategy})
    assert job.run(world, **args) == [0] * world, job.output
    torch.testing.assert_close(job.final()["model"], plain.final()["model"], rtol=1e-10, atol=1e-12)


def test_a_finished_job_is_not_trained_again(tmp_path: Path) -> None:
    job = Job(tmp_path)
    assert job.run() == [0]
    before = (job.checkpoints / "step-000000000012.pt").stat().st_mtime_ns
    assert job.run(1, raise_at=0) == [0]
    assert job.state["attempt"] == 2
    assert (job.checkpoints / "step-000000000012.pt").stat().st_mtime_ns == before


def test_periodic_checkpoints_outlive_a_kill_and_a_damaged_one_is_passed_over(tmp_path: Path) -> None:
    job = Job(tmp_path, env={"HPCSCHED_CHECKPOINT_EVERY_S": "0"})
    assert job.run(1, at=7, signal="SIGKILL") == [-signal.SIGKILL]
    newest = sorted(job.checkpoints.glob("*.pt"))
    assert [path.name for path in newest] == ["step-000000000006.pt", "step-000000000007.pt"]
    newest[-1].write_bytes(newest[-1].read_bytes()[:-100])
    assert job.run() == [0]
    assert job.output.count("is damaged") == 1
    plain = Job(tmp_path / "plain")
    assert plain.run() == [0]
    assert same(job.final(), plain.final())


def test_a_suspend_that_cannot_be_saved_ends_with_74(tmp_path: Path) -> None:
    job = Job(tmp_path)
    assert job.run(1, at=3, file_limit=100_000) == [74]
    assert "step 4 could not be saved" in job.output
    assert "Traceback" not in job.output
    assert list(job.checkpoints.glob("*.pt")) == []
    assert list(job.checkpoints.glob(".*")) == []


def test_a_periodic_checkpoint_that_fails_only_warns(tmp_path: Path) -> None:
    job = Job(tmp_path, steps=4, env={"HPCSCHED_CHECKPOINT_EVERY_S": "0"})
    assert job.run(2, file_limit=100_000) == [74, 74]  # for the final state cannot be saved either
    assert job.output.count("periodic checkpoint failed, training goes on") == 4


def test_starting_over_puts_former_checkpoints_aside(tmp_path: Path) -> None:
    job = Job(tmp_path)
    assert job.run(1, at=3) == [75]
    job.env["HPCSCHED_RESUME"] = "0"
    assert job.run() == [0]
    assert [path.name for path in job.checkpoints.glob("*.pt")] == ["step-000000000012.pt"]
    assert (job.checkpoints / "before-attempt-2" / "step-000000000004.pt").exists()


@pytest.mark.parametrize("world", [1, 2])
def test_without_its_agent_a_job_saves_and_leaves(tmp_path: Path, world: int) -> None:
    agent = subprocess.Popen(["sleep", "60"])
    job = Job(tmp_path, steps=10**9, env={"HPCSCHED_NOTIFY_PID": str(agent.pid)})
    ranks = job.start(world)
    deadline = time.monotonic() + 120
    while not (job.dir / "ready.1").exists() and time.monotonic() < deadline:
        ranks[0].join(0.02)
    agent.kill()
    agent.wait()
    assert wait(ranks) == [75] * world
    assert "step" in job.state, "saved, if only at the start"


def test_the_example_of_an_own_loop_is_elastic(tmp_path: Path) -> None:
    import hpcsched.examples.own_loop as example

    job = Job(tmp_path, steps=100)
    rank = job.spawn(sys.executable, str(Path(example.__file__)), env={"HPCSCHED_STEPS": str(10**9)})
    deadline = time.monotonic() + 120
    while not (job.dir / "ready.1").exists() and time.monotonic() < deadline and rank.poll() is None:
        time.sleep(0.02)
    with woken_by():
        os.kill(rank.pid, signal.SIGTSTP)
        assert rank.wait(120) == 75, job.output
    saved = job.state["step"]
    again = job.spawn(sys.executable, str(Path(example.__file__)), env={"HPCSCHED_STEPS": str(saved + 10)})
    assert again.wait(120) == 0, job.output
    assert job.state["step"] == saved + 10
    assert set(job.state["metrics"]) == {"loss"}
