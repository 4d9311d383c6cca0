"""What two trainings must have in common for their models to be computed as one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

_PLAIN = (bool, int, float, str, type(None))


def architecture(model: nn.Module, loss: Callable[..., Any]) -> tuple[Any, ...]:
    """What two models have in common that can be one of a stack: equal values are compared, no more."""
    modules = tuple(
        (name, type(module), module.extra_repr(), module.training) for name, module in model.named_modules()
    )
    tensors = tuple(
        (name, tuple(tensor.shape), tensor.dtype, tensor.device, tensor.requires_grad)
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    )
    return modules, tuple(map(str, plain_attributes(model))), tensors, _code_of(loss)


def _code_of(function: Any) -> Any:
    """A function by what it does: its code, and the plain values that it has from outside."""
    code = getattr(function, "__code__", None)
    if code is None:
        return function if isinstance(function, type) else type(function)
    cells = getattr(function, "__closure__", None) or ()
    plain: list[Any] = []
    for cell in cells:
        value: Any = getattr(cell, "cell_contents", None)
        plain.append(repr(value) if isinstance(value, _PLAIN) else type(value))
    return code, tuple(plain), repr(getattr(function, "__defaults__", None))


def plain_attributes(model: nn.Module) -> list[Any]:
    """All numbers and words that a model's modules have as attributes."""
    return [
        (name, key, value)
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if type(value) in _PLAIN
    ]
