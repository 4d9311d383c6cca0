"""Costs of a choice of GPU counts: computation, synchronisation, transfers, amplification (section 4.1).

All times are microseconds. GPU counts are named by their place in `BurstCosts.counts`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from math import inf, isfinite

import numpy as np
import numpy.typing as npt

from hpcsched.compat import dataclass
from hpcsched.errors import ConfigError
from hpcsched.planning.burst.graph import LayerProfile, times_at
from hpcsched.planning.burst.structure import SOURCE

Array = npt.NDArray[np.float64]

HOME, AWAY = 0, 1
"""Where a layer's ranks are as seen from the layer before: from the same first rank on, or elsewhere."""

_ROUNDING = 1 + 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Interconnect:
    """The network between GPUs: bytes a second of a GPU each way, and the least seconds of a message.

    Raises ConfigError for figures that are none.
    """

    bandwidth_bytes_s: float
    latency_s: float

    def __post_init__(self) -> None:
        if not (isfinite(self.bandwidth_bytes_s) and self.bandwidth_bytes_s > 0):
            got = repr(self.bandwidth_bytes_s)
            raise ConfigError(where="network", key="bandwidth", got=got, accepted="a number above 0")
        if not (isfinite(self.latency_s) and self.latency_s >= 0):
            got = repr(self.latency_s)
            raise ConfigError(where="network", key="latency", got=got, accepted="0 or a number above it")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spot:
    """The ranks of a layer: the place of its GPU count in `BurstCosts.counts`, and its first rank."""

    count: int
    first: int


class BurstCosts(ABC):
    """The costs of one model on so many GPUs.

    Args:
        names: of the layers.
        prev: the layers that each reads from.
        counts: GPU counts, ascending, shape [counts].
        time_us: of each layer with its synchronisation, shape [layers, counts]; infinite where it may not be.
        base_us: of each layer on one GPU, for its amplification (section 4.2), shape [layers].
        limit: on each layer's amplification; a layer on one GPU is always allowed.
    """

    def __init__(
        self,
        *,
        names: Sequence[str],
        prev: Sequence[tuple[int, ...]],
        counts: Sequence[int],
        time_us: Array,
        base_us: Array,
        limit: float,
    ) -> None:
        self.names, self.prev, self.limit = tuple(names), tuple(prev), limit
        self.counts = np.asarray(counts, dtype=np.int64)
        self.base_us = base_us
        self.sink = len(names)
        self.time_us = np.vstack([time_us, np.zeros(len(self.counts))])  # the sink costs nothing
        if isfinite(limit):
            room_us = limit * _ROUNDING * base_us[:, None] / self.counts - time_us
            self._room_us = np.where(self.counts == 1, inf, room_us)
        else:
            self._room_us = np.full(time_us.shape, inf)
        self._room_us[np.isinf(time_us)] = -inf

    def edge_us(self, layer: int, then: int) -> Array:
        """Microseconds between two layers, shape [place, counts of `layer`, counts of `then`].

        Infinite where `then` would be amplified beyond the limit, which is a condition on edges: its
        amplification counts the transfer (section 4.2).
        """
        n = len(self.counts)
        if then == self.sink:
            return np.zeros((2, n, n))
        lag_us = np.zeros((2, n, n)) if layer == SOURCE else self._lags_us(layer, then)
        return np.where(lag_us <= self._room_us[then], lag_us, inf)

    @abstractmethod
    def lag_us(self, layer: int, here: Spot, then: int, there: Spot) -> float:
        """Microseconds between two layers whose ranks are known, without regard to the limit."""

    @abstractmethod
    def _lags_us(self, layer: int, then: int) -> Array:
        """The same for all pairs of counts, shape [place, counts, counts]; never less than `lag_us`."""

    def amplification(self, layer: int, count: int, lag_us: float) -> float:
        """GPU-seconds of a layer, with its largest incoming transfer, over those of one GPU (section 4.2)."""
        gpu_us = (self.time_us[layer, count] + lag_us) * self.counts[count]
        base_us = self.base_us[layer]
        return float(gpu_us / base_us) if base_us > 0 else (1.0 if gpu_us == 0 else inf)


