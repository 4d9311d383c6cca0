"""A model's forward pass as a graph of operations, each with what it makes for two batch sizes.

Beside every recorded operation its result is computed as to shape only, for two batch sizes (torch's fake
tensors: no memory, no work). So a condition on shapes has an answer while tracing, what depends on the batch
size is known, and what depends on data is found out and refused.
"""

from __future__ import annotations

import inspect
import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from operator import attrgetter
from typing import Any, NoReturn

import numpy as np
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.nn.modules.batchnorm import _NormBase

from hpcsched.compat import zip
from hpcsched.errors import ConfigError

BATCHES = (7, 11)
"""Two batch sizes that no other dimension is taken for: what is 7 for the one and 11 for the other is one."""

STATIC = "a forward pass that takes the same course for all data and batch sizes"

_FACTORIES = (
    *(
        "arange",
        "empty",
        "eye",
        "full",
        "linspace",
        "logspace",
        "ones",
        "rand",
        "randint",
        "randn",
        "randperm",
    ),
    *("tensor", "tril_indices", "triu_indices", "zeros"),
)
"""Functions of torch that make tensors out of nothing."""

_OF_AUTOGRAD = ("requires_grad", "grad_fn", "is_leaf", "grad", "register_hook", "retain_grad")
"""What a tensor that stands for another while tracing cannot tell, or take."""

_NOISE = logging.getLogger("torch._subclasses.fake_tensor")


def name_of(model: nn.Module) -> str:
    """How messages call a model."""
    return f"model {type(model).__name__}"


class _Proxy(fx.Proxy):
    """Stands for a value while tracing; gives Python a number where that is the same for every batch."""

    tracer: Tracer

    def __index__(self) -> int:
        return int(self._number())

    def __int__(self) -> int:
        return int(self._number())

    def __float__(self) -> float:
        return float(self._number())

    def __len__(self) -> int:
        first, second = self.tracer.seen(self.node)
        return int(self.tracer.same((len(first), len(second)), "a length"))

    def __getattr__(self, name: str) -> Any:
        if name in _OF_AUTOGRAD and not self.tracer.looking:
            self.tracer.refuse(f"its course depends on autograd (a tensor's {name})")
        return _Attribute(self, name)

    def _number(self) -> Any:
        return self.tracer.same(self.tracer.seen(self.node), "a number")


class _Attribute(fx.proxy.Attribute, _Proxy):  # type: ignore[misc]
    """`value.name`, which becomes a method call where it is called."""


