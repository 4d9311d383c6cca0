"""Resizes in place over a backend with NCCL's rules, for real but for the GPUs: nobody waits for a group that
is no more, or never will be; and what ranks call, they call in one order."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from budget import slow

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

import ncclrules  # noqa: E402
from elasticjobs import Elastic, eventually, expected_samples  # noqa: E402
from rankjobs import Job, same, wait, woken_by  # noqa: E402
from vswtrainings import ADAPTIVE  # noqa: E402

RULES = '''

import pathlib
from multiprocessing.util import Finalize
import ncclrules

ncclrules.use()
_HERE = pathlib.Path(os.environ["HPCSCHED_RUN_DIR"])
Finalize(None, lambda: ncclrules.write(_HERE / f"nccl.{os.getpid()}"), exitpriority=1)

class Late(ncclrules.Nccl):
    """While a new group is made, the victim is killed: all others have come, and wait for it."""
    def __init__(self, store, rank, size, timeout):
        if os.path.exists("armed") and os.environ["HPCSCHED_RANK"] == os.environ.get("VICTIM"):
            os.kill(os.getpid(), signal.SIGKILL)
        if os.path.exists("armed"):
            pathlib.Path(f"waiting.{rank}").touch()
        super().__init__(store, rank, size, timeout)

ncclrules.Nccl = Late
def settled(device, within_s):
    """What the GPU is waited for: here it has never anything to do."""
    ncclrules.Nccl.words["settled"] += 1

process_group.backend.settle = settled
process_group.CONNECT_TIMEOUT_S = float(os.environ.get("CONNECT_S", "20"))
'''


def over_standin(folder: Path, trainer: str = "WatchedExact", **env: str) -> Elastic:
    job = Elastic(folder, trainer)
    with (folder / "watched.py").open("a") as file:
        file.write(RULES)
    job.env |= {"HPCSCHED_RANKS_BACKEND": ncclrules.NAME, **env}
    return job


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Elastic]:
    place = over_standin(tmp_path / "elastic")
    with woken_by():
        yield place
    os.close(place.control)
    os.close(place.arena)


def found(job: Job) -> tuple[dict[str, list[ncclrules.Call]], list[dict[str, int]]]:
    calls, words = ncclrules.read(sorted(job.folder.glob("nccl.*")))
    return calls, [dict(one) for one in words]


@pytest.mark.slow
def test_all_ranks_abort_the_old_group_and_nobody_destroys_it(job: Elastic) -> None:
    ranks = job.begin(1, pause=0.02)
    job.word()
    for old, new in ((1, 3), (3, 2), (2, 1)):
        ranks += job.resize(old, new)
        assert job.word()["stopped_s"] < 30
    job.go()
    assert wait(ranks) == [0, 0, 0], job.output
    assert job.samples_seen() == expected_samples(job)
    calls, words = found(job)
    assert [one["made"] for one in words] and all("destroyed" not in one for one in words), words
    assert [one["aborted"] for one in words] == [one["made"] for one in words], "leavers too"
    assert [one["settled"] for one in words] == [one["aborted"] for one in words], "before each"
    assert sorted(one["made"] for one in words) == [1, 2, 2]
    assert ncclrules.deadlock(calls) == ""


def test_reproducible_sums_are_worked_off_and_have_the_bits_of_one_rank(tmp_path: Path) -> None:
    strategy = json.dumps({"kind": "ddp", "reproducible": True, "shards": 4})
    plain = Elastic(tmp_path / "plain", "Convolutional", steps=30)
    plain.env["HPCSCHED_STRATEGY"] = strategy
    assert plain.run() == [0], plain.output
    job = over_standin(tmp_path / "two", "Convolutional", HPCSCHED_STRATEGY=strategy)
    job.steps = 30
    assert job.run(3) == [0, 0, 0], job.output
    calls, _ = found(job)
    assert any(call.sends for one in calls.values() for call in one)
    assert ncclrules.deadlock(calls) == ""
    assert same(job.final()["model"], plain.final()["model"])


@pytest.mark.parametrize("old", [1, slow(2)])
def test_a_death_while_the_new_group_is_made_ends_the_wait(tmp_path: Path, old: int) -> None:
    """NCCL itself waits without a limit. The state of the step is saved, and the attempt ends."""
    job = over_standin(tmp_path / "elastic", VICTIM="1", CONNECT_S="1.5")
    with woken_by():
        ranks = job.begin(old, pause=0.05)
        job.word()
        (job.folder / "armed").touch()
        ranks += job.resize(old, 3)
        eventually((job.folder / "waiting.0").exists)
        began = time.monotonic()
        assert wait(ranks)[0] == 75, job.output
        assert time.monotonic() - began < ncclrules.LIMIT_S / 2
        (job.folder / "armed").unlink()
        assert 0 < job.state["step"] < 300
        job.env.pop("VICTIM")
        job.go()
        assert job.run() == [0], job.output
    assert job.samples_seen() == expected_samples(job)


def test_the_agents_signal_ends_the_wait_at_once(tmp_path: Path) -> None:
    """It has seen that a rank is dead, and gives the others 5 s to save."""
    job = over_standin(tmp_path / "elastic", VICTIM="1", CONNECT_S="60")
    with woken_by():
        ranks = job.begin(2, pause=0.05)
        job.word()
        (job.folder / "armed").touch()
        ranks += job.resize(2, 3)
        eventually((job.folder / "waiting.0").exists)
        began = time.monotonic()
        for rank in (ranks[0], ranks[2]):
            os.kill(rank.pid or 0, signal.SIGTERM)
        assert wait(ranks)[0] == 75, job.output
        assert time.monotonic() - began < ncclrules.LIMIT_S / 2
    assert job.state["step"] == job.final()["step"] > 0


def test_two_ranks_on_one_gpu_are_refused_by_nccl(tmp_path: Path) -> None:
    job = over_standin(tmp_path / "elastic", STANDIN_GPU="0")
    codes = job.run(2)
    assert 0 not in codes
    assert "Duplicate GPU" in job.output


@pytest.mark.parametrize(
    ("trainer", "strategy"),
    [("Branches", {"kind": "ddp"}), ("Noisy", ADAPTIVE)],
    ids=["gradients that some ranks lack", "adaptive batches"],
)
def test_whatever_ranks_train_is_worked_off(tmp_path: Path, trainer: str, strategy: dict[str, Any]) -> None:
    job = over_standin(tmp_path / "job", HPCSCHED_STRATEGY=json.dumps(strategy))
    (job.folder / "also.py").write_text(f"import training, watched\nclass It(training.{trainer}): pass\n")
    job.trainer, job.steps = "also:It", 25
    assert job.run(3, batch=12) == [0, 0, 0], job.output
    calls, _ = found(job)
    assert all(len(one) >= 25 for one in calls.values())
    assert ncclrules.deadlock(calls) == ""
