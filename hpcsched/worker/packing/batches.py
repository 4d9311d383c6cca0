"""What is in a batch: its tensors, and copies of it."""

from __future__ import annotations

import contextlib
import copy
from collections import deque
from collections.abc import Callable, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch

from hpcsched.worker.packing.compatibility import PLAIN


def tensors_in(batch: Any) -> list[torch.Tensor]:
    """The tensors of a batch, wherever `to_device` looks for them."""
    if isinstance(batch, torch.Tensor):
        return [batch]
    if isinstance(batch, Mapping):
        return [tensor for value in batch.values() for tensor in tensors_in(value)]
    if isinstance(batch, (list, tuple)):
        return [tensor for value in batch for tensor in tensors_in(value)]
    return []


def tensors_within(batch: Any) -> list[torch.Tensor]:
    """All tensors of a batch, each once, also those in attributes of objects such as dataclasses.

    The nearest first, and not beyond `MOST_VALUES`: an object may know the whole dataset.
    """
    found: dict[int, torch.Tensor] = {}
    seen: dict[int, Any] = {}  # by identity; kept, so that no other object gets it
    left = deque([batch])
    while left and len(seen) < MOST_VALUES:
        value = left.popleft()
        if id(value) in seen or isinstance(value, _NO_PART):
            continue
        seen[id(value)] = value
        if isinstance(value, torch.Tensor):
            found[id(value)] = value
        elif isinstance(value, Mapping):
            left += value.values()
        elif isinstance(value, (list, tuple, set, frozenset)):
            left += value
        else:
            left += getattr(value, "__dict__", {}).values()
            slots = (vars(kind).get("__slots__", ()) for kind in type(value).__mro__)
            names = (name for some in slots for name in ((some,) if isinstance(some, str) else some))
            left += [getattr(value, name) for name in names if hasattr(value, name)]
    return list(found.values())


MOST_VALUES = 10_000

_NO_PART = (*PLAIN, type, ModuleType, FunctionType, MethodType, torch.nn.Module, torch.dtype, torch.device)
"""What a batch may refer to and has no tensors of its own in."""


def only_tensors(batch: Any) -> bool:
    """Whether there is nothing else in a batch, so that two of the same shapes are of the same kind."""
    if isinstance(batch, Mapping):
        return all(only_tensors(value) for value in batch.values())
    if isinstance(batch, (list, tuple)):
        return all(only_tensors(value) for value in batch)
    return batch is None or isinstance(batch, torch.Tensor)


def writes_in(batch: Any) -> int:
    """How often somebody has written into a batch: a number that grows."""
    return sum(tensor._version for tensor in tensors_in(batch))


def mapped(batch: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """The same batch with something else for each of its tensors, asked for in the order of `tensors_in`."""
    if isinstance(batch, torch.Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        return {key: mapped(value, function) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(mapped(value, function) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(mapped(value, function) for value in batch)
    return batch


def own(batch: Any) -> Any:
    """A batch as one member's of several: whoever takes something out of it or puts something in changes
    nobody else's. The tensors are the same, as is what cannot be copied."""
    if isinstance(batch, torch.Tensor) or type(batch) in PLAIN:
        return batch
    if isinstance(batch, Mapping):
        return {key: own(value) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(own, batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(map(own, batch))
    with contextlib.suppress(Exception):
        return copy.deepcopy(batch)
    return batch


def private(batch: Any) -> Any:
    """A copy of a batch for one that writes into it."""
    return mapped(batch, torch.Tensor.clone)
