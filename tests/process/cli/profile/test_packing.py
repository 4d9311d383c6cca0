"""`profile pack` with real processes: packs that train, and the ways in which they do not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from budget import slow

from hpcsched.store.database import Database

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

JOBS = """
schema = 1
[[job]]
name = "{name}"
model = "{name}"
trainer = "{trainer}"
args = {{ {args} }}
"""

TRAINERS = """
import time, weakref
import torch
from torch import nn
from hpcsched.worker import Parts, Trainer
from torch.nn.functional import cross_entropy

living = weakref.WeakSet()

class Mine(Trainer):
    def build(self, args):
        model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3))
        living.add(model)
        if len(living) > args.get("room", 9):
            raise MemoryError
        data = torch.rand(40, 6, generator=torch.Generator().manual_seed(1)), torch.arange(40) % 3
        return Parts(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), dataset=data,
                     global_batch=args.get("batch", 8), loss=self.loss)
    def loss(self, model, batch):
        return cross_entropy(model(batch[0]), batch[1], reduction="none")

class Crash(Mine):
    def loss(self, model, batch):
        if len(living) == 2:
            raise ZeroDivisionError("my own mistake")
        return super().loss(model, batch)

class Silent(Mine):
    def build(self, args):
        time.sleep(600)
"""


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(TRAINERS)
    (tmp_path / "tmp").mkdir()
    return tmp_path


def pack(here: Path, jobs: str, *words: str) -> subprocess.CompletedProcess[str]:
    (here / "jobs.toml").write_text(jobs)
    env = {**os.environ, "HPCSCHED_DATABASE": str(here / "h.db"), "TMPDIR": str(here / "tmp")}
    command = [sys.executable, "-m", "hpcsched", "profile", "pack", "jobs.toml", *words]
    asked = [*command, "--devices", "cpu:2", "--seconds", "0.1"]
    return subprocess.run(asked, cwd=here, env=env, capture_output=True, text=True, timeout=120, check=False)


def test_digits_are_packed_shown_and_kept(here: Path) -> None:
    digits = JOBS.format(
        name="mlp-16", trainer="hpcsched.examples.digits:Digits", args='kind = "mlp", width = 16'
    )
    done = pack(here, digits, "--counts", "1,2,4", "--costs", "costs.json")
    assert done.returncode == 0, done.stderr
    head, titles, *rows, switching, _ = done.stdout.split("\n")[:-1]
    assert head.startswith("mlp-16 on one cpu, batch 64: ") and head.endswith(" ms a step alone")
    assert titles.split() == ["MODELS", "STEP(ms)", "IMPV", "MODE", "JOIN(s)"]
    assert [row.split()[0] for row in rows] == ["1", "2", "4"]
    assert rows[0].split()[3] == "loop"
    assert switching.startswith("a member takes 0.")
    assert [line.partition(",")[0] for line in done.stderr.splitlines()[1:4]] == [
        f"mlp-16: {n} in a pack" for n in (1, 2, 4)
    ]
    with Database(here / "h.db") as db:
        (profile,) = db.profiles("mlp-16")
    assert (profile.device, profile.global_batch, profile.packed_mib) == ("cpu", 64, None)
    assert sorted(profile.packed_s or {}) == [1, 2, 4]
    # Stacked, four take little more than one; whatever else runs here, less than four.
    assert profile.packed_s and profile.packed_s[4] < 4 / profile.rate(1)
    costs = json.loads((here / "costs.json").read_text())["costs"][0]
    assert costs["stackable"]
    assert 0 < costs["shared_s"] < costs["separate_s"]
    command = [sys.executable, "-m", "hpcsched", "plan", "pack", "costs.json"]
    planned = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=60, check=False)
    assert planned.returncode == 0, planned.stderr
    assert list((here / "tmp").glob("hpcsched-*")) == []


@pytest.mark.slow
def test_models_are_packed_with_different_ones_of_other_batches(here: Path) -> None:
    jobs = JOBS.format(name="one", trainer="mine:Mine", args="")
    jobs += JOBS.format(name="other", trainer="mine:Mine", args="batch = 12").partition("schema = 1")[2]
    done = pack(here, jobs, "--counts", "2", "--pairs", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert [one["global_batch"] for one in told["packs"]] == [8, 12]
    assert told["packs"][0]["unstackable"] == "the models draw random numbers, each its own"
    (pair,) = told["pairs"]
    assert (pair["models"], pair["batches"]) == (["one", "other"], [8, 12])
    assert pair["mode"] in ("loop", "turns"), "whichever is faster on this machine now"
    separate_s, packed_s = pair["separate_sample_s"], pair["packed_sample_s"]
    assert pair["impv"] == pytest.approx((separate_s - packed_s) / separate_s)
    assert 0.25 < packed_s / separate_s < 4  # about 1, on a machine that nobody else uses


@pytest.mark.slow
def test_too_many_for_the_memory_end_the_list(here: Path) -> None:
    done = pack(here, JOBS.format(name="m", trainer="mine:Mine", args="room = 2"), "--counts", "1,2,3,4")
    assert done.returncode == 0, done.stderr
    assert "m: 3 of it do not fit into the memory of one cpu\n" in done.stderr
    assert "3 models or more do not fit into memory\n" in done.stdout
    with Database(here / "h.db") as db:
        (profile,) = db.profiles("m")
    assert sorted(profile.packed_s or {}) == [1, 2]


@pytest.mark.parametrize(
    ("trainer", "args", "words", "text"),
    [
        ("mine:Nobody", "", (), "m: trainer 'mine:Nobody': mine has no Nobody; accepted: "),
        ("mine:Mine", "room = 0", (), "m: mine:Mine: out of memory with one model alone; accepted: "),
        slow("mine:Mine", "", ("--mode", "stacked"), "'stacked' (the models draw random numbers"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(
    here: Path, trainer: str, args: str, words: tuple[str, ...], text: str
) -> None:
    done = pack(here, JOBS.format(name="m", trainer=trainer, args=args), "--counts", "2", *words)
    assert done.returncode == 2
    assert text in done.stderr.splitlines()[-1]
    assert done.stdout == ""
    assert list((here / "tmp").glob("hpcsched-*")) == []


@pytest.mark.slow
def test_an_error_in_the_trainer_is_told_with_where_its_output_is(here: Path) -> None:
    done = pack(here, JOBS.format(name="m", trainer="mine:Crash", args=""), "--counts", "2")
    assert done.returncode == 2
    assert "packs.out ends: ZeroDivisionError: my own mistake" in done.stderr.splitlines()[-1]
    (scratch,) = (here / "tmp").glob("hpcsched-*")
    assert "Traceback" in (scratch / "packs.out").read_text()


def test_a_trainer_that_says_nothing_is_ended_at_the_deadline(here: Path) -> None:
    done = pack(here, JOBS.format(name="m", trainer="mine:Silent", args=""), "--timeout", "3")
    assert done.returncode == 2
    assert "m: it made no step in 3 s" in done.stderr
