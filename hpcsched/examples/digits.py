"""Handwritten digits (8x8 pixels, bundled with scikit-learn): a training job of a few seconds.

[[job]]
name = "digits"
trainer = "hpcsched.examples.digits:Digits"
args = { kind = "cnn", width = 16, lr = 0.05 }
steps = 500
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from hpcsched.errors import ConfigError
from hpcsched.worker.session.trainer import Parts, Trainer

DEFAULTS: dict[str, Any] = {
    "kind": "mlp",
    "width": None,  # hidden units of the mlp (1024), channels of the cnn (16)
    "dropout": 0.0,
    "lr": 0.05,
    "optimizer": "momentum",
    "momentum": 0.9,
    "batch": 64,
    "seed": 0,
}
_TEST_SAMPLES = 360


class Digits(Trainer):
    """A small network, by default with momentum SGD; evaluates its accuracy on 360 held-out digits."""

    def build(self, args: dict[str, Any]) -> Parts:
        if unknown := sorted(set(args) - set(DEFAULTS)):
            raise ConfigError(
                where="Digits", key=unknown[0], got="unknown argument", accepted=", ".join(DEFAULTS)
            )
        chosen = DEFAULTS | args
        train, (test_x, test_y) = _digits()
        model = _network(chosen["kind"], chosen["width"], chosen["dropout"])

        def evaluate(model: nn.Module) -> dict[str, float]:
            device = next(model.parameters()).device
            right = model(test_x.to(device)).argmax(1) == test_y.to(device)
            return {"accuracy": right.float().mean().item()}

        return Parts(
            model=model,
            optimizer=_optimizer(model, chosen),
            dataset=train,
            global_batch=chosen["batch"],
            loss=lambda model, batch: cross_entropy(model(batch[0]), batch[1], reduction="none"),
            evaluate=evaluate,
            seed=chosen["seed"],
        )


def _optimizer(model: nn.Module, chosen: dict[str, Any]) -> torch.optim.Optimizer:
    makers: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "momentum": partial(torch.optim.SGD, momentum=chosen["momentum"]),
        "sgd": torch.optim.SGD,
        "adam": torch.optim.Adam,
        "adagrad": torch.optim.Adagrad,
    }
    if chosen["optimizer"] not in makers:
        got, accepted = repr(chosen["optimizer"]), ", ".join(makers)
        raise ConfigError(where="Digits", key="optimizer", got=got, accepted=accepted)
    return makers[chosen["optimizer"]](model.parameters(), lr=chosen["lr"])


def _network(kind: str, width: int | None, dropout: float) -> nn.Module:
    if kind == "mlp":
        hidden = width or 1024
        return nn.Sequential(
            nn.Flatten(),
            nn.Linear(64, hidden),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, 10),
        )
    if kind == "cnn":
        channels = width or 16
        return nn.Sequential(
            nn.Conv2d(1, channels, 3, padding=1),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, 2 * channels, 3, padding=1),
            nn.BatchNorm2d(2 * channels),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout(dropout),
            nn.Flatten(),
            nn.Linear(2 * channels * 16, 10),
        )
    raise ConfigError(where="Digits", key="kind", got=repr(kind), accepted="'mlp' or 'cnn'")


def _digits() -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """(images, labels) to train on and to test on; images have shape [samples, 1, 8, 8], values 0 to 1."""
    pixels, labels = load_digits(return_X_y=True)
    x = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    y = torch.tensor(labels, dtype=torch.int64)
    # The last digits were written by other people than the first: an honest test.
    return (x[:-_TEST_SAMPLES], y[:-_TEST_SAMPLES]), (x[-_TEST_SAMPLES:], y[-_TEST_SAMPLES:])
