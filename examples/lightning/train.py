"""An image classifier with Lightning: a small convolutional network, on images made here.

It saves by itself, every 20 steps, and goes on from its last checkpoint.
"""

import argparse

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CLASSES, SIZE = 10, 24


def images(samples: int, seed: int = 0) -> TensorDataset:
    """Each class is a pattern; an image is that with noise, shifted. float32 [samples, 3, SIZE, SIZE]."""
    patterns = torch.randn(CLASSES, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0))
    draw = torch.Generator().manual_seed(1 + seed)
    labels = torch.randint(CLASSES, (samples,), generator=draw)
    noise = torch.randn(samples, 3, SIZE, SIZE, generator=draw)
    shifts = torch.randint(3, (samples,), generator=draw).tolist()
    shifted = [patterns[label].roll(shift, -1) for label, shift in zip(labels.tolist(), shifts, strict=True)]
    return TensorDataset(torch.stack(shifted) + 2 * noise, labels)


class Classifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1),
            nn.GELU(),
            nn.Conv2d(32, 32, 3, padding=1),
            nn.GELU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.GELU(),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
            nn.Linear(64 * 16, CLASSES),
        )

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("accuracy", (self.net(x).argmax(1) == y).float().mean(), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=2e-3)
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class PrintLoss(Logger):
    """`step 12 loss 2.3...` for each step, on rank 0."""

    name = version = None
    last = None

    def log_hyperparams(self, *_, **__) -> None:
        pass

    @L.pytorch.utilities.rank_zero_only
    def log_metrics(self, metrics, step=None) -> None:
        if "loss" in metrics:
            self.last = metrics["loss"]
            print(f"step {step + 1} loss {self.last!r}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", default="out")
    options = parser.parse_args()

    L.seed_everything(0)
    printing = PrintLoss()
    checkpoint = ModelCheckpoint(dirpath=options.out, every_n_train_steps=20, save_last=True)
    trainer = L.Trainer(
        max_steps=options.steps,
        callbacks=[checkpoint],
        logger=[CSVLogger(options.out), printing],
        log_every_n_steps=1,
        gradient_clip_val=1.0,
        enable_progress_bar=False,
    )
    trainer.fit(
        Classifier(),
        DataLoader(images(1600), batch_size=64, shuffle=True, num_workers=1, persistent_workers=True),
        DataLoader(images(256, seed=1), batch_size=64),
        ckpt_path="last",
    )
    if trainer.is_global_zero:
        print(f"done step {trainer.global_step} loss {printing.last!r}", flush=True)


if __name__ == "__main__":
    main()
