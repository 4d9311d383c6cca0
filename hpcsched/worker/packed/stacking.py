"""Several models of one architecture as one: their parameters stacked, one forward and backward pass for all.

The forward pass is traced once, with `torch.vmap` over the models, and made lean (`passes`). A stack is used
only if on a real batch it gives each of its models the losses, gradients and statistics that the model has by
itself; whatever cannot be stacked is said to be so, and trains one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from hpcsched.worker.packed.likeness import plain_attributes
from hpcsched.worker.packed.member import Member
from hpcsched.worker.packed.passes import simplify
from hpcsched.worker.packed.updates import NotTogether, Row, Update, update_for

CLOSE = 1e-5
"""How far a stack's losses, gradients and statistics may be from those of its models one by one, by the
largest of them: the order of a sum makes 1e-7 to 1e-6."""

NOISE = 1e-3
"""A gradient that differs by this much of its own size is rounding errors."""

Forward = Callable[..., torch.Tensor]
Batches = Sequence[Any]


class NotStackable(Exception):
    """These models cannot be computed as one, and why."""


class _Losses(nn.Module):
    """The losses of a model as a module: what is stacked."""

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module, Any], torch.Tensor]) -> None:
        super().__init__()
        self.model, self._of = model, loss

    def forward(self, batch: Any) -> torch.Tensor:
        return self._of(self.model, batch)


class Stack:
    """Members whose models train as one; between two steps each has its own parameters as ever.

    All have the same architecture and batch size, and have made a first step.

    Args:
        batches: real ones, to trace the forward pass with and to check it on; no step is made.
        traced: forward passes that were traced before, by what they were traced for.

    Raises NotStackable.
    """

    def __init__(self, members: Sequence[Member], batches: Batches, traced: dict[Any, Forward]) -> None:
        self.members = tuple(members)
        self._samples = members[0].batch
        first = members[0]
        signature = first.architecture
        if any(member.architecture != signature for member in members):
            raise NotStackable("the models are not of one architecture")
        if any(member.draws is None or member.draws for member in members):
            raise NotStackable("the models draw random numbers, each its own")
        if not all(member.started for member in members):
            raise NotStackable("an optimizer has not made its first step yet")
        self._names = [name for name, p in first.parts.model.named_parameters() if p.requires_grad]
        self._fixed = [name for name, p in first.parts.model.named_parameters() if not p.requires_grad]
        self._buffers = [name for name, _ in first.parts.model.named_buffers()]
        if not self._names:
            raise NotStackable("nothing in it is trained")
        self._own = [dict(member.parts.model.named_parameters()) for member in members]
        mine = [[own[name] for name in self._names] for own in self._own]
        if len({(p.dtype, p.device) for parameters in mine for p in parameters}) > 1:
            raise NotStackable("its parameters are of several types")
        if {id(p) for p in first.parts.optimizer.param_groups[0]["params"]} - {id(p) for p in mine[0]}:
            raise NotStackable("the optimizer trains what is not the model's")
        expected = [_by_itself(m, batch) for m, batch in zip(members, batches, strict=True)]
        self._row = Row(mine[0], len(members))
        self._values = self._row.new()
        self._stacked = self._row.stacked(self._values)
        for index, stacked in enumerate(self._stacked):
            for model, parameters in enumerate(mine):
                stacked[model].copy_(parameters[index].detach())
            stacked.requires_grad_()
        self._rest = [
            torch.stack([own[name].detach() for own in self._own]) for name in self._fixed
        ] + self._stack_buffers()
        self._update: Update | None = None
        self._one_batch = all(batch is batches[0] for batch in batches)
        key = (signature, len(members), self._one_batch, _shapes(batches[0]))
        if (forward := traced.get(key)) is None:
            forward = traced[key] = self._trace(batches)
        self._forward = forward
        self._check(batches, expected)
        self._hand_out(mine)
        try:
            self._update = update_for(self._row, [m.parts.optimizer for m in members], mine)
        except NotTogether:
            self._update = None
        self._mine = mine

    def _stack_buffers(self) -> list[torch.Tensor]:
        self._modules = [dict(member.parts.model.named_buffers()) for member in self.members]
        try:
            return [torch.stack([own[name].detach() for own in self._modules]) for name in self._buffers]
        except RuntimeError as error:
            raise NotStackable(f"its buffers cannot be stacked: {error}") from error

    def _trace(self, batches: Batches) -> Forward:
        """The losses of all models, shape [models, samples], of parameters, the rest and what is in the batch
        (if it is not one for all: stacked)."""
        losses = _Losses(self.members[0].parts.model, self.members[0].parts.loss)
        names = [f"model.{name}" for name in (*self._names, *self._fixed, *self._buffers)]
        leaves, spec = tree_flatten(batches[0])
        tensors = self._tensors(batches)

        def one(*given: torch.Tensor) -> torch.Tensor:
            values, left = given[: len(names)], list(given[len(names) :])
            filled = [left.pop(0) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            there = tree_unflatten(filled, spec)
            result: torch.Tensor = functional_call(losses, dict(zip(names, values, strict=True)), (there,))
            return result

        over = torch.vmap(
            one, in_dims=(*(0 for _ in names), *((None if self._one_batch else 0) for _ in tensors))
        )
        values = [tensor.detach() for tensor in (*self._stacked, *self._rest)]
        try:
            graph = make_fx(over, tracing_mode="fake", _allow_non_fake_inputs=True)(*values, *tensors)
        except Exception as error:  # whatever a model does that cannot be traced
            raise NotStackable(f"it cannot be traced: {str(error).splitlines()[0][:200]}") from error
        for node in graph.graph.nodes:
            tags = getattr(node.target, "tags", ())
            if torch.Tag.nondeterministic_seeded in tags:
                raise NotStackable("the models draw random numbers, each its own")
        return simplify(graph)

    def _tensors(self, batches: Batches) -> list[torch.Tensor]:
        if self._one_batch:
            return _tensors_of(batches[0])
        each = [_tensors_of(batch) for batch in batches]
        return [torch.stack(tensors) for tensors in zip(*each, strict=True)]

    def _losses(self, batches: Batches) -> torch.Tensor:
        """Shape [models, samples]; or [models, 1] with what comes to the same sum."""
        losses = self._forward(*self._stacked, *self._rest, *self._tensors(batches))
        return losses if losses.ndim > 1 else losses.unsqueeze(1) * self._samples

    def _gradients(self, totals: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = torch.autograd.grad(totals.sum() / self._samples, self._stacked, allow_unused=True)
        return tuple(
            torch.zeros_like(stacked) if grad is None else grad
            for grad, stacked in zip(found, self._stacked, strict=True)
        )

    def _check(self, batches: Batches, expected: Sequence[_Result]) -> None:
        """Raise NotStackable unless all models get what they get by themselves; changes nothing."""
        before = [tensor.clone() for tensor in self._rest]
        try:
            totals = self._losses(batches).sum(1)
            gradients = self._gradients(totals)
        except RuntimeError as error:
            raise NotStackable(f"it cannot be computed: {str(error).splitlines()[0][:200]}") from error
        buffers = self._rest[len(self._fixed) :]
        for model, result in enumerate(expected):
            close = (
                _close([totals[model]], [result.total])
                and _close([gradient[model] for gradient in gradients], result.gradients)
                and _close([buffer[model] for buffer in buffers], result.buffers)
            )
            if not close:
                raise NotStackable("as one, the models do not give what they give by themselves")
            if type(self.members[model].parts.optimizer) is not torch.optim.SGD:
                self._check_noise([gradient[model] for gradient in gradients], result.gradients)
        for tensor, old in zip(self._rest, before, strict=True):
            tensor.copy_(old)

    def _check_noise(self, gradients: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
        """Raise NotStackable if a gradient is nothing but rounding errors (that of a bias before batch norm):
        an optimizer that divides by its size would make them as large as any other."""
        for name, gradient, wanted in zip(self._names, gradients, expected, strict=True):
            if float((gradient - wanted).abs().max()) > NOISE * float(wanted.abs().max()):
                raise NotStackable(f"the gradient of {name} is rounding errors, which its optimizer enlarges")

    def _hand_out(self, mine: Sequence[Sequence[nn.Parameter]]) -> None:
        """From now on the models' own parameters and buffers are views of the stacked ones."""
        for index, stacked in enumerate(self._stacked):
            values = stacked.detach()
            for model, parameters in enumerate(mine):
                parameters[index].data = values[model]
                parameters[index].grad = None
        rest = [*self._fixed, *self._buffers]
        for name, stacked in zip(rest, self._rest, strict=True):
            for model, member in enumerate(self.members):
                _place(member.parts.model, name, stacked[model])

    def step(self, batches: Batches) -> None:
        """One step of all members."""
        if self._one_batch and any(batch is not batches[0] for batch in batches):
            raise RuntimeError("these models do not see the same samples any more")
        totals = self._losses(batches).sum(1)
        gradients = self._gradients(totals)
        if self._update is not None:
            row = torch.cat([gradient.reshape(-1) for gradient in gradients])
            self._update.step(self._values, row)
        else:
            for index, gradient in enumerate(gradients):
                for model, parameters in enumerate(self._mine):
                    parameters[index].grad = gradient[model]
            for member in self.members:
                member.parts.optimizer.step()
        values = totals.detach()
        for model, member in enumerate(self.members):
            member.has_lost(values[model])
            member.stepped()

    def write_back(self) -> None:
        """Make the members' optimizers complete, so that they can be saved."""
        if self._update is not None:
            self._update.write_back()

    def apart(self) -> None:
        """Give each model what is its own, in memory of its own: the stack is over."""
        if self._update is not None:
            self._update.apart()
        for parameters in self._mine:
            for parameter in parameters:
                parameter.data = parameter.data.clone()
        for name, stacked in zip((*self._fixed, *self._buffers), self._rest, strict=True):
            for model, member in enumerate(self.members):
                _place(member.parts.model, name, stacked[model].clone())


