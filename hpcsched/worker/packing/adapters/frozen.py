"""What is frozen in a model with adapters of PEFT, and what in it is a training's own.

Two trainings belong together when what is frozen is the same in both; rank, alpha, target modules and all
else that is PEFT's may differ. What is frozen then lies in memory once.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from types import MethodType
from typing import Any

import torch
from torch import nn

from hpcsched.worker.packing.compatibility import PLAIN

_PROBES = 64
"""So many elements of a tensor stand for it before it is compared as a whole."""

_OF_THE_TASK = frozenset(
    ("architectures", "dtype", "id2label", "label2id", "problem_type", "transformers_version", "use_cache")
)
"""What a model's configuration tells of its head, of generating text, or of nothing that is computed."""


class Frozen:
    """A model with adapters, taken apart.

    Attributes:
        backbone: the frozen network that trainings of one group run once for all: the base model without its
            head, where Transformers knows of one.
        own: the modules in the backbone that have something of the training's own, by their path.
        key: equal for models whose frozen parts look alike; `share` tells whether they are the same.
    """

    def __init__(self, base: nn.Module, backbone: nn.Module) -> None:
        self.backbone = backbone
        self.own: dict[str, nn.Module] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        self._buffers: dict[str, torch.Tensor] = {}
        described: list[Any] = [type(base).__qualname__, type(backbone).__qualname__, _configured(backbone)]
        for path, module in _parts(backbone):
            if _is_own(module):
                self.own[path] = module
            module = under(module)
            described.append((path, type(module), module.extra_repr(), _plain(module)))
            for name, tensor in _of_its_own(module):
                if not tensor.requires_grad:
                    is_buffer = name in module._buffers
                    (self._buffers if is_buffer else self._tensors)[f"{path}.{name}"] = tensor
                    described.append((name, tuple(tensor.shape), tensor.dtype, tensor.device, _probe(tensor)))
        self.key: tuple[Any, ...] = tuple(described)
        known = {id(tensor) for tensor in self._tensors.values()}
        self._beside = {
            f"head.{path}.{name}": p
            for path, module in _parts(base)
            for name, p in under(module).named_parameters(recurse=False)
            if not p.requires_grad and id(p) not in known
        }

    @property
    def digest(self) -> str:
        """What is frozen, in some letters, wherever it lies: tells whether a checkpoint is of this model.

        Without buffers, which may change in a step (batch norm's): a checkpoint holds them.
        """
        found = hashlib.sha256()
        for name, tensor in sorted((self._tensors | self._beside).items()):
            found.update(repr((name, tuple(tensor.shape), tensor.dtype)).encode() + _probe(tensor))
        return found.hexdigest()

    def names(self, model: nn.Module) -> frozenset[str]:
        """What of a model's state the digest stands for: no checkpoint needs it."""
        frozen = {id(tensor) for tensor in (self._tensors | self._beside).values()}
        named = model.named_parameters(remove_duplicate=False)
        return frozenset(name for name, p in named if id(p) in frozen and not p.requires_grad)

    def share(self, other: Frozen) -> bool:
        """Have the same memory as another one whose frozen parts are the same; whether they are.

        Buffers stay each one's own. An adapter that is merged into its frozen layer takes that out first.
        """
        pairs = [(tensor, other._tensors[name]) for name, tensor in self._tensors.items()]
        alike = [*pairs, *((tensor, other._buffers[name]) for name, tensor in self._buffers.items())]
        if not all(_same(one, two) for one, two in alike):
            return False
        for name, tensor in self._beside.items():
            there = other._beside.get(name)
            if there is not None and tensor.shape == there.shape and _same(tensor, there):
                pairs.append((tensor, there))
        for one, two in pairs:
            one.data = two.data
        for module in (*self.own.values(), *other.own.values()):
            if hasattr(type(module), "merge"):
                vars(module)["merge"] = MethodType(merge, module)
        return True

    def alone(self) -> None:
        """It looks like others, and is not the same: it belongs to nobody."""
        self.key = (object(),)


def frozen_of(model: nn.Module) -> Frozen | None:
    """What is frozen in a model; None where it has no adapters of PEFT on something frozen."""
    peft: Any = sys.modules.get("peft")
    if peft is None:
        return None
    found = [module for module in model.modules() if isinstance(module, peft.PeftModel)]
    if len(found) != 1 or any(config.is_prompt_learning for config in found[0].peft_config.values()):
        return None
    base = found[0].get_base_model()
    # Of Transformers: the network that is followed by a head.
    backbone = getattr(base, "base_model", base)
    if not isinstance(backbone, nn.Module) or _is_own(backbone):
        return None
    return Frozen(base, backbone)


def under(module: nn.Module) -> nn.Module:
    """What an adapter lies around: the frozen module; any other module is that itself."""
    if hasattr(module, "get_base_layer"):
        return module.get_base_layer()  # type: ignore[no-any-return, operator]
    original = getattr(module, "original_module", None)
    return original if isinstance(original, nn.Module) else module


def _parts(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """All modules by their path, but nothing inside those that are the training's own."""
    yield path, module
    if not _is_own(module):
        for name, child in module.named_children():
            yield from _parts(child, f"{path}.{name}" if path else name)


def _is_own(module: nn.Module) -> bool:
    """Whether a module has something of the training's own: an adapter, a copy to train, a trained bias."""
    if hasattr(module, "get_base_layer") or hasattr(module, "modules_to_save"):
        return True
    return any(p.requires_grad for p in module.parameters(recurse=False))


def merge(module: Any, *args: Any, **kwargs: Any) -> Any:
    """As PEFT does it, which writes into the frozen layer: others have theirs in the same memory.

    Its name is that of the method in whose place it is, by which pickle finds that.
    """
    for parameter in under(module).parameters(recurse=False):
        parameter.data = parameter.data.clone()
    return type(module).merge(module, *args, **kwargs)


def _plain(module: nn.Module) -> tuple[Any, ...]:
    """The numbers and words that a module computes with, such as the number of heads."""
    return tuple(
        (name, value)
        for name, value in sorted(vars(module).items())
        if type(value) in PLAIN and name != "training" and not name.startswith("_")
    )


def _configured(backbone: nn.Module) -> str:
    """What is said of the whole network, such as the size of attention's window."""
    values = getattr(getattr(backbone, "config", None), "__dict__", {})
    return repr(sorted((k, repr(v)) for k, v in values.items() if k[:1] != "_" and k not in _OF_THE_TASK))


def _of_its_own(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(recurse=False)
    yield from module.named_buffers(recurse=False)


def _probe(tensor: torch.Tensor) -> bytes:
    if tensor.is_meta or not tensor.numel():
        return b""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // _PROBES)].contiguous().cpu().view(torch.uint8).numpy().tobytes()


def _same(one: torch.Tensor, two: torch.Tensor) -> bool:
    return one.data_ptr() == two.data_ptr() or torch.equal(one, two)
