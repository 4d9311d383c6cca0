"""Trainings of the Lightning tests, and the attempts of a job in this process."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from hpcsched.integrations.lightning import HpcschedCallback
from hpcsched.worker import link
from hpcsched.worker.process.contract import JobEnv


class Samples(Dataset[Any]):
    """Sample i is (i, 8 numbers, a class)."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        draw = torch.Generator().manual_seed(index)
        return index, torch.randn(8, generator=draw), torch.randint(3, (), generator=draw)


class Stream(IterableDataset[Any]):
    """The same samples, one after the other."""

    def __iter__(self) -> Any:
        return iter([Samples(40)[index] for index in range(40)])


class Net(pl.LightningModule):
    """A classifier with dropout, which notes all that happens in `seen`.

    `stops`: after so many batches in all it is told to leave, as by the agent.
    """

    def __init__(self, seen: list[Any], stops: Sequence[int] = (), *, plateau: bool = False) -> None:
        super().__init__()
        self.seen, self.stops, self.plateau = seen, stops, plateau
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.Linear(16, 3))

    def loss(self, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch[1]), batch[2])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        drawn = (random.random(), float(np.random.rand()))
        step = (self.current_epoch, batch_idx, self.trainer.global_step)
        self.seen.append(("batch", *step, batch[0].tolist(), repr(loss.item()), drawn))
        self.log("loss", loss)
        if len(of(self.seen, "batch")) in self.stops:
            os.kill(os.getpid(), signal.SIGTSTP)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        rates = [group["lr"] for one in self.trainer.optimizers for group in one.param_groups]
        self.seen.append(("end", self.trainer.global_step, rates))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        if not self.trainer.sanity_checking:
            self.seen.append(("validation", self.trainer.global_step, batch_idx, repr(loss.item())))
            self.log("val_loss", loss)

    def on_train_epoch_end(self) -> None:
        self.seen.append(("epoch", self.current_epoch, self.trainer.global_step))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
        if self.plateau:
            schedule: Any = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
            return [optimizer], [{"scheduler": schedule, "interval": "epoch", "monitor": "val_loss"}]
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Gan(Net):
    """Two optimizers, stepped by hand: a batch makes two steps."""

    def __init__(self, seen: list[Any], stops: Sequence[int] = (), **_: Any) -> None:
        super().__init__(seen, stops)
        self.automatic_optimization = False
        self.other = nn.Linear(8, 3)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        other = nn.functional.cross_entropy(self.other(batch[1]), batch[2])
        for optimizer, one in zip(self.optimizers(), (loss, other), strict=True):
            optimizer.zero_grad()
            self.manual_backward(one)
            optimizer.step()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.net.parameters()), torch.optim.SGD(self.other.parameters(), lr=0.1)


class Head(Net):
    """Has a backbone, which a callback may have trained later."""

    def __init__(self, seen: list[Any], stops: Sequence[int] = (), **_: Any) -> None:
        super().__init__(seen, stops)
        self.backbone = nn.Sequential(self.net[0], nn.BatchNorm1d(16))
        self.net = nn.Sequential(self.backbone, *self.net[1:])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW((one for one in self.parameters() if one.requires_grad), lr=1e-2)


class Thaw(pl.Callback):
    """As people write it: what is trained is put in place when an epoch begins."""

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        module.net[0].requires_grad_(False)

    def on_train_epoch_start(self, trainer: pl.Trainer, module: Any) -> None:
        if trainer.current_epoch == 1:
            module.net[0].requires_grad_(True)


def of(seen: Sequence[Any], kind: str) -> list[Any]:
    return [one for one in seen if one[0] == kind]


def loader(size: int = 38, **options: Any) -> DataLoader[Any]:
    return DataLoader(Samples(size), **{"batch_size": 4, "shuffle": True, **options})


def trainer_of(folder: Path, *callbacks: Any, **options: Any) -> pl.Trainer:
    return pl.Trainer(
        **{
            "accelerator": "cpu",
            "callbacks": list(callbacks),
            "default_root_dir": folder,
            "logger": pl.loggers.CSVLogger(folder / "logs", flush_logs_every_n_steps=1000),
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "log_every_n_steps": 1,
            **options,
        }
    )


class Job:
    """A job whose attempts run in this process, one after the other."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.patch = folder, patch
        self.seen: list[Any] = []
        self.attempts = 0
        self.model = Net(self.seen)
        self.progress = folder / "progress"
        patch.setattr(JobEnv, "wake_agent", lambda self: None)  # our parent is no agent

    def begin(self) -> None:
        """Another attempt."""
        self.attempts += 1
        self.folder.mkdir(exist_ok=True)
        told = {
            "JOB_ID": "1",
            "ATTEMPT": str(self.attempts),
            "RUN_DIR": str(self.folder),
            "JOB_DIR": str(self.folder / "job"),
            "RESUME": "1" if self.attempts > 1 else "",
            "PROGRESS_FD": str(os.open(self.progress, os.O_WRONLY | os.O_APPEND | os.O_CREAT)),
        }
        for name, value in told.items():
            self.patch.setenv(f"HPCSCHED_{name}", value)
        link._of_process.clear()

    def through(
        self,
        stops: Sequence[int] = (),
        *,
        model: Any = Net,
        data: Any = loader,
        plateau: bool = False,
        more: Callable[[], pl.Callback] | None = None,
        **options: Any,
    ) -> list[Any]:
        """Train to the end, in as many attempts as it takes; all that was seen."""
        while True:
            self.begin()
            pl.seed_everything(7)
            saves = pl.callbacks.ModelCheckpoint(every_n_train_steps=3, save_last=True, save_top_k=-1)
            callbacks = [saves, more()] if more else [saves]
            trainer = trainer_of(self.folder, *callbacks, HpcschedCallback(), **options)
            self.model = model(self.seen, stops, plateau=plateau)
            try:
                trainer.fit(self.model, data(), loader(8, shuffle=False))
            except SystemExit as error:
                assert error.code == 75
                continue
            return self.seen

    @property
    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "job" / "STATE.json").read_text())
        return found

    @property
    def logged(self) -> dict[str, list[str]]:
        """What is in the folder of logs: each version's files, and the rows of its table."""
        versions = sorted((self.folder / "logs" / "lightning_logs").iterdir())
        return {
            folder.name: [
                *sorted(str(one.relative_to(folder)) for one in folder.rglob("*")),
                *(folder / "metrics.csv").read_text().splitlines(),
            ]
            for folder in versions
        }
