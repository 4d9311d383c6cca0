"""Trainers evaluate and call back while they train, on all ranks alike, and train no other than without."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from rankjobs import Job, same  # noqa: E402

from hpcsched.contract import files  # noqa: E402
from hpcsched.store.metrics import read_curves, read_points  # noqa: E402
from hpcsched.worker import load_checkpoint  # noqa: E402

CALLING = """
import json, os
import torch
from training import Noisy
from hpcsched.worker import Callback, EarlyStopping, ModelCheckpoint

class Recorder(Callback):
    def __init__(self):
        self.evaluations = 0
        self.logged = []

    def on_train_start(self, session):
        self.write("start", session.step)

    def on_train_batch_end(self, session):
        if session.step % 5 == 0:
            self.write("batch", session.step)

    def on_train_epoch_end(self, session):
        self.write("epoch", session.step)

    def on_validation_end(self, session, metrics):
        self.evaluations += 1
        self.write("validation", session.step, self.evaluations, dict(metrics))

    def on_train_end(self, session):
        self.write("end", session.step)

    def state_dict(self):
        return {"evaluations": self.evaluations}

    def load_state_dict(self, state):
        self.evaluations = state["evaluations"]

    def log(self, metrics, step):
        self.logged.append((step, sorted(metrics)))

    def close(self):
        self.write("closed", len(self.logged))

    def write(self, *what):
        with open("calls." + os.environ["HPCSCHED_RANK"], "a") as file:
            file.write(json.dumps(what) + "\\n")

class Calling(Noisy):
    def build(self, args):
        parts = super().build(args)
        values = args.get("values", [])

        def evaluate(model):
            torch.rand(3)  # draws, and leaves the model in its mode
            step = len(values) - len(left)
            # Another on each rank: rank 0's counts.
            return {"value": (left.pop(0) if left else 0.0) + int(os.environ["HPCSCHED_RANK"])}

        left = list(values)
        parts.evaluate, parts.evaluate_every = evaluate, args["every"]
        parts.callbacks = [
            Recorder(),
            ModelCheckpoint("value"),
            EarlyStopping("value", patience=args.get("patience", 100)),
        ]
        return parts
"""


def calling(folder: Path) -> Job:
    job = Job(folder, trainer="calling:Calling", steps=16)
    (folder / "calling.py").write_text(CALLING)
    return job


def calls(job: Job, rank: int = 0) -> list[Any]:
    return [json.loads(line) for line in (job.folder / f"calls.{rank}").read_text().splitlines()]


def test_what_is_trained_is_the_same_with_and_without_and_over_a_suspend(tmp_path: Path) -> None:
    plain, job = Job(tmp_path / "plain", steps=16), calling(tmp_path / "calling")
    assert plain.run(2) == [0, 0], plain.output
    given = {"every": 4, "values": [3.0, 2.0]}
    assert job.run(2, at=9, **given) == [75, 75], job.output
    assert job.run(2, every=4, values=[2.5, 1.0]) == [0, 0], job.output
    for part in ("model", "optimizer", "scheduler", "rng"):
        assert same(job.final()[part], plain.final()[part]), part
    told = [[4, 1, {"value": 3.0}], [8, 2, {"value": 2.0}], [12, 3, {"value": 2.5}], [16, 4, {"value": 1.0}]]
    for rank in (0, 1):  # 50 samples in batches of 7: a pass ends with step 8, another with step 15
        assert [rest for what, *rest in calls(job, rank) if what == "validation"] == told
        assert [step for what, step, *_ in calls(job, rank) if what == "epoch"] == [8, 15]
        assert [step for what, step, *_ in calls(job, rank) if what == "start"] == [0, 10]
        assert [step for what, step, *_ in calls(job, rank) if what == "batch"] == [5, 10, 15]
        assert [step for what, step, *_ in calls(job, rank) if what == "end"] == [16]
    assert [rest[0] > 0 for what, *rest in calls(job) if what == "closed"] == [True, True]
    curves = read_curves(job.dir / files.METRICS)
    assert curves["value"] == [(4, 3.0), (8, 2.0), (12, 2.5), (16, 1.0)]
    assert {"loss", "lr"} <= curves.keys()
    assert job.state["metrics"] == {"value": 1.0}  # of the last evaluation: not once more
    best = load_checkpoint(job.checkpoints / "best.pt")
    assert best["step"] == 16 and same(best["model"], plain.final()["model"])


def test_what_does_not_become_better_ends_early_on_all_ranks(tmp_path: Path) -> None:
    job = calling(tmp_path)
    assert job.run(2, every=2, values=[3.0, 1.0, 2.0, 2.0], patience=2) == [0, 0], job.output
    assert job.state["step"] == 8 and job.state["metrics"] == {"value": 2.0}
    assert "value has not become better than 1.0 for 2 evaluations" in job.output
    assert load_checkpoint(job.checkpoints / "best.pt")["step"] == 4


def test_each_epoch(tmp_path: Path) -> None:
    job = calling(tmp_path)
    assert job.run(1, every="epoch", values=[2.0, 1.0]) == [0], job.output
    assert [step for what, step, *_ in calls(job) if what == "validation"] == [8, 15, 16]
    # Once more after the last step, which no epoch ends with.
    assert job.state["metrics"] == {"value": 0.0}
    assert len(read_points(job.dir / files.METRICS)) >= 4


@pytest.mark.parametrize(
    ("every", "patch", "message"),
    [
        (0, "", "evaluate_every: 0; accepted: a number of steps"),
        ("often", "", "evaluate_every: 'often'"),
        (2, "parts.evaluate = None", "`evaluate`, which is missing"),
        (2, "parts.callbacks = 'no'", "callbacks: str; accepted: a list"),
        (2, "parts.callbacks = [EarlyStopping('accuracy')]", "monitor: accuracy; accepted: value"),
        (2, "parts.callbacks = 2 * [ModelCheckpoint('value')]", "best.pt twice; accepted: another filename"),
        (2, "parts.evaluate = lambda model: 0.5", "evaluate returned float; accepted: numbers by name"),
        (2, "parts.evaluate = lambda model: {'step': 1.0}", "a number 'step'; accepted: numbers by name"),
    ],
)
def test_what_makes_no_sense_is_said_in_a_line(tmp_path: Path, every: Any, patch: str, message: str) -> None:
    job = calling(tmp_path)
    text = (tmp_path / "calling.py").read_text()
    end = "        return parts\n"
    (tmp_path / "calling.py").write_text(text.replace(end, f"        {patch}\n{end}"))
    assert job.run(1, every=every) == [2], job.output
    assert message in job.output and "Traceback" not in job.output


def test_where_jobs_are_packed_it_trains_by_itself_and_evaluates(tmp_path: Path) -> None:
    job = calling(tmp_path)
    job.env["HPCSCHED_STRATEGY"] = json.dumps({"kind": "packed"})
    assert job.run(1, every=8, values=[2.0, 1.0]) == [0], job.output
    assert [step for what, step, *_ in calls(job) if what == "validation"] == [8, 16]


def test_another_strategy_refuses_it_in_a_line(tmp_path: Path) -> None:
    job = calling(tmp_path)
    job.env["HPCSCHED_STRATEGY"] = json.dumps({"kind": "vsw", "local_batch": 7})
    assert job.run(1, every=2) == [2], job.output
    assert "the strategy 'ddp' takes it" in job.output
