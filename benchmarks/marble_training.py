"""Stands for the networks of the MARBLE paper: real steps at their pace, with state of their size."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from hpcsched.worker import Parts, Trainer

SAMPLES, FEATURES, CLASSES = 512, 64, 10


class Paced(Trainer):
    """A small network that is trained, beside frozen weights that are only saved and moved.

    `args`: `state_mb`, the size of all that is saved; `rates`, steps per second by rank count: each step
    waits until it has taken as long.
    """

    def build(self, args: dict[str, Any]) -> Parts:
        frozen = nn.Parameter(torch.zeros(int(args["state_mb"] * 250_000)), requires_grad=False)
        model = nn.Sequential(nn.Linear(FEATURES, 128), nn.ReLU(), nn.Linear(128, CLASSES))
        model.register_parameter("frozen", frozen)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.01, momentum=0.9)
        rates = {int(ranks): rate for ranks, rate in args["rates"].items()}
        due = [0.0]

        def pace(*_: object) -> None:
            now = time.monotonic()
            due[0] = max(due[0] + 1 / rates[int(os.environ["WORLD_SIZE"])], now - 0.1)
            time.sleep(max(0.0, due[0] - now))

        optimizer.register_step_post_hook(pace)
        return Parts(
            model=model,
            optimizer=optimizer,
            dataset=(torch.randn(SAMPLES, FEATURES), torch.randint(0, CLASSES, (SAMPLES,))),
            global_batch=24,
            loss=lambda model, batch: cross_entropy(model(batch[0]), batch[1], reduction="none"),
        )
