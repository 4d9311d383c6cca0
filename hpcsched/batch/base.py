"""The allocation around us: what Slurm or LSF granted, or nothing but this machine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """What we were given: the hosts, and until when.

    `kind` is "none", "slurm" or "lsf"; `id` is the batch system's job id. `deadline` is
    the Unix time by which we must be gone, None if there is none. `restart_count` counts how often the
    batch system has put this job back into its queue.
    """

    kind: str
    id: str | None
    hosts: tuple[str, ...]
    deadline: float | None
    restart_count: int
