"""Ranks come and go while a training runs: nothing is lost or done twice, and nothing hangs."""

from __future__ import annotations

import fcntl
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from budget import examples, slow
from places import ROOT

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from elasticjobs import Elastic, eventually, expected_samples  # noqa: E402
from rankjobs import same, wait, woken_by  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from hpcsched.worker.checkpoint.shared_memory import Arena  # noqa: E402
from hpcsched.worker.process.contract import JobEnv  # noqa: E402
from hpcsched.worker.session.agreement import is_wrapped  # noqa: E402


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Elastic]:
    place = Elastic(tmp_path / "elastic")
    with woken_by():
        yield place
    os.close(place.control)
    os.close(place.arena)


@pytest.mark.parametrize("one_host", [True, False], ids=["shared memory", "broadcast"])
def test_ranks_join_and_leave_and_no_sample_is_lost_or_seen_twice(job: Elastic, one_host: bool) -> None:
    ranks = job.begin(1, pause=0.05, crawl_at=150)
    assert job.word() == {"parallel": True, "in_place": True}
    for old, new in ((1, 3), (3, 2), (2, 4), (4, 1)):
        ranks += job.resize(old, new, one_host=one_host)
        word = job.word()
        assert word["in_place"] and 0 <= word["stopped_s"] < 60
    job.go()
    assert wait(ranks) == [0] * len(ranks), job.output
    plain = Elastic(job.folder.parent / "plain")
    assert plain.run() == [0]
    assert job.state["attempt"] == 5
    arena = Arena.open(job.arena)
    assert arena is not None and (arena.newest() is not None) == one_host, "where the state went by"
    arena.close()
    assert (job.state["step"], job.state["samples"]) == (300, 2100)
    assert job.samples_seen() == expected_samples(job)
    torch.testing.assert_close(job.final()["model"], plain.final()["model"], rtol=1e-10, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["Convolutional", "Attentive"])
def test_the_result_is_the_same_to_the_last_bit_over_any_resizes(tmp_path: Path, trainer: str) -> None:
    strategy = json.dumps({"kind": "ddp", "reproducible": True, "shards": 4})
    plain = Elastic(tmp_path / "plain", trainer)
    plain.env["HPCSCHED_STRATEGY"] = strategy
    assert plain.run() == [0], plain.output

    job = Elastic(tmp_path / "elastic", trainer)
    job.env["HPCSCHED_STRATEGY"] = strategy
    choice, resizes = random.Random(trainer), examples(10)
    with woken_by():
        now, ranks = 2, job.begin(2, pause=0.01, crawl_at=400)
        job.word()
        for _ in range(resizes):
            now, before = choice.choice([n for n in (1, 2, 3) if n != now]), now
            ranks += job.resize(before, now)
            assert job.word()["in_place"]
        job.go()
        assert wait(ranks) == [0] * len(ranks), job.output
    assert job.state["attempt"] == 1 + resizes
    assert job.state["step"] == 300
    assert same(job.final()["model"], plain.final()["model"])
    assert same(job.final()["optimizer"], plain.final()["optimizer"])


# Suspended into shared memory.


@pytest.mark.parametrize("world", [1, slow(2)])
def test_a_quick_suspend_touches_no_disk_and_changes_no_bit(tmp_path: Path, job: Elastic, world: int) -> None:
    plain = Elastic(tmp_path / "plain", "WatchedNoisy")
    assert plain.run(world) == [0] * world
    job.trainer = "watched:WatchedNoisy"
    for attempt in (1, 2):
        ranks = job.begin(world, pause=0.02)
        job.word()
        eventually(lambda: len(job.steps_seen()) > attempt * 4 * world)  # noqa: B023
        job.order(suspend={"quick": True})
        for rank in ranks:
            os.kill(rank.pid or 0, signal.SIGTSTP)
        assert wait(ranks) == [75] * world, job.output
        assert not list(job.checkpoints.glob("*")) and not (job.dir / "STATE.json").exists()
        held = json.loads((job.dir / f"held.{attempt}").read_text())
        assert held["samples"] == 7 * held["step"] > 0
    job.go()
    assert job.run(world) == [0] * world, job.output
    assert job.state["step"] == 300
    assert same(job.final(), plain.final())
    assert job.samples_seen() == expected_samples(job)


