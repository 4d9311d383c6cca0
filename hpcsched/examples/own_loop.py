"""A training loop of one's own, made elastic with `Session`; `python own_loop.py` works as well.

[[job]]
name = "own-loop"
command = ["python", "own_loop.py"]
steps = 2000
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import mse_loss

from hpcsched.worker import Session


def main() -> None:
    """Learn a sine wave."""
    torch.manual_seed(0)
    x = torch.linspace(-3, 3, 4096).unsqueeze(1)
    y = torch.sin(2 * x)
    model = nn.Sequential(nn.Linear(1, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)

    session = Session(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        dataset_size=len(x),
        global_batch=256,
        total_steps=500,
    )
    for indices in session.steps():  # this rank's samples of the next global batch
        batch, target = x[indices].to(session.device), y[indices].to(session.device)
        optimizer.zero_grad()
        loss = session.backward(mse_loss(model(batch), target))  # in place of loss.backward()
        optimizer.step()
        scheduler.step()
        if session.rank == 0 and session.step % 100 == 0:
            print(f"step {session.step}: loss {loss.item():.4f}", flush=True)
    session.finish({"loss": loss.item()})


if __name__ == "__main__":
    main()
