"""Burst plans: the fastest way to run a training step on so many GPUs within an amplification limit."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

import numpy as np

from hpcsched.errors import ConfigError, HpcschedError
from hpcsched.planning.burst.costs import BurstCosts, Interconnect, ModelCosts, Spot
from hpcsched.planning.burst.graph import MAX_GPUS, LayerProfile
from hpcsched.planning.burst.plan import BurstPlan, PlannedLayer
from hpcsched.planning.burst.search import BurstSearch, TooLarge
from hpcsched.planning.burst.structure import structure
from hpcsched.planning.burst.table import BurstProblem
from hpcsched.planning.burst.timeline import StepTimeline, refined, timeline, within_limit

MOST_UNEVEN = 8
"""GPUs; with more of them planning takes long where counts need not divide the batch (Inception-v3: 0.3 s for
8, 3 s for 16)."""


class NoBurstPlan(HpcschedError):
    """There is no plan within the limit; the text says what stands in its way."""


def plan(
    profile: LayerProfile,
    *,
    gpus: int,
    global_batch: int,
    network: Interconnect,
    amplification: float = inf,
    overlap: bool = False,
    uneven: bool = False,
    shared_norms: bool = True,
) -> BurstPlan:
    """The fastest plan for a measured model.

    Args:
        profile: its layers.
        gpus: how many there are.
        global_batch: samples in a step.
        network: between the GPUs.
        amplification: the limit on each layer's GPU-seconds over those of one GPU, at least 1.
        overlap: gradients travel while the backward pass goes on.
        uneven: a layer may have any count up to the batch, not only one that divides it.
        shared_norms: batch norm is over the samples of all ranks of a layer, which takes messages.

    Raises ConfigError for a limit below 1 or counts below 1, NoBurstPlan when the limit allows none.
    """
    for key, value in (("gpus", gpus), ("global_batch", global_batch)):
        if not 1 <= value <= MAX_GPUS:
            accepted = f"a positive whole number, at most {MAX_GPUS}"
            raise ConfigError(where="plan", key=key, got=str(value), accepted=accepted)
    if not amplification >= 1:
        raise ConfigError(
            where="plan", key="amplification", got=str(amplification), accepted="a number of at least 1"
        )
    costs = ModelCosts(
        profile,
        gpus=gpus,
        global_batch=global_batch,
        network=network,
        limit=amplification,
        overlap=overlap,
        uneven=uneven,
        shared_norms=shared_norms,
    )
    notes = []
    if global_batch > profile.most_samples:
        notes.append(
            f"measured with at most {profile.most_samples} samples on a GPU: "
            f"times for up to {global_batch} are extrapolated"
        )
    widest = int(costs.counts[-1])
    if widest < gpus:
        how = "has samples for" if uneven else "divides among"
        notes.append(f"a global batch of {global_batch} {how} {widest} of the {gpus} GPUs at most")
    problem = BurstProblem(
        model=profile.model, gpus=gpus, global_batch=global_batch, limit=amplification, costs=costs
    )
    return solve(problem, notes=tuple(notes))


def uniform(
    profile: LayerProfile,
    *,
    gpus: int,
    global_batch: int,
    network: Interconnect,
    amplification: float = inf,
    uneven: bool = False,
    shared_norms: bool = True,
) -> Iterator[BurstPlan]:
    """Plans that give all layers the same GPUs, the most first: those within the limit, which one GPU is.

    Arguments and errors are those of `plan`.
    """
    costs = ModelCosts(
        profile,
        gpus=gpus,
        global_batch=global_batch,
        network=network,
        limit=amplification,
        uneven=uneven,
        shared_norms=shared_norms,
    )
    problem = BurstProblem(
        model=profile.model, gpus=gpus, global_batch=global_batch, limit=amplification, costs=costs
    )
    plain = _data_parallel(costs, gpus)
    for count in reversed(range(len(costs.counts))):
        line = timeline(costs, gpus, dict.fromkeys(range(costs.sink), Spot(count=count, first=0)))
        if within_limit(costs, line):
            yield _described(problem, line, plain, ())


def solve(problem: BurstProblem, *, notes: tuple[str, ...] = ()) -> BurstPlan:
    """The fastest plan that the search finds, and no slower than plain data parallelism if that is allowed.

    Raises NoBurstPlan when the limit allows none, and ConfigError where a plan would take too long to find.
    """
    costs = problem.costs
    try:
        search = BurstSearch(costs, problem.gpus, structure(costs.prev))
    except (TooLarge, RecursionError) as error:
        got = str(error) if isinstance(error, TooLarge) else "blocks of branches within each other, too deep"
        accepted = (
            "fewer layers, branches or GPU counts: those that divide a batch, or that a layer has times for"
        )
        raise ConfigError(where="plan", got=got, accepted=accepted) from None
    placement = search.best()
    if placement is None:
        name = search.blocked()
        which = f"layer {name!r} cannot be run" if name else "no choice of GPU counts stays"
        raise NoBurstPlan(f"{which} within an amplification of {problem.limit:g}")
    best = refined(costs, problem.gpus, timeline(costs, problem.gpus, placement))
    plain = _data_parallel(costs, problem.gpus)
    if plain is not None and plain.iter_us < best.iter_us:
        if within_limit(costs, plain):
            best = plain
        else:
            why = f"plain data parallelism is faster, but the limit of {problem.limit:g} forbids it"
            notes = (*notes, why)
    return _described(problem, best, plain, notes)


def _described(
    problem: BurstProblem, best: StepTimeline, plain: StepTimeline | None, notes: tuple[str, ...]
) -> BurstPlan:
    costs = problem.costs
    layers = tuple(
        PlannedLayer(
            id=layer,
            name=costs.names[layer],
            ranks=tuple(range(spot.first, spot.first + int(costs.counts[spot.count]))),
            start_us=best.begin_us[layer],
            end_us=best.end_us[layer],
            amplification=costs.amplification(layer, spot.count, best.lag_us[layer]),
        )
        for layer, spot in best.placement.items()
    )
    busy_us = ((best.lag_us[layer.id] + layer.end_us - layer.start_us) * len(layer.ranks) for layer in layers)
    return BurstPlan(
        model=problem.model,
        gpus=problem.gpus,
        global_batch=problem.global_batch,
        amplification_limit=problem.limit,
        iter_us=best.iter_us,
        data_parallel_us=inf if plain is None else plain.iter_us,
        gpu_us=sum(busy_us),
        layers=layers,
        notes=notes,
    )


def _data_parallel(costs: BurstCosts, gpus: int) -> StepTimeline | None:
    """Every layer on as many GPUs as all layers can have; None if they have no count in common."""
    common = np.flatnonzero(np.isfinite(costs.time_us).all(axis=0))
    if not len(common):
        return None
    spot = Spot(count=int(common[-1]), first=0)
    return timeline(costs, gpus, dict.fromkeys(range(costs.sink), spot))
