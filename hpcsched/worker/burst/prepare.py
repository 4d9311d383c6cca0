"""Makes a model's layers fit to run anywhere: batch norm and dropout replaced, all else checked."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import fx, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from hpcsched.compat import zip
from hpcsched.errors import ConfigError
from hpcsched.worker.burst.channels import Channels, format_of
from hpcsched.worker.burst.norms import SharedBatchNorm
from hpcsched.worker.burst.placement import LayerPlacement
from hpcsched.worker.burst.sample_rng import SampleDropout
from hpcsched.worker.layers.graph import Layers, Value
from hpcsched.worker.process import rng

EXAMPLE_SAMPLES = 2

_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_DROPOUTS: dict[type[nn.Module], bool] = {
    nn.Dropout: False,
    nn.Dropout1d: True,
    nn.Dropout2d: True,
    nn.Dropout3d: True,
}
_DROPOUT_CALLS: dict[Any, bool] = {
    functional.dropout: False,
    torch.dropout: False,
    functional.dropout1d: True,
    functional.dropout2d: True,
    functional.dropout3d: True,
}


@dataclass(frozen=True)
class ValueShape:
    """What every rank knows of a value before it comes: one sample's shape, and whether gradients return."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: torch.memory_format
    differentiable: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> ValueShape:
        return cls(tuple(tensor.shape[1:]), tensor.dtype, format_of(tensor), tensor.requires_grad)

    def room(self, samples: int, device: torch.device) -> torch.Tensor:
        """Memory for so many samples."""
        shape = (samples, *self.shape)
        return torch.empty(shape, dtype=self.dtype, device=device, memory_format=self.layout)


