"""One update for a stack of models: what each one's own optimizer would do, with its own hyperparameters.

All parameters of a stack lie in one row of memory, and so do their gradients and what the optimizers keep,
so an update is a handful of operations however many models and layers there are. Only for optimizers that are
exactly one of torch's; of any others each is called by itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from hpcsched.compat import zip

Slices = Sequence[Sequence[torch.Tensor]]
"""By model, its parameters in the order of the stack."""


class Row:
    """One row of memory for all parameters of a stack: [parameter][model][element]."""

    def __init__(self, parameters: Sequence[torch.Tensor], models: int) -> None:
        self.shapes = [tuple(p.shape) for p in parameters]
        self.models = models
        self.sizes = [p.numel() * models for p in parameters]
        self.total = sum(self.sizes)
        self.like = parameters[0]

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
        each = torch.tensor(values, dtype=self.like.dtype, device=self.like.device).unsqueeze(1)
        row = torch.empty(self.total, dtype=self.like.dtype, device=self.like.device)
        for piece, size in zip(row.split(self.sizes), self.sizes, strict=True):
            piece.view(self.models, size // self.models).copy_(each)
        return row


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
            [optimizer.state.get(p, {}) for p in parameters]
            for optimizer, parameters in zip(optimizers, slices, strict=True)
        ]
        self._spread: dict[str, tuple[tuple[float, ...], torch.Tensor | float]] = {}
        steps = [{int(state.get("step", 0)) for state in states} for states in self._states]
        if any(len(made) != 1 for made in steps):
            raise NotTogether("optimizers that have not made as many steps with all parameters")
        self.steps = [made.pop() for made in steps]
        each = [state for states in self._states for state in states]
        if not self._keeps_nothing:
            for name in self.KEPT:
                if any(not isinstance(state.get(name), torch.Tensor) for state in each):
                    raise NotTogether(f"optimizers without {name}")
        self.kept = {} if self._keeps_nothing else {name: row.new() for name in self.KEPT}
        for name, kept in self.kept.items():
            self._take_over(name, kept)

    @property
    def _keeps_nothing(self) -> bool:
        """Whether this kind of optimizer keeps nothing with these options."""
        return False

    def _take_over(self, name: str, row: torch.Tensor) -> None:
        """Move what the optimizers keep into one row; what they have from then on are views of it."""
        for index, stacked in enumerate(self.row.stacked(row)):
            for model, states in enumerate(self._states):
                stacked[model].copy_(states[index][name])
                states[index][name] = stacked[model]

    def number(self, name: str, values: Iterable[float]) -> torch.Tensor | float:
        """A hyperparameter of all models, spread over their elements anew when it has changed."""
        now = tuple(values)
        known = self._spread.get(name)
        if known is None or known[0] != now:
            known = self._spread[name] = now, self.row.spread(now)
        return known[1]

    def option(self, name: str) -> torch.Tensor | float:
        """The same for an option of the optimizers as it is now: schedulers change them."""
        return self.number(name, [float(group[name]) for group in self.groups])

    @torch.no_grad()
    def step(self, parameters: torch.Tensor, gradients: torch.Tensor) -> None:
        """Make a step; both are rows, and `gradients` is overwritten.

        All that takes memory comes before anything of the models changes: if it raises, nothing has.
        """
        self._step(parameters, gradients, [step + 1 for step in self.steps])
        self.steps = [step + 1 for step in self.steps]

    @abstractmethod
    def _step(self, p: torch.Tensor, g: torch.Tensor, steps: Sequence[int]) -> None: ...

    def write_back(self) -> None:
        """Tell the optimizers how many steps they have made."""
        for step, states in zip(self.steps, self._states, strict=True):
            for state in states:
                if "step" in state:
                    state["step"].fill_(step)

    def homes(self) -> Iterator[tuple[dict[str, Any], str]]:
        """Where the optimizers have what lies in the stack's rows."""
        return ((state, name) for states in self._states for state in states for name in self.kept)


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
        if any(optimizer.param_groups[0].get(name) != first.get(name) for optimizer in optimizers):
            raise NotTogether(f"optimizers that differ in {name}")
    if any(p.is_sparse or p.dtype not in (torch.float32, torch.float64) for ps in slices for p in ps):
        raise NotTogether("sparse, complex or half precision parameters")
    return kind(row, optimizers, slices)


