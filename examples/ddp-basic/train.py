"""A toy model with DistributedDataParallel, in the shape of PyTorch's basic example.

    torchrun --standalone --nproc-per-node=2 train.py

It saves nothing.
"""

from __future__ import annotations

import argparse
import math
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WIDTH, BATCH = 1536, 48


class ToyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.relu, self.second = nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.relu(self.first(x)))


def samples(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of a step, of all processes together."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(BATCH, 64, generator=generator)
    return inputs, inputs.repeat(1, WIDTH // 64).sin()


def demo_basic(steps: int, local_rank: int, local_world_size: int) -> None:
    # Each process takes an equal part of the GPUs that it sees, and uses the first of them.
    gpus = torch.cuda.device_count() // local_world_size
    device = torch.device("cuda", local_rank * gpus) if gpus else torch.device("cpu")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    print(f"rank {rank} of {world_size} on {device}", flush=True)

    model = DistributedDataParallel(ToyModel().to(device), device_ids=[device] if gpus else None)
    loss_fn, optimizer = nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    mean = torch.full((), math.nan, device=device)  # where all steps were made before
    for step in range(steps):
        inputs, targets = (part[rank::world_size].to(device) for part in samples(step))
        optimizer.zero_grad()
        loss = loss_fn(model(inputs), targets)
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step + 1} loss {mean.item() / world_size!r}", flush=True)
    if rank == 0:
        print(f"done step {steps} loss {mean.item() / world_size!r}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()

    names = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    given = {name: os.environ[name] for name in names}
    print(f"[{os.getpid()}] {given}", flush=True)
    torch.manual_seed(0)
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    demo_basic(args.steps, int(given["LOCAL_RANK"]), int(given["LOCAL_WORLD_SIZE"]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
