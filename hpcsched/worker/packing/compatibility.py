"""What two trainings must have in common for their models to be computed as one, and must not do for that.

The forward pass of one model is traced for all: whatever it finds in other places than its parameters and
buffers becomes a constant, the same for all and for ever.
"""

from __future__ import annotations

import dis
import hashlib
import random
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import ReferenceType

import numpy as np
import torch
from torch import nn

from hpcsched.compat import pairwise, zip

PLAIN = (bool, int, float, complex, str, bytes, type(None))
"""Types whose values are all there is to them."""

_DEEP = 6
"""So far into things inside things it is looked ..."""

_MANY = 100_000
"""... and at so many of them."""

_MOST_BYTES = 64 << 20
"""So much of what tensors, arrays and words hold is compared; beyond it, by which they are."""

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


class _Itself:
    """A value that is like nothing but itself."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


class _Description:
    """All that is found from somewhere on, so that two of which all is equal do the same."""

    def __init__(self, model: nn.Module) -> None:
        self.found: list[Any] = []
        own = (*model.modules(), *model.parameters(), *model.buffers())
        self._seen = {id(part): number for number, part in enumerate(own)}
        self._held: list[Any] = []
        self._budget = _Budget()

    def add(self, value: Any, depth: int = _DEEP) -> None:
        """Describe one more; whatever cannot be looked at is like nothing but itself."""
        try:
            self._add(value, depth)
        except Exception:  # whatever the user's own objects do when they are looked at
            self.found.append(_Itself(value))

    def _add(self, value: Any, depth: int) -> None:
        if isinstance(value, PLAIN):
            self.found.append((type(value), _plain(value)))
            if type(value) in PLAIN:
                return
        if id(value) in self._seen:
            self.found.append(self._seen[id(value)])
            return
        self._seen[id(value)] = len(self._seen)
        self._held.append(value)  # nothing may take its place while others are looked at
        if isinstance(value, (torch.Tensor, np.ndarray)):
            content = self._budget.content(value)
            self.found.append(_Itself(value) if content is None else content)
        elif isinstance(value, (type, ModuleType, CodeType, BuiltinFunctionType)):
            self.found.append(value)
        elif isinstance(value, re.Pattern):
            self.found.append((value.pattern, value.flags))
        elif depth == 0 or len(self.found) > _MANY or isinstance(value, (Iterator, *_GENERATORS)):
            self.found.append(_Itself(value))
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


def _plain(value: Any) -> Any:
    """A plain value, also one of a class of its own; long words by what they come to."""
    if isinstance(value, (str, bytes)) and len(value) > 1024:
        data = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
        return hashlib.sha256(data).digest()
    kind: Any = next(kind for kind in PLAIN if isinstance(value, kind))
    return kind.__repr__(value)


class _Budget:
    """What tensors and arrays hold, as long as all of it is not too much."""

    def __init__(self) -> None:
        self._left = _MOST_BYTES

    def content(self, value: torch.Tensor | np.ndarray[Any, Any]) -> Any:
        """None: it cannot be compared, or is too much."""
        if isinstance(value, torch.Tensor):
            odd = value.is_meta or value.is_quantized or value.is_conj()
            if odd or value.layout is not torch.strided or not self._has(value.nbytes):
                return None
            array = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        else:
            if value.dtype == object or not self._has(value.nbytes):
                return None
            array = np.ascontiguousarray(value)
        return str(value.dtype), tuple(value.shape), hashlib.sha256(array.tobytes()).digest()

    def _has(self, size: int) -> bool:
        self._left -= size
        return self._left >= 0


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
        self._budget = _Budget()
        for module in self._model.modules():
            self._walk(_attributes(module), found, _DEEP)
        self._walk(self._loss, found, _DEEP)
        return found

    def _walk(self, value: Any, found: list[tuple[Any, Any]], depth: int) -> None:
        if type(value) in PLAIN:
            found.append((None, _plain(value)))
            return
        if isinstance(value, torch.Tensor):
            # An inference tensor counts nothing: nobody may write into it.
            counts = id(value) not in self._own and not value.is_inference()
            found.append((value, value._version if counts else None))
            return
        if isinstance(value, np.ndarray):
            content = self._budget.content(value)
            found.append((object(), None) if content is None else (value, content))
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
    methods and properties which it names. Trainers have much in them that is not the loss's. All that is in
    the object, where the method does more with it than to ask for attributes by their names."""
    owner = method.__self__
    if isinstance(owner, (type, nn.Module)) or not isinstance(method.__func__, FunctionType):
        return [owner]
    names: set[str] = set()
    codes, seen = [method.__func__.__code__], set()
    while codes:
        code = codes.pop()
        if code in seen:
            continue
        seen.add(code)
        if _hands_on(code):
            return [owner]
        names |= (inside := _names_in(code))
        for kind in type(owner).__mro__:
            for name in inside & vars(kind).keys():
                named = vars(kind)[name]
                named = named.fget if isinstance(named, property) else getattr(named, "__func__", named)
                if isinstance(named, FunctionType):
                    codes.append(named.__code__)
    if names & {"getattr", "setattr", "vars", "__dict__"}:
        return [owner]
    return [value for name, value in sorted(getattr(owner, "__dict__", {}).items()) if name in names]


def _names_in(code: CodeType) -> set[str]:
    """All names of attributes and globals in a function's code, and in that of the functions in it."""
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*map(_names_in, inner))


def _hands_on(code: CodeType) -> bool:
    """Whether a method does more with its object than to use attributes of it."""
    if not code.co_varnames or not code.co_argcount:
        return False
    self = code.co_varnames[0]
    if self in code.co_cellvars:
        return True
    used = ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "LOAD_SUPER_ATTR")
    steps = [step for step in dis.get_instructions(code) if step.opname != "CACHE"]
    return any(
        step.opname.startswith("LOAD_FAST") and self in _loaded(step) and after.opname not in used
        for step, after in pairwise(steps)
    )


def _loaded(step: dis.Instruction) -> tuple[Any, ...]:
    return step.argval if isinstance(step.argval, tuple) else (step.argval,)


def _filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:  # a variable that has no value yet
        return False
    return True
