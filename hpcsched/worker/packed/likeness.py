"""What two trainings must have in common for their models to be computed as one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

PLAIN = (bool, int, float, complex, str, bytes, type(None))
"""Types whose values are all there is to them."""

_DEEP = 6
"""So far into things inside things it is looked for what changes in a step ..."""

_MANY = 20_000
"""... and at so many of them."""

_REGISTRIES = frozenset(("_parameters", "_buffers", "_modules"))


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
        plain.append(repr(value) if isinstance(value, PLAIN) else type(value))
    return code, tuple(plain), repr(getattr(function, "__defaults__", None))


def plain_attributes(model: nn.Module) -> list[Any]:
    """All numbers and words that a model's modules have as attributes."""
    return [
        (name, key, value)
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if type(value) in PLAIN
    ]


class Memory:
    """What a model and its loss keep in other places than parameters and buffers.

    A stack computes with what was there when it was traced: nothing of it may change in a step.
    """

    def __init__(self, model: nn.Module, loss: Callable[..., Any]) -> None:
        self._model, self._loss = model, loss
        self._attributes = {module: dict(vars(module)) for module in model.modules()}
        self._marks = self._look()

    def changed(self) -> bool:
        """Whether anything is not what it was."""
        now = self._look()
        return len(now) != len(self._marks) or any(
            a is not c or b != d for (a, b), (c, d) in zip(now, self._marks, strict=True)
        )

    def put_back(self) -> None:
        """Have the modules' attributes be what they were; what has changed inside of them stays changed."""
        for module, attributes in self._attributes.items():
            here = vars(module)
            for key in [key for key in here if key not in attributes]:
                del here[key]
            here.update(attributes)

    def _look(self) -> list[tuple[Any, Any]]:
        """Each thing that is found, and what of it can be compared; things are held, so that none can take
        another one's place."""
        found: list[tuple[Any, Any]] = []
        for module in self._model.modules():
            _walk({k: v for k, v in vars(module).items() if k not in _REGISTRIES}, found, _DEEP)
        _walk(self._loss, found, _DEEP)
        return found


def _walk(value: Any, found: list[tuple[Any, Any]], depth: int) -> None:
    if type(value) in PLAIN:
        found.append((None, repr(value)))
        return
    if isinstance(value, torch.Tensor):
        found.append((value, value._version))
        return
    if isinstance(value, Mapping):
        found.append((None, len(value)))
    elif isinstance(value, nn.Module):
        found.append((value, None))
        for tensor in (*value.parameters(), *value.buffers()):
            found.append((tensor, tensor._version))
    elif not isinstance(value, (list, tuple, set, frozenset)):
        found.append((value, None))
    for inner in _inside(value) if depth else ():
        if len(found) > _MANY:
            return
        _walk(inner, found, depth - 1)


def _inside(value: Any) -> Iterable[Any]:
    """What there may be in a value that can change."""
    if isinstance(value, Mapping):
        return [*value.keys(), *value.values()]
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if _filled(cell)]
        return [*cells, *(value.__defaults__ or ()), *vars(value).values()]
    if isinstance(value, MethodType):
        return [value.__self__]
    if isinstance(value, partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, (type, ModuleType, nn.Module)):
        return []
    return list(getattr(value, "__dict__", {}).values())


def _filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:  # a variable that has no value yet
        return False
    return True
