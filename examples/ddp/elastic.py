"""A small classifier with DistributedDataParallel and snapshots, as `torchrun` starts it.

    torchrun --standalone --nproc-per-node=2 train.py

Under hpcsched it goes on in the middle of an epoch, with any number of processes.
"""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from hpcsched.integrations.ddp import Elastic

SAMPLES, BATCH = 640, 32


def points() -> TensorDataset:
    """Ten classes, each around a centre of its own."""
    generator = torch.Generator().manual_seed(1)
    centres = torch.randn(10, 256, generator=generator)
    labels = torch.randint(10, (SAMPLES,), generator=generator)
    return TensorDataset(centres[labels] + 4 * torch.randn(SAMPLES, 256, generator=generator), labels)


def network(dropout: float) -> nn.Module:
    wide = [nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU()]
    return nn.Sequential(*wide, nn.Dropout(dropout), nn.Linear(1024, 10))


class Training:
    """The model and all that is trained with it, on this rank."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args, self.device, self.rank = args, device, dist.get_rank()
        dataset = points()
        self.loader = DataLoader(dataset, batch_size=BATCH, sampler=DistributedSampler(dataset))
        model = network(args.dropout).to(device)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=args.steps)
        self.snapshot, self.step, self.epoch = args.out / "snapshot.pt", 0, 0
        self.model = DistributedDataParallel(model)
        self.elastic = Elastic(model=self.model, optimizer=self.optimizer, scheduler=self.scheduler)
        self.loader, self.step = self.elastic.loader(self.loader), self.elastic.step

    def save(self) -> None:
        kept = {
            "MODEL_STATE": self.model.module.state_dict(),
            "OPTIMIZER_STATE": self.optimizer.state_dict(),
            "SCHEDULER_STATE": self.scheduler.state_dict(),
            "STEPS_RUN": self.step,
            "EPOCHS_RUN": self.epoch,
        }
        self.args.out.mkdir(parents=True, exist_ok=True)
        torch.save(kept, self.snapshot.with_suffix(".new"))
        self.snapshot.with_suffix(".new").replace(self.snapshot)

    def train(self) -> None:
        epochs = -(-self.args.steps // len(self.loader))
        loss = torch.full((), math.nan, device=self.device)  # where all steps were made before
        for epoch in self.elastic.epochs(epochs):
            self.loader.sampler.set_epoch(epoch)
            for inputs, labels in self.loader:
                loss = nn.functional.cross_entropy(self.model(inputs.to(self.device)), labels.to(self.device))
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                self.scheduler.step()
                self.step += 1
                self.say("", loss)
                if self.step == self.args.steps:
                    break
            self.epoch = epoch + 1
            if self.rank == 0:
                self.save()
        self.say("done ", loss)

    def say(self, word: str, loss: torch.Tensor) -> None:
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if self.rank == 0:
            print(f"{word}step {self.step} loss {mean.item() / dist.get_world_size()!r}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path, default=Path("ddp-out"))
    parser.add_argument("--dropout", type=float, default=0.0)
    args = parser.parse_args()

    torch.manual_seed(0)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    Training(args, device).train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
