"""`python plain.py NAME STEPS SIZE DEVICE [TAKE_MIB]`: a training as people have it, which knows of nobody.

It prints its steps, and at its end leaves a line of JSON in NAME.json: when it began, began to train and
ended, by the clock on the wall, its slowest and median step in seconds, and how much memory is in use on its
GPU then, in MiB. With TAKE_MIB it takes memory instead, piece by piece, until it has so much or there is no
more: NAME.json has what it got, at any time.
"""

import json
import sys
import time
from pathlib import Path
from statistics import median

BEGAN = time.time()

import torch  # noqa: E402 - its import is part of what a start takes

MIB = 2**20
PIECE_MIB = 128


def train(name: str, steps: int, size: int, device: torch.device) -> None:
    """An MLP, with its data made on the CPU for each batch."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(size, size) for _ in range(4)]
    model = torch.nn.Sequential(*[part for layer in layers for part in (layer, torch.nn.ReLU())]).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    took: list[float] = []
    first = 0.0
    for step in range(1, steps + 1):
        since = time.perf_counter()
        batch = torch.randn(64, size).to(device)
        optimizer.zero_grad()
        loss = (model(batch) - batch).square().mean()
        loss.backward()
        optimizer.step()
        value = loss.item()  # waits for the GPU, as a training does that says its loss
        took.append(time.perf_counter() - since)
        first = first or time.time()
        print(f"step {step}: {value:.4f}", flush=True)
    used = 0.0
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        used = (total - free) / MIB
    note(
        name,
        began=BEGAN,
        trains=first,
        ended=time.time(),
        median_step_s=median(took),
        slowest_step_s=max(took),
        used_mib=used,
    )


def take(name: str, wanted_mib: int, device: torch.device) -> None:
    """Has it for a second, if it gets it."""
    kept: list[torch.Tensor] = []
    while len(kept) * PIECE_MIB < wanted_mib:
        kept.append(torch.ones(PIECE_MIB * MIB, dtype=torch.uint8, device=device))
        note(name, took_mib=len(kept) * PIECE_MIB)
    time.sleep(1.0)


def note(name: str, **what: float) -> None:
    Path(f"{name}.json").write_text(json.dumps(what))


if __name__ == "__main__":
    torch.set_num_threads(1)
    name, steps, size, kind, *more = sys.argv[1:]
    if more:
        take(name, int(more[0]), torch.device(kind))
    else:
        train(name, int(steps), int(size), torch.device(kind))