class StackedSGD(Update):
    """torch.optim.SGD: momentum, dampening, Nesterov, weight decay."""

    KIND, KEPT = SGD, ("momentum_buffer",)
    SAME = ("nesterov", "maximize")

    @property
    def _keeps_nothing(self) -> bool:
        momentum = [bool(group["momentum"]) for group in self.groups]
        if any(momentum) != all(momentum):
            raise NotTogether("optimizers with momentum and without")
        return not any(momentum)

    def _step(self, p: torch.Tensor, g: torch.Tensor, steps: Sequence[int]) -> None:
        groups, first = self.groups, self.groups[0]
        decay, momentum = self.option("weight_decay"), self.option("momentum")
        keep = self.number("keep", [1 - float(group["dampening"]) for group in groups])
        rate = self.number("rate", [-float(group["lr"]) for group in groups])
        if first["maximize"]:
            g.neg_()
        _add_times(g, p, decay)
        if self.kept:
            buffer = self.kept["momentum_buffer"]
            _add_times(buffer.mul_(momentum), g, keep)
            if first["nesterov"]:
                _add_times(g, buffer, momentum)
            else:
                g = buffer
        _add_times(p, g, rate)


class StackedAdam(Update):
    """torch.optim.Adam; its weight decay is added to the gradient."""

    KIND: type[Optimizer] = Adam
    KEPT = ("exp_avg", "exp_avg_sq")
    SAME = ("eps", "maximize", "decoupled_weight_decay")

    @property
    def _decoupled(self) -> bool:
        return bool(self.groups[0].get("decoupled_weight_decay"))

    def _step(self, p: torch.Tensor, g: torch.Tensor, steps: Sequence[int]) -> None:
        groups, first = self.groups, self.groups[0]
        rates = [float(group["lr"]) for group in groups]
        decays = [float(group["weight_decay"]) for group in groups]
        betas = [group["betas"] for group in groups]  # a schedule may change them
        keep1 = self.number("keep1", [1 - beta1 for beta1, _ in betas])
        beta2 = self.number("beta2", [beta2 for _, beta2 in betas])
        keep2 = self.number("keep2", [1 - beta2 for _, beta2 in betas])
        shrink = self.number("shrink", [1 - rate * decay for rate, decay in zip(rates, decays, strict=True)])
        decay = self.number("decay", decays)
        known1 = [1 - beta1**step for (beta1, _), step in zip(betas, steps, strict=True)]
        known2 = [(1 - beta2**step) ** 0.5 for (_, beta2), step in zip(betas, steps, strict=True)]
        root = self.number("root", known2)
        if (
            len(set(known1)) == 1
        ):  # all equally old: what each has to itself changes no more often than it says
            rate, scale = self.number("rate", rates), -1 / known1[0]
        else:
            sizes = [rate / known for rate, known in zip(rates, known1, strict=True)]
            rate, scale = self.number("rate", sizes), -1.0
        if first["maximize"]:
            g.neg_()
        if self._decoupled:
            p.mul_(shrink)
        else:
            _add_times(g, p, decay)
        mean, square = self.kept["exp_avg"], self.kept["exp_avg_sq"]
        mean.lerp_(g, keep1)
        square.mul_(beta2)
        _add_product(square, g, keep2)
        torch.sqrt(square, out=g)
        g.div_(root).add_(first["eps"])
        torch.div(mean, g, out=g)
        _add_times(p, g, rate, scale)


class StackedAdamW(StackedAdam):
    """torch.optim.AdamW: weight decay by itself."""

    KIND = AdamW
    _decoupled = True


class StackedAdagrad(Update):
    """torch.optim.Adagrad."""

    KIND, KEPT = Adagrad, ("sum",)
    SAME = ("eps", "maximize")

    def __init__(self, row: Row, optimizers: Sequence[Optimizer], slices: Slices) -> None:
        super().__init__(row, optimizers, slices)
        self._room = row.new()

    def _step(self, p: torch.Tensor, g: torch.Tensor, steps: Sequence[int]) -> None:
        groups, first = self.groups, self.groups[0]
        decay = self.option("weight_decay")
        rates = [
            -group["lr"] / (1 + (step - 1) * group["lr_decay"])
            for group, step in zip(groups, steps, strict=True)
        ]
        rate = self.number("rate", rates)
        if first["maximize"]:
            g.neg_()
        _add_times(g, p, decay)
        total = self.kept["sum"].addcmul_(g, g)
        torch.sqrt(total, out=self._room)
        _add_times(p, g.div_(self._room.add_(first["eps"])), rate)


def _add_times(to: torch.Tensor, tensor: torch.Tensor, by: torch.Tensor | float, scale: float = 1.0) -> None:
    """Add a multiple of a tensor, in place."""
    if isinstance(by, torch.Tensor):
        to.addcmul_(tensor, by, value=scale)
    elif by:
        to.add_(tensor, alpha=by * scale)


def _add_product(to: torch.Tensor, tensor: torch.Tensor, by: torch.Tensor | float) -> None:
    """Add a multiple of a tensor's square, in place; the tensor is overwritten where that saves memory."""
    if isinstance(by, torch.Tensor):
        to.add_(tensor.mul_(tensor).mul_(by))
    else:
        to.addcmul_(tensor, tensor, value=by)


_KINDS: dict[type[Any], type[Update]] = {
    kind.KIND: kind for kind in (StackedSGD, StackedAdam, StackedAdamW, StackedAdagrad)
}
