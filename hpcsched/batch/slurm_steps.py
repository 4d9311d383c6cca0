"""The parts of a Slurm job, and the job steps that go to them; nothing here runs a command."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from hpcsched.batch.hostlist import expand, expand_counts
from hpcsched.batch.numbers import whole
from hpcsched.contract.visibility import CUDA
from hpcsched.errors import MOST_SHOWN, BatchError
from hpcsched.printing import shortened

_SIZES = re.compile(
    "SRUN_.*|SLURM_(?:NTASKS|NPROCS|NNODES|TASKS_PER|CPUS_PER|CPU_BIND|CPU_FREQ|GPU|GRES|MEM|TRES|ACCEL|THREADS"
    "|CORE_SPEC|HINT|EXACT|EXCLUSIVE|OVERLAP|OVERCOMMIT|WHOLE|DISTRIBUTION|TIMELIMIT|IMMEDIATE|WAIT|KILL_BAD"
    "|HOSTFILE|MULTI_PROG|STD(?:IN|OUT|ERR)MODE|UNBUFFEREDIO|LABELIO|OPEN_MODE|EXPORT_ENV|RELATIVE|STEP_"
    "|SPREAD_JOB|USE_MIN|RESV_PORTS|PROLOG|EPILOG|TASK_PROLOG|TASK_EPILOG|NO_KILL|ARRAY_INX|REQ_SWITCH).*"
)


def step_argv(
    job_id: str,
    host: str,
    gpus: int | None,
    environ: Mapping[str, str],
    argv: Sequence[str],
    *,
    component: int | None = None,
    overlap: bool = True,
) -> tuple[str, ...]:
    """One job step of one process on one host, beside all others, with all that the job has there.

    srun takes each of its options from a variable too, and sbatch leaves many of them in a job's
    environment with the meaning they had for the whole job: with SLURM_GPUS=12 a step on one of two hosts
    is refused, with SLURM_GPUS_PER_TASK=3 it sees three of six GPUs. Those variables are taken out.

    `gpus` is how many the job has on that host. It is always said, as --gpus: left out, a step gets what a
    task or the whole job asked for; as --gres it is refused where the hosts of a job have different numbers.
    `component`: the host's, in a heterogeneous job. `overlap`: whether srun knows the option; before it came
    steps shared what the job has by themselves.
    """
    unset = [word for key in sorted(environ) if _SIZES.fullmatch(key) for word in ("-u", key)]
    return (
        *(("env", *unset) if unset else ()),
        "srun",
        "--quiet",
        f"--jobid={job_id}",
        *(("--overlap",) if overlap else ()),
        *((f"--het-group={component}",) if component is not None else ()),
        "--nodes=1",
        "--ntasks=1",
        f"--nodelist={host}",
        *((f"--gpus={gpus}",) if gpus else ()),
        "--mem=0",
        "--cpu-bind=none",
        "--mpi=none",
        "--input=none",
        "--kill-on-bad-exit=0",
        "--export=ALL",
        *argv,
    )


OVERLAP_SINCE = (20, 11)
"""The release from which on srun has --overlap, and needs it."""


def has_overlap(version: str) -> bool:
    """Whether the srun that says this of its version has --overlap; an answer not understood: it has."""
    found = re.match(r"slurm\S* (\d{1,6})\.(\d{1,6})", version)
    return found is None or (int(found[1]), int(found[2])) >= OVERLAP_SINCE


def components(environ: Mapping[str, str]) -> tuple[Mapping[str, str], ...]:
    """The variables of each component of a heterogeneous job, by their plain names; else the job's own.

    The batch script runs in component 0, whose variables stand in its environment without a number too.
    """
    size = _number(environ.get("SLURM_HET_SIZE"))
    if not 1 < size <= _MOST_COMPONENTS:
        return (environ,)
    found = []
    for at in range(size):
        mark = f"_HET_GROUP_{at}"
        mine = {key.removesuffix(mark): value for key, value in environ.items() if key.endswith(mark)}
        found.append({**environ, **mine} if at == 0 else mine)
    return tuple(found)


_MOST_COMPONENTS = 128
"""Slurm's own bound (MAX_HET_JOB_COMPS)."""


def host_gpus(environ: Mapping[str, str]) -> tuple[str, ...] | None:
    """The GPUs of the host we are on, from this job's environment; None when it does not say."""
    for name in (CUDA.variable, "SLURM_STEP_GPUS", "SLURM_JOB_GPUS"):
        text = environ.get(name)
        if text is not None:
            return _device_names(text)
    return None


def _device_names(text: str) -> tuple[str, ...]:
    """`0,1`, `0-3`, `GPU-5a…,MIG-…`; nothing from "", "NoDevFiles" and, as CUDA has it, from -1 on."""
    names: list[str] = []
    for name in (word.strip() for word in text.split(",")):
        if name in (*CUDA.none, "NoDevFiles"):
            break
        span = re.fullmatch(r"(\d{1,4})-(\d{1,4})", name)
        names.extend(map(str, range(int(span[1]), int(span[2]) + 1)) if span else (name,))
    return tuple(names)


def gpus_by_request(environ: Mapping[str, str], hosts: Sequence[str]) -> Iterator[tuple[str, int]]:
    """How many GPUs each host should have, by what sbatch was asked for: when Slurm cannot be asked."""
    here = environ.get("SLURMD_NODENAME")
    on_node = _number(environ.get("SLURM_GPUS_ON_NODE"))
    per_node, per_task = (_number(environ.get(f"SLURM_GPUS_PER_{what}")) for what in ("NODE", "TASK"))
    try:
        tasks = expand_counts(environ.get("SLURM_TASKS_PER_NODE", ""))
    except ValueError:
        tasks = ()
    for at, host in enumerate(hosts):
        if host == here and on_node:
            yield host, on_node
        elif per_node:
            yield host, per_node
        elif per_task and len(tasks) == len(hosts):
            yield host, per_task * tasks[at]
        elif on_node:
            yield host, on_node


def _number(text: str | None) -> int:
    """6 from `6` and from `a100:6`; 0 from anything else."""
    return whole((text or "").rpartition(":")[2]) or 0


def cpu_counts(text: str, hosts: int) -> tuple[int | None, ...]:
    """CPUs on each of so many hosts, from SLURM_JOB_CPUS_PER_NODE; None each when it does not fit."""
    try:
        counts = expand_counts(text)
    except ValueError:
        counts = ()
    return counts if len(counts) == hosts else (None,) * hosts


def hosts_of(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The job's hosts; raises BatchError, naming the variable, when they are missing or cannot be read."""
    for name in ("SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        text = environ.get(name, "").strip()
        if text:
            try:
                hosts = expand(text)
            except ValueError as error:
                raise BatchError(f"{name}: {shortened(str(error), MOST_SHOWN)}") from None
            return tuple(dict.fromkeys(hosts))
    raise BatchError("SLURM_JOB_NODELIST is not set: this is not inside a running Slurm job")