class ModelCosts(BurstCosts):
    """Costs by a layer profile and a network.

    - computation: forward and backward at global_batch / g samples, no less than it takes to launch them; for
      the last layer the loss too; and the optimizer's part for the layer's parameters, on each of its ranks;
    - with `shared_norms`, for each batch norm of a layer on several GPUs, a message forward and one backward;
    - synchronisation: an all-reduce of the gradients, 2 (g - 1) / g of their bytes over the bandwidth, and
      the latency; with `overlap` a layer's travels while the layer before it computes its backward pass,
      and only the rest is paid;
    - transfers: the most bytes that a GPU sends or receives over the bandwidth, and the latency; once for
      the samples and once for their gradients. Samples that stay on a GPU are free.

    The paper knows nothing of norms, loss, optimizer and launches: profiles without them have its costs. By
    default a layer may have the counts that divide the batch, as in the paper. With `uneven` it may have any
    up to the batch: shares differ by one sample, and the largest one counts.
    """

    def __init__(
        self,
        profile: LayerProfile,
        *,
        gpus: int,
        global_batch: int,
        network: Interconnect,
        limit: float = inf,
        overlap: bool = False,
        uneven: bool = False,
        shared_norms: bool = True,
    ) -> None:
        most = min(gpus, global_batch)
        counts = [g for g in range(1, most + 1) if uneven or global_batch % g == 0]
        g = np.asarray(counts, dtype=np.float64)
        samples = np.ceil(global_batch / g)
        self._global_batch, self._network, self._overlap = global_batch, network, overlap
        self._activation_bytes = [layer.activation_bytes for layer in profile.layers]
        forward_us = np.array([times_at(layer.forward_us, samples) for layer in profile.layers])
        self._backward_us = np.array([times_at(layer.backward_us, samples) for layer in profile.layers])
        bandwidth, self._latency_us = network.bandwidth_bytes_s / 1e6, network.latency_s * 1e6
        self._bytes_us = bandwidth
        parameter_bytes = np.array([layer.parameter_bytes for layer in profile.layers], dtype=np.float64)
        sync_us = 2 * (g - 1) / g * parameter_bytes[:, None] / bandwidth + self._latency_us
        self._sync_us = np.where((parameter_bytes[:, None] > 0) & (g > 1), sync_us, 0.0)
        if profile.loss_us:
            forward_us[-1] += times_at(profile.loss_us, samples)
        launch_us = np.array([layer.launch_us for layer in profile.layers])
        time_us = np.maximum(forward_us + self._backward_us, launch_us[:, None])
        time_us += profile.update_us * parameter_bytes[:, None]
        base_us = time_us[:, 0].copy()
        if shared_norms:
            norms = np.array([layer.norms for layer in profile.layers])
            time_us += np.where(g > 1, 2 * norms[:, None] * self._latency_us, 0.0)
        prev = [layer.prev for layer in profile.layers]
        for layer, before in enumerate(prev):
            if not (overlap and before):
                time_us[layer] += self._sync_us[layer]
        largest = np.maximum(samples[:, None], samples[None, :]) / global_batch
        self._moved = np.stack([_moved_home(g, global_batch), largest])
        super().__init__(
            names=[layer.name for layer in profile.layers],
            prev=prev,
            counts=counts,
            time_us=time_us,
            base_us=base_us,
            limit=limit,
        )

    def lag_us(self, layer: int, here: Spot, then: int, there: Spot) -> float:
        g, h = int(self.counts[here.count]), int(self.counts[there.count])
        moved = _moved(here.first - there.first, g, h, self._global_batch)
        return float(self._transfer_us(layer, np.float64(moved))) + self._unhidden_us(
            layer, here.count, then, there.count
        )

    def _lags_us(self, layer: int, then: int) -> Array:
        lags_us: Array = self._transfer_us(layer, self._moved)
        if self._overlap:
            lags_us = lags_us + np.maximum(
                0.0, self._sync_us[then][None, :] - self._backward_us[layer][:, None]
            )
        return lags_us

    def _transfer_us(self, layer: int, moved: npt.ArrayLike) -> Array:
        size = self._activation_bytes[layer] * self._global_batch
        fraction = np.asarray(moved)
        times_us = 2 * (size * fraction / self._bytes_us + self._latency_us)
        return np.where(fraction > 1e-12, times_us, 0.0)

    def _unhidden_us(self, layer: int, here: int, then: int, there: int) -> float:
        """What of the gradient sums is not hidden by the backward pass of the layer before."""
        if not self._overlap:
            return 0.0
        return max(0.0, float(self._sync_us[then, there] - self._backward_us[layer, here]))


def _moved_home(g: Array, batch: int) -> Array:
    """The largest fraction of the batch that a rank sends or receives between g and h ranks from 0 on.

    The k-th of n ranks has the samples from k batch // n on. Shape [counts, counts].
    """
    # The k-th ranks of both have ever less in common: where all shares are equal, last ones move the most.
    rank = np.arange(g[-1]) if (batch % g).any() else g - 1
    low = rank * batch // g[:, None]
    high = np.where(rank < g[:, None], (rank + 1) * batch // g[:, None], low)
    stays = np.minimum(high[:, None], high[None]) - np.maximum(low[:, None], low[None])
    stays = np.maximum(0.0, stays)
    out, in_ = (high - low)[:, None] - stays, (high - low)[None] - stays
    moved: Array = np.maximum(out, in_).max(axis=-1) / batch
    return moved


@lru_cache(maxsize=4096)
def _moved(offset: int, g: int, h: int, batch: int) -> float:
    """The same from g ranks to h ranks of which the first is `offset` ranks before those."""
    ranks = np.arange(min(0, offset), max(h, offset + g))
    here, there = (ranks >= offset) & (ranks < offset + g), (ranks >= 0) & (ranks < h)
    low_g, high_g = ((ranks - offset + more) * batch // g for more in (0, 1))
    low_h, high_h = ((ranks + more) * batch // h for more in (0, 1))
    stays = np.minimum(high_g, high_h) - np.maximum(low_g, low_h)
    stays = np.where(here & there, np.maximum(0, stays), 0)
    out, in_ = np.where(here, high_g - low_g, 0) - stays, np.where(there, high_h - low_h, 0) - stays
    return float(np.maximum(out, in_).max() / batch)
