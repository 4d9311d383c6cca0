"""The global batch of a training, kept while its number of ranks changes."""

from __future__ import annotations

from hpcsched.errors import ConfigError


def accumulation(global_batch: int, *, per_device: int, world_size: int) -> int:
    """Batches of `per_device` samples that each rank takes through the model for one step.

    Raises ConfigError where `global_batch` samples cannot be kept to exactly.
    """
    steps, rest = divmod(global_batch, per_device * world_size)
    if rest or not steps:
        raise ConfigError(
            where="integrations",
            key="global batch",
            got=f"{global_batch} samples",
            accepted=f"a multiple of {per_device} samples on each of {world_size} ranks",
        )
    return steps


def split(global_batch: int, *, per_device: int, world_size: int) -> tuple[int, int]:
    """(samples at once, batches of them) that each rank takes through the model for one step.

    At once are as many samples as divide a rank's share, and `per_device` at most. Raises ConfigError where
    `global_batch` does not divide by the ranks.
    """
    share, rest = divmod(global_batch, world_size)
    if rest or not share:
        raise ConfigError(
            where="integrations",
            key="global batch",
            got=f"{global_batch} samples on {world_size} ranks",
            accepted="a number of ranks that divides it",
        )
    at_once = next(size for size in range(min(per_device, share), 0, -1) if share % size == 0)
    return at_once, share // at_once
