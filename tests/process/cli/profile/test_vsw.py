"""`profile vsw` with real processes: workers that train, sums over ranks, and what ends a measurement."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hpcsched.planning.vsw.profile import VswProfile

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

TRAINERS = """
import torch
from torch import nn
from hpcsched.worker import Parts, Trainer

class Mine(Trainer):
    def build(self, args):
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        self.most = args.get("most", 1000)
        optimizer = torch.optim.Adam(model.parameters())
        data = (torch.rand(40, 6),)
        return Parts(model=model, optimizer=optimizer, dataset=data, global_batch=64, loss=self.loss)
    def loss(self, model, batch):
        if len(batch[0]) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
        return model(batch[0]).square().mean(1)
"""


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(TRAINERS)
    (tmp_path / "tmp").mkdir()
    return tmp_path


def start(here: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "hpcsched", "profile", "vsw", "-o", "f.json", "--seconds", "0.1", *words]
    env = {**os.environ, "TMPDIR": str(here / "tmp")}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=here, env=env, stdout=pipe, stderr=pipe, text=True)


def vsw(here: Path, *words: str) -> tuple[int, str, str]:
    with start(here, *words) as process:
        out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def measured(here: Path) -> VswProfile:
    return VswProfile.parse(json.loads((here / "f.json").read_text()), where="f.json")


def left_over(here: Path) -> list[Any]:
    return [*(here / "tmp").glob("hpcsched-*")]


def test_a_trainer_is_measured_and_the_plan_reads_it(here: Path) -> None:
    digits = ["--trainer", "hpcsched.examples.digits:Digits", "--args", "width=32"]
    code, out, err = vsw(here, *digits, "--local-batch", "16-40", "--devices", "cpu:2")
    assert code == 0, err
    head, _, *rows, sums = out.splitlines()
    assert head == "Digits on one cpu"
    assert [row.split()[:2] for row in rows] == [["16", "1"], ["32", "1"], ["40", "1"]][: len(rows)]
    assert sums.startswith("all-reduce over 2 ranks: ")
    profile = measured(here)
    cpu = profile.costs.gpus["cpu"]
    assert profile.local_batches == [16, 32, 40][: len(rows)]
    assert all([*speed.times] == [1] and speed.times[1].backward_s > 0 for speed in cpu.speeds.values())
    assert cpu.update_s > 0
    assert cpu.buffers_s == 0
    trained = 64 * 32 + 32 + 32 * 32 + 32 + 32 * 10 + 10
    assert sum(profile.costs.buckets) == 4 * trained
    assert profile.costs.network.within.all_reduce_s(1e6, 2) > 0
    assert profile.note.count("torch ") == 1
    assert left_over(here) == []
    command = [sys.executable, "-m", "hpcsched", "plan", "vsw", "f.json", "--global-batch", "64", "--json"]
    planned = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=60, check=False)
    assert planned.returncode == 0, planned.stderr
    assert len(json.loads(planned.stdout)["gpus"]) == 2


@pytest.mark.slow
def test_a_local_batch_that_does_not_fit_ends_the_list(here: Path) -> None:
    words = ["--args", "most=8", "--local-batch", "4-64", "--devices", "cpu:1"]
    code, _, err = vsw(here, "--trainer", "mine:Mine", *words)
    assert code == 0, err
    assert "note: no local batch is larger than the dataset, which has 40 samples\n" in err
    assert "note: local batch 16 does not fit: CUDA out of memory." in err
    assert measured(here).local_batches == [4, 8]


@pytest.mark.slow
def test_an_interrupted_measurement_keeps_what_it_has(here: Path) -> None:
    words = ["--trainer", "mine:Mine", "--local-batch", "4-8", "--devices", "cpu:1", "--seconds", "1"]
    with start(here, *words) as process:
        until = time.monotonic() + 30
        while not (here / "f.json").exists() and time.monotonic() < until:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    assert process.returncode == 130
    assert measured(here).local_batches == [4]
    assert left_over(here) == []


def test_a_local_batch_larger_than_the_dataset_is_refused_in_one_line(here: Path) -> None:
    code, out, err = vsw(here, "--trainer", "mine:Mine", "--local-batch", "41", "--devices", "cpu:1")
    assert (code, out) == (2, "")
    assert err == "hpcsched: local batch: 41 samples; accepted: 1 to 40, as many as the dataset has\n"
    assert left_over(here) == []
    assert not (here / "f.json").exists()
