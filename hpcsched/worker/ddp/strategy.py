"""Data parallel: every rank has the whole model and an equal share of each global batch."""

from __future__ import annotations

from hpcsched.errors import ConfigError
from hpcsched.worker.process.contract import JobEnv
from hpcsched.worker.session.data_parallel import DataParallel
from hpcsched.worker.session.session import train
from hpcsched.worker.session.trainer import Trainer

OPTIONS = ("micro_batch", "reproducible", "shards")


def run(trainer: Trainer, env: JobEnv) -> None:
    """Train to the end, save the final state and its metrics.

    Options: `micro_batch`, the most samples a rank takes through the model at a time. `reproducible`: the
    same result to the last bit on any number of ranks, as `shards` parts of each global batch are computed
    one by one.
    """
    micro_batch, shards = _count(env, "micro_batch"), _count(env, "shards")
    reproducible = env.strategy.get("reproducible", False)
    if not isinstance(reproducible, bool):
        raise ConfigError(
            where="strategy", key="reproducible", got=repr(reproducible), accepted="true or false"
        )
    train(
        trainer,
        env,
        lambda parts: DataParallel(parts, micro_batch=micro_batch, reproducible=reproducible, shards=shards),
    )


def _count(env: JobEnv, key: str) -> int | None:
    value = env.strategy.get(key)
    if value is not None and (type(value) is not int or value < 1):
        raise ConfigError(where="strategy", key=key, got=repr(value), accepted="a positive whole number")
    return value
