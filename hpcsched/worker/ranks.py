"""Which rank of how many this process is: by what started it last."""

from __future__ import annotations

from typing import NamedTuple

from hpcsched.core.ranks import OURS
from hpcsched.worker.variables import Variables

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_BELOW_US = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
)
"""Of mpirun (Open MPI; MPICH and Intel MPI) and srun. No job inherits these from the agent, so what is there
was said by one that the job itself has started."""


class Ranks(NamedTuple):
    """A rank among all ranks, and among those of its host. `launched`: by a launcher, not by hpcsched."""

    rank: int
    world_size: int
    local_rank: int
    launched: bool


def own_rank(read: Variables) -> Ranks:
    """The rank that a launcher has given, if there is one between hpcsched and us; else hpcsched's own.

    Rank 0 of 1 where nobody has said anything. Raises ConfigError for what is no number.
    """
    ours, theirs = ([read.text(name) for name in names] for names in (OURS, _TORCHRUN))
    if theirs[0] and any(mine != other for mine, other in zip(ours, theirs, strict=True) if other):
        return _read(read, _TORCHRUN, launched=True)
    for names in _BELOW_US:
        if read.text(names[0]) and read.text(names[1]):
            return _read(read, names, launched=True)
    return _read(read, OURS, launched=False)


def _read(read: Variables, names: tuple[str, ...], *, launched: bool) -> Ranks:
    rank = read.number(names[0], int, 0)
    return Ranks(rank, read.number(names[1], int, 1), read.number(names[2], int, rank), launched)
