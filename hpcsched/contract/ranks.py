"""Which rank of how many a process is: the variables that say so, and whose word counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from hpcsched.contract import variables
from hpcsched.contract.environment import Reader

TORCHRUN = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"),
)
"""torchrun's names for what a rank is told, and Lightning's NODE_RANK."""

TORCHELASTIC = "TORCHELASTIC_"
"""What torchrun says of a group of ranks begins so."""

_BELOW_US = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
)
"""Of mpirun (Open MPI; MPICH and Intel MPI) and srun. No job inherits these from the agent, so what is there
was said by one that the job itself has started."""


def tells_rank(name: str) -> bool:
    """Whether a variable says something of ranks, in torchrun's words or in ours."""
    return name in TORCHRUN or name in variables.OF_A_RANK or name.startswith(TORCHELASTIC)


class Ranks(NamedTuple):
    """A rank among all ranks, and among those of its host. `launched`: by a launcher, not by hpcsched."""

    rank: int
    world_size: int
    local_rank: int
    launched: bool


def own_rank(environ: Mapping[str, str]) -> Ranks:
    """The rank that a launcher has given, if there is one between hpcsched and us; else hpcsched's own.

    Rank 0 of 1 where nobody has said anything. Raises ConfigError for what is no number.
    """
    read = Reader(environ)
    ours, theirs = ([read.text(name) for name in names] for names in (variables.OF_A_RANK, TORCHRUN[:3]))
    if theirs[0] and any(mine != other for mine, other in zip(ours, theirs) if other):
        return _read(read, TORCHRUN[:3], launched=True)
    for names in _BELOW_US:
        if read.text(names[0]) and read.text(names[1]):
            return _read(read, names, launched=True)
    return _read(read, variables.OF_A_RANK, launched=False)


def _read(read: Reader, names: tuple[str, ...], *, launched: bool) -> Ranks:
    rank = read.number(names[0], 0)
    return Ranks(rank, read.number(names[1], 1), read.number(names[2], rank), launched)
