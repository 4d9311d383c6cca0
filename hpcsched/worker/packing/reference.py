"""What the models of a stack give by themselves, which is what it has to give; and what no stack can do."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from hpcsched.compat import zip
from hpcsched.worker.packing.compatibility import Memory
from hpcsched.worker.packing.failures import ModeRefused, line_of, out_of_memory
from hpcsched.worker.packing.member import Member
from hpcsched.worker.packing.rollback import Buffers, homes_of

CLOSE = 1e-5
"""How far a stack's losses, gradients and statistics may be from those of its models one by one, by the
largest of them: the order of a sum makes 1e-7 to 1e-6."""

TOUCHY, FARTHEST = 16.0, 3e-2
"""Models that enlarge rounding errors may be this many times as far from themselves as they are when the last
digit of their weights changes, but no farther than so far."""

NOISE = 1e-3
"""A gradient that differs by this much of its own size is rounding errors."""


class NotStackable(ModeRefused):
    """These models cannot be computed as one, and why."""


def can_be_stacked(members: Sequence[Member]) -> None:
    """Raise NotStackable for what can be seen at once."""
    first = members[0].parts.model
    if any(member.architecture != members[0].architecture for member in members):
        raise NotStackable("the models are not of one architecture")
    if why := next(filter(None, (member.differs_by_step() for member in members)), None):
        raise NotStackable(why)
    if len(list(first.named_buffers(remove_duplicate=False))) > len(list(first.buffers())):
        raise NotStackable("a buffer is in several places of it")
    for member in members:
        _trains_alone(member)


def _trains_alone(member: Member) -> None:
    model, groups = member.parts.model, member.parts.optimizer.param_groups
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise NotStackable("nothing in it is trained")
    if len({(p.dtype, p.device) for p in trained}) > 1:
        raise NotStackable("its parameters are of several types")
    if {id(p) for group in groups for p in group["params"]} - {id(p) for p in trained}:
        raise NotStackable("the optimizer trains what is not the model's")
    if any(p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None) for p in trained):
        raise NotStackable("its parameters have hooks")
    if any(module._backward_hooks or module._backward_pre_hooks for module in model.modules()):
        raise NotStackable("its modules have hooks on the backward pass")


class Alone:
    """What one model gives for a batch by itself; it is then as it was. Raises NotStackable.

    Args:
        names: of the parameters whose gradients are wanted.
        nudge: each weight is changed by up to this part of it while this is computed.
    """

    def __init__(self, member: Member, batch: Any, names: Sequence[str], nudge: float = 0.0) -> None:
        model, buffers = member.parts.model, Buffers(homes_of(member.parts.model))
        own, there = dict(model.named_parameters()), dict(model.named_buffers())
        copies = [p.detach().clone() for p in own.values()]
        memory = Memory(model, member.parts.loss)
        try:
            _change(own.values(), nudge)
            with _Switches() as switches:
                total = member.losses(batch)
            trained = [own[name] for name in names]
            found = torch.autograd.grad(total / member.batch, trained, allow_unused=True)
            changed = memory.changed()
            replaced = any(there.get(name) is not buffer for name, buffer in model.named_buffers())
            self.buffers = [tensor.clone() for tensor in there.values()]
        finally:
            memory.put_back()
            buffers.put_back()
            put_back([p.detach() for p in own.values()], copies)
        if switches.off:
            raise NotStackable("the model or its loss switches gradients off in between")
        if changed:
            raise NotStackable("the model or its loss changes attributes of its own in a step")
        if replaced:
            raise NotStackable("the model replaces its buffers in a step")
        self.total = total.detach()
        self._gradients = dict(zip(names, found, strict=True))

    def gradients(self, names: Sequence[str]) -> list[torch.Tensor]:
        """Those of these parameters. Raises NotStackable if one has none."""
        for name in names:
            if self._gradients[name] is None:
                raise NotStackable(f"{name} gets no gradient")
        return [self._gradients[name] for name in names]

    def results(self, names: Sequence[str]) -> Results:
        """All that it gives."""
        return [self.total], self.gradients(names), self.buffers


class _Switches(TorchFunctionMode):
    """Sees whether gradients are switched off inside: a trace of the forward pass does not know of it."""

    off = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch._C._set_grad_enabled and not args[0]:
            self.off = True
        return func(*args, **(kwargs or {}))


Results = tuple[Sequence[torch.Tensor], Sequence[torch.Tensor], Sequence[torch.Tensor]]
"""The sum of the losses, gradients, buffers."""


@torch.no_grad()
def _change(parameters: Iterable[torch.Tensor], by: float) -> None:
    if by:
        generator = torch.Generator().manual_seed(0)
        for parameter in parameters:
            part = torch.rand(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.mul_(part.mul_(2 * by).add_(1 - by).to(parameter))


def alone(member: Member, batch: Any, names: Sequence[str], nudge: float = 0.0) -> Alone:
    """Compute it, as the member's code is run; raises NotStackable, or what says that there is no memory."""
    try:
        result, drawn = member.rehearse(Alone, member, batch, names, nudge)
    except NotStackable:
        raise
    except (
        Exception,
        SystemExit,
    ) as error:  # whatever the member's code does; it will be heard when it makes a step
        if out_of_memory(error):
            raise
        raise NotStackable(f"{member.name} fails: {line_of(error)}") from error
    if drawn:
        raise NotStackable("the models draw random numbers, each its own")
    return result


