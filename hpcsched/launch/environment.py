"""The environment of a worker: what it inherits of ours, and what it is told of its ranks and threads.

Pure functions. A rank is told what torchrun would tell it; a single process, and a launcher such as torchrun
itself, are told nothing of ranks. None is left what a batch step or an MPI said of ranks to us: workers are
ranks of something else, and libraries that find these (MPI, Lightning) take our numbers for theirs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from hpcsched.contract import variables
from hpcsched.contract.environment import Environment
from hpcsched.contract.ranks import TORCHELASTIC, tells_rank
from hpcsched.core.processes import Launcher

_OF_A_STEP = re.compile(
    # Slurm: https://slurm.schedmd.com/srun.html, "OUTPUT ENVIRONMENT VARIABLES". The job's own stay.
    r"SLURM_(PROCID|LOCALID|NODEID|NTASKS|NPROCS|TASKS_PER_NODE|TASK_PID|GTIDS|STEP|SRUN_|LAUNCH_NODE_IPADDR"
    r"|CPU_BIND|MEM_BIND|DISTRIBUTION|PTY_|MPI_TYPE|PMI|PMIX)"
    # The process managers of MPIs. What people set for an MPI (OMPI_MCA_btl, I_MPI_FABRICS) stays.
    r"|PMI2?_|PMIX_(?!MCA_)|PALS_|HYDI_|HYDRA_PROXY|MPISPAWN_|MPI_LOCAL|MV2_COMM_"
    r"|OMPI_(COMM_WORLD_|UNIVERSE_SIZE|APP_CTX|NUM_APP|FIRST_RANKS|FILE_LOCATION|ARGV|COMMAND)"
    r"|OMPI_MCA_(orte_|ess|prte_|pmix|initial_wdir)|FLUX_TASK_|ALPS_APP_PE"
    # The tasks of LSF's blaunch and jsrun, and of PBS's pbsdsh.
    r"|LSF_PM_|JSM_|PBS_(TASKNUM|NODENUM|VNODENUM)"
)

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def inherited(environ: Mapping[str, str]) -> dict[str, str]:
    """What workers get of the environment that we were started in.

    Where that is an attempt of another hpcsched, what its agent told it is not true of ours.
    """
    return {
        name: value
        for name, value in environ.items()
        if not (_OF_A_STEP.match(name) or tells_rank(name) or name in variables.OF_AN_ATTEMPT)
    }


def attempt_variables(*, run_id: str, job_id: int, attempt: int, retries: int) -> dict[str, str]:
    """What torchrun says of itself to all ranks.

    Not TORCHELASTIC_USE_AGENT_STORE, with which every rank would wait for a store that torchrun serves, nor
    TORCHELASTIC_ERROR_FILE, which nobody would read.
    """
    told = {"RUN_ID": f"{run_id}.{job_id}", "RESTART_COUNT": attempt - 1, "MAX_RESTARTS": retries}
    return {f"{TORCHELASTIC}{name}": str(value) for name, value in told.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """Where one rank stands: among all, among those started with it on its host, and its host among all."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int = 0
    nodes: int = 1

    def variables(self) -> dict[str, str]:
        """What torchrun tells a rank of itself, and our own names for the first three."""
        ours = Environment(rank=self.rank, world_size=self.world_size, local_rank=self.local_rank)
        told = {
            "RANK": self.rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_RANK": self.local_rank,
            "LOCAL_WORLD_SIZE": self.local_world_size,
            "GROUP_RANK": self.node_rank,
            "GROUP_WORLD_SIZE": self.nodes,
            "ROLE_NAME": "default",
            "ROLE_RANK": self.rank,
            "ROLE_WORLD_SIZE": self.world_size,
        }
        return {**{name: str(value) for name, value in told.items()}, **ours.to_environ()}


def rank_variables(rank: Rank, environ: Mapping[str, str], where: tuple[str, int]) -> dict[str, str]:
    """What a rank is told beyond `environ`, which all ranks of its attempt share. They meet at `where`."""
    return {
        **rank.variables(),
        "MASTER_ADDR": where[0],
        "MASTER_PORT": str(where[1]),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }


def launcher_variables(
    launcher: Launcher | None, *, gpus: int, node_rank: int, nodes: int, where: tuple[str, int]
) -> dict[str, str]:
    """What a launcher goes by where its command line says nothing else: the ranks of one host, and where.

    torchrun reads PET_<OPTION>: without a port of its own each would take 29500, and two on a host collide.
    An MPI is kept to this host and to the processes that its user asks for, whatever batch job it finds
    itself in: Slurm or LSF would give it the whole allocation.
    """
    if launcher is Launcher.TORCHRUN:
        told = {
            "NPROC_PER_NODE": gpus,
            "NNODES": nodes,
            "NODE_RANK": node_rank,
            "MASTER_ADDR": where[0],
            "MASTER_PORT": where[1],
        }
        return {f"PET_{name}": str(value) for name, value in told.items()}
    if launcher is Launcher.MPIRUN:
        not_batch = "^slurm,lsf,tm,gridengine,alps"
        return {
            **{f"{mpi}_MCA_{part}": not_batch for mpi in ("OMPI", "PRTE") for part in ("ras", "plm")},
            "HYDRA_RMK": "user",
            "HYDRA_LAUNCHER": "fork",
            "I_MPI_HYDRA_BOOTSTRAP": "fork",
        }
    return {}


def threads_of_all(
    shown: Mapping[str, str], *, devices: int, processes: int, cores: Collection[int] | None
) -> Mapping[str, str]:
    """What shows several devices to each of so many processes: they divide the threads of all.

    `shown` is for a rank on one of the devices. `cores`: those that they are pinned to, or None.
    """

    def each(count: int) -> int:
        return max(1, min(count * devices, len(cores) if cores else count * devices) // processes)

    threads = {name: str(each(int(shown[name]))) for name in THREADS if name in shown}
    return {**shown, **threads}


def identities(descriptors: Mapping[str, int]) -> dict[str, str]:
    """By what a process knows these descriptors again: the variable of each, and "device:inode".

    Whoever starts other programs closes what it does not know, and its children open files of their own under
    the same numbers. Raises OSError for a descriptor that is not open.
    """
    found = {}
    for name, descriptor in descriptors.items():
        seen = os.fstat(descriptor)
        found[variables.IDENTITIES[name]] = f"{seen.st_dev}:{seen.st_ino}"
    return found
