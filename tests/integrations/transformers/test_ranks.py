"""Transformers' Trainer on one and two ranks in turn: the same samples in each step."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

import torch
import transformers
from accelerate.state import AcceleratorState, GradientState, PartialState

from hpcsched.integrations.transformers import prepare_trainer
from tests.integrations.transformers.trainings import Job, Samples, make, plain

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        transformers.__version__ < "5", reason="transformers 4 cannot load an optimizer on several CPU ranks"
    ),
]


def rank_of(told: dict[str, str], out: Path, notes: Path, how: dict[str, Any]) -> None:
    """One rank of an attempt, in a process of its own: writes what it has seen, step by step."""
    os.environ.update(told | {"OMP_NUM_THREADS": "1"})  # as a launcher has it, else Accelerate warns
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    torch.set_num_threads(1)
    trainer = prepare_trainer(make(out, **how))
    code = 0
    try:
        trainer.train()
    except SystemExit as left:
        code = int(left.code or 0)
    notes.write_text(json.dumps({"seen": trainer.model.seen, "log": trainer.state.log_history}))
    os._exit(code)


def attempt(job: Job, ranks: int, **how: Any) -> list[dict[str, Any]]:
    """What the ranks of one attempt have noted, by rank."""
    job.attempts += 1
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    fork = multiprocessing.get_context("fork")
    notes = [job.folder / f"notes.{job.attempts}.{rank}" for rank in range(ranks)]
    processes = []
    for rank in range(ranks):
        told = job.environment(rank, ranks)
        if ranks > 1:
            told |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
            told |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        processes.append(fork.Process(target=rank_of, args=(told, job.folder / "out", notes[rank], how)))
        processes[-1].start()
    for process in processes:
        process.join(120)
        assert process.exitcode in (0, 75)
    return [json.loads(path.read_text()) for path in notes]


@pytest.mark.parametrize("worlds", [(1, 2, 1), (2, 1, 2)])
def test_no_sample_is_lost_or_comes_again(job: Job, tmp_path: Path, worlds: tuple[int, int, int]) -> None:
    how: dict[str, Any] = {"data": Samples(48), "per_device_train_batch_size": 4}
    seen: list[set[int]] = []
    log: list[dict[str, Any]] = []
    for number, ranks in enumerate(worlds):
        how["gradient_accumulation_steps"] = 2 // ranks if number == 0 else 1
        stops = {"stops": (4 * (number + 1),)} if number < 2 else {}
        found = attempt(job, ranks, **how, **stops)
        share = 8 // ranks
        steps = len(found[0]["seen"]) // share
        for step in range(steps):
            seen.append({i for one in found for i in one["seen"][step * share : (step + 1) * share]})
        log = found[0]["log"]
    one = plain(tmp_path / "plain", data=Samples(48))
    expected = [set(one.model.seen[at : at + 8]) for at in range(0, len(one.model.seen), 8)]
    assert seen == expected
    rates = [line["learning_rate"] for line in log if "learning_rate" in line]
    assert rates == [line["learning_rate"] for line in one.state.log_history if "learning_rate" in line]


def test_two_ranks_are_as_never_interrupted(job: Job) -> None:
    """Sums of losses are of each rank: the mean that is logged over the suspension is the same."""
    how: dict[str, Any] = {"gradient_accumulation_steps": 1}
    attempt(job, 2, **how, stops=(5,))
    (first, _) = attempt(job, 2, **how)
    other = Job(job.folder / "other", job.patch)
    (never, _) = attempt(other, 2, **how)
    keys = ("loss", "grad_norm", "step")
    lines = [
        [{key: line[key] for key in keys} for line in one["log"] if "loss" in line] for one in (first, never)
    ]
    assert lines[0] == lines[1]