def check(got: Results, expected: Alone, member: Member, batch: Any, names: Sequence[str]) -> None:
    """Raise NotStackable unless a model has got what it gives by itself, but for rounding errors."""
    wanted = expected.results(names)
    far = max(map(difference, got, wanted))
    if far > CLOSE:
        nudged = alone(member, batch, names, last_digit(member)).results(names)
        if far > min(FARTHEST, TOUCHY * max(map(difference, nudged, wanted))):
            raise NotStackable("as one, the models do not give what they give by themselves")
    if type(member.parts.optimizer) is not torch.optim.SGD:
        check_noise(names, got[1], wanted[1])


def last_digit(member: Member) -> float:
    """The part of a number that products of a model's numbers do not tell from it."""
    device, dtype = member.session.device, next(member.parts.model.parameters()).dtype
    cudnn: Any = torch.backends.cudnn
    short = device.type == "cuda" and (cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32)
    return 2.0**-11 if short and dtype is torch.float32 else torch.finfo(dtype).eps


def difference(got: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> float:
    """How far tensors are from others, as a part of the largest number in any of them; inf: hopelessly."""
    largest = farthest = 0.0
    for one, other in zip(got, wanted, strict=True):
        if one.shape != other.shape or one.dtype != other.dtype:
            return math.inf
        if not other.is_floating_point():
            if not torch.equal(one, other):
                return math.inf
            continue
        finite = torch.isfinite(other)
        if not torch.equal(finite, torch.isfinite(one)):
            return math.inf
        if finite.any():
            here, there = one.detach()[finite], other[finite]
            largest = max(largest, float(there.abs().max()))
            farthest = max(farthest, float((here - there).abs().max()))
    if not farthest:
        return 0.0
    return farthest / largest if largest else math.inf


def check_noise(
    names: Sequence[str], gradients: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]
) -> None:
    """Raise NotStackable if a gradient is nothing but rounding errors (that of a bias before batch norm): an
    optimizer that divides by its size would make them as large as any other."""
    for name, gradient, wanted in zip(names, gradients, expected, strict=True):
        # Attention keeps the biases of queries, keys and values in one: those of the keys change nothing.
        parts = 3 if name.endswith("in_proj_bias") else 1
        for here, there in zip(gradient.chunk(parts), wanted.chunk(parts), strict=True):
            if float((here - there).abs().max()) > NOISE * float(there.abs().max()):
                raise NotStackable(f"the gradient of {name} is rounding errors, which its optimizer enlarges")


def put_back(tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Have tensors be what they were."""
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)
