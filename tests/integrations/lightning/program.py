"""A Lightning program of the tests: notes which rank saw which samples in which step, and the mean losses.

python program.py FOLDER STEPS [--accumulate N] [--batch N] [--slow SECONDS] [--trainer JSON]
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from hpcsched.integrations.lightning import HpcschedCallback


class Samples(Dataset[Any]):
    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        draw = torch.Generator().manual_seed(index)
        return index, torch.randn(8, generator=draw), torch.randint(3, (), generator=draw)


class Net(pl.LightningModule):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.options = options
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(options.dropout), nn.Linear(16, 3))

    def note(self, what: str, **more: Any) -> None:
        file = self.options.folder / f"{what}-{self.trainer.global_rank}"
        with file.open("a") as lines:
            lines.write(json.dumps(more) + "\n")

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        time.sleep(self.options.slow)
        loss = nn.functional.cross_entropy(self.net(batch[1]), batch[2])
        self.note(
            "samples", step=self.trainer.global_step, world=self.trainer.world_size, seen=batch[0].tolist()
        )
        self.log("loss", loss, sync_dist=True)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        loss = float(self.trainer.callback_metrics["loss"])
        if self.trainer.is_global_zero:
            self.note("loss", step=self.trainer.global_step, loss=repr(loss))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--slow", type=float, default=0.0)
    parser.add_argument("--trainer", type=json.loads, default={})
    options = parser.parse_args()
    options.folder.mkdir(exist_ok=True, parents=True)
    pl.seed_everything(3)
    trainer = pl.Trainer(
        max_steps=options.steps,
        accumulate_grad_batches=options.accumulate,
        callbacks=[HpcschedCallback()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options.trainer,
    )
    trainer.fit(Net(options), DataLoader(Samples(), batch_size=options.batch, shuffle=True))


if __name__ == "__main__":
    main()
