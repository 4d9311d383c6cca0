"""Batch norm whose statistics are those of the whole batch, shared by the ranks that compute the layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import batch_norm

from hpcsched.worker.burst.channels import format_of
from hpcsched.worker.burst.placement import LayerPlacement
from hpcsched.worker.burst.transfers import share_of


class SharedBatchNorm(nn.Module):
    """An `nn.BatchNorm1d`, 2d or 3d, over the samples of all ranks of its layer, however many each has.

    It is what that module would do on one rank with the whole batch. Running statistics come out equal, to
    the last bit, on all of these ranks. With the seat's `local_norms` it is that module, on each rank alone.
    """

    def __init__(self, norm: nn.modules.batchnorm._BatchNorm, seat: LayerPlacement) -> None:
        super().__init__()
        self.norm = norm
        self._seat = seat

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The normalised `x`, shape [samples, channels, ...]."""
        norm, seat = self.norm, self._seat
        if seat.looked_at:
            return x
        if seat.local_norms or len(seat.ranks) == 1 or not (norm.training or norm.running_mean is None):
            return norm(x)  # type: ignore[no-any-return]
        norm._check_input_dim(x)
        y, mean, variance, count = _Normalise.apply(x, norm.weight, norm.bias, norm.eps, seat)
        if norm.training and norm.track_running_stats and norm.running_mean is not None:
            with torch.no_grad():
                assert norm.num_batches_tracked is not None and norm.running_var is not None
                norm.num_batches_tracked.add_(1)
                momentum = norm.momentum
                if momentum is None:
                    momentum = 1.0 / float(norm.num_batches_tracked)
                unbiased = variance * (count / (count - 1))
                norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), momentum)
                norm.running_var.lerp_(unbiased.to(norm.running_var.dtype), momentum)
        return y  # type: ignore[no-any-return]


class _Normalise(torch.autograd.Function):
    """Normalises a batch of which this rank has a part.

    The ranks tell each other mean and variance of their parts, and everyone puts them together in the same
    order (Chan, Golub, LeVeque: nothing cancels). In the backward pass two sums a channel travel.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        seat: LayerPlacement,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
        channels = x.shape[1]
        exact = torch.float64 if x.dtype == torch.float64 else torch.float32
        mean, variance = torch.batch_norm_update_stats(x, None, None, 0.0)  # four times as fast as var_mean
        row = torch.stack([mean.double(), variance.double()])
        means, variances = seat.wires.gather(row, seat.ranks).unbind(1)
        shares = [len(share_of(seat.batch, seat.ranks, rank)) for rank in seat.ranks]
        weights = torch.tensor(shares, dtype=torch.float64).div_(seat.batch).to(x.device)[:, None]
        mean = (means * weights).sum(0)
        variance = ((variances + (means - mean) ** 2) * weights).sum(0).to(exact)
        mean, count = mean.to(exact), x.numel() // channels // len(seat.places) * seat.batch
        ctx.save_for_backward(x, weight, mean, variance)
        ctx.eps, ctx.seat, ctx.count = eps, seat, count
        ctx.mark_non_differentiable(mean, variance)
        y = batch_norm(x, mean, variance, weight, bias, training=False, eps=eps)
        return y, mean, variance, count

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dy: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        x, weight, mean, variance = ctx.saved_tensors
        scale = torch.ones_like(mean) if weight is None else weight
        dx, dscale, dshift = torch.ops.aten.native_batch_norm_backward(
            dy.contiguous(memory_format=format_of(x)),
            x,
            scale,
            mean,
            variance,
            None,
            None,
            False,
            ctx.eps,
            [True, True, True],
        )
        if ctx.needs_input_grad[0]:
            row = torch.stack([dscale.double(), dshift.double()])
            all_dscale, all_dshift = ctx.seat.wires.gather(row, ctx.seat.ranks).sum(0) / ctx.count
            inverse = 1 / torch.sqrt(variance.double() + ctx.eps)
            shape = [1, -1, *([1] * (x.dim() - 2))]
            scale = scale.double() * inverse
            slope = (scale * inverse * all_dscale).to(mean.dtype).view(shape)
            level = (scale * all_dshift).to(mean.dtype).view(shape)
            if x.dtype == mean.dtype:  # in place, twice as fast
                dx.addcmul_(x, slope, value=-1).add_(mean.view(shape) * slope - level)
            else:
                dx -= (x - mean.view(shape)).mul_(slope).add_(level)
        affine = weight is not None
        return (
            dx if ctx.needs_input_grad[0] else None,
            dscale if affine and ctx.needs_input_grad[1] else None,
            dshift if affine and ctx.needs_input_grad[2] else None,
            None,
            None,
        )
