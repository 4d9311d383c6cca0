"""Data parallel: every rank has the whole model and an equal share of each global batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hpcsched.errors import ConfigError
from hpcsched.worker.process.contract import JobEnv
from hpcsched.worker.session.session import Session
from hpcsched.worker.session.trainer import Parts, Trainer, build, evaluate, read, rehearse

OPTIONS = ("micro_batch", "reproducible", "shards")


def run(trainer: Trainer, env: JobEnv) -> None:
    """Train to the end, save the final state and its metrics.

    Options: `micro_batch`, the most samples a rank takes through the model at a time; larger shares
    are split and their gradients added up, which changes memory and nothing else. `reproducible`: the
    same result to the last bit on any number of ranks, as `shards` parts of each global batch are computed
    one by one.
    """
    micro_batch = _count(env, "micro_batch")
    reproducible = env.strategy.get("reproducible", False)
    if not isinstance(reproducible, bool):
        raise ConfigError(
            where="strategy", key="reproducible", got=repr(reproducible), accepted="true or false"
        )
    parts = build(trainer, env.args)
    parts.model.train()

    session = Session(
        model=parts.model,
        optimizer=parts.optimizer,
        scheduler=parts.scheduler,
        dataset_size=parts.size,
        global_batch=parts.global_batch,
        seed=parts.seed,
        in_place=True,
        reproducible=reproducible,
        shards=_count(env, "shards"),
        rehearse=lambda session: rehearse(
            parts, next(_batches(parts, session, micro_batch, until=session.step + 1, loaders=0))
        ),
    )
    session.end_after(parts.epochs)
    batches: Iterator[Any] = iter(())
    ranks = (-1, 0)
    for indices in session.steps():
        if ranks != (session.rank, session.world_size):  # what was read ahead is another share's
            ranks = session.rank, session.world_size
            batches = _batches(parts, session, micro_batch, loaders=parts.loaders)
        parts.optimizer.zero_grad()
        for part in session.shards(indices):
            for _ in range(-(-len(part) // (micro_batch or len(part)))):
                session.backward(parts.loss(parts.model, next(batches)))
        parts.optimizer.step()
        if parts.scheduler is not None:
            parts.scheduler.step()
    session.finish(lambda: evaluate(parts))


def _count(env: JobEnv, key: str) -> int | None:
    value = env.strategy.get(key)
    if value is not None and (type(value) is not int or value < 1):
        raise ConfigError(where="strategy", key=key, got=repr(value), accepted="a positive whole number")
    return value


def _batches(
    parts: Parts, session: Session, micro_batch: int | None, *, loaders: int, until: int | None = None
) -> Iterator[Any]:
    """This rank's batches of all coming steps, on its device, at most `micro_batch` samples each."""
    places = (
        part[start : start + (micro_batch or len(part))]
        for step in session.upcoming_places(until)
        for part in step
        for start in range(0, len(part), micro_batch or len(part))
    )
    return read(
        parts,
        places,
        device=session.device,
        loaders=loaders,
        seeded=session.reproducible,
        step=session.step,
    )
