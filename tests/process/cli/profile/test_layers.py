"""`profile layers` with real processes: trainers that work, and all the ways in which they do not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from budget import slow

from hpcsched.planning.burst.graph import LayerProfile
from hpcsched.store.database import Database

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

TRAINERS = """
import os, signal, sys, time
import torch
from torch import nn
from hpcsched.worker import Parts, Trainer
from torch.nn.functional import cross_entropy

class Mine(Trainer):
    def build(self, args):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
        data = torch.rand(5, 6), torch.randint(3, (5,))
        return Parts(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), dataset=data,
                     global_batch=args.get("batch", 6), loss=self.loss)
    def loss(self, model, batch):
        return cross_entropy(model(batch[0]), batch[1], reduction="none")

class Dynamic(Mine):
    def build(self, args):
        parts = super().build(args)
        class Gate(nn.Module):
            def forward(self, x):
                return x if x[0, 0] > 0 else -x
        parts.model.insert(1, Gate())
        return parts

class Flat(Mine):
    def loss(self, model, batch):
        return model(batch[0].reshape(-1, 3).repeat(1, 2)).sum(1)

class Crash(Mine):
    def build(self, args):
        raise ZeroDivisionError("my own mistake")

class Silent(Mine):
    def build(self, args):
        time.sleep(600)

class Killed(Mine):
    def loss(self, model, batch):
        if len(batch[0]) > 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(model, batch)
"""


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(TRAINERS)
    (tmp_path / "tmp").mkdir()
    return tmp_path


def layers(here: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "HPCSCHED_DATABASE": str(here / "h.db"), "TMPDIR": str(here / "tmp")}
    command = [sys.executable, "-m", "hpcsched", "profile", "layers", *words]
    asked = [*command, "--devices", "cpu:2", "--seconds", "0"]
    return subprocess.run(asked, cwd=here, env=env, capture_output=True, text=True, timeout=120, check=False)


def test_a_trainers_layers_are_measured_shown_kept_and_written(here: Path) -> None:
    done = layers(here, "mine:Mine", "-o", "mine.json")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "Mine on one cpu, batch 6 of 1,2,4,6"
    assert [line.split()[1] for line in lines[2:4]] == ["0", "2"]
    profile = LayerProfile.parse(json.loads((here / "mine.json").read_text()), where="mine.json")
    assert [layer.parameter_bytes for layer in profile.layers] == [4 * (6 * 8 + 8), 4 * (8 * 3 + 3)]
    assert list(profile.layers[0].forward_us) == [1, 2, 4, 6]
    assert profile.conditions.keys() == {"torch", "float32_matmul_precision", "threads"}
    assert "mine:Mine; torch " in profile.note
    with Database(here / "h.db") as db:
        assert db.layers("Mine", "cpu") == (profile.to_table(),)
    assert f"kept in {here / 'h.db'} as Mine on cpu and in mine.json" in done.stderr
    assert list((here / "tmp").glob("hpcsched-*")) == []


@pytest.mark.slow
def test_a_built_in_network_is_measured_at_the_batches_asked_for(here: Path) -> None:
    words = [
        "vgg16",
        "--args",
        "width=0.0625,image=32,classes=4",
        "--model",
        "tiny",
        "--batches",
        "2",
        "--json",
    ]
    done = layers(here, *words)
    assert done.returncode == 0, done.stderr
    profile = LayerProfile.parse(json.loads(done.stdout), where="stdout")
    assert (profile.model, profile.device, len(profile.layers)) == ("tiny", "cpu", 16)
    assert profile.input_bytes == 3 * 32 * 32 * 4
    assert all(list(layer.forward_us) == [2] for layer in profile.layers)


@pytest.mark.parametrize(
    ("trainer", "text"),
    [
        slow("mine:Dynamic", "model Sequential: 1: its course depends on data (a condition); accepted: "),
        slow("mine:Flat", "loss: 1 samples go into the model as [2]; accepted: "),
        ("mine:Nobody", "trainer 'mine:Nobody': mine has no Nobody; accepted: "),
    ],
)
def test_a_model_that_has_no_layers_is_refused_in_one_line(here: Path, trainer: str, text: str) -> None:
    done = layers(here, trainer)
    assert done.returncode == 2
    assert text in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""
    assert list((here / "tmp").glob("hpcsched-*")) == []
    with Database(here / "h.db") as db:
        assert db.layers() == ()


def test_an_error_in_the_trainer_is_told_with_where_its_output_is(here: Path) -> None:
    done = layers(here, "mine:Crash")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "exit code 1" in done.stderr
    assert "layers.out ends: ZeroDivisionError: my own mistake" in done.stderr
    (scratch,) = (here / "tmp").glob("hpcsched-*")
    assert "Traceback" in (scratch / "layers.out").read_text()


def test_a_trainer_that_says_nothing_is_ended_at_the_deadline(here: Path) -> None:
    done = layers(here, "mine:Silent", "--timeout", "1")
    assert done.returncode == 2
    assert "no layer was finished in 1 s" in done.stderr
    assert done.stderr.count("\n") == 1


def test_what_was_measured_before_it_was_killed_is_kept(here: Path) -> None:
    done = layers(here, "mine:Killed")
    assert done.returncode == 0, done.stderr
    assert "ended with signal 9 (SIGKILL) after batch 4; larger ones are missing" in done.stderr
    assert done.stdout.startswith("Killed on one cpu, batch 4 of 1,2,4\n")
