"""Keeps a guest's random numbers apart from its host's: not a bit of the foreground's may change.

Python's, numpy's and torch's generators belong to the process. In the threads of a guest each of their
functions works on a generator of the guest's own; elsewhere they are what they were.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from contextvars import ContextVar, copy_context
from functools import wraps
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hpcsched.compat import zip
from hpcsched.errors import HpcschedError
from hpcsched.worker.process.rng import PYTHONS


class NotHostable(HpcschedError):
    """This guest cannot be run beside another job in one process; it can in a process of its own."""


class Generators(TorchDispatchMode):
    """The generators of one guest; as a context, torch's operators draw from them.

    Operators that draw are told by their tag; one whose draws cannot be led elsewhere raises NotHostable.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.python = random.Random()
        self.numpy = np.random.RandomState()
        self.cpu = torch.Generator()
        self.cuda = torch.Generator(device) if device.type == "cuda" else None
        self.drawn = 0
        """How often an operator has drawn."""

    def shared(self) -> Generators:
        """The same generators for another thread: a context is entered by one only."""
        other = Generators(torch.device("cpu"))
        other.python, other.numpy, other.cpu, other.cuda = self.python, self.numpy, self.cpu, self.cuda
        return other

    def of(self, device: torch.device) -> torch.Generator:
        """The generator for draws on this device."""
        return self.cuda if device.type == "cuda" and self.cuda is not None else self.cpu

    def seed_all(self, seed: int) -> torch.Generator:
        """As `torch.manual_seed` does."""
        for generator in filter(None, (self.cpu, self.cuda)):
            generator.manual_seed(seed)
        return self.cpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        self.drawn += 1
        given = kwargs.get("generator")
        if given is not None and given is not torch.default_generator:
            return func(*args, **kwargs)
        if _takes_generator(func):
            return func(*args, **{**kwargs, "generator": self.of(_device_of(args, kwargs))})
        if func is torch.ops.aten.native_dropout.default:
            return self._dropout(*args, **kwargs)
        if _draws_nothing(func, args, kwargs):
            return func(*args, **kwargs)
        own = _overload_with_generator(func)
        if own is not None:
            return own(*args, **kwargs, generator=self.of(_device_of(args, kwargs)))
        if func.overloadpacket in _FILLING:  # in torch 2.4 they have no overload with a generator
            return self._like(func.overloadpacket, *args, **kwargs)
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with self:
                return func.decompose(*args, **kwargs)
        raise NotHostable(
            f"{func} draws random numbers in a way that cannot be kept apart from another job's"
        )

    def _dropout(self, x: torch.Tensor, p: float, train: bool | None) -> tuple[torch.Tensor, torch.Tensor]:
        if not train or p == 0:
            return x.clone(), torch.ones_like(x, dtype=torch.bool)
        mask = torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - p, generator=self.of(x.device))
        return x * mask * (1 / (1 - p) if p < 1 else 0.0), mask

    def _like(self, func: Any, x: torch.Tensor, *bounds: int, **options: Any) -> torch.Tensor:
        room = torch.empty_like(x, **options)
        bounds = (0, *bounds) if len(bounds) == 1 else bounds
        filled: torch.Tensor = _FILLING[func](room, *bounds, generator=self.of(room.device))
        return filled


_FILLING: dict[Any, Any] = {
    torch.ops.aten.rand_like: torch.Tensor.uniform_,
    torch.ops.aten.randn_like: torch.Tensor.normal_,
    torch.ops.aten.randint_like: torch.Tensor.random_,
}
"""What fills the new tensor, by their own definition."""


def _takes_generator(func: Any) -> bool:
    return any(argument.name == "generator" for argument in func._schema.arguments)


def _overload_with_generator(func: Any) -> Any:
    name, packet = func._overloadname, func.overloadpacket
    names = (
        ("generator",) if name == "default" else (f"{name}_generator", name.replace("low", "low_generator"))
    )
    found = next((candidate for candidate in names if candidate in packet.overloads()), None)
    return None if found is None else getattr(packet, found)


def _draws_nothing(func: Any, args: Any, kwargs: Any) -> bool:
    """An attention or a recurrent layer that could drop out, and does not."""
    arguments = func._schema.arguments
    values = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
    values |= {argument.name: value for argument, value in zip(arguments, args, strict=False)} | kwargs
    return any(values.get(name) == 0 for name in ("dropout_p", "dropout"))


def _device_of(args: Any, kwargs: Any) -> torch.device:
    for value in args:
        if isinstance(value, torch.Tensor):
            return value.device
    return torch.device(kwargs.get("device") or "cpu")


# -- the functions of the process ----------------------------------------------------------------------------

_own: ContextVar[Generators | None] = ContextVar("generators", default=None)


def draw_from(generators: Generators) -> None:
    """From now on the calling thread's Python and numpy numbers, and all seeding, are these generators'."""
    _own.set(generators)


