"""The fastest way to run a global batch on a set of GPUs, and the best sets of GPUs (sections 5.2, 6.3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hpcsched.compat import dataclass, zip
from hpcsched.errors import HpcschedError
from hpcsched.planning.vsw import sets
from hpcsched.planning.vsw.batching import worker_count
from hpcsched.planning.vsw.costs import SYNCS, Unknown, VswCosts, sync_method
from hpcsched.planning.vsw.rounds import Rounds
from hpcsched.planning.vsw.solver import Infeasible, solve

ACCUMULATION_BOUNDS = (0, 1000)
"""Rounds before the last, at least and at most; the authors' bound."""


class NoConfiguration(HpcschedError):
    """The batch cannot be run on these GPUs; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterGpu:
    """One GPU: its kind, by which its costs are found, and the host that it is in."""

    kind: str
    host: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuShare:
    """The share of one GPU in a step: so many workers, so many of them at once."""

    workers: int
    at_once: int

    @property
    def accumulation(self) -> int:
        """Rounds before the last one."""
        return -(-self.workers // self.at_once) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """The configuration of a step.

    Args:
        global_batch: samples of a step: all workers' local batches; what was asked for, rounded.
        local_batch: samples of each worker.
        iter_s: predicted seconds of a step.
        sync: how weights are synchronised, "sequential" or "overlap".
        shares: what each GPU runs, in their order; None: nothing.
    """

    global_batch: int
    local_batch: int
    iter_s: float
    sync: str
    shares: tuple[GpuShare | None, ...]

    @property
    def samples_s(self) -> float:
        """Samples that are trained in a second."""
        return self.global_batch / self.iter_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaled:
    """The best set of `count` GPUs: their indices, and the predicted seconds of the epoch on them."""

    count: int
    epoch_s: float
    gpus: tuple[int, ...]


def configure(
    costs: VswCosts,
    gpus: Sequence[ClusterGpu],
    global_batch: int,
    *,
    local_batches: Sequence[int],
    accumulation: tuple[int, int] = ACCUMULATION_BOUNDS,
    even: bool = True,
    every_gpu: bool = True,
    sync: str = "auto",
    at_once: int | None = None,
) -> Configuration:
    """The configuration of most samples a second for a global batch on these GPUs (Algorithm 1, but exact).

    Every local batch is tried. It makes global_batch / local_batch workers, rounded, which are shared out
    such that the slowest GPU takes least.

    Args:
        local_batches: that may be used; at least one.
        accumulation: rounds before the last on each GPU, at least and at most.
        even: the workers can be halved, for the similarity of two halves' gradients.
        every_gpu: each GPU has a worker; else the best of all sets of GPUs is used, as `scale` finds it.
        sync: "sequential", "overlap", or "auto": by the size of the buckets.
        at_once: workers at once on every GPU that has as many; None: what is fastest.

    Raises NoConfiguration.
    """
    sync = _sync(costs, sync)
    if not every_gpu:
        options: dict[str, Any] = {
            "accumulation": accumulation,
            "even": even,
            "sync": sync,
            "at_once": at_once,
        }
        scaled = scale(costs, gpus, [(global_batch, 1.0)], local_batches=local_batches, **options)
        best = min(scaled, key=lambda each: each.epoch_s)
        chosen = [gpus[i] for i in best.gpus]
        made = configure(costs, chosen, global_batch, local_batches=local_batches, **options)
        own = dict(zip(best.gpus, made.shares, strict=True))
        return replace(made, shares=tuple(own.get(i) for i in range(len(gpus))))
    kinds = _kinds(gpus, costs)
    communication_s = costs.communication_s(len(gpus), one_host=len({gpu.host for gpu in gpus}) == 1)
    found: list[Configuration] = []
    why: dict[str, list[int]] = {}
    for local_batch in local_batches:
        workers = worker_count(global_batch, local_batch, even=even)
        try:
            rounds = {
                kind: Rounds.of(
                    costs, kind, local_batch, sync=sync, accumulation=accumulation, at_once=at_once
                )
                for kind in kinds
            }
            shares, iter_s = _shared([rounds[gpu.kind] for gpu in gpus], workers, communication_s)
        except (Unknown, Infeasible) as error:
            why.setdefault(str(error), []).append(local_batch)
            continue
        found.append(
            Configuration(
                global_batch=workers * local_batch,
                local_batch=local_batch,
                iter_s=iter_s,
                sync=sync,
                shares=shares,
            )
        )
    if not found:
        raise NoConfiguration(_reasons(global_batch, why))
    return max(found, key=lambda each: (each.samples_s, -each.local_batch))


def _shared(
    rounds: Sequence[Rounds], workers: int, communication_s: tuple[float, float]
) -> tuple[tuple[GpuShare, ...], float]:
    """The share of each GPU, by how workers run on it, and the seconds of the slowest."""
    fewest = sum(own.fewest for own in rounds)
    if workers < len(rounds):
        raise Unknown(f"fewer workers than the {len(rounds)} GPUs")
    if workers < fewest:
        raise Unknown(f"{workers} workers, but the least accumulation makes {fewest} at least")
    ways = {id(own): own.options(workers, communication_s) for own in rounds}
    groups = [ways[id(own)][0] for own in rounds]
    shares, slowest_s = [], 0.0
    for own, i in zip(rounds, solve(groups, workers, use_all=True), strict=True):
        assert i is not None  # every group is used
        options, at_once = ways[id(own)]
        shares.append(GpuShare(workers=options[i].workers, at_once=at_once[i]))
        slowest_s = max(slowest_s, options[i].iter_s)
    return tuple(shares), slowest_s


def _sync(costs: VswCosts, sync: str) -> str:
    if sync == "auto":
        return sync_method(costs.buckets)
    if sync not in SYNCS:
        raise ValueError(f"weights are synchronised by one of auto, {', '.join(SYNCS)}, not {sync!r}")
    return sync


def _kinds(gpus: Sequence[ClusterGpu], costs: VswCosts) -> list[str]:
    """The kinds there are, in their order. Raises NoConfiguration if nothing is known of one."""
    if not gpus:
        raise NoConfiguration("there is no GPU")
    kinds = list(dict.fromkeys(gpu.kind for gpu in gpus))
    for kind in kinds:
        if kind not in costs.gpus:
            raise NoConfiguration(f"nothing was measured on {kind}")
    return kinds


def _reasons(global_batch: int, why: dict[str, list[int]]) -> str:
    if not why:
        return "there is no local batch to try"
    parts = [f"local batch {', '.join(map(str, sizes))}: {reason}" for reason, sizes in why.items()]
    return f"a global batch of {global_batch} cannot be run: " + "; ".join(parts)


def scale(
    costs: VswCosts,
    gpus: Sequence[ClusterGpu],
    trajectory: Sequence[tuple[int, float]],
    *,
    local_batches: Sequence[int],
    accumulation: tuple[int, int] = ACCUMULATION_BOUNDS,
    even: bool = True,
    sync: str = "auto",
    at_once: int | None = None,
    least: int = 1,
    most: int | None = None,
) -> list[Scaled]:
    """The best set of GPUs of each size for an epoch, by rising size; sizes that cannot run it are left out.

    One set trains the whole epoch, each batch of it in its best configuration. For a trajectory of one batch
    no set of that size is faster. For several the sets compared, on each kind of host and over several hosts,
    are those that are best for one of the batches: no set is faster if the kinds of GPUs can be ordered by
    speed whatever the batch.

    Args:
        trajectory: (global batch, samples that are trained with it), at least one.
        accumulation: as for `configure`, but nothing above 0 as the least.
        least, most: GPUs of a set.

    Raises NoConfiguration if no set can run every batch.
    """
    if accumulation[0] > 0:
        raise ValueError("sets of GPUs are compared without a least accumulation")
    sync = _sync(costs, sync)
    if not local_batches:
        raise NoConfiguration(_reasons(trajectory[0][0], {}))
    kinds = _kinds(gpus, costs)
    names = list(dict.fromkeys(gpu.host for gpu in gpus))
    by_host: list[dict[int, list[int]]] = [{} for _ in names]
    for i, gpu in enumerate(gpus):
        by_host[names.index(gpu.host)].setdefault(kinds.index(gpu.kind), []).append(i)
    hosts = np.array([[len(own.get(kind, ())) for kind in range(len(kinds))] for own in by_host])
    samples: dict[int, float] = {}
    for batch, some in trajectory:
        samples[batch] = samples.get(batch, 0.0) + some
    made = sets.BatchTrajectory(
        samples=np.array(list(samples.values())),
        workers={
            local_batch: np.array([worker_count(batch, local_batch, even=even) for batch in samples])
            for local_batch in local_batches
        },
        rounds={
            local_batch: [
                _rounds_or_none(costs, kind, local_batch, sync, accumulation, at_once) for kind in kinds
            ]
            for local_batch in local_batches
        },
    )
    counts = range(max(1, least), min(most or len(gpus), len(gpus)) + 1)
    found = sets.best_sets(
        made, hosts, counts, lambda count, one_host: costs.communication_s(count, one_host=one_host)
    )
    if not found:
        some_batches = ", ".join(map(str, sorted(samples)))
        raise NoConfiguration(f"no set of GPUs can run every global batch of {some_batches}")
    return [
        Scaled(count=count, epoch_s=each.seconds, gpus=sets.indices(each, by_host))
        for count, each in sorted(found.items())
    ]


def _rounds_or_none(
    costs: VswCosts,
    kind: str,
    local_batch: int,
    sync: str,
    accumulation: tuple[int, int],
    at_once: int | None,
) -> Rounds | None:
    try:
        return Rounds.of(costs, kind, local_batch, sync=sync, accumulation=accumulation, at_once=at_once)
    except Unknown:
        return None
