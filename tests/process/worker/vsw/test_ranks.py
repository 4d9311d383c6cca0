"""Stream workers in real ranks: whoever computes a step, and how, it is the same step (JABAS, section 4)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from budget import slow

torch = pytest.importorskip("torch")

from rankjobs import Job, woken_by  # noqa: E402
from vswtrainings import ADAPTIVE, BATCH, CLOSE, STEPS, courses, trained  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Plain data parallelism at the same global batch."""
    return trained(tmp_path_factory.mktemp("plain"), {"kind": "ddp"})


@pytest.mark.parametrize(
    ("world", "workers", "accumulation"),
    [
        (1, 3, 1),
        (2, 2, 2),
        *(slow(*numbers) for numbers in ((1, 1, 5), (1, 2, 2), (1, 6, 0), (2, 1, 2), (2, 3, 0), (3, 2, 1))),
    ],
)
def test_every_combination_of_ranks_workers_and_accumulation_is_plain_data_parallelism(
    tmp_path: Path, plain: Any, world: int, workers: int, accumulation: int
) -> None:
    strategy = {"kind": "vsw", "workers": workers, "accumulation": accumulation}
    state = trained(tmp_path, strategy, world)
    assert (state["step"], state["samples"]) == (STEPS, STEPS * BATCH)
    for name, value in plain["model"].items():
        torch.testing.assert_close(state["model"][name], value, **CLOSE)


def replayed(folder: Path, batches: list[int]) -> Any:
    """What plain SGD makes of these global batches, with the learning rate by the root of their size."""
    (folder / "plain.py").write_text(PLAIN)
    job = Job(folder, "plain:Plain", STEPS)
    env = job.environment(0, 1, 1, {"batch": BATCH})
    script = "import sys, json, plain; plain.main(json.loads(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(batches)],
        env={**os.environ, **env},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return torch.load(folder / "plain.pt")


PLAIN = """
import torch
from training import Exact
from hpcsched.worker.session.sampler import Sampler
from hpcsched.worker.session.trainer import build

class Plain(Exact):
    pass

def main(batches):
    parts = build(Plain(), {"batch": 12})
    sampler, samples = Sampler(parts.size, parts.seed), 0
    for batch in batches:
        parts.optimizer.zero_grad()
        given = parts.batch(sampler.batch(samples, batch).tolist())
        parts.loss(parts.model, given).mean().backward()
        factor = (batch / 12) ** 0.5
        for group in parts.optimizer.param_groups:
            group["lr"] *= factor
        parts.optimizer.step()
        for group in parts.optimizer.param_groups:
            group["lr"] /= factor
        for _ in range((samples + batch) // 12 - samples // 12):
            parts.scheduler.step()
        samples += batch
    torch.save(parts.model.state_dict(), "plain.pt")
"""


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("synchronize", [slow("sequential"), "overlap"])
def test_an_adaptive_batch_is_the_same_training_as_plain_steps_of_those_batches(
    tmp_path: Path, world: int, synchronize: str
) -> None:
    """Also where who computes what changed in between, and with weights that are updated bucket by bucket."""
    job = Job(tmp_path, "training:Exact", 150)
    job.env["HPCSCHED_STRATEGY"] = json.dumps({**ADAPTIVE, "synchronize": synchronize})
    assert job.run(world, batch=BATCH) == [0] * world, job.output
    state = job.final()
    # From 12 by 30 % every 5 steps in units of 4, and a last step of what is left.
    sizes = [12] * 5 + [16] * 5 + [20] * 5 + [28] * 5 + [36] * 5 + [44] * 5 + [48] * 100
    batches, left = [], 150 * BATCH
    for size in sizes:
        batches.append(min(size, left))
        left -= batches[-1]
        if not left:
            break
    assert state["extra"]["vsw"]["updates"] == len(batches)
    assert (state["step"], state["samples"]) == (150, 150 * BATCH)
    for name, value in replayed(tmp_path, batches).items():
        torch.testing.assert_close(state["model"][name], value, **CLOSE)


def test_it_goes_on_from_a_checkpoint_with_the_batch_it_had_on_other_ranks(tmp_path: Path) -> None:
    whole = trained(tmp_path / "whole", ADAPTIVE, 1, 150)
    job = Job(tmp_path / "parts", "training:Exact", 150, {"HPCSCHED_STRATEGY": json.dumps(ADAPTIVE)})
    with woken_by():
        assert job.run(2, batch=BATCH, at=60) == [75, 75], job.output
        assert 0 < job.state["step"] < 150
        assert job.run(1, batch=BATCH) == [0], job.output
    state = job.final()
    assert state["samples"] == 150 * BATCH
    assert state["extra"]["vsw"]["updates"] == whole["extra"]["vsw"]["updates"]
    for name, value in whole["model"].items():
        torch.testing.assert_close(state["model"][name], value, **CLOSE)


def test_a_fixed_batch_by_workers_of_unequal_number_is_plain_data_parallelism(
    tmp_path: Path, plain: Any
) -> None:
    """Five workers on two ranks, and those that are faster get more: as measured."""
    state = trained(tmp_path, {"kind": "vsw", "local_batch": 4}, 2)
    for name, value in plain["model"].items():
        torch.testing.assert_close(state["model"][name], value, **CLOSE)


def test_what_was_measured_is_known_after_a_restart(tmp_path: Path) -> None:
    """Nothing is tried again: the first decision is as good as the last one."""
    job = Job(tmp_path, "training:Exact", 150, {"HPCSCHED_STRATEGY": json.dumps(ADAPTIVE)})
    with woken_by():
        assert job.run(1, batch=BATCH, at=60) == [75], job.output
        left_at = job.state["step"]
        assert job.run(1, batch=BATCH) == [0], job.output
    again = [course for course in courses(job) if course["attempt"] == 2]
    assert again[0]["step"] == left_at


def test_a_batch_that_may_change_in_every_step_is_no_trial_for_ever(tmp_path: Path) -> None:
    job = Job(tmp_path, "training:Exact", 60, {"HPCSCHED_STRATEGY": json.dumps({**ADAPTIVE, "every": 1})})
    assert job.run(1, batch=BATCH) == [0], job.output
    assert courses(job)[0]["step"] <= 6
    assert job.final()["extra"]["vsw"]["tables"][0]["rounds"]
