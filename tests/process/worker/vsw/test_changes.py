"""Stream workers while things change: ranks come and go, memory is too small, gradients are not finite."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from budget import slow  # noqa: E402
from elasticjobs import Elastic, eventually  # noqa: E402
from rankjobs import Job, wait, woken_by  # noqa: E402
from vswtrainings import ADAPTIVE, BATCH, CLOSE, courses, trained  # noqa: E402

pytestmark = pytest.mark.torch

ODD = """
import os, time
import torch
from training import Exact, Mapped

class Tight(Exact):
    '''A device whose memory holds `room` samples; from step `later` on only half of that.
    A pass takes as long for many samples as for few, so that the larger local batch is the faster one.'''

    def loss(self, model, batch):
        room = self.args["room"]
        if self.seen >= self.args.get("later", 10**9) and not os.path.exists("roomy"):
            room //= 2
        if len(batch[0]) > room and os.environ["HPCSCHED_RANK"] == self.args.get("tight", "0"):
            self.seen += 1
            raise torch.OutOfMemoryError("no room")
        time.sleep(0.002)
        return super().loss(model, batch)

class Endless(Exact):
    def loss(self, model, batch):
        return super().loss(model, batch) * float("nan")
"""


def a_job(folder: Path, trainer: str, strategy: dict[str, Any], steps: int = 60) -> Job:
    job = Job(folder, f"odd:{trainer}", steps, {"HPCSCHED_STRATEGY": json.dumps({"kind": "vsw", **strategy})})
    (folder / "odd.py").write_text(ODD)
    return job


def same_weights(state: Any, other: Any) -> None:
    for name, value in other["model"].items():
        torch.testing.assert_close(state["model"][name], value, **CLOSE)


def test_ranks_come_and_go_while_the_batch_grows(tmp_path: Path) -> None:
    """Resized in place from one rank to two and back: the same training, and every sample once."""
    whole = trained(tmp_path / "whole", ADAPTIVE, 1, 150)
    (tmp_path / "job").mkdir()
    job = Elastic(tmp_path / "job", steps=150)
    job.env["HPCSCHED_STRATEGY"] = json.dumps(ADAPTIVE)
    with woken_by():
        ranks = job.begin(1, batch=BATCH, pause=0.01)
        job.word()
        joined = job.resize(1, 2)
        assert job.word()["in_place"]
        eventually(lambda: any(len(line["workers"]) == 2 for line in courses(job)))
        job.resize(2, 1)
        job.word()
        assert wait(joined) == [0], job.output
        job.go()
        assert wait(ranks) == [0], job.output
    state = job.final()
    assert (state["step"], state["samples"]) == (150, 150 * BATCH)
    assert job.samples_seen() == sorted(list(range(50)) * (150 * BATCH // 50))
    same_weights(state, whole)


@pytest.mark.parametrize(("world", "tight"), [(1, "0"), slow(2, "1")])
def test_a_local_batch_that_does_not_fit_is_given_up_and_the_step_made_again(
    tmp_path: Path, world: int, tight: str
) -> None:
    """All ranks agree to go on with a smaller one; no attempt is lost, and none of the samples."""
    job = a_job(tmp_path, "Tight", {"local_batch": [2, 16], "global_batch": [32, 32]}, 300)
    assert job.run(world, batch=32, room=4, tight=tight) == [0] * world, job.output
    assert "no room for 1 local batches of 8 at once: no room" in job.output
    assert json.loads((job.dir / "too-large.json").read_text()) == [[8, 1]]
    assert {course["local_batch"] for course in courses(job)} <= {2, 4}
    state = job.final()
    assert state["samples"] == 300 * 32
    same_weights(state, trained(tmp_path / "whole", {"kind": "ddp"}, 1, 300, batch=32))


def test_what_does_not_fit_any_more_is_known_to_the_next_attempt(tmp_path: Path) -> None:
    """Memory that was enough runs out in the middle: that attempt fails, the next one knows better."""
    job = a_job(tmp_path, "Tight", {"local_batch": [2, 4]})
    job.env["HPCSCHED_CHECKPOINT_EVERY_S"] = "0.01"
    assert job.run(1, batch=BATCH, room=4, later=150) == [1]
    assert "OutOfMemoryError" in job.output
    assert json.loads((job.dir / "too-large.json").read_text()) == [[4, 1]]
    before = job.state["step"]
    assert job.run(1, batch=BATCH, room=4, later=0) == [0], job.output
    assert job.final()["samples"] == 60 * BATCH
    assert before > 0
    again = [course for course in courses(job) if course["attempt"] == 2]
    assert {course["local_batch"] for course in again} == {2}


def test_the_smallest_local_batch_has_to_fit(tmp_path: Path) -> None:
    job = a_job(tmp_path, "Tight", {"local_batch": 4})
    assert job.run(1, batch=BATCH, room=2) == [1]
    assert "no room for 1 local batches of 4 at once" in job.output


def test_where_the_gradient_is_not_finite_the_batch_stays_and_it_is_said(tmp_path: Path) -> None:
    job = a_job(tmp_path, "Endless", {**ADAPTIVE}, 20)
    assert job.run(1, batch=BATCH) == [0], job.output
    said = "the gradient's halves cannot be compared, the batch stays: their squares are nan"
    assert f"step 4: {said}" in job.output
    assert job.output.count(said) == 1
    assert job.final()["extra"]["vsw"]["wish"] == BATCH
    assert {course.get("similarity") for course in courses(job)} == {None}


@pytest.mark.slow
def test_processes_that_read_ahead_lose_and_repeat_nothing_when_the_batch_changes(tmp_path: Path) -> None:
    whole = trained(tmp_path / "whole", ADAPTIVE, 1, 100)
    job = Job(tmp_path / "read", "training:Mapped", 100, {"HPCSCHED_STRATEGY": json.dumps(ADAPTIVE)})
    assert job.run(2, batch=BATCH, loaders=2) == [0, 0], job.output
    state = job.final()
    assert state["samples"] == 100 * BATCH
    same_weights(state, whole)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ({"local_batch": 5}, "strategy vsw: local_batch: 5, of which the trainer's global batch of 12"),
        ({"workers": 5}, "strategy vsw: workers: 5 workers on 1 devices, for a global batch of 12"),
        ({"local_batch": 2, "global_batch": [8, 48]}, "fewer than the trainer's global batch of 12"),
        ({"local_batch": 4, "global_batch": [12, 48]}, "global_batch: 12 samples, not a whole number of 8"),
        ({}, "strategy vsw: local_batch: not given"),
    ],
)
def test_what_cannot_be_is_one_line_and_exit_code_2(
    tmp_path: Path, strategy: dict[str, Any], message: str
) -> None:
    job = a_job(tmp_path, "Endless", strategy)
    assert job.run(1, batch=BATCH) == [2]
    assert message in job.output
    assert job.output.count("\n") == 1


@pytest.mark.parametrize("batch", [6, 24])
def test_a_checkpoint_of_another_strategy_and_batch_is_gone_on_from(tmp_path: Path, batch: int) -> None:
    """What is left are the steps that are left, each of as many samples as the trainer says now."""
    job = Job(tmp_path, "training:Exact", 40)
    with woken_by():
        assert job.run(1, batch=BATCH, at=20) == [75], job.output
    done = job.state
    job.env["HPCSCHED_STRATEGY"] = json.dumps({"kind": "vsw", "local_batch": 2})
    assert job.run(1, batch=batch) == [0], job.output
    state = job.final()
    assert state["step"] == 40
    assert state["samples"] == done["samples"] + (40 - done["step"]) * batch
