"""Which trainings of a search are packed together, where the user wants a strategy of the paper's (pack,
sections 5.3 and 5.4) and not what the agent finds as it goes."""

from __future__ import annotations

from collections.abc import Sequence

from hpcsched.planning.packing import distance, strategies
from hpcsched.planning.packing.admission import PackLimits
from hpcsched.planning.packing.problem import PackProblem
from hpcsched.planning.packing.speeds import PackMember, Speeds
from hpcsched.tuning.search import Search
from hpcsched.tuning.source import RungJob

BATCH_KEYS = ("batch", "batch_size", "global_batch")
"""What the argument with the size of a batch is usually called."""

STRATEGIES = {"knn": strategies.knn, "batch": strategies.by_batch, "random": strategies.random_packs}


def packs_of(jobs: Sequence[RungJob], search: Search, *, devices: int) -> dict[str, str]:
    """The name of its pack for each of these jobs, which are to start at about the same time.

    A pack is called like the first job in it.
    """
    problem = PackProblem(
        members=tuple(_member(job) for job in jobs),
        speeds=Speeds(()),
        limits=PackLimits(),
        devices=devices,
        axes=axes_of(search),
        threshold=search.knn_threshold,
        seed=search.seed,
    )
    return {member.name: pack[0].name for pack in STRATEGIES[search.packing](problem) for member in pack}


def _member(job: RungJob) -> PackMember:
    batch = next((job.args[key] for key in BATCH_KEYS if key in job.args), None)
    size = batch if isinstance(batch, int) and batch > 0 else 1
    return PackMember(name=job.name, model="", batch=size, config=job.args)


def axes_of(search: Search) -> tuple[distance.DistanceAxis, ...]:
    """The axes of the search's space, as distances are measured: those that make another model or batch, if
    the search says which do."""
    found, own = [], search.architecture
    for axis in search.space.axes():
        if own and axis.name not in (*own, *BATCH_KEYS):
            continue
        values = None
        if axis.kind == "numeric" and axis.values:
            values = tuple(sorted(float(value) for value in axis.values))
        found.append(
            distance.DistanceAxis(
                name=axis.name, kind=axis.kind, values=values, log=axis.log, low=axis.low, high=axis.high
            )
        )
    return tuple(found)
