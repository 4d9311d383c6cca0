"""The environment of a worker: the variables that it inherits, and those about its ranks and threads.

Pure functions. A rank gets the variables that torchrun would set; a single process, and a launcher such as
torchrun itself, get none about ranks. Those of a batch step or an MPI around the agent are removed: libraries
that find them (MPI, Lightning) would take the agent's numbers for the worker's.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from hpcsched.contract import variables
from hpcsched.contract.environment import Environment
from hpcsched.contract.ranks import TORCHELASTIC, tells_rank
from hpcsched.core.processes import KnownLauncher
from hpcsched.launch.base import Rendezvous

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

_REMOVED = variables.OF_AN_ATTEMPT | {variables.NOTIFY_WEBHOOK}

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def inherited(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of `environ`, the agent's environment, that workers inherit.

    Variables of the contract are removed: they are there if the agent is itself an attempt of another run. So
    is the address of a webhook, which is often a secret.
    """
    return {
        name: value
        for name, value in environ.items()
        if not (_OF_A_STEP.match(name) or tells_rank(name) or name in _REMOVED)
    }


def attempt_variables(*, run_id: str, job_id: int, attempt: int, retries: int) -> dict[str, str]:
    """The TORCHELASTIC_* variables that torchrun sets for all ranks.

    Without TORCHELASTIC_USE_AGENT_STORE, with which ranks would wait for a store that torchrun serves, and
    TORCHELASTIC_ERROR_FILE, which is not read.
    """
    told = {"RUN_ID": f"{run_id}.{job_id}", "RESTART_COUNT": attempt - 1, "MAX_RESTARTS": retries}
    return {f"{TORCHELASTIC}{name}": str(value) for name, value in told.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """The numbers of one rank: among all, among those started with it on its host, and of its host."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int = 0
    nodes: int = 1

    def variables(self) -> dict[str, str]:
        """The variables that torchrun sets for a rank, and the contract's for the first three."""
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


def rank_variables(rank: Rank, environ: Mapping[str, str], where: Rendezvous) -> dict[str, str]:
    """The variables of a rank beyond `environ`, which all ranks share; their rendezvous is `where`."""
    return {
        **rank.variables(),
        "MASTER_ADDR": where.address,
        "MASTER_PORT": str(where.port),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }


def launcher_variables(
    launcher: KnownLauncher | None, *, gpus: int, node_rank: int, nodes: int, where: Rendezvous
) -> dict[str, str]:
    """The variables that set a launcher's defaults: the ranks of one host, and their rendezvous `where`.

    torchrun reads PET_<OPTION>: without a port each would take 29500, and two on a host collide. An MPI is
    kept to this host and to the processes that its user asks for: in a Slurm or LSF job it would take the
    whole allocation.
    """
    if launcher is KnownLauncher.TORCHRUN:
        told = {
            "NPROC_PER_NODE": gpus,
            "NNODES": nodes,
            "NODE_RANK": node_rank,
            "MASTER_ADDR": where.address,
            "MASTER_PORT": where.port,
        }
        return {f"PET_{name}": str(value) for name, value in told.items()}
    if launcher is KnownLauncher.MPIRUN:
        not_batch = "^slurm,lsf,tm,gridengine,alps"
        return {
            **{f"{mpi}_MCA_{part}": not_batch for mpi in ("OMPI", "PRTE") for part in ("ras", "plm")},
            "HYDRA_RMK": "user",
            "HYDRA_LAUNCHER": "fork",
            "I_MPI_HYDRA_BOOTSTRAP": "fork",
        }
    return {}


def divided_threads(
    shown: Mapping[str, str], *, devices: int, processes: int, cores: Collection[int] | None
) -> Mapping[str, str]:
    """The variables of `processes` that see all of `devices`: they divide the threads of all devices.

    `shown`: the variables of a rank on one of the devices. `cores`: those that they are pinned to, or None.
    """

    def each(count: int) -> int:
        return max(1, min(count * devices, len(cores) if cores else count * devices) // processes)

    threads = {name: str(each(int(shown[name]))) for name in THREAD_VARIABLES if name in shown}
    return {**shown, **threads}


def descriptor_identities(descriptors: Mapping[str, int]) -> dict[str, str]:
    """The variables by which a process recognises its descriptors: the value of each is "device:inode".

    A launcher may close descriptors that it does not know, and its children open other files under the same
    numbers. Raises OSError for a descriptor that is not open.
    """
    found = {}
    for name, descriptor in descriptors.items():
        seen = os.fstat(descriptor)
        found[variables.IDENTITIES[name]] = f"{seen.st_dev}:{seen.st_ino}"
    return found
