"""Several models of one architecture as one: their parameters stacked, one forward and backward pass for all.

The forward pass is traced once, with `torch.vmap` over the models, and made lean (`passes`). A stack is used
only if on a real batch it gives each of its models the losses, gradients and statistics that the model has by
itself; whatever cannot be stacked is said to be so, and trains one by one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.func import functional_call, functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_flatten

from hpcsched.compat import zip
from hpcsched.worker.packing.batches import mapped, only_tensors, tensors_in
from hpcsched.worker.packing.failures import Failures, let_go, line_of, out_of_memory
from hpcsched.worker.packing.graph_passes import simplify
from hpcsched.worker.packing.member import Member
from hpcsched.worker.packing.reference import (
    Alone,
    NotStackable,
    alone,
    can_be_stacked,
    check,
    put_back,
)
from hpcsched.worker.packing.stacked_optimizers import NotTogether, Row, Update, update_for

Batches = Sequence[Any]


@dataclass(frozen=True)
class Forward:
    """A traced forward pass: from parameters, the rest of the models, and a batch's tensors to all losses.

    `written` are the numbers of those of the rest that it writes to.
    """

    run: Callable[..., torch.Tensor]
    written: tuple[int, ...]


class _Losses(nn.Module):
    """The losses of a model as a module: what is stacked."""

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module, Any], torch.Tensor]) -> None:
        super().__init__()
        self.model, self._of = model, loss

    def forward(self, batch: Any) -> torch.Tensor:
        return self._of(self.model, batch)


class Stack:
    """Members whose models train as one; between two steps each has its own parameters as ever.

    All have the same architecture, and have made a first step. Where their batches are not of one size, the
    smaller ones are filled up with samples of theirs that count for nothing.

    Args:
        batches: real ones, to trace the forward pass with and to check it on; no step is made.
        traced: forward passes that were traced before, by what they were traced for.

    Raises NotStackable, or what says that there is no memory; the members are then as they were.
    """

    def __init__(self, members: Sequence[Member], batches: Batches, traced: dict[Any, Forward]) -> None:
        self.members = tuple(members)
        self._samples = max(member.batch for member in members)
        self._filled = _filled(members, self._samples)
        models = [member.parts.model for member in members]
        can_be_stacked(members)
        self._names = [name for name, p in models[0].named_parameters() if p.requires_grad]
        self._fixed = [name for name, p in models[0].named_parameters() if not p.requires_grad]
        self._buffers = [name for name, _ in models[0].named_buffers()]
        own = [dict(model.named_parameters()) | dict(model.named_buffers()) for model in models]
        self._mine = [[tensors[name] for name in self._names] for tensors in own]
        self._others = [[tensors[name] for name in (*self._fixed, *self._buffers)] for tensors in own]
        expected = [alone(m, batch, self._names) for m, batch in zip(members, batches, strict=True)]
        for result in expected:
            result.gradients(self._names)

        self._row = Row(self._mine[0], len(members))
        self._values, self._gradient = self._row.new(), self._row.new()
        self._stacked = self._row.stacked(self._values)
        self._gradients = self._row.stacked(self._gradient)
        for index, stacked in enumerate(self._stacked):
            for model, parameters in enumerate(self._mine):
                stacked[model].copy_(parameters[index].detach())
            stacked.requires_grad_()
        self._rest = self._stack_rest()
        self._one_batch = all(batch is batches[0] for batch in batches)
        self._share = torch.tensor([1 / member.batch for member in members], device=members[0].session.device)
        self._shapes = [tensor.shape for tensor in self._fill(batches[0], 0)]
        key = (members[0].architecture, len(members), self._one_batch, _form(batches[0]), self._samples)
        if key not in traced:
            traced[key], _ = members[0].rehearse(self._trace, batches)
        self._forward = traced[key].run
        changing = {*traced[key].written, *self._check(batches, expected)}
        self._changing = [self._rest[index] for index in sorted(changing)]
        self._update: Update | None = None
        try:
            if any(member.parts.clip_norm is not None for member in members):
                raise NotTogether("gradients are clipped")
            self._update = update_for(self._row, [m.parts.optimizer for m in members], self._mine)
        except NotTogether:
            self._update = None
        self._hand_out()

    def _stack_rest(self) -> list[torch.Tensor]:
        try:
            return [torch.stack([t.detach() for t in each]) for each in zip(*self._others, strict=True)]
        except RuntimeError as error:
            if out_of_memory(error):
                raise
            raise NotStackable(f"its buffers cannot be stacked: {line_of(error)}") from error

    def _trace(self, batches: Batches) -> Forward:
        losses = _Losses(self.members[0].parts.model, self.members[0].parts.loss)
        names = [f"model.{name}" for name in (*self._names, *self._fixed, *self._buffers)]
        tensors = self._tensors(batches)

        def one(*given: torch.Tensor) -> torch.Tensor:
            values, left = given[: len(names)], iter(given[len(names) :])
            batch = mapped(batches[0], lambda _: next(left))
            result: torch.Tensor = functional_call(losses, dict(zip(names, values, strict=True)), (batch,))
            return result

        over = torch.vmap(
            one, in_dims=(*(0 for _ in names), *((None if self._one_batch else 0) for _ in tensors))
        )
        values = [tensor.detach() for tensor in (*self._stacked, *self._rest)]
        try:
            # Functionalized: what is written in place becomes a value, so that `passes` may move it.
            trace = make_fx(functionalize(over), tracing_mode="fake", _allow_non_fake_inputs=True)
            # Attention as products of matrices: as one kernel, it would be one for each model.
            with warnings.catch_warnings(), sdpa_kernel(SDPBackend.MATH):
                warnings.simplefilter(
                    "ignore"
                )  # what has no rule for several models is slow: the trial tells
                graph = trace(*values, *tensors)
        except Exception as error:  # whatever a model does that cannot be traced
            if out_of_memory(error):
                raise
            raise NotStackable(f"it cannot be traced: {line_of(error)}") from error
        nodes = list(graph.graph.nodes)
        inputs = [node for node in nodes if node.op == "placeholder"]
        into = [node.args[0] for node in nodes if node.target is torch.ops.aten.copy_.default]
        written = [inputs.index(node) if node in inputs else -1 for node in into]
        if any(not len(self._names) <= index < len(names) for index in written):
            raise NotStackable("it writes into its parameters or its batch, or into parts of others")
        if any(torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) for node in nodes):
            raise NotStackable("the models draw random numbers, each its own")
        return Forward(simplify(graph).forward, tuple(index - len(self._names) for index in written))

    def _tensors(self, batches: Batches) -> list[torch.Tensor]:
        """What the forward pass takes of the batches. Raises NotStackable if they are not what it was traced
        with: it may have become a constant in there."""
        if self._one_batch:
            if any(batch is not batches[0] for batch in batches):
                raise NotStackable("the models do not see the same samples any more")
            tensors = tensors_in(batches[0])
            shapes = [tensor.shape for tensor in tensors]
        else:
            each = [self._fill(batch, model) for model, batch in enumerate(batches)]
            shapes = [tensor.shape for tensor in each[0]]
            if any([tensor.shape for tensor in some] != shapes for some in each):
                raise NotStackable("the models' batches are of several shapes")
            tensors = [torch.stack(some) for some in zip(*each, strict=True)]
        if shapes != self._shapes:
            raise NotStackable("the batches are not of one shape")
        return tensors

    def _fill(self, batch: Any, model: int) -> list[torch.Tensor]:
        """The tensors of a model's batch, with as many samples as the largest one."""
        tensors = tensors_in(batch)
        if self._filled is None:
            return tensors
        if any(not t.ndim or len(t) != self.members[model].batch for t in tensors):
            raise NotStackable("batches are of several sizes, and not all in them is made of samples")
        return [tensor[self._filled.chosen[model]] for tensor in tensors]

    def _compute(self, batches: Batches) -> torch.Tensor:
        """Have the gradients in their row; returns the sums of the losses, shape [models]."""
        losses = self._forward(*self._stacked, *self._rest, *self._tensors(batches))
        if self._filled is not None:
            if losses.ndim < 2:
                raise NotStackable("batches of several sizes need one loss a sample")
            losses = losses.where(self._filled.counts, 0)
        totals = losses.sum(1) if losses.ndim > 1 else losses * self._samples
        torch._foreach_copy_(self._gradients, torch.autograd.grad(totals, self._stacked, self._share))
        return totals.detach()

    def _check(self, batches: Batches, expected: Sequence[Alone]) -> list[int]:
        """Raise NotStackable unless all models get what they get by themselves; nothing is changed by it.

        Returns which of the rest a step changes.
        """
        before = [tensor.clone() for tensor in self._rest]
        try:
            totals = self._compute(batches)
        except RuntimeError as error:
            if out_of_memory(error):
                raise
            raise NotStackable(f"it cannot be computed: {line_of(error)}") from error
        for model, (member, batch, result) in enumerate(zip(self.members, batches, expected, strict=True)):
            gradients = [gradient[model] for gradient in self._gradients]
            buffers = [buffer[model] for buffer in self._rest[len(self._fixed) :]]
            check(([totals[model]], gradients, buffers), result, member, batch, self._names)
        changed = [i for i, old in enumerate(before) if not torch.equal(self._rest[i], old)]
        put_back(self._rest, before)
        return changed

    def _hand_out(self) -> None:
        """From now on the models' own parameters and buffers are views of the stacked ones."""
        for own, tensors in ((self._mine, self._stacked), (self._others, self._rest)):
            for model, mine in enumerate(own):
                for tensor, stacked in zip(mine, tensors, strict=True):
                    tensor.data, tensor.grad = stacked.detach()[model], None

    def step(self, batches: Batches, *, careful: bool = False) -> None:
        """One step of all members.

        Raises Failed for those whose schedulers or own optimizers have raised, Full where these have found no
        memory; and anything else when nobody has made the step: all are then as before it.
        """
        before = [tensor.clone() for tensor in self._changing]
        try:
            totals = self._compute(batches)
            if self._update is not None:
                self._update.step(self._values, self._gradient)
        except BaseException:
            put_back(self._changing, before)
            raise
        failures = Failures()
        for model, (member, total) in enumerate(zip(self.members, totals.unbind(), strict=True)):
            if not failures.full:
                try:
                    self._finish(model, member, careful)
                    member.has_lost(total)
                    continue
                except (Exception, SystemExit) as error:
                    failures.add(member, error)
            if not member.torn:
                put_back([tensor[model] for tensor in self._changing], [old[model] for old in before])
        failures.check()

    def _finish(self, model: int, member: Member, careful: bool) -> None:
        """The rest of a member's step: with its own optimizer, if these cannot be stepped as one."""
        if self._update is None:
            for parameter, gradient in zip(self._mine[model], self._gradients, strict=True):
                parameter.grad = gradient[model]
            member.call_quickly(member.update, careful)
        elif member.parts.scheduler is not None:
            member.call_quickly(member.stepped)
        else:
            member.stepped()

    def write_back(self) -> None:
        """Make the members' optimizers complete, so that they can be saved."""
        if self._update is not None:
            self._update.write_back()

    def apart(self) -> None:
        """Give each model what is its own, in memory of its own: the stack is over.

        Where there is no memory for that, it goes by way of the host; failing that, all stays where it is.
        """
        self.write_back()
        for way in (torch.Tensor.clone, _on_host):
            try:
                self._move(way)
                break
            except Exception as error:
                if not out_of_memory(error):
                    raise
                let_go(error)

    def _move(self, way: Callable[[torch.Tensor], torch.Tensor]) -> None:
        tensors = [tensor for own in (*self._mine, *self._others) for tensor in own]
        homes = [] if self._update is None else list(self._update.homes())
        apart = [way(tensor.detach()) for tensor in tensors]
        kept = [way(state[name]) for state, name in homes]
        device = self._values.device
        self._update, self._stacked, self._rest, self._gradients, self._changing = None, [], [], [], []
        self._values = self._gradient = torch.empty(0, device=device)
        for tensor in tensors:
            tensor.grad = None
        for tensor, value in zip(tensors, apart, strict=True):
            tensor.data = value
        for (state, name), value in zip(homes, kept, strict=True):
            state[name] = value
        del apart, kept
        for tensor in tensors:
            tensor.data = tensor.data.to(device)
        for state, name in homes:
            state[name] = state[name].to(device)


@dataclass(frozen=True)
class _Filled:
    """Batches of several sizes: by model, the samples that one of the largest size is made of, and which of
    them count, shape [models, samples]."""

    chosen: list[torch.Tensor]
    counts: torch.Tensor


def _filled(members: Sequence[Member], samples: int) -> _Filled | None:
    if all(member.batch == samples for member in members):
        return None
    places = torch.arange(samples, device=members[0].session.device)
    sizes = [member.batch for member in members]
    return _Filled([places.clamp(max=size - 1) for size in sizes], torch.stack([places < s for s in sizes]))


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("cpu", copy=True)


def _form(batch: Any) -> tuple[Any, ...]:
    """What a traced forward pass depends on in a batch. Raises NotStackable if that is more than tensors."""
    if not only_tensors(batch):
        raise NotStackable("there is more in a batch than tensors")
    (_, spec), tensors = tree_flatten(batch), tensors_in(batch)
    return str(spec), tuple((tuple(tensor.shape), tensor.dtype, tensor.device) for tensor in tensors)
