"""The pack paper's four networks, as trainings on random images; and how far two such models are apart."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from hpcsched.errors import ConfigError
from hpcsched.examples.models import make
from hpcsched.worker import Parts

NETS = ("mlp-3", "mobilenet-v2", "resnet50", "densenet121")
SMALL = {"mobilenet-v2": {"width": 0.1, "image": 32}, "resnet50": {"width": 0.05, "image": 32}}
SMALL |= {"densenet121": {"width": 0.05, "image": 32}}
CLASSES = 10

cudnn: Any = torch.backends.cudnn


def network(
    net: str,
    batch: int,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    small: bool = False,
    device: torch.device | None = None,
) -> Parts:
    """One of `NETS` to be trained without chance: `seed` says which weights and learning rate. Its dataset,
    of two batches, lies on `device`."""
    torch.manual_seed(0)
    samples = 2 * batch
    if net == "mlp-3":
        inputs: tuple[torch.Tensor, ...] = (torch.randn(samples, 3072),)
        torch.manual_seed(seed)
        width = 16 if small else 128
        layers = (nn.Linear(3072, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        model: nn.Module = nn.Sequential(*layers, nn.Linear(width, CLASSES))
    else:
        torch.manual_seed(seed)
        model, example = make(net, {"classes": CLASSES, **(SMALL[net] if small else {})})
        torch.manual_seed(0)
        inputs = example(samples)
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Dropout):  # it draws random numbers, so nothing could be stacked
                setattr(module, name, nn.Identity())
    model.to(dtype)
    return Parts(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-3 * (1 + seed % 4), momentum=0.9),
        dataset=(*(x.to(device, dtype) for x in inputs), torch.arange(samples, device=device) % CLASSES),
        global_batch=batch,
        loss=lambda model, batch: cross_entropy(model(*batch[:-1]), batch[-1], reduction="none"),
        data=f"random images for {net} at {batch} as {dtype}",
    )


def usable_device(*, quick: bool) -> torch.device:
    """The GPU; a CPU's one thread will do where it only has to be shown that a program works (`quick`)."""
    if torch.cuda.is_available():
        return torch.device("cuda", 0)
    if not quick:
        raise SystemExit("no GPU here; --quick shows that the program works")
    torch.set_num_threads(1)
    return torch.device("cpu")


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Kernels that give the same bits each time."""
    before = cudnn.deterministic, cudnn.benchmark
    cudnn.deterministic, cudnn.benchmark = True, False
    try:
        yield
    finally:
        cudnn.deterministic, cudnn.benchmark = before


def distance(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    """The largest difference between two models, as a part of the largest number in each tensor."""
    pairs = [(one[name].double(), other[name].double()) for name in other if other[name].is_floating_point()]
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-2)) for a, b in pairs)


def short(error: Exception) -> str:
    """Why something was not measured, in a few words."""
    if isinstance(error, ConfigError):
        return f"refused: {error.got[:100]}"
    return "out of memory" if "out of memory" in str(error).lower() else f"failed: {str(error)[:100]}"
