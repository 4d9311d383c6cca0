"""Measured costs of a model's workers, and the time of a step predicted from them (section 5.1, Eq. 1-6)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from math import inf

import numpy as np

from hpcsched.compat import dataclass

MIB = 2**20
BUCKET_BYTES = 25 * MIB
"""What a gradient bucket holds at most, unless somebody says otherwise (PyTorch's default)."""

SYNCS = ("sequential", "overlap")
"""Weights are updated and copied after all gradients have been summed, or bucket by bucket meanwhile."""

_FIT_FROM = 3
"""A logarithm is fitted to throughput only if this many workers at once, or more, were measured."""


class Unknown(LookupError):
    """The measurements do not tell; the text says what is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds that some workers at once take for one local batch each: loading, forward, backward."""

    data_s: float
    forward_s: float
    backward_s: float

    @property
    def total_s(self) -> float:
        return self.data_s + self.forward_s + self.backward_s


@dataclass(frozen=True, kw_only=True)
class BatchTimes:
    """Times of workers on one GPU with one local batch, by how many of them run at once.

    Args:
        local_batch: samples of each worker.
        times: as measured, by the number of workers at once; at least one. They should rise with it.
        most: workers at once that fit into memory; None: not known, then as many as were measured.
    """

    local_batch: int
    times: Mapping[int, Times]
    most: int | None = None

    @property
    def usable(self) -> int:
        """The largest number at once whose time is known or can be predicted, and that fits."""
        known = max(self.times)
        if self.most is None:
            return known
        return self.most if self._fit is not None else min(known, self.most)

    def at(self, n: int) -> Times:
        """The times of `n` workers at once.

        Measured ones as they are. Others by a throughput of a * ln(n) + b (Eq. 1), fitted by least squares
        to all measured if these are at least two with one of 3 or more, but no less than fewer measured
        workers take and no more than more of them do; forward's share and loading per worker are those of
        the most workers measured. Without a fit only measured ones are known.

        Raises Unknown where the time is not known, or so many do not fit into memory.
        """
        if (found := self.times.get(n)) is not None:
            return found
        what = f"{n} worker{'s' if n > 1 else ''} at once with a local batch of {self.local_batch}"
        if not 1 <= n <= self.usable:
            raise Unknown(f"{what}: {self.usable} are known to fit")
        if self._fit is None:
            raise Unknown(f"{what} was not measured")
        counts = sorted(self.times)
        place = bisect_left(counts, n)
        slope, base = self._fit
        largest = self.times[counts[-1]]
        share = largest.forward_s / _compute_s(largest)
        least_s = _compute_s(self.times[counts[place - 1]]) if place else 0.0
        throughput = slope * float(np.log(n)) + base
        compute_s = max(least_s, n / throughput if throughput > 0 else inf)
        if place < len(counts):
            compute_s = min(compute_s, max(least_s, _compute_s(self.times[counts[place]])))
        elif compute_s == inf:
            raise Unknown(f"{what}: the throughput falls too fast to say")
        return Times(
            data_s=largest.data_s * n / counts[-1],
            forward_s=share * compute_s,
            backward_s=(1 - share) * compute_s,
        )

    @cached_property
    def _fit(self) -> tuple[float, float] | None:
        """Slope and base of the workers done a second by the logarithm of their number."""
        if len(self.times) < 2 or max(self.times) < _FIT_FROM:
            return None
        counts = sorted(self.times)
        throughput = [n / _compute_s(self.times[n]) for n in counts]
        slope, base = np.polyfit(np.log(counts), throughput, 1)
        return float(slope), float(base)


def _compute_s(times: Times) -> float:
    return times.forward_s + times.backward_s


@dataclass(frozen=True, kw_only=True)
class GpuCosts:
    """The costs of one kind of GPU.

    Args:
        speeds: by local batch; at least one.
        update_s: seconds of the optimizer's step.
        copy_s: seconds of copying the weights to one further worker on the GPU.
        buffers_s: seconds for the buffers (of batch normalisation) of each worker, once a step.
    """

    speeds: Mapping[int, BatchTimes]
    update_s: float
    copy_s: float = 0.0
    buffers_s: float = 0.0

    def speed(self, local_batch: int) -> BatchTimes:
        """The speed with a local batch: as measured, or on the line between the two nearest measured.

        Between two, as many workers at once are known as for both, and as many fit as do with the larger.
        Raises Unknown outside what was measured: neither memory nor efficiency is known there.
        """
        if (found := self.speeds.get(local_batch)) is not None:
            return found
        known = sorted(self.speeds)
        place = bisect_left(known, local_batch)
        if place in (0, len(known)):
            raise Unknown(
                f"a local batch of {local_batch} was not measured; {known[0]} to {known[-1]} were"
                if len(known) > 1
                else f"a local batch of {local_batch} was not measured; {known[0]} was"
            )
        below, above = (self.speeds[known[i]] for i in (place - 1, place))
        weight = (local_batch - below.local_batch) / (above.local_batch - below.local_batch)
        usable = min(below.usable, above.usable)
        times = {n: _between(below.at(n), above.at(n), weight) for n in range(1, usable + 1)}
        if not times:
            raise Unknown(f"no worker with a local batch of {above.local_batch} fits into memory")
        return BatchTimes(local_batch=local_batch, times=times, most=usable)


def _between(one: Times, other: Times, weight: float) -> Times:
    return Times(
        data_s=one.data_s + weight * (other.data_s - one.data_s),
        forward_s=one.forward_s + weight * (other.forward_s - one.forward_s),
        backward_s=one.backward_s + weight * (other.backward_s - one.backward_s),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduceCost:
    """Seconds of an all-reduce: latency_s + per_byte_s * travelled(bytes, gpus) (Eq. 3)."""

    per_byte_s: float
    latency_s: float

    def all_reduce_s(self, size_bytes: float, gpus: int) -> float:
        """Seconds of the all-reduce of so many bytes on so many GPUs; 0 for one GPU."""
        return self.latency_s + self.per_byte_s * travelled(size_bytes, gpus) if gpus > 1 else 0.0


def travelled(size_bytes: float, gpus: int) -> float:
    """Bytes that each GPU sends in a ring all-reduce of `size_bytes`."""
    return size_bytes * 2 * (gpus - 1) / gpus


def fit_line(points: Iterable[tuple[float, float]]) -> AllReduceCost:
    """The line through measured (travelled bytes, seconds) with the least sum of squared relative errors.

    Relative, such that large messages do not drown what small ones say of the latency; no part of it is
    negative. One point: all of it counts as transfer. Raises ValueError without points.
    """
    known = [(size, taken_s) for size, taken_s in points if taken_s > 0]
    if not known:
        raise ValueError("no all-reduce was measured")
    if len({size for size, _ in known}) < 2:
        size = known[0][0]
        mean_s = sum(taken_s for _, taken_s in known) / len(known)
        return AllReduceCost(per_byte_s=mean_s / size if size else 0.0, latency_s=0.0 if size else mean_s)
    scale = max(size for size, _ in known)
    rows = np.array([(size / scale / taken_s, 1 / taken_s) for size, taken_s in known])
    ones = np.ones(len(rows))
    slope, latency_s = np.linalg.lstsq(rows, ones, rcond=None)[0]
    if latency_s < 0:
        slope, latency_s = np.linalg.lstsq(rows[:, :1], ones, rcond=None)[0][0], 0.0
    elif slope < 0:
        slope, latency_s = 0.0, np.linalg.lstsq(rows[:, 1:], ones, rcond=None)[0][0]
    return AllReduceCost(per_byte_s=float(slope / scale), latency_s=float(latency_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduceCosts:
    """All-reduce among GPUs of one host, and among those of several."""

    within: AllReduceCost
    between: AllReduceCost


@dataclass(frozen=True, kw_only=True)
class VswCosts:
    """Everything that a step's time is predicted from.

    Args:
        gpus: what each kind of GPU takes.
        buckets: bytes of the gradient buckets, in the order in which they are summed; at least one.
        network: what summing them takes.
    """

    gpus: Mapping[str, GpuCosts]
    buckets: tuple[int, ...]
    network: AllReduceCosts

    def communication_s(self, gpus: int, *, one_host: bool) -> tuple[float, float]:
        """Seconds of the all-reduce of all buckets but the last, and of the last (Eq. 4)."""
        line = self.network.within if one_host else self.network.between
        each_s = [line.all_reduce_s(size, gpus) for size in self.buckets]
        return sum(each_s[:-1]), each_s[-1]

    def exposed(self, sync: str) -> float:
        """The share tau of the weights' update and copies that a step waits for (Eq. 5)."""
        return 1.0 if sync == "sequential" else self.buckets[-1] / sum(self.buckets)


def sync_method(buckets: Sequence[int], bucket_bytes: float = BUCKET_BYTES) -> str:
    """Which way of weight synchronisation is better: "sequential" or "overlap" (section 4).

    Large buckets disturb an update that runs meanwhile: sequential if their mean is more than half of
    `bucket_bytes`.
    """
    return "sequential" if sum(buckets) / len(buckets) > 0.5 * bucket_bytes else "overlap"


def iteration_s(
    costs: VswCosts,
    kind: str,
    *,
    local_batch: int,
    workers: int,
    at_once: int,
    gpus: int,
    one_host: bool,
    sync: str,
) -> float:
    """Seconds of a step on a GPU of this kind, one of `gpus` in the job (Eq. 6, refined).

    `workers` run in rounds of `at_once`, the last of those that are left. All rounds but the last cost their
    loading, forward and backward; in the last, backward runs beside the all-reduce of all buckets but the
    last, which follows. Then come the exposed part of update and copies, and each worker's buffers.

    Raises Unknown if the measurements do not tell.
    """
    own = costs.gpus[kind]
    speed = own.speed(local_batch)
    at_once = min(at_once, workers)
    full, rest = divmod(workers - 1, at_once)
    last = speed.at(rest + 1)
    most_s, last_bucket_s = costs.communication_s(gpus, one_host=one_host)
    return (
        full * speed.at(at_once).total_s
        + last.data_s
        + last.forward_s
        + max(last.backward_s, most_s)
        + last_bucket_s
        + after_s(own, costs.exposed(sync), at_once)
    )


def after_s(own: GpuCosts, exposed: float, at_once: int) -> float:
    """Seconds of a step that are spent on weights and buffers with so many workers at once (Eq. 5)."""
    return exposed * (own.update_s + own.copy_s * (at_once - 1)) + own.buffers_s * at_once
