"""The environment of a worker: what it inherits, and what it is told of ranks, threads and descriptors."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpcsched.launch.base import RankPlacement
from hpcsched.launch.environment import (
    Rank,
    attempt_variables,
    descriptor_identities,
    divided_threads,
    inherited,
    rank_variables,
)

KEPT = (
    *("PATH", "SLURM_JOB_ID", "SLURM_JOBID", "SLURM_JOB_NODELIST", "SLURM_NNODES", "SLURM_CONF"),
    *("SLURM_CPUS_PER_TASK", "SLURM_JOB_END_TIME", "SLURM_ARRAY_TASK_ID", "LSB_JOBID", "LSB_HOSTS"),
    *("PBS_JOBID", "PBS_NODEFILE", "OMPI_MCA_btl", "I_MPI_FABRICS", "PMIX_MCA_gds", "HPCSCHED_DIR"),
    *("HPCSCHED_RUN_ID", "HPCSCHED_NODE", "OMP_NUM_THREADS", "RANKING", "NCCL_DEBUG", "TORCH_HOME"),
)
DROPPED = (
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE"),
    *("SLURM_NPROCS", "SLURM_TASKS_PER_NODE", "SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NODELIST"),
    *("SLURM_STEP_TASKS_PER_NODE", "SLURM_SRUN_COMM_PORT", "SLURM_TASK_PID", "SLURM_GTIDS"),
    *("SLURM_CPU_BIND", "SLURM_CPU_BIND_LIST", "SLURM_DISTRIBUTION", "SLURM_LAUNCH_NODE_IPADDR"),
    *("PMI_RANK", "PMI_SIZE", "PMI2_FD", "PMIX_RANK", "PMIX_SERVER_URI41", "JSM_NAMESPACE_RANK"),
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_MCA_orte_ess_jobid", "MPI_LOCALRANKID"),
    *("MV2_COMM_WORLD_RANK", "PALS_RANKID", "LSF_PM_TASKID", "PBS_TASKNUM", "PBS_NODENUM"),
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "MASTER_ADDR"),
    *("MASTER_PORT", "ROLE_RANK", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"),
    *("TORCHELASTIC_ERROR_FILE", "HPCSCHED_RANK", "HPCSCHED_JOB_ID", "HPCSCHED_PROGRESS_FD"),
    *("HPCSCHED_PROGRESS_ID", "HPCSCHED_JOINING", "HPCSCHED_STEPS"),
)


@pytest.mark.parametrize("name", DROPPED)
def test_what_is_said_of_other_ranks_or_jobs_is_not_inherited(name: str) -> None:
    kept = dict.fromkeys(KEPT, "1")
    assert inherited({**kept, name: "1"}) == kept


def test_a_rank_is_told_what_torchrun_would_tell_it() -> None:
    rank = Rank(rank=5, world_size=8, local_rank=1, local_world_size=4, node_rank=1, nodes=2)
    told = {
        **attempt_variables(run_id="r7", job_id=3, attempt=4, retries=2),
        **rank_variables(rank, {}, RankPlacement(address="n1", port=4711)),
    }
    assert told == {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_NAME": "default",
        "ROLE_RANK": "5",
        "ROLE_WORLD_SIZE": "8",
        "MASTER_ADDR": "n1",
        "MASTER_PORT": "4711",
        "TORCHELASTIC_RUN_ID": "r7.3",
        "TORCHELASTIC_RESTART_COUNT": "3",
        "TORCHELASTIC_MAX_RESTARTS": "2",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "HPCSCHED_RANK": "5",
        "HPCSCHED_WORLD_SIZE": "8",
        "HPCSCHED_LOCAL_RANK": "1",
    }
    # What every rank would wait for, and what nobody reads.
    assert not {"TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE"} & told.keys()


def test_how_nccl_errors_are_handled_is_the_users_to_say() -> None:
    name, rank = (
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        Rank(rank=0, world_size=1, local_rank=0, local_world_size=1),
    )
    assert rank_variables(rank, {name: "3"}, RankPlacement(address="n1", port=1))[name] == "3"


@pytest.mark.parametrize(
    ("devices", "processes", "cores", "threads"),
    [
        (1, 1, None, "2"),
        (4, 1, None, "8"),
        (4, 1, range(8), "8"),
        (4, 1, range(3), "3"),
        (4, 2, range(8), "4"),
    ],
)
def test_processes_on_several_devices_divide_the_threads_of_all(
    devices: int, processes: int, cores: range | None, threads: str
) -> None:
    shown = {"CUDA_VISIBLE_DEVICES": "0,1", "OMP_NUM_THREADS": "2"}
    among = divided_threads(shown, devices=devices, processes=processes, cores=cores)
    assert among == {**shown, "OMP_NUM_THREADS": threads}
    assert divided_threads({"A": "b"}, devices=devices, processes=processes, cores=cores) == {"A": "b"}


def test_descriptors_are_known_again_by_what_they_are(tmp_path: Path) -> None:
    read, write = os.pipe()
    other = os.dup(write)
    try:
        (told,) = descriptor_identities({"HPCSCHED_PROGRESS_FD": write}).items()
        assert told == (
            "HPCSCHED_PROGRESS_ID",
            descriptor_identities({"HPCSCHED_ARENA_FD": other})["HPCSCHED_ARENA_ID"],
        )
        with (tmp_path / "mine").open("w") as file:  # what a program opens when the number is free
            os.dup2(file.fileno(), write)
        assert descriptor_identities({"HPCSCHED_PROGRESS_FD": write}) != dict([told])
    finally:
        for descriptor in (read, write, other):
            os.close(descriptor)