class Tracer(fx.Tracer):
    """Records `model`'s forward pass on tensors like `example`, module by module."""

    proxy_buffer_attributes = True

    def __init__(self, model: nn.Module, example: tuple[torch.Tensor, ...]) -> None:
        super().__init__()
        self.root = model
        self.path = ""
        self.looking = False
        self._example = example
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._seen: dict[fx.Node, tuple[Any, Any]] = {}

    def record(self) -> fx.Graph:
        """The graph. A node's meta has its "seen" values and the "path" of the module that it is in.

        Raises ConfigError, with the innermost module, where the pass cannot be recorded.
        """
        had = set(vars(self.root))
        drawn = random.getstate(), _numpy_state()
        self._gradients = torch.is_grad_enabled()
        if self.root._forward_hooks or self.root._forward_pre_hooks:
            self.refuse("has forward hooks of its own", "hooks on its parts")
        try:
            with self._factories():
                graph = self.trace(self.root)
        except ConfigError:
            raise
        except Exception as error:
            self.refuse(f"cannot be traced: {_first_line(error)}")
        if drawn != (random.getstate(), _numpy_state()):
            self.refuse("draws random numbers of Python or numpy", "torch's, by dropout")
        self.constants = {name: vars(self.root)[name] for name in set(vars(self.root)) - had}
        for name in self.constants:  # torch.fx leaves them in the user's model
            delattr(self.root, name)
        for node in graph.nodes:
            if node.op != "output":
                node.meta["seen"] = self.seen(node)
        return graph

    def refuse(self, got: str, accepted: str = STATIC) -> NoReturn:
        raise ConfigError(where=name_of(self.root), key=self.path, got=got, accepted=accepted)

    def same(self, values: tuple[Any, Any], what: str) -> Any:
        """The value that Python is to go on with; refused where data or the batch size decides it."""
        if any(isinstance(value, torch.Tensor) for value in values):
            self.refuse(f"its course depends on data ({what})")
        if values[0] != values[1]:
            self.refuse(f"its course depends on the batch size ({what})")
        return values[0]

    # What torch.fx asks while it traces

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> Any:
        names = list(inspect.signature(self.root.forward).parameters)
        names += [f"input{i}" for i in range(len(names), len(self._example))]
        inputs = []
        for name, tensor in zip(names, self._example, strict=False):
            proxy = super().create_proxy("placeholder", name, (), {})
            with self._look(), self._fake:
                made = [tensor.new_empty((n, *tensor.shape[1:])) for n in BATCHES]
            self._seen[proxy.node] = (made[0], made[1])
            inputs.append(proxy)
        return inspect.unwrap(root_fn), [self.root, *inputs]

    def create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **more: Any) -> Any:
        if not self.looking:
            self._refuse_modes()
        proxy = super().create_proxy(kind, target, args, kwargs, *rest, **more)
        proxy.node.meta["path"] = self.path
        self.seen(proxy.node)
        return proxy

    def _refuse_modes(self) -> None:
        """What operations are run under is not in a graph of operations."""
        if torch.is_grad_enabled() != self._gradients:
            self.refuse(
                "runs with gradients switched on or off", "requires_grad_(False) for what stays as it is"
            )
        if any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")):
            self.refuse("runs under autocast", "a model of the precision that it computes with")

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        if self.looking:
            return forward(*args, **kwargs)
        outer, self.path = self.path, self.path_of_module(m)
        result = super().call_module(m, forward, args, kwargs)
        self.path = outer  # not after an error: the innermost is the one to name
        return result

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        return attr_val if self.looking else super().getattr(attr, attr_val, parameter_proxy_cache)

    def to_bool(self, obj: fx.Proxy) -> bool:
        return bool(self.same(self.seen(obj.node), "a condition"))

    def iter(self, obj: Any) -> Iterator[Any]:
        values = self.seen(obj.node)
        if isinstance(values[0], torch.Tensor) and values[0].shape[:1] != values[1].shape[:1]:
            self.refuse("goes through the samples of a batch one by one")
        return iter([obj[i] for i in range(self.same((len(values[0]), len(values[1])), "a length"))])

    # What each node makes

    def seen(self, node: fx.Node) -> tuple[Any, Any]:
        """What it makes for either batch size; tensors are fake. Raises ConfigError."""
        if node not in self._seen:
            self._seen[node] = (self._make(node, 0), self._make(node, 1))
        return self._seen[node]

    def _make(self, node: fx.Node, which: int) -> Any:
        if node.op == "get_attr":
            with self._look():
                return self._like(attrgetter(str(node.target))(self.root))
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: self.seen(n)[which])
        with self._look(), self._fake, torch.no_grad():
            try:
                if node.op == "call_method":
                    return getattr(args[0], node.target)(*args[1:], **kwargs)  # type: ignore[arg-type]
                if node.op == "call_module":
                    module = self.root.get_submodule(node.target)  # type: ignore[arg-type]
                    state = dict(chain(module.named_parameters(), module.named_buffers()))
                    state = {name: self._like(tensor) for name, tensor in state.items()}
                    with _countless(module):
                        return functional_call(module, state, args, kwargs)
                return node.target(*args, **kwargs)  # type: ignore[operator]
            except ConfigError:
                raise
            except Exception as error:
                kind = type(error).__name__
                if kind.startswith(("DataDependent", "DynamicOutput")):
                    self.refuse(f"a value or a shape depends on data ({node.target})")
                self.refuse(f"{_target(node)} fails: {_first_line(error)}", "a model that runs on its inputs")

    def _like(self, value: Any) -> Any:
        """A fake in the place of a tensor, so that nothing is done to the model's own."""
        return self._fake.from_tensor(value) if isinstance(value, torch.Tensor) else value

    @contextmanager
    def _look(self) -> Iterator[None]:
        """Meanwhile nothing is recorded, and torch does not log what goes wrong: we say it."""
        before, self.looking, quiet, _NOISE.disabled = self.looking, True, _NOISE.disabled, True
        try:
            yield
        finally:
            self.looking, _NOISE.disabled = before, quiet

    @contextmanager
    def _factories(self) -> Iterator[None]:
        """Record what makes tensors out of nothing; else they would be made once, while tracing."""
        originals = {name: getattr(torch, name) for name in _FACTORIES}

        def recorded(original: Any) -> Any:
            def make(*args: Any, **kwargs: Any) -> Any:
                if self.looking:
                    return original(*args, **kwargs)
                return self.create_proxy("call_function", original, args, kwargs)

            return make

        apply = vars(torch.autograd.Function)["apply"]

        def refused(function: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.looking and any(isinstance(arg, fx.Proxy) for arg in (*args, *kwargs.values())):
                self.refuse(f"{function.__name__}, an autograd.Function, has a backward pass of its own")
            return apply.__func__(function, *args, **kwargs)

        try:
            for name, original in originals.items():
                setattr(torch, name, recorded(original))
            torch.autograd.Function.apply = classmethod(refused)  # type: ignore[method-assign, assignment]
            yield
        finally:
            torch.autograd.Function.apply = apply  # type: ignore[method-assign]
            for name, original in originals.items():
                setattr(torch, name, original)


@contextmanager
def _countless(module: nn.Module) -> Iterator[None]:
    """Meanwhile a batch norm with a cumulative mean does not ask for its count, which a fake has not."""
    if not (isinstance(module, _NormBase) and module.momentum is None):
        yield
        return
    module.momentum = 0.5
    try:
        yield
    finally:
        module.momentum = None


def _numpy_state() -> tuple[bytes, int]:
    _, keys, position, *_ = np.random.get_state(legacy=True)
    return np.asarray(keys).tobytes(), int(position)


def _target(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target))


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
