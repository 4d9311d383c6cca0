"""The model as it is, for a rank that has all layers: it computes what the layers do, at less cost."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch
from torch import nn

from hpcsched.worker.burst.prepare import RankLayer
from hpcsched.worker.burst.sample_rng import SampleDropout
from hpcsched.worker.layers.graph import Layers
from hpcsched.worker.process import rng


class WholeModel:
    """A traced model whose dropout is that of its layers: it shares everything else with the model.

    `module` is None where the model cannot be had so: dropout is called as a function, or is shared by
    several layers, or the model does not compute with the modules that it names.
    """

    def __init__(self, layers: Layers, units: Iterable[RankLayer], example: tuple[torch.Tensor, ...]) -> None:
        self._units = [unit for unit in units if _dropouts(unit)]
        self._copies: list[tuple[nn.Module, nn.Module]] = []
        self.module: nn.Module | None = layers.model
        if layers.model is None or not self._units:
            return
        drawn = {part.source: part for unit in self._units for part in _dropouts(unit)}
        if None in drawn or len(drawn) < sum(len(_dropouts(unit)) for unit in self._units):
            self.module = None
            return
        module = self._with({part: ours for part, ours in drawn.items() if part}, layers.model)
        self.module = None if self._draws(module, example) else module

    def begin(self, places: range) -> None:
        """Before a step with the samples at these places of the stream of all samples."""
        for unit in self._units:
            unit.seat.calls, unit.seat.places = 0, places
        for ours, model_s in self._copies:
            ours.training = model_s.training

    def _with(self, drawn: dict[nn.Module, SampleDropout], module: nn.Module) -> nn.Module:
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
    def _draws(self, module: nn.Module, example: tuple[torch.Tensor, ...]) -> bool:
        """Whether it draws random numbers other than by its layers' dropout. Leaves everything as it was."""
        device = example[0].device
        generators = rng.capture(device)
        before = [(buffer, buffer.clone()) for buffer in module.buffers()]
        self.begin(range(len(example[0])))
        module(*example)
        for buffer, value in before:
            buffer.copy_(value)
        drew = rng.moved(generators, device)
        rng.restore(generators, device)
        return drew


def _dropouts(unit: RankLayer) -> list[SampleDropout]:
    return [part for part in unit.module.modules() if isinstance(part, SampleDropout)]
