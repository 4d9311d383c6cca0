"""Plain adapters of PEFT's LoRA on one frozen layer, of several trainings: all that they add, in one go.

An adapter adds B A x * scale to what its frozen layer gives (Hu et al. 2021, 4.1). PEFT's own code around
these two products takes longer than they do where a model is small. Here they are made for each training on
its rows, in the same order as by PEFT, and without a node of autograd each. Whatever else an adapter does
(DoRA, biases, several at once, one that is merged or off) is left to PEFT's code.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from hpcsched.compat import zip
from hpcsched.worker.packing.adapters.rows import Rows


class Lora(NamedTuple):
    """An adapter: A [rank, in], B [out, rank], the scale, and what drops of its input (None: nothing)."""

    down: nn.Parameter
    up: nn.Parameter
    scale: float
    dropout: nn.Module | None


def plain_lora(module: nn.Module) -> Lora | None:
    """A layer's adapter if it does no more than add B A x * scale; None for all else."""
    layer = getattr(sys.modules.get("peft.tuners.lora.layer"), "Linear", None)
    if layer is None or type(module) is not layer:
        return None
    of: Any = module
    names = [name for name in of.active_adapters if name in of.lora_A]
    if len(names) != 1 or of.disable_adapters or of.merged:
        return None
    name = names[0]
    if any(getattr(of, more, {}).get(name) for more in ("lora_variant", "use_dora", "lora_bias")):
        return None
    down, up, dropout, scale = of.lora_A[name], of.lora_B[name], of.lora_dropout[name], of.scaling[name]
    if any(type(one) is not nn.Linear or one.bias is not None or _watched(one) for one in (down, up)):
        return None
    if type(scale) not in (int, float) or _watched(dropout):
        return None
    return Lora(down.weight, up.weight, scale, None if type(dropout) is nn.Identity else dropout)


def computed_together(loras: Sequence[Lora | None]) -> bool:
    """Whether there are adapters, all in one precision."""
    return len({weight.dtype for one in loras if one is not None for weight in (one.down, one.up)}) == 1


def added(
    x: torch.Tensor,
    loras: Sequence[Lora | None],
    rows: Rows,
    draws: Callable[[int], AbstractContextManager[None]],
) -> torch.Tensor:
    """What the adapters add on these rows x [rows, ..., in], all in one precision: [rows, ..., out].

    A training without one (None) gets zeros. `draws(member)`: within it, the random numbers are a member's.
    Raises NotStackable where x is not made of rows.
    """
    sizes = rows.counts_in(x)
    there = [one for one in loras if one is not None]
    kind, device = there[0].down.dtype, x.device.type
    if torch.is_autocast_enabled(device) and kind != torch.float64:
        kind = torch.get_autocast_dtype(device)
    x = x.to(kind)
    if any(one.dropout is not None and one.dropout.training for one in there):
        dropped = []
        for member, (piece, one) in enumerate(zip(rows.split(x), loras, strict=True)):
            with draws(member):
                dropped.append(piece if one is None or one.dropout is None else one.dropout(piece))
        x = rows.joined(dropped)
    weights = [w for one in loras for w in ((None, None) if one is None else (one.down, one.up))]
    scales = [1.0 if one is None else one.scale for one in loras]
    each = x.numel() // x.shape[-1] // len(x)
    made: torch.Tensor = _Added.apply(
        x, [size * each for size in sizes], scales, *(w if w is None else w.to(kind) for w in weights)
    )
    return made


class _Added(torch.autograd.Function):
    """Of rows x [rows, ..., in], so many of each member, and each one's A and B (or None and None)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        sizes: Sequence[int],
        scales: Sequence[float],
        *weights: torch.Tensor | None,
    ) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        downs, ups = weights[::2], weights[1::2]
        width = next(len(up) for up in ups if up is not None)
        made = flat.new_empty(len(flat), width)
        inner: list[torch.Tensor | None] = []
        for own, out, down, up, scale in zip(
            flat.split(sizes), made.split(sizes), downs, ups, scales, strict=True
        ):
            if down is None or up is None:
                out.zero_()
                inner.append(None)
                continue
            within = own.mm(down.t())
            torch.mm(within, up.t(), out=out)
            inner.append(within)
            if scale != 1:
                out.mul_(scale)
        ctx.sizes, ctx.scales, ctx.shape = sizes, scales, x.shape
        ctx.save_for_backward(flat, *inner, *downs, *ups)
        return made.view(*x.shape[:-1], width)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        flat, *saved = ctx.saved_tensors
        count = len(ctx.sizes)
        inner, downs, ups = saved[:count], saved[count : 2 * count], saved[2 * count :]
        wanted = ctx.needs_input_grad
        back = torch.empty_like(flat) if wanted[0] else None
        backs = [None] * count if back is None else back.split(ctx.sizes)
        gradients = gradient.reshape(-1, gradient.shape[-1]).split(ctx.sizes)
        found: list[torch.Tensor | None] = []
        for member, (own, into, g) in enumerate(zip(flat.split(ctx.sizes), backs, gradients, strict=True)):
            down, up, scale = downs[member], ups[member], ctx.scales[member]
            if down is None:
                found += [None, None]
                if into is not None:
                    into.zero_()
                continue
            g = g if scale == 1 else g * scale
            within = g.mm(up)
            found.append(within.t().mm(own) if wanted[3 + 2 * member] else None)
            found.append(g.t().mm(inner[member]) if wanted[4 + 2 * member] else None)
            if into is not None:
                torch.mm(within, down, out=into)
        return None if back is None else back.view(ctx.shape), None, None, *found


def _watched(module: nn.Module) -> bool:
    """Whether more happens in its call than its class tells."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return "forward" in vars(module) or any(getattr(module, some) for some in hooks)