def test_an_agent_that_has_gone_holds_no_memory_so_the_state_goes_to_disk(job: Elastic) -> None:
    agent = subprocess.Popen(["sleep", "600"])
    job.env["HPCSCHED_NOTIFY_PID"] = str(agent.pid)
    ranks = job.begin(1, pause=0.02)
    job.word()
    eventually(job.steps_seen)
    job.order(suspend={"quick": True})
    agent.kill()
    agent.wait()
    assert wait(ranks) == [75], job.output
    assert not (job.dir / "held.1").exists()
    assert job.state["step"] == job.final()["step"] > 0


def test_without_room_in_memory_it_is_saved_to_disk(job: Elastic) -> None:
    sealed = os.memfd_create("arena", os.MFD_ALLOW_SEALING)
    fcntl.fcntl(sealed, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    os.dup2(sealed, job.arena)
    os.close(sealed)
    ranks = job.begin(1, pause=0.02)
    job.word()
    job.order(suspend={"quick": True})
    os.kill(ranks[0].pid or 0, signal.SIGTSTP)
    assert wait(ranks) == [75], job.output
    assert not (job.dir / "held.1").exists()
    assert job.state["step"] == job.final()["step"]
    job.go()
    assert job.run() == [0], job.output
    assert job.samples_seen() == expected_samples(job)


def test_a_state_damaged_in_memory_is_passed_over(job: Elastic) -> None:
    ranks = job.begin(1, pause=0.02)
    job.word()
    os.kill(ranks[0].pid or 0, signal.SIGTSTP)
    assert wait(ranks) == [75], job.output
    durable = job.state["step"]
    ranks = job.begin(1, pause=0.02)
    job.word()
    eventually(lambda: len(job.steps_seen()) > durable + 3)
    job.order(suspend={"quick": True})
    os.kill(ranks[0].pid or 0, signal.SIGTSTP)
    assert wait(ranks) == [75], job.output
    (job.dir / "held.2").unlink()
    for slot in (1, 2):
        os.pwrite(job.arena, b"damage", slot << 40)
    job.go()
    assert job.run() == [0], job.output
    assert "going on from a checkpoint" in job.output
    assert job.state["step"] == 300


# What can go wrong.


@pytest.mark.parametrize(
    ("old", "new", "victim", "dies", "code"),
    [
        (2, 3, "1", "regroup", 75),
        (2, 3, "1", "meet", 75),
        (1, 2, "1", "meet", 75),
        (2, 3, "1", "broadcast_state", 75),
        (1, 3, "2", "tell", 75),
        (1, 2, "1", "broadcast_state", 75),
        (3, 2, "1", "regroup", 75),
        (3, 2, "2", "wait_parted", 0),  # it had nothing to do any more
    ],
)
def test_whoever_dies_in_a_resize_no_step_is_lost_and_nothing_hangs(
    job: Elastic, old: int, new: int, victim: str, dies: str, code: int
) -> None:
    """The others save where they are and leave, or go on if they can; the next attempt ends the job."""
    ranks = job.begin(old, pause=0.05, victim=victim, dies=dies)
    job.word()
    (job.folder / "armed").touch()
    ranks += job.resize(old, new, one_host=dies != "broadcast_state")
    if code == 0:
        job.word()
        job.go()
    assert wait(ranks)[0] == code, job.output
    (job.folder / "armed").unlink()
    if code == 75:
        assert job.state["step"] < 300
        job.go()
        assert job.run() == [0], job.output
    assert job.state["step"] == 300
    assert job.samples_seen() == expected_samples(job)


def test_a_rank_that_cannot_be_built_costs_the_others_nothing(job: Elastic) -> None:
    ranks = job.begin(2, pause=0.02)
    job.word()
    (joining,) = job.resize(2, 3)
    joining.kill()
    joining.join()
    job.order(forget={"attempt": 2})
    before = len(job.steps_seen())
    eventually(lambda: len(job.steps_seen()) > before + 10)
    ranks += job.resize(2, 3)
    assert job.word(3)["in_place"]
    job.go()
    assert wait(ranks) == [0, 0, 0], job.output
    assert job.samples_seen() == expected_samples(job)


def test_a_suspend_goes_before_a_resize(job: Elastic) -> None:
    ranks = job.begin(2, pause=0.1)
    job.word()
    joining = job.resize(2, 3)
    for rank in ranks:
        os.kill(rank.pid or 0, signal.SIGTSTP)
    assert wait(ranks) == [75, 75], job.output
    for rank in joining:
        os.kill(rank.pid or 0, signal.SIGTERM)
    for rank in joining:
        rank.join(60.0)
        assert rank.exitcode not in (None, 0), "it hears the signal, also where nobody listens any more"
    assert not (job.dir / "ready.2").exists()
    job.go()
    assert job.run(2) == [0, 0], job.output
    assert job.samples_seen() == expected_samples(job)


@pytest.mark.parametrize(
    ("order", "why"),
    [
        ({"world_size": 8, "keep": [0]}, "a global batch of 7 samples is too small for 8 ranks"),
        ({"world_size": 1, "keep": [0, 2]}, None),
        ({"world_size": 2, "keep": [0, 2]}, "ranks (0, 2) of 2 are to stay"),
        ({"world_size": 2, "keep": [1, 0]}, None),
        (
            {"world_size": 3, "keep": [0, 1], "where": "192.0.2.99:4711"},  # where this host is not
            "rank 0 of 2 could not meet the others at 192.0.2.99:4711: "
            "[Errno 99] Cannot assign requested address",
        ),
        ({"keep": [0]}, None),
    ],
)
def test_an_order_that_cannot_be_carried_out_changes_nothing(
    job: Elastic, order: dict[str, Any], why: str | None
) -> None:
    """It is refused, or if it makes no sense, passed over with a line in the output."""
    ranks = job.begin(2, pause=0.02)
    job.word()
    job.order(resize={"attempt": 2, "one_host": True, **order})
    if why is None:
        eventually(lambda: "makes no sense" in job.output)
    else:
        eventually((job.dir / "refused.2").exists)
        assert (job.dir / "refused.2").read_text().startswith(why)
    job.go()
    assert wait(ranks) == [0, 0], job.output
    assert job.samples_seen() == expected_samples(job)


def test_a_loop_that_has_not_said_so_is_not_resized_in_place(job: Elastic) -> None:
    job.steps = 40
    (job.folder / "loop.py").write_text(
        "from training import own_loop\nimport time, torch\n"
        "step = torch.optim.SGD.step\n"
        "torch.optim.SGD.step = lambda *args: (time.sleep(0.05), step(*args))[1]\n"
        "own_loop()\n"
    )
    read, write = os.pipe()
    rank = job.spawn(
        sys.executable,
        "loop.py",
        pass_fds=[read],
        env={"HPCSCHED_CONTROL_FD": str(read), "PYTHONPATH": str(ROOT)},
    )
    assert job.word() == {"parallel": True}
    order = {"attempt": 2, "world_size": 1, "keep": [0], "one_host": True}
    os.write(write, json.dumps({"resize": order}).encode() + b"\n")
    os.close(read)
    eventually((job.dir / "refused.2").exists)
    os.close(write)
    assert rank.wait(60) == 0
    assert "has not said that it can" in (job.dir / "refused.2").read_text()


def test_a_model_in_a_wrapper_that_fixes_the_ranks_is_noticed() -> None:
    wrapped = torch.nn.Linear(1, 1)
    env = JobEnv.from_environ({"HPCSCHED_JOB_ID": "1", "HPCSCHED_RUN_DIR": "/nowhere"})
    assert env is not None
    assert not is_wrapped(wrapped, env)
    wrapper = DistributedDataParallel.__new__(DistributedDataParallel)
    wrapper.__dict__["module"] = wrapped
    assert is_wrapped(wrapped, env)
    assert not is_wrapped(torch.nn.Linear(1, 1), env), "it is another model's"
