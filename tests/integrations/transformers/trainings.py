"""A small Trainer, and the life of a job around it, all in this process."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

from hpcsched.integrations.transformers import prepare_trainer

CLASSES = 8


class Samples(torch.utils.data.Dataset):
    """Numbers in, their classes out; of lengths from 1 to 5, told by index."""

    def __init__(self, count: int = 50) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index >= self.count:
            raise IndexError(index)
        return {"input_ids": [index % 7 + 1] * (index % 5 + 1), "labels": index % CLASSES, "index": index}


class Stream(torch.utils.data.IterableDataset):
    """The same, of unknown length."""

    def __init__(self, count: int = 50) -> None:
        self.count = count

    def __iter__(self) -> Any:
        yield from (Samples(self.count)[index] for index in range(self.count))


class Model(torch.nn.Module):
    """With dropout, and a memory of the samples that it was trained with."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(CLASSES, 16)
        self.drop = torch.nn.Dropout(0.2)
        self.head = torch.nn.Linear(16, CLASSES)
        self.seen: list[int] = []

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, index: torch.Tensor) -> dict[str, Any]:
        """Mean cross entropy over the batch."""
        if self.training:
            self.seen += index.tolist()
        logits = self.head(self.drop(self.embed(input_ids).mean(1)))
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def collate(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Sequences to the length of the longest."""
    longest = max(len(one["input_ids"]) for one in samples)
    rows = [one["input_ids"] + [0] * (longest - len(one["input_ids"])) for one in samples]
    return {
        "input_ids": torch.tensor(rows),
        "labels": torch.tensor([one["labels"] for one in samples]),
        "index": torch.tensor([one["index"] for one in samples]),
    }


class StopAfter(TrainerCallback):
    """Asks to save and leave after one of these steps, as the agent would: by a signal."""

    def __init__(self, steps: tuple[int, ...], number: int = signal.SIGTSTP) -> None:
        self.steps, self.number = steps, number

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Before the callback of `prepare_trainer` has its turn."""
        if state.global_step in self.steps:
            os.kill(os.getpid(), self.number)


class Job:
    """A job of hpcsched's, of which this process is each attempt in turn."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.patch = folder, patch
        self.attempts = 0
        self.seen: list[int] = []
        """The samples of all attempts, in the order of training."""
        (folder / "job").mkdir(parents=True, exist_ok=True)

    @property
    def state(self) -> dict[str, Any]:
        """What is on record."""
        found: dict[str, Any] = json.loads((self.folder / "job" / "STATE.json").read_text())
        return found

    def environment(self, rank: int = 0, world_size: int = 1) -> dict[str, str]:
        """What the agent tells the next attempt."""
        told = {"ID": "1", "NAME": "job", "RUN_ID": "r", "RUN_DIR": self.folder, "DIR": self.folder / "job"}
        return {
            **{
                f"HPCSCHED_{'' if key.startswith('RUN') else 'JOB_'}{key}": str(value)
                for key, value in told.items()
            },
            "HPCSCHED_ATTEMPT": str(self.attempts),
            "HPCSCHED_RESUME": str(int((self.folder / "job" / "STATE.json").exists())),
            "HPCSCHED_RANK": str(rank),
            "HPCSCHED_WORLD_SIZE": str(world_size),
            "HPCSCHED_LOCAL_RANK": str(rank),
        }

    def begin(self, **how: Any) -> Trainer:
        """The Trainer of the next attempt, as a script makes it."""
        self.attempts += 1
        for name, value in self.environment().items():
            self.patch.setenv(name, value)
        progress = os.open(self.folder / "progress", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self.patch.setenv("HPCSCHED_PROGRESS_FD", str(progress))
        return prepare_trainer(make(self.folder / "out", **how))

    def train(self, trainer: Trainer, **others: Any) -> Any:
        """What train() answers; None if it has left, saved."""
        try:
            return trainer.train(**others)
        except SystemExit as left:
            assert left.code == 75
            return None
        finally:
            self.seen += trainer.model.seen

    def through(self, **how: Any) -> Trainer:
        """Attempts until one comes to the end: its Trainer."""
        for _ in range(20):
            trainer = self.begin(**how)
            if self.train(trainer) is not None:
                return trainer
        raise AssertionError("it leaves again and again")


def make(
    out: Path,
    *,
    stops: tuple[int, ...] = (),
    data: Any = None,
    callbacks: tuple[TrainerCallback, ...] = (),
    then: Callable[[Trainer], object] = lambda trainer: None,
    number: int = signal.SIGTSTP,
    **arguments: Any,
) -> Trainer:
    """A Trainer as scripts make it; `stops`: see StopAfter; `then` changes it before it is prepared."""
    set_seed(3)
    args = TrainingArguments(
        str(out),
        **{
            "max_steps": 20,
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "learning_rate": 0.05,
            "warmup_steps": 3,
            "logging_steps": 3,
            "save_steps": 1000,
            "report_to": "none",
            "disable_tqdm": True,
            "use_cpu": True,
            "remove_unused_columns": False,
            **arguments,
        },
    )
    data = Samples() if data is None else data
    trainer = Trainer(
        Model(),
        args,
        data_collator=collate,
        train_dataset=data,
        eval_dataset=Samples(8),
        callbacks=[*callbacks, StopAfter(stops, number)],
    )
    then(trainer)
    return trainer


def logged(trainer: Trainer) -> list[dict[str, Any]]:
    """The log without what is about times and the last line, of train()."""
    times = ("runtime", "per_second")
    return [
        {key: value for key, value in line.items() if not key.endswith(times)}
        for line in trainer.state.log_history
        if "train_runtime" not in line
    ]


def plain(folder: Path, **how: Any) -> Trainer:
    """The same training without interruption and without hpcsched."""
    trainer = make(folder, **how)
    trainer.train()
    return trainer


def same(one: Trainer, other: Trainer) -> None:
    """To the last digit: the log and the weights."""
    assert logged(one) == logged(other)
    for name, value in one.model.state_dict().items():
        assert torch.equal(value, other.model.state_dict()[name]), name
