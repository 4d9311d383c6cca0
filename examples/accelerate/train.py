"""A classifier of small images, trained with Hugging Face Accelerate.

python train.py                                              one device
accelerate launch --num_processes=2 train.py                 two
python train.py --resume_from_checkpoint OUT/step_20         goes on from a checkpoint of its own
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

SAMPLES, BATCH, ACCUMULATED = 640, 16, 2


class Progress:
    """How many steps are made; Accelerate saves it with the rest."""

    steps = 0

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


def images() -> TensorDataset:
    """Ten classes: one blurred pattern each, with noise."""
    generator = torch.Generator().manual_seed(1)
    patterns = torch.randn(10, 3, 32, 32, generator=generator)
    labels = torch.randint(10, (SAMPLES,), generator=generator)
    noise = torch.randn(SAMPLES, 3, 32, 32, generator=generator)
    return TensorDataset(patterns[labels] + 2 * noise, labels)


def network(dropout: float) -> nn.Module:
    def block(into: int, out: int) -> list[nn.Module]:
        return [nn.Conv2d(into, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU(), nn.MaxPool2d(2)]

    body = [*block(3, 16), *block(16, 32), *block(32, 64)]
    return nn.Sequential(*body, nn.Flatten(), nn.Dropout(dropout), nn.Linear(64 * 4 * 4, 10))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path, default=Path("accelerate-out"))
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--save_steps", type=int, default=20)
    parser.add_argument("--resume_from_checkpoint", type=Path)
    args = parser.parse_args()

    set_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATED)
    model = network(args.dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = CosineAnnealingLR(optimizer, T_max=args.steps)
    loader = DataLoader(images(), batch_size=BATCH, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)

    per_epoch = len(loader) // accelerator.gradient_accumulation_steps
    epochs = -(-args.steps // per_epoch)
    first, had, last = 0, 0, math.nan
    if args.resume_from_checkpoint:
        accelerator.load_state(args.resume_from_checkpoint)
        first, had = divmod(progress.steps, per_epoch)

    for epoch in range(first, epochs):
        loader.set_epoch(epoch)
        skipped = had * accelerator.gradient_accumulation_steps if epoch == first else 0
        model.train()
        total = 0.0
        for inputs, labels in accelerator.skip_first_batches(loader, skipped) if skipped else loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(inputs), labels)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            total += (
                accelerator.reduce(loss.detach(), "mean").item() / accelerator.gradient_accumulation_steps
            )
            if not accelerator.sync_gradients:
                continue
            progress.steps += 1
            accelerator.print(f"step {progress.steps} loss {total!r}", flush=True)
            last, total = total, 0.0
            if progress.steps % args.save_steps == 0:
                accelerator.save_state(str(args.out / f"step_{progress.steps}"))
            if progress.steps == args.steps:
                break
    accelerator.print(f"done step {progress.steps} loss {last!r}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
