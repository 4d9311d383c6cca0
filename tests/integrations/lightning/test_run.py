"""Lightning under `hpcsched run`: started, suspended, promoted, refused."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from livebench import Bench, job

pytest.importorskip("lightning", reason="lightning is not installed")

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "examples" / "lightning" / "elastic.py"
PROGRAM = Path(__file__).with_name("program.py")


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    place = Bench(tmp_path)
    place.env["PYTHONPATH"] = os.pathsep.join([str(ROOT), place.env.get("PYTHONPATH", "")])
    yield place
    place.close()


def training(folder: Path, steps: int, *words: str, **keys: Any) -> str:
    command = [sys.executable, str(PROGRAM), str(folder), str(steps), *words]
    return job("it", command=command, steps=steps, processes="per-gpu", **keys)


def noted(folder: Path, what: str) -> list[dict[str, Any]]:
    """What was noted, in the order in which each rank noted it."""
    files = sorted(folder.glob(f"{what}-*"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def samples(folder: Path) -> dict[int, list[int]]:
    """The samples of each step, of all ranks."""
    found: dict[int, list[int]] = {}
    for one in noted(folder, "samples"):
        found.setdefault(one["step"], []).extend(one["seen"])
    return {step: sorted(found[step]) for step in sorted(found)}


def losses(folder: Path) -> dict[int, float]:
    return {one["step"]: float(one["loss"]) for one in noted(folder, "loss")}


def whole(bench: Bench, folder: Path, steps: int, *words: str, gpus: int = 1) -> None:
    """Train once without any ado."""
    path = bench.set_of(training(folder, steps, *words, gpus=gpus), name="whole.toml")
    ended = bench("run", path, "--devices", f"cpu:{gpus}", "--dir", bench.folder / "whole")
    assert ended.returncode == 0, ended.stderr


@pytest.mark.slow
def test_the_example_trains(bench: Bench) -> None:
    out = bench.folder / "out"
    words = [sys.executable, str(EXAMPLE), "--steps", "3", "--out", str(out)]
    ended = bench("run", bench.set_of(job("it", command=words, steps=3)), "--devices", "cpu:1")
    assert ended.returncode == 0, ended.stderr
    assert "done step 3 loss" in bench.output()
    state = json.loads((bench.dir / "jobs" / "1" / "STATE.json").read_text())
    assert state["step"] == 3
    assert (bench.dir / "jobs" / "1" / "ready.1").exists()


@pytest.mark.slow
@pytest.mark.parametrize("gpus", [1, 2])
def test_suspended_the_losses_are_the_same_to_the_last_digit(bench: Bench, gpus: int) -> None:
    """With dropout, on each rank with draws of its own."""
    alone, there = bench.folder / "alone", bench.folder / "there"
    words = ("--dropout", "0.3")
    whole(bench, alone, 40, *words, gpus=gpus)
    bench.start(
        bench.set_of(training(there, 40, *words, "--slow", "0.1", gpus=gpus)), "--devices", f"cpu:{gpus}"
    )
    for at in (5, 15):
        bench.until(lambda at=at: len(losses(there)) >= at, f"step {at}")
        assert bench("suspend", "it").returncode == 0
        bench.until(lambda: bench.states()["it"] in ("SUSPENDED", "HELD"), "suspended")
        assert bench("resume", "it").returncode == 0
    assert bench.agents[-1].wait() == 0
    assert losses(there) == losses(alone)
    assert len(losses(there)) == 40
    assert samples(there) == samples(alone)
    assert noted(there, "samples") == noted(alone, "samples")


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("--batch", "4", "--accumulate", "2")])
def test_promoted_it_sees_each_sample_once(bench: Bench, words: tuple[str, ...]) -> None:
    alone, there = bench.folder / "alone", bench.folder / "there"
    whole(bench, alone, 60, *words)
    neighbour = job("neighbour", f"until [ -e {bench.folder / 'go'} ]; do sleep 0.1; done", gpus=1)
    it = training(there, 60, *words, "--slow", "0.1", gpus={"min": 1, "max": 2})
    bench.start(bench.set_of(it, neighbour), "--devices", "cpu:2", "--policy", "equal")
    bench.until(lambda: len(samples(there)) >= 5, "step 5")
    (bench.folder / "go").touch()
    assert bench.agents[-1].wait() == 0
    assert {one["world"] for one in noted(there, "samples")} == {1, 2}
    assert samples(there) == samples(alone)
    epoch = [one for step in range(12) for one in samples(there)[step]]
    assert sorted(epoch) == list(range(96))
    if not words:
        found, right = losses(there), losses(alone)
        assert found.keys() == right.keys()
        assert max(abs(found[step] - right[step]) for step in right) < 1e-4


@pytest.mark.slow
def test_ranks_that_would_each_train_alone_are_refused(bench: Bench) -> None:
    there = bench.folder / "there"
    it = training(there, 5, "--trainer", '{"devices": 1}', gpus=2, retries=0)
    bench("run", bench.set_of(it), "--devices", "cpu:2")
    assert bench.output().count("the Trainer has 1 of 2 ranks: each would train alone; leave `devices`") == 1
    assert not samples(there)
    assert bench.states()["it"] == "FAILED"


@pytest.mark.slow
def test_a_batch_that_two_ranks_cannot_share_is_refused(bench: Bench) -> None:
    it = training(bench.folder / "there", 5, "--batch", "3", gpus=2, retries=0)
    bench("run", bench.set_of(it), "--devices", "cpu:2")
    assert bench.output().count("batch_size: 3, 1 at a time; accepted: what 2 ranks can share evenly") == 1
    assert bench.states()["it"] == "FAILED"


@pytest.mark.slow
def test_processes_that_lightning_would_start_itself_are_refused(bench: Bench) -> None:
    it = training(bench.folder / "there", 5, "--trainer", '{"devices": 2}', gpus=2, retries=0)
    it = it.replace('processes = "per-gpu"', "processes = 1")
    bench("run", bench.set_of(it), "--devices", "cpu:2")
    assert bench.output().count('set processes = "per-gpu" in the job file') == 1
    assert not samples(bench.folder / "there")
    assert bench.states()["it"] == "FAILED"
