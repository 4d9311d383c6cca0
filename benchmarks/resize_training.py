"""The training that `resize.py` resizes: its state as large as is asked for, its steps on record."""

from __future__ import annotations

import os
import time
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import skip_init

from hpcsched.worker import Parts, Trainer

SAMPLES = 256


class Wide(Trainer):
    """A multi-layer perceptron with momentum SGD; `args`: `width`, `layers`, `batch`, `record` (a file).

    With `adamw` it has that optimizer instead, and weights that nobody has set: that takes long by itself.
    Each step writes one line there when it begins and one when it ends: the rank, "b" or "e", the step's
    number in this process, the time (monotonic, s), and the number of ranks.
    """

    def build(self, args: dict[str, Any]) -> Parts:
        width = args["width"]
        adamw = args.get("adamw", False)
        linear = partial(skip_init, nn.Linear) if adamw else nn.Linear
        layers = [nn.Sequential(linear(width, width), nn.ReLU()) for _ in range(args["layers"])]
        model = nn.Sequential(nn.Linear(64, width), *layers, nn.Linear(width, 10))
        parameters = model.parameters()
        optimizer = (
            torch.optim.AdamW(parameters) if adamw else torch.optim.SGD(parameters, lr=0.001, momentum=0.9)
        )
        record = os.open(args["record"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        steps = [0]

        def write(what: str) -> None:
            ranks = os.environ["WORLD_SIZE"]
            line = f"{os.environ['RANK']} {what} {steps[0]} {time.monotonic():.6f} {ranks}\n"
            os.write(record, line.encode())

        def loss(model: nn.Module, batch: Any) -> torch.Tensor:
            if "HPCSCHED_JOINING" not in os.environ or model[0].weight.grad is not None or steps[0]:
                write("b")
            return cross_entropy(model(batch[0]), batch[1], reduction="none")

        def after(*_: object) -> None:
            write("e")
            steps[0] += 1

        optimizer.register_step_post_hook(after)
        return Parts(
            model=model,
            optimizer=optimizer,
            dataset=(torch.randn(SAMPLES, 64), torch.randint(0, 10, (SAMPLES,))),
            global_batch=args["batch"],
            loss=loss,
        )