def draws_so_far() -> int:
    """How often operators of the calling thread's guest have drawn; 0 where there is none."""
    own = _own.get()
    return 0 if own is None else own.drawn


def _divert(module: Any, name: str, instead: Callable[[Generators], Callable[..., Any]]) -> None:
    usual = getattr(module, name, None)
    if usual is None or hasattr(usual, "hpcsched_diverted"):
        return

    @wraps(usual)
    def diverted(*args: Any, **kwargs: Any) -> Any:
        own = _own.get()
        return usual(*args, **kwargs) if own is None else instead(own)(*args, **kwargs)

    diverted.hpcsched_diverted = True  # type: ignore[attr-defined]
    setattr(module, name, diverted)


def divert_generators() -> None:
    """Make the process's random functions ask who calls them; to be called before user code is imported."""
    for name in PYTHONS:
        _divert(random, name, lambda own, name=name: getattr(own.python, name))  # type: ignore[misc]
    for name in [name for name in dir(np.random.RandomState) if not name.startswith("_")]:
        _divert(np.random, name, lambda own, name=name: getattr(own.numpy, name))  # type: ignore[misc]
    for alias in ("ranf", "sample"):
        _divert(np.random, alias, lambda own: own.numpy.random_sample)
    torch_functions: dict[str, Callable[[Generators], Callable[..., Any]]] = {
        "manual_seed": lambda own: own.seed_all,
        "seed": lambda own: lambda: own.seed_all(own.cpu.seed()).initial_seed(),
        "initial_seed": lambda own: own.cpu.initial_seed,
        "get_rng_state": lambda own: own.cpu.get_state,
        "set_rng_state": lambda own: own.cpu.set_state,
    }
    cuda_functions: dict[str, Callable[[Generators], Callable[..., Any]]] = {
        "manual_seed": lambda own: lambda seed: _on_cuda(own).manual_seed(seed),
        "manual_seed_all": lambda own: lambda seed: _on_cuda(own).manual_seed(seed),
        "get_rng_state": lambda own: lambda device="cuda": _on_cuda(own).get_state(),
        "set_rng_state": lambda own: lambda state, device="cuda": _on_cuda(own).set_state(state),
    }
    _divert(threading.Thread, "start", lambda own: lambda thread: _start_beside(thread, own))
    for home, functions in (
        (torch, torch_functions),
        (torch.random, torch_functions),
        (torch.cuda, cuda_functions),
        (torch.cuda.random, cuda_functions),
    ):
        for name, instead in functions.items():
            _divert(home, name, instead)


_usual_start = threading.Thread.start


def _start_beside(thread: threading.Thread, own: Generators) -> None:
    """Start a thread that belongs to the guest as the one does that starts it."""
    context, run = copy_context(), thread.run

    def run_beside() -> None:
        del thread.run  # it holds the thread
        mine = own.shared()
        draw_from(mine)
        with mine, torch.autograd.set_multithreading_enabled(False):
            run()

    thread.run = lambda: context.run(run_beside)  # type: ignore[method-assign]
    _usual_start(thread)


def _on_cuda(own: Generators) -> torch.Generator:
    return own.of(torch.device("cuda"))


# -- what holds for the whole process ------------------------------------------------------------------------


def process_settings() -> dict[str, Any]:
    """torch's settings that hold for all threads, and change results."""
    return {
        "torch.set_default_dtype": torch.get_default_dtype(),
        "torch.use_deterministic_algorithms": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        "torch.set_num_threads": torch.get_num_threads(),
        "torch.backends.cudnn.benchmark": torch.backends.cudnn.benchmark,
        "torch.backends.cudnn.deterministic": torch.backends.cudnn.deterministic,
        "torch.backends.cudnn.enabled": torch.backends.cudnn.enabled,
        "torch.backends.cudnn.allow_tf32": _known(lambda: torch.backends.cudnn.allow_tf32),
        "torch.set_float32_matmul_precision": _known(torch.get_float32_matmul_precision),
    }


def _known(setting: Callable[[], Any]) -> Any:
    try:
        return setting()
    except RuntimeError:  # it was set by another of torch's ways, between which that does not translate
        return None


def put_back(settings: dict[str, Any]) -> None:
    """Make the settings what they were. Raises NotHostable, naming the first that was not, afterwards."""
    found = process_settings()
    changed = [name for name, value in settings.items() if found[name] != value]
    for name in changed:
        value = settings[name]
        if value is None:
            continue
        if name.startswith("torch.backends.cudnn."):
            setattr(torch.backends.cudnn, name.rpartition(".")[2], value)
        elif name == "torch.use_deterministic_algorithms":
            torch.use_deterministic_algorithms(value[0], warn_only=value[1])
        else:
            getattr(torch, name.removeprefix("torch."))(value)
    if changed:
        raise NotHostable(f"{changed[0]} is used, which holds for the whole process, another job in it too")
