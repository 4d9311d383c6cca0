"""Well-known networks, written from their papers, to measure and to train: nothing is downloaded.

Each is a module whose constructor makes it smaller on request (`width`, `image`, `classes`, ...), and whose
`example(samples)` gives inputs of the right shape. Results have the shape [samples, classes].
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from hpcsched.errors import ConfigError
from hpcsched.examples.models.densenet import DenseNet121
from hpcsched.examples.models.inception import InceptionV3
from hpcsched.examples.models.mobilenet import MobileNetV2
from hpcsched.examples.models.resnet import ResNet50, WideResNet101
from hpcsched.examples.models.transformer import Transformer
from hpcsched.examples.models.vgg import VGG16
from hpcsched.worker.session.trainer import Parts, Trainer

__all__ = [
    "MODELS",
    "DenseNet121",
    "InceptionV3",
    "MobileNetV2",
    "Network",
    "ResNet50",
    "Transformer",
    "VGG16",
    "WideResNet101",
    "make",
]


class Example(Protocol):
    """A network that knows what its inputs look like."""

    def example(self, samples: int) -> tuple[torch.Tensor, ...]: ...


MODELS: dict[str, Callable[..., nn.Module]] = {
    "vgg16": VGG16,
    "wrn101-2": WideResNet101,
    "inception-v3": InceptionV3,
    "resnet50": ResNet50,
    "transformer": Transformer,
    "mobilenet-v2": MobileNetV2,
    "densenet121": DenseNet121,
}
"""The networks by the names that commands know them by."""


def make(name: str, args: Mapping[str, Any]) -> tuple[nn.Module, Callable[[int], tuple[torch.Tensor, ...]]]:
    """The network of this name, and what gives inputs for so many samples. Raises ConfigError."""
    if name not in MODELS:
        raise ConfigError(where="model", got=repr(name), accepted=", ".join(MODELS))
    known = inspect.signature(MODELS[name]).parameters
    for key, value in args.items():
        if key not in known:
            raise ConfigError(where=name, key=key, got="unknown argument", accepted=", ".join(known))
        _like(known[key].default, value, name, key)
    try:
        model = MODELS[name](**args)
    except (ValueError, RuntimeError, ZeroDivisionError) as error:
        got = str(error).splitlines()[0]
        raise ConfigError(where=name, got=got, accepted="arguments that make a network") from error
    return model, cast(Example, model).example


class Network(Trainer):
    """Trains one of the networks on random data: for measuring, not for learning.

    Arguments: `network`, its name; those of its constructor; `batch` (32), `samples` in the dataset (twice
    the batch), `lr` (0.01) and `seed` (0).
    """

    def build(self, args: dict[str, Any]) -> Parts:
        own: dict[str, Any] = {"batch": 32, "samples": 0, "lr": 0.01, "seed": 0}
        rest = {key: value for key, value in args.items() if key not in (*own, "network")}
        chosen = {key: _like(default, args.get(key, default), "Network", key) for key, default in own.items()}
        model, example = make(str(args.get("network")), rest)
        inputs = example(chosen["samples"] or 2 * chosen["batch"])
        classes = rest.get("classes", 1000)
        return Parts(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=chosen["lr"], momentum=0.9),
            dataset=(*inputs, torch.randint(classes, (len(inputs[0]),))),
            global_batch=chosen["batch"],
            loss=lambda model, batch: cross_entropy(model(*batch[:-1]), batch[-1], reduction="none"),
            seed=chosen["seed"],
        )


def _like(default: Any, value: Any, where: str, key: str) -> Any:
    """The value, if it is of the kind of the default and not negative. Raises ConfigError."""
    kinds = (int, float) if isinstance(default, float) else (type(default),)
    if type(value) not in kinds or value < 0:
        words = {bool: "true or false", int: "a whole number of at least 0", float: "a number of at least 0"}
        raise ConfigError(where=where, key=key, got=repr(value), accepted=words[type(default)])
    return value
