"""The variables by which a process is told which rank of how many it is."""

from __future__ import annotations

OF_A_RANK = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"),
)
"""torchrun's names, and Lightning's NODE_RANK."""

OF_AN_ATTEMPT = "TORCHELASTIC_"
"""What torchrun says of a group of ranks begins so."""

OURS = ("HPCSCHED_RANK", "HPCSCHED_WORLD_SIZE", "HPCSCHED_LOCAL_RANK")
"""What hpcsched's own ranks are told besides: behind a launcher, these are the launcher's rank."""


def tells_rank(name: str) -> bool:
    """Whether a variable says something of ranks, in torchrun's words or in ours."""
    return name in OF_A_RANK or name in OURS or name.startswith(OF_AN_ATTEMPT)