@dataclass(frozen=True, eq=False)
class RankLayer:
    """A layer as this rank runs it; `module` shares parameters, buffers and modes with the model."""

    id: int
    name: str
    module: nn.Module
    inputs: tuple[Value, ...]
    seat: LayerPlacement
    copies: tuple[tuple[nn.Module, nn.Module], ...]
    """Modules that had to be copied, each with the one of the model, whose mode it has to follow."""

    @property
    def norms(self) -> list[nn.Module]:
        """The model's batch norms in it."""
        return [module.norm for module in self.module.modules() if isinstance(module, SharedBatchNorm)]

    def __call__(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.seat.calls = 0
        for ours, model_s in self.copies:
            ours.training = model_s.training
        return self.module(*inputs)  # type: ignore[no-any-return]


def prepare(
    layers: Layers, wires: Channels, seed: int, *, local_norms: bool = False
) -> tuple[RankLayer, ...]:
    """The layers, with what depends on the other samples of a batch replaced.

    Raises ConfigError naming a module that cannot be.
    """
    units = []
    for layer in layers.layers:
        swap = _Swap(LayerPlacement(name=layer.name, seed=seed, wires=wires, local_norms=local_norms))
        module = swap.graph(layer.module)
        units.append(RankLayer(layer.id, layer.name, module, layer.inputs, swap.seat, tuple(swap.copies)))
    return tuple(units)


class _Swap:
    """Replaces modules and calls in one layer."""

    def __init__(self, seat: LayerPlacement) -> None:
        self.seat = seat
        self.copies: list[tuple[nn.Module, nn.Module]] = []

    def graph(self, module: fx.GraphModule) -> fx.GraphModule:
        graph = fx.Graph()
        graph.output(graph.graph_copy(module.graph, {}))
        ours = fx.GraphModule(module, graph)
        for node in list(graph.nodes):
            if node.op == "call_module":
                parent, _, name = str(node.target).rpartition(".")
                setattr(ours.get_submodule(parent), name, self.module(ours.get_submodule(str(node.target))))
            elif node.op == "call_function" and node.target in _DROPOUT_CALLS:
                name = f"_dropout_of_{node.name}"
                ours.add_module(name, SampleDropout(self.seat, whole=_DROPOUT_CALLS[node.target]))
                node.op, node.target = "call_module", name
        ours.recompile()
        return ours

    def module(self, module: nn.Module) -> nn.Module:
        """This module, or what takes its place."""
        if isinstance(module, (SharedBatchNorm, SampleDropout)):
            return module  # the layer calls it twice
        if isinstance(module, _BatchNorm) and type(module) in _NORMS:
            return SharedBatchNorm(module, self.seat)
        if (whole := _DROPOUTS.get(type(module))) is not None:
            return SampleDropout(self.seat, whole=whole, source=module)
        if isinstance(module, _NormBase) and (module.track_running_stats or not _of_one_sample(module)):
            self.refuse(f"a {type(module).__name__}", "BatchNorm1d, 2d or 3d, or norms of single samples")
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            self._check_embedding(module)
        children = {name: self.module(child) for name, child in module.named_children()}
        if all(child is getattr(module, name) for name, child in children.items()):
            return module
        ours = copy.copy(module)
        vars(ours)["_modules"] = {**module._modules, **children}
        self.copies.append((ours, module))
        return ours

    def _check_embedding(self, module: nn.Embedding | nn.EmbeddingBag) -> None:
        """Some look at the whole batch, or have gradients that cannot be added up as they are."""
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(module, option):
                self.refuse(f"an {type(module).__name__} with {option}", f"one without {option}")

    def refuse(self, got: str, accepted: str) -> NoReturn:
        raise ConfigError(where=f"layer {self.seat.name}", got=got, accepted=accepted)


def _of_one_sample(norm: _NormBase) -> bool:
    return isinstance(norm, (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d))


def describe(units: tuple[RankLayer, ...], example: tuple[torch.Tensor, ...]) -> dict[Value, ValueShape]:
    """The form of every value, found by computing all layers on an example: `EXAMPLE_SAMPLES` samples.

    Leaves everything as it was. Raises ConfigError naming a layer that cannot be computed by itself, that
    draws random numbers other than by dropout, or that keeps something other than batch norm's statistics.
    """
    tensors = {Value(-1, i): tensor.detach() for i, tensor in enumerate(example)}
    forms = {value: ValueShape.of(tensor) for value, tensor in tensors.items()}
    device = example[0].device
    generators = rng.capture(device)
    for unit in units:
        unit.seat.ranks, unit.seat.batch, unit.seat.places = (0,), len(example[0]), range(len(example[0]))
        inputs = [tensors[v].detach().requires_grad_(forms[v].differentiable) for v in unit.inputs]
        before = {name: buffer.clone() for name, buffer in unit.module.named_buffers()}
        try:
            outputs = unit(*inputs)
        except (RuntimeError, ValueError, TypeError) as error:
            got = f"fails on {len(example[0])} samples: {str(error).splitlines()[0]}"
            raise ConfigError(
                where=f"layer {unit.name}", got=got, accepted="a layer that runs by itself"
            ) from error
        expected = set(_kept_by_norms(unit))
        for name, buffer in unit.module.named_buffers():
            if name not in expected and not torch.equal(buffer, before[name]):
                raise ConfigError(
                    where=f"layer {unit.name}",
                    key=name,
                    got="changes in the forward pass",
                    accepted="buffers that only batch norm changes",
                )
            with torch.no_grad():
                buffer.copy_(before[name])
        if _drawn(generators, device):
            rng.restore(generators, device)
            raise ConfigError(
                where=f"layer {unit.name}",
                got="draws random numbers in another way than by dropout",
                accepted="Dropout, Dropout1d, 2d, 3d, or the functions of these names",
            )
        _check_samples(unit, inputs)
        for i, output in enumerate(outputs):
            tensors[Value(unit.id, i)] = output
            forms[Value(unit.id, i)] = ValueShape.of(output)
    return forms


@torch.no_grad()
def _check_samples(unit: RankLayer, inputs: list[torch.Tensor]) -> None:
    """Raise ConfigError for a layer that does to a sample what depends on the others, on its place among
    them, or on how many there are; but for batch norm."""
    first, second = ([tensor.detach()[i] for tensor in inputs] for i in (0, 1))
    second = [0.3 - 0.7 * x if x.is_floating_point() else x for x in second]  # whatever the data: another one

    def results(samples: list[list[torch.Tensor]]) -> tuple[torch.Tensor, ...]:
        unit.seat.places = range(len(samples))
        return unit(*(torch.stack(tensors) for tensors in zip(*samples, strict=True)))

    places = unit.seat.places
    unit.seat.looked_at = True
    try:
        both = results([first, second])
        apart = results([first] * 3), results([second] * 3)
    finally:
        unit.seat.looked_at, unit.seat.places = False, places
    for i, same in enumerate(apart):
        if not all(close(three, two[i].expand_as(three)) for three, two in zip(same, both, strict=True)):
            raise ConfigError(
                where=f"layer {unit.name}",
                got="mixes the samples of a batch, or depends on how many there are",
                accepted="layers that treat each sample by itself, and batch norm",
            )


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    if not one.is_floating_point():
        return torch.equal(one, other)
    coarse = max(1e-3, 8 * torch.finfo(one.dtype).eps)
    return torch.allclose(one, other, rtol=coarse, atol=coarse / 100, equal_nan=True)


def _kept_by_norms(unit: RankLayer) -> Iterator[str]:
    for path, module in unit.module.named_modules():
        if isinstance(module, SharedBatchNorm):
            yield from (f"{path}.norm.{name}" for name, _ in module.norm.named_buffers())


def _drawn(generators: dict[str, Any], device: torch.device) -> bool:
    """Whether one of torch's generators has moved on since they were captured."""
    if not torch.equal(torch.get_rng_state(), generators["torch"]):
        return True
    return device.type == "cuda" and not torch.equal(torch.cuda.get_rng_state(device), generators["cuda"])