class _Result:
    """What one model gives for a batch by itself."""

    def __init__(
        self, total: torch.Tensor, gradients: list[torch.Tensor], buffers: list[torch.Tensor]
    ) -> None:
        self.total, self.gradients, self.buffers = total, gradients, buffers


def _by_itself(member: Member, batch: Any) -> _Result:
    """Compute it; the model is then as it was, and has no gradients."""
    model = member.parts.model
    buffers = dict(model.named_buffers())
    before = {name: tensor.clone() for name, tensor in buffers.items()}
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    own = dict(model.named_parameters())
    plain = plain_attributes(model)
    total = member.losses(batch)
    found = torch.autograd.grad(total / member.batch, [own[name] for name in names], allow_unused=True)
    gradients = [
        torch.zeros_like(own[name]) if grad is None else grad for name, grad in zip(names, found, strict=True)
    ]
    if plain_attributes(model) != plain:
        raise NotStackable("the model changes attributes of its own in a step")
    after = [tensor.clone() for tensor in buffers.values()]
    for name, tensor in buffers.items():
        tensor.copy_(before[name])
    return _Result(total.detach(), gradients, after)


def _close(got: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> bool:
    """Whether tensors are alike, by the largest number in any of them."""
    largest = 0.0
    pairs = []
    for one, other in zip(got, wanted, strict=True):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        if not other.is_floating_point():
            if not torch.equal(one, other):
                return False
            continue
        finite = torch.isfinite(other)
        if not torch.equal(finite, torch.isfinite(one)):
            return False
        pairs.append((one.detach()[finite], other[finite]))
        if finite.any():
            largest = max(largest, float(pairs[-1][1].abs().max()))
    return all(bool(((a - b).abs() <= CLOSE * largest).all()) for a, b in pairs)


def _place(model: nn.Module, name: str, value: torch.Tensor) -> None:
    """Put a tensor in the place of a buffer, or of the data of a parameter that is not trained."""
    home, _, last = name.rpartition(".")
    module = model.get_submodule(home)
    if last in module._buffers:
        module._buffers[last] = value
    else:
        module._parameters[last].data = value  # type: ignore[union-attr]


def _tensors_of(batch: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(batch)[0] if isinstance(leaf, torch.Tensor)]


def _shapes(batch: Any) -> Any:
    leaves, spec = tree_flatten(batch)
    return str(spec), tuple(
        (tuple(leaf.shape), leaf.dtype, leaf.device) if isinstance(leaf, torch.Tensor) else repr(leaf)
        for leaf in leaves
    )
