"""A model cut into layers: which tensors each reads from the others, and the module that computes it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import fx, nn

from hpcsched.errors import ConfigError
from hpcsched.worker.layers.cut import cut
from hpcsched.worker.layers.passes import record
from hpcsched.worker.layers.symbols import name_of


@dataclass(frozen=True)
class Value:
    """Output number `index` of layer number `layer`; of layer -1: the model's input number `index`."""

    layer: int
    index: int


@dataclass
class Layer:
    """One layer; `module`, called with the tensors of `inputs`, returns a tuple of `outputs` tensors.

    All of them have the samples of a batch along the first dimension. The module shares parameters, buffers
    and submodules with the model.
    """

    id: int
    name: str
    module: fx.GraphModule
    inputs: tuple[Value, ...]
    outputs: int

    @property
    def prev(self) -> tuple[int, ...]:
        """The layers it reads from, each once, ascending; empty: the model's inputs only."""
        return tuple(sorted({value.layer for value in self.inputs} - {-1}))


@dataclass
class Layers:
    """A model's layers, each after those it reads from; the last one returns the model's result alone.

    `inputs`: how many tensors the model is called with. `model`: what was traced.
    """

    layers: tuple[Layer, ...]
    inputs: int
    model: nn.Module | None = None

    def run(self, *inputs: torch.Tensor) -> torch.Tensor:
        """The model's result: all layers one after the other, where their parameters are."""
        if len(inputs) != self.inputs:
            raise ValueError(f"{len(inputs)} inputs given to a model of {self.inputs}")
        made: dict[int, Sequence[torch.Tensor]] = {-1: inputs}
        for layer in self.layers:
            made[layer.id] = layer.module(*(made[v.layer][v.index] for v in layer.inputs))
        (result,) = made[len(self.layers) - 1]
        return result


def trace(model: nn.Module, example: tuple[torch.Tensor, ...]) -> Layers:
    """The layers of `model` for inputs like `example`; only shapes, types and device of that count.

    A layer is what has weights with all that depends on it alone (normalisation, activation, pooling,
    reshaping), or where several layers' values meet. It works in training and in evaluation mode, whichever
    the model is in when it runs. Sizes other than the batch are the example's. Move the model to its device
    first: buffers that are read by name are those that it has now.

    Raises ConfigError naming the module where the model's course depends on data, mode or batch size, where
    samples are mixed otherwise than by a normalisation module, and where inputs or result do not fit: tensors
    with the batch first, and one of them as result.
    """
    _check_inputs(model, example)
    graph, root = record(model, example)
    pieces, inputs = cut(model, graph, root)
    home = {node: Value(-1, i) for i, node in enumerate(inputs)}
    layers = []
    for i, piece in enumerate(pieces):
        home.update({node: Value(i, at) for at, node in enumerate(piece.outputs)})
        module = fx.GraphModule(root, piece.graph, class_name="Layer")
        values = tuple(home[node] for node in piece.inputs)
        layers.append(Layer(i, piece.name, module, values, len(piece.outputs)))
    return Layers(tuple(layers), inputs=len(example), model=model)


def _check_inputs(model: nn.Module, example: Any) -> None:
    def refuse(got: str) -> NoReturn:
        accepted = "tensors as positional arguments, the samples along the first dimension of each"
        raise ConfigError(where=name_of(model), key="inputs", got=got, accepted=accepted)

    if not isinstance(example, tuple) or not example:
        refuse("none" if example == () else f"a {type(example).__name__}")
    for tensor in example:
        if not isinstance(tensor, torch.Tensor):
            refuse(f"a {type(tensor).__name__}")
        if tensor.dim() == 0:
            refuse("a tensor without dimensions")
    if len({len(tensor) for tensor in example}) > 1:
        refuse("first dimensions of " + ", ".join(str(len(tensor)) for tensor in example))


class _Called(BaseException):
    """Ends the loss once the model has been called; no Exception, which a loss may catch."""


class TracedModel(nn.Module):
    """Behaves like the model until it is called, and then as `run` does, with the same arguments."""

    def __init__(self, model: nn.Module, run: Callable[..., Any]) -> None:
        super().__init__()
        vars(self).update(_model=model, _run=run)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_model"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        model = vars(self)["_model"]
        accepted = "a loss that leaves the model as it is"
        raise ConfigError(where=name_of(model), key=name, got="set by the loss", accepted=accepted)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return vars(self)["_run"](*args, **kwargs)


def capture_inputs(
    loss: Callable[[nn.Module, Any], Any], model: nn.Module, batch: Any
) -> tuple[torch.Tensor, ...]:
    """The tensors that `loss(model, batch)` calls the model with; the model itself is not run.

    Raises ConfigError where it is not called, or with other than positional tensors.
    """
    called: list[tuple[tuple[Any, ...], dict[str, Any], str]] = []

    def note(*args: Any, **kwargs: Any) -> NoReturn:
        how = "" if torch.is_grad_enabled() else "without gradients"
        if any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")):
            how = "under autocast"
        called.append((args, kwargs, how))
        raise _Called

    with contextlib.suppress(_Called):
        loss(TracedModel(model, note), batch)
    accepted = "a loss that calls model(...) once, with tensors as positional arguments"

    def refuse(got: str) -> NoReturn:
        raise ConfigError(where=name_of(model), key="inputs", got=got, accepted=accepted)

    if not called:
        refuse("the loss does not call the model")
    args, kwargs, how = called[0]
    if kwargs:
        refuse("called with keyword arguments " + ", ".join(kwargs))
    if how:
        refuse(f"called {how}")
    for i, value in enumerate(args):
        if not isinstance(value, torch.Tensor):
            refuse(f"argument {i} is a {type(value).__name__}")
    if not args:
        refuse("called without arguments")
    return tuple(args)
