"""One update for a stack of models: what each one's own optimizer would do, with its own hyperparameters.

All parameters of a stack lie in one row of memory, and so do their gradients and what the optimizers keep,
so an update is a handful of operations however many models and layers there are. Only for optimizers that are
exactly one of torch's; of any others each is called by itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

Slices = Sequence[Sequence[torch.nn.Parameter]]
"""By model, its parameters in the order of the stack."""


class Row:
    """One row of memory for all parameters of a stack: [parameter][model][element].

    `owner` is the number of the model that each element belongs to.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], models: int) -> None:
        first = parameters[0]
        self.shapes = [tuple(p.shape) for p in parameters]
        self.models = models
        self.sizes = [p.numel() * models for p in parameters]
        self.total = sum(self.sizes)
        self.like = first
        pieces = [torch.arange(models, device=first.device).repeat_interleave(p.numel()) for p in parameters]
        self.owner = torch.cat(pieces)

    def new(self) -> torch.Tensor:
        """Room for one number for each element."""
        return torch.zeros(self.total, dtype=self.like.dtype, device=self.like.device)

    def stacked(self, row: torch.Tensor) -> list[torch.Tensor]:
        """The parameters in a row, each of shape [models, ...]."""
        pieces = row.split(self.sizes)
        return [p.view(self.models, *shape) for p, shape in zip(pieces, self.shapes, strict=True)]

    def spread(self, values: Sequence[float]) -> torch.Tensor | float:
        """A number of each model's for all of its elements; one number if it is the same for all."""
        if len(set(values)) == 1:
            return values[0]
        each = torch.tensor(values, dtype=self.like.dtype, device=self.like.device)
        return each[self.owner]


class Update(ABC):
    """Brings a stack's parameters one step further.

    Raises NotTogether if these optimizers cannot be stepped as one.
    """

    KIND: type[Optimizer]
    KEPT: tuple[str, ...]
    """What the optimizer keeps for each element."""
    SAME: tuple[str, ...]
    """Options that have to be the same in all models."""

    def __init__(self, row: Row, optimizers: Sequence[Optimizer], slices: Slices) -> None:
        self.row, self.groups = row, [optimizer.param_groups[0] for optimizer in optimizers]
        self._states = [
            [optimizer.state[p] for p in parameters]
            for optimizer, parameters in zip(optimizers, slices, strict=True)
        ]
        self._spread: dict[str, tuple[tuple[float, ...], torch.Tensor | float]] = {}
        self.steps = [int(states[0].get("step", 0)) for states in self._states]
        self.kept: dict[str, torch.Tensor] = {}
        for name in self.KEPT:
            if all(states[0].get(name) is not None for states in self._states):
                self.kept[name] = self._take_over(name)

    def _take_over(self, name: str) -> torch.Tensor:
        """Move what the optimizers keep into one row; what they have from then on are views of it."""
        row = self.row.new()
        for index, stacked in enumerate(self.row.stacked(row)):
            for model, states in enumerate(self._states):
                stacked[model].copy_(states[index][name])
                states[index][name] = stacked[model]
        return row

    def number(self, name: str, values: Iterator[float]) -> torch.Tensor | float:
        """A hyperparameter of all models, spread over their elements anew when it has changed."""
        now = tuple(values)
        known = self._spread.get(name)
        if known is None or known[0] != now:
            known = self._spread[name] = now, self.row.spread(now)
        return known[1]

    def option(self, name: str) -> torch.Tensor | float:
        """The same for an option of the optimizers as it is now: schedulers change them."""
        return self.number(name, (float(group[name]) for group in self.groups))

    @torch.no_grad()
    def step(self, parameters: torch.Tensor, gradients: torch.Tensor) -> None:
        """Make a step; both are rows, and `gradients` may be overwritten."""
        self.steps = [step + 1 for step in self.steps]
        self._step(parameters, gradients)

    @abstractmethod
    def _step(self, p: torch.Tensor, g: torch.Tensor) -> None: ...

    def write_back(self) -> None:
        """Tell the optimizers how many steps they have made."""
        for step, states in zip(self.steps, self._states, strict=True):
            for state in states:
                if "step" in state:
                    state["step"].fill_(step)

    def apart(self) -> None:
        """Give each optimizer back what it keeps, in memory of its own."""
        self.write_back()
        for states in self._states:
            for state in states:
                for name in self.kept:
                    state[name] = state[name].clone()


class NotTogether(Exception):
    """These optimizers cannot be stepped as one; each can by itself."""


