"""What two trainings must have in common for their models to be computed as one, and must not do for that.

The forward pass of one model is traced for all: whatever it finds in other places than its parameters and
buffers becomes a constant, the same for all and for ever.
"""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from inspect import getattr_static
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import ReferenceType

import numpy as np
import torch
from torch import nn

PLAIN = (bool, int, float, complex, str, bytes, type(None))
"""Types whose values are all there is to them."""

_DEEP = 6
"""So far into things inside things it is looked ..."""

_MANY = 20_000
"""... and at so many of them."""

_MOST_BYTES = 1 << 20
"""Tensors and arrays that are larger are compared by which they are, not by what they hold."""

_REGISTRIES = frozenset(("_parameters", "_buffers", "_modules"))
_SEVERAL = (list, tuple, set, frozenset, deque)
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)


def architecture(model: nn.Module, loss: Callable[..., Any]) -> tuple[Any, ...]:
    """What two models have in common that can be one of a stack: equal values are compared, no more."""
    modules = tuple((name, type(module), module.extra_repr()) for name, module in model.named_modules())
    tensors = tuple(
        (name, tuple(tensor.shape), tensor.dtype, tensor.device, tensor.requires_grad)
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    )
    described = _Description(model)
    for module in model.modules():
        described.add(_attributes(module))
    described.add(loss)
    return modules, tensors, tuple(described.found)


class _Description:
    """All that is found from somewhere on, so that two of which all is equal do the same."""

    def __init__(self, model: nn.Module) -> None:
        self.found: list[Any] = []
        own = (*model.modules(), *model.parameters(), *model.buffers())
        self._seen = {id(part): number for number, part in enumerate(own)}
        self._held: list[Any] = []

    def add(self, value: Any, depth: int = _DEEP) -> None:
        """Describe one more."""
        if type(value) in PLAIN:
            self.found.append(repr(value))
            return
        if id(value) in self._seen:
            self.found.append(self._seen[id(value)])
            return
        self._seen[id(value)] = len(self._seen)
        self._held.append(value)  # nothing may take its place while others are looked at
        if isinstance(value, (torch.Tensor, np.ndarray)):
            self.found.append(_content(value))
        elif isinstance(value, (type, ModuleType, CodeType, BuiltinFunctionType)):
            self.found.append(value)
        elif depth == 0 or len(self.found) > _MANY or isinstance(value, (Iterator, *_GENERATORS)):
            self.found.append(id(value))  # like nothing but itself
        elif _closed(value):
            self.found.append((type(value), repr(value)))
        else:
            self.found.append(type(value))
            for inner in _inside(value):
                self.add(inner, depth - 1)


def _closed(value: Any) -> bool:
    """Whether nobody can look into it."""
    known = isinstance(
        value, (Mapping, *_SEVERAL, FunctionType, MethodType, ReferenceType, partial, nn.Module)
    )
    return not (known or hasattr(value, "__dict__") or hasattr(value, "__slots__"))


def _content(value: torch.Tensor | np.ndarray[Any, Any]) -> Any:
    """A tensor or array by what it holds, or by which it is."""
    if value.nbytes > _MOST_BYTES or (isinstance(value, np.ndarray) and value.dtype == object):
        return id(value)
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            return id(value)
        array = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    else:
        array = np.ascontiguousarray(value)
    return str(value.dtype), tuple(value.shape), hashlib.sha256(array.tobytes()).digest()


class Memory:
    """What a model and its loss keep in other places than parameters and buffers.

    A stack computes with what was there when it was traced: nothing of it may change in a step.
    """

    def __init__(self, model: nn.Module, loss: Callable[..., Any]) -> None:
        self._model, self._loss = model, loss
        self._own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
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
            self._walk(_attributes(module), found, _DEEP)
        self._walk(self._loss, found, _DEEP)
        return found

    def _walk(self, value: Any, found: list[tuple[Any, Any]], depth: int) -> None:
        if type(value) in PLAIN:
            found.append((None, repr(value)))
            return
        if isinstance(value, torch.Tensor):
            found.append((value, None if id(value) in self._own else value._version))
            return
        if isinstance(value, np.ndarray):
            found.append((value, _content(value)))
            return
        if isinstance(value, Iterator):
            found.append((object(), None))  # nobody can see how far it is
            return
        if isinstance(value, _GENERATORS):
            found.append((value, _position(value)))
            return
        if isinstance(value, nn.Module) and value in self._attributes:
            return
        found.append((None, len(value)) if isinstance(value, (Mapping, *_SEVERAL)) else (value, None))
        for inner in _inside(value) if depth else ():
            if len(found) > _MANY:
                return
            self._walk(inner, found, depth - 1)


def _attributes(module: nn.Module) -> dict[str, Any]:
    """All that a module keeps in other places than parameters, buffers and modules."""
    return {key: value for key, value in vars(module).items() if key not in _REGISTRIES}


def _position(generator: Any) -> Any:
    """Where a generator of random numbers is."""
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, np.random.Generator):
        return repr(generator.bit_generator.state)
    return repr(generator.getstate() if isinstance(generator, random.Random) else generator.get_state())


def _inside(value: Any) -> Iterable[Any]:
    """What there may be in a value that makes a difference, or can change."""
    if isinstance(value, Mapping):
        return [*value.keys(), *value.values()]
    if isinstance(value, _SEVERAL):
        return list(value)
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if _filled(cell)]
        defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        return [value.__code__, *cells, *defaults, *vars(value).values()]
    if isinstance(value, MethodType):
        return [value.__func__, *_used(value)]
    if isinstance(value, ReferenceType):
        return [value()]
    if isinstance(value, partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, nn.Module):
        tensors = (*value._parameters.values(), *value._buffers.values())
        return [value.extra_repr(), *_attributes(value).values(), *tensors, *value.children()]
    if isinstance(value, (type, ModuleType, CodeType, BuiltinFunctionType)):
        return []
    names = {name for kind in type(value).__mro__ for name in (getattr(kind, "__slots__", None) or ())}
    slots = (getattr(value, name, None) for name in sorted(names) if name not in ("__dict__", "__weakref__"))
    return [*getattr(value, "__dict__", {}).values(), *slots]


def _used(method: MethodType) -> list[Any]:
    """What a method finds in its object: the attributes whose names are in its code, and in that of the
    methods and properties which it names. Trainers have much in them that is not the loss's."""
    owner = method.__self__
    if isinstance(owner, (type, nn.Module)):
        return [owner]
    names: set[str] = set()
    codes = [_code(method.__func__)]
    while codes:
        code = codes.pop()
        if code is None:
            return [owner]  # it cannot be seen
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        for name in set(code.co_names) - names:
            names.add(name)
            named = getattr_static(type(owner), name, None)
            named = named.fget if isinstance(named, property) else getattr(named, "__func__", named)
            if isinstance(named, FunctionType):
                codes.append(named.__code__)
    return [value for name, value in sorted(getattr(owner, "__dict__", {}).items()) if name in names]


def _code(function: Any) -> CodeType | None:
    return function.__code__ if isinstance(function, FunctionType) else None


def _filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:  # a variable that has no value yet
        return False
    return True
