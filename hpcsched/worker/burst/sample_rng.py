"""Random numbers that belong to a sample, not to the process that computes it."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import nn

from hpcsched.errors import ConfigError
from hpcsched.worker.burst.placement import LayerPlacement

_GOLDEN = -0x61C8864680B583EB  # 2**64 over the golden ratio, odd, as a signed number
_MIX_1 = -0x40A7B892E31B1A47
_MIX_2 = -0x6B2FB644ECCEEE15


def uniform_bits(seed: int, places: torch.Tensor, *words: object, count: int) -> torch.Tensor:
    """64 random bits for each of `count` elements of each sample; int64, shape [samples, count].

    A function of the seed, the sample's place in the stream of all samples, the words and the element's
    number, equal on every device: splitmix64, each sample with a stream of its own.

    Args:
        places: int64, shape [samples].
        words: who draws; words that print differently give unrelated bits.
    """
    digest = hashlib.sha256("/".join(map(str, (seed, *words))).encode()).digest()
    base = int.from_bytes(digest[:8], "little", signed=True)
    keys = _mix(places * _GOLDEN + base)
    elements = torch.arange(1, count + 1, device=places.device) * _GOLDEN
    return _mix(keys[:, None] + elements)


def _mix(bits: torch.Tensor) -> torch.Tensor:
    """Splitmix64's last step, in place. Products wrap; `>>` carries the sign along, so it is masked away."""
    bits ^= (bits >> 30) & ((1 << 34) - 1)
    bits *= _MIX_1
    bits ^= (bits >> 27) & ((1 << 37) - 1)
    bits *= _MIX_2
    bits ^= (bits >> 31) & ((1 << 33) - 1)
    return bits


class SampleDropout(nn.Module):
    """Dropout whose choice depends on the seed, the layer and the sample: the same by every plan.

    `whole`: drops whole channels (the second dimension), as Dropout1d, 2d and 3d do. With a `source` its
    rate and mode are that module's, else they come with each call.
    """

    def __init__(self, seat: LayerPlacement, *, whole: bool, source: nn.Module | None = None) -> None:
        super().__init__()
        self._seat, self._whole, self._source = seat, whole, (source,)  # a tuple: not a submodule

    @property
    def source(self) -> nn.Module | None:
        """The module that it stands for."""
        (source,) = self._source
        return source

    def forward(
        self, x: torch.Tensor, p: Any = 0.5, training: Any = True, inplace: Any = False
    ) -> torch.Tensor:
        """`x`, samples along the first dimension, with a share `p` of it zeroed and the rest scaled up."""
        (source,) = self._source
        if source is not None:
            p, training = source.p, source.training
        seat = self._seat
        if not training or p == 0 or seat.looked_at:
            return x
        call = seat.next_call()
        if len(x) != len(seat.places):
            raise ConfigError(
                where=f"layer {seat.name}",
                got=f"dropout on a tensor of shape {list(x.shape)} for {len(seat.places)} samples",
                accepted="samples in the first dimension",
            )
        shape = [*x.shape[:2], *([1] * (x.dim() - 2))] if self._whole else list(x.shape)
        places = torch.arange(seat.places.start, seat.places.stop, device=x.device)
        bits = uniform_bits(seat.seed, places, seat.name, call, count=torch.Size(shape[1:]).numel())
        kept = (
            bits < min(round((1 - p) * 2**64), 2**64 - 1) - 2**63
            if p < 1
            else torch.zeros_like(bits, dtype=torch.bool)
        )
        return x * (kept.view(shape).to(x.dtype) * (1 / (1 - p) if p < 1 else 0.0))