def update_for(row: Row, optimizers: Sequence[Optimizer], slices: Slices) -> Update:
    """The update that does what these optimizers do. Raises NotTogether."""
    kind = _KINDS.get(type(optimizers[0]))
    if kind is None or any(type(optimizer) is not kind.KIND for optimizer in optimizers):
        raise NotTogether("optimizers of other or of several kinds")
    for optimizer, parameters in zip(optimizers, slices, strict=True):
        groups = optimizer.param_groups
        if len(groups) > 1 or {id(p) for p in groups[0]["params"]} != {id(p) for p in parameters}:
            raise NotTogether("optimizers with several groups of parameters, or not of all")
        if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
            raise NotTogether("optimizers with hooks")
        if any(groups[0].get(name) for name in ("capturable", "differentiable", "fused", "amsgrad")):
            raise NotTogether("optimizers with special options")
        options = [name for name in groups[0] if isinstance(groups[0][name], torch.Tensor)]
        if options:
            raise NotTogether(f"optimizers whose {options[0]} is a tensor")
    first = optimizers[0].param_groups[0]
    for name in kind.SAME:
        if any(optimizer.param_groups[0][name] != first[name] for optimizer in optimizers):
            raise NotTogether(f"optimizers that differ in {name}")
    if any(p.is_sparse or p.is_complex() for parameters in slices for p in parameters):
        raise NotTogether("sparse or complex parameters")
    return kind(row, optimizers, slices)


class StackedSGD(Update):
    """torch.optim.SGD: momentum, dampening, Nesterov, weight decay."""

    KIND, KEPT = SGD, ("momentum_buffer",)
    SAME = ("nesterov", "maximize")

    def __init__(self, row: Row, optimizers: Sequence[Optimizer], slices: Slices) -> None:
        momentum = [bool(optimizer.param_groups[0]["momentum"]) for optimizer in optimizers]
        if any(momentum) != all(momentum):
            raise NotTogether("optimizers with momentum and without")
        super().__init__(row, optimizers, slices)
        self._momentum = momentum[0]

    def _step(self, p: torch.Tensor, g: torch.Tensor) -> None:
        first = self.groups[0]
        if first["maximize"]:
            g.neg_()
        _add_times(g, p, self.option("weight_decay"))
        if self._momentum:
            buffer, momentum = self.kept["momentum_buffer"], self.option("momentum")
            keep = self.number("keep", (1 - float(group["dampening"]) for group in self.groups))
            _add_times(buffer.mul_(momentum), g, keep)
            if first["nesterov"]:
                _add_times(g, buffer, momentum)
            else:
                g = buffer
        _add_times(p, g, self.number("rate", (-float(group["lr"]) for group in self.groups)))


class StackedAdam(Update):
    """torch.optim.Adam; its weight decay is added to the gradient."""

    KIND: type[Optimizer] = Adam
    KEPT = ("exp_avg", "exp_avg_sq")
    SAME = ("betas", "eps", "maximize")
    DECOUPLED = False

    def _step(self, p: torch.Tensor, g: torch.Tensor) -> None:
        first = self.groups[0]
        beta1, beta2 = first["betas"]
        if first["maximize"]:
            g.neg_()
        if self.DECOUPLED or first.get("decoupled_weight_decay"):
            p.mul_(self.number("shrink", (1 - group["lr"] * group["weight_decay"] for group in self.groups)))
        else:
            _add_times(g, p, self.option("weight_decay"))
        mean, square = self.kept["exp_avg"], self.kept["exp_avg_sq"]
        mean.lerp_(g, 1 - beta1)
        square.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        sizes = (
            -group["lr"] / (1 - beta1**step) for group, step in zip(self.groups, self.steps, strict=True)
        )
        roots = ((1 - beta2**step) ** 0.5 for step in self.steps)
        below = square.sqrt().div_(self.number("root", roots)).add_(first["eps"])
        _add_times(p, mean / below, self.number("rate", sizes))


class StackedAdamW(StackedAdam):
    """torch.optim.AdamW: weight decay by itself."""

    KIND, DECOUPLED = AdamW, True


class StackedAdagrad(Update):
    """torch.optim.Adagrad."""

    KIND, KEPT = Adagrad, ("sum",)
    SAME = ("eps", "maximize")

    def _step(self, p: torch.Tensor, g: torch.Tensor) -> None:
        first = self.groups[0]
        if first["maximize"]:
            g.neg_()
        _add_times(g, p, self.option("weight_decay"))
        total = self.kept["sum"].addcmul_(g, g)
        rates = (
            -group["lr"] / (1 + (step - 1) * group["lr_decay"])
            for group, step in zip(self.groups, self.steps, strict=True)
        )
        _add_times(p, g / total.sqrt().add_(first["eps"]), self.number("rate", rates))


def _add_times(to: torch.Tensor, tensor: torch.Tensor, by: torch.Tensor | float) -> None:
    """Add a multiple of a tensor, in place."""
    if isinstance(by, torch.Tensor):
        to.addcmul_(tensor, by)
    elif by:
        to.add_(tensor, alpha=by)


_KINDS: dict[type[Any], type[Update]] = {
    kind.KIND: kind for kind in (StackedSGD, StackedAdam, StackedAdamW, StackedAdagrad)
}
