"""The model as it is, for a rank that has all layers: it computes what the layers do, at less cost."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from hpcsched.worker.burst.prepare import RankLayer, close
from hpcsched.worker.burst.sample_rng import SampleDropout
from hpcsched.worker.layers.graph import Layers, Value
from hpcsched.worker.process import rng


class WholeModel:
    """A traced model whose dropout is that of its layers: it shares everything else with the model.

    `module` is None where the model cannot be had so: dropout is called as a function, or the model does not
    compute with the modules that it names, or calls one for several layers in another order than theirs.
    """

    def __init__(self, layers: Layers, units: Sequence[RankLayer], example: tuple[torch.Tensor, ...]) -> None:
        self._units = [unit for unit in units if _dropouts(unit)]
        self._copies: list[tuple[nn.Module, nn.Module]] = []
        self._shared: list[_InTurn] = []
        self.module: nn.Module | None = layers.model
        if layers.model is None or not self._units:
            return
        drawn: dict[nn.Module | None, list[SampleDropout]] = defaultdict(list)
        for unit in self._units:
            for part in _dropouts(unit):
                drawn[part.source].append(part)
        ours = {source: self._one_of(parts) for source, parts in drawn.items() if source is not None}
        module = self._with(ours, layers.model)
        self.module = module if None not in drawn and self._same(module, units, example) else None

    def begin(self, places: range) -> None:
        """Before a step with the samples at these places of the stream of all samples."""
        for unit in self._units:
            unit.seat.calls, unit.seat.places = 0, places
        for shared in self._shared:
            shared.calls = 0
        for ours, model_s in self._copies:
            ours.training = model_s.training

    def _one_of(self, parts: list[SampleDropout]) -> nn.Module:
        if len(parts) == 1:
            return parts[0]
        self._shared.append(_InTurn(parts))
        return self._shared[-1]

    def _with(self, drawn: Mapping[nn.Module, nn.Module], module: nn.Module) -> nn.Module:
        if module in drawn:
            return drawn[module]
        children = {name: self._with(drawn, child) for name, child in module.named_children()}
        if all(child is getattr(module, name) for name, child in children.items()):
            return module
        ours = copy.copy(module)
        vars(ours)["_modules"] = {**module._modules, **children}
        self._copies.append((ours, module))
        return ours

    @torch.no_grad()
    def _same(self, module: nn.Module, units: Iterable[RankLayer], example: tuple[torch.Tensor, ...]) -> bool:
        """Whether it gives what the layers give, and draws no random numbers but theirs. Leaves everything as
        it was."""
        device = example[0].device
        generators = rng.capture(device)
        before = [(buffer, buffer.clone()) for buffer in module.buffers()]
        self.begin(range(len(example[0])))
        made = {Value(-1, i): tensor for i, tensor in enumerate(example)}
        for unit in units:
            outputs = unit(*(made[value] for value in unit.inputs))
            made.update({Value(unit.id, i): tensor for i, tensor in enumerate(outputs)})
        (expected,) = outputs
        self._put_back(before)
        self.begin(range(len(example[0])))
        result = module(*example)
        self._put_back(before)
        drew = rng.moved(generators, device)
        rng.restore(generators, device)
        return not drew and result.shape == expected.shape and close(result, expected)

    @staticmethod
    def _put_back(buffers: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for buffer, value in buffers:
            buffer.copy_(value)


class _InTurn(nn.Module):
    """Stands for a module that several layers call: each call is that of the next layer."""

    def __init__(self, parts: Sequence[SampleDropout]) -> None:
        super().__init__()
        self.parts, self.calls = tuple(parts), 0  # a tuple: not submodules

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        result: torch.Tensor = self.parts[(self.calls - 1) % len(self.parts)](x)
        return result


def _dropouts(unit: RankLayer) -> list[SampleDropout]:
    return [part for part in unit.module.modules() if isinstance(part, SampleDropout)]
