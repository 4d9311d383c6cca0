"""sbatch: what a follow-up job is submitted with; nothing here runs a command."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping

from hpcsched.contract.visibility import OF_BATCH_STEPS

_KEPT_FOR_SBATCH = {"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT"}
_OF_ONE_JOB = {
    # Which cluster this job was to go to: the one that follows goes where the run's files are.
    "SBATCH_CLUSTERS",
    *OF_BATCH_STEPS,
    "ZE_AFFINITY_MASK",
    "ENVIRONMENT",
    "HOSTNAME",
}


def submit_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Our environment without what describes this job.

    sbatch hands its environment on: SLURM_RESTART_COUNT and SLURM_GPUS of this job would stand in a
    follow-up job that does not set its own. HPCSCHED_* are the user's settings and go along.
    """
    job_id = environ.get("SLURM_JOB_ID", "")
    return {
        key: value
        for key, value in environ.items()
        if not (
            key.startswith(("SLURM_", "SLURMD_", "SRUN_", "PMI_", "PMIX_")) and key not in _KEPT_FOR_SBATCH
        )
        and key not in _OF_ONE_JOB
        and not (key == "TMPDIR" and job_id and job_id in value)
    }


_SHORT = {
    "-A": "--account",
    "-a": "--array",
    "-p": "--partition",
    "-q": "--qos",
    "-t": "--time",
    "-N": "--nodes",
    "-n": "--ntasks",
    "-c": "--cpus-per-task",
    "-G": "--gpus",
    "-J": "--job-name",
    "-D": "--chdir",
}
_GPUS = {"--gres", "--gpus", "--gpus-per-node", "--gpus-per-task", "--gpus-per-socket", "--ntasks-per-gpu"}
_MEMORY = {"--mem", "--mem-per-cpu", "--mem-per-gpu"}
_TASKS = {"--ntasks", "--ntasks-per-node", "--ntasks-per-gpu"}


def script_options(script: str) -> set[str]:
    """The long names of the options that a batch script's #SBATCH lines give."""
    found: set[str] = set()
    for line in script.splitlines():
        if line.startswith("#SBATCH"):
            for word in _words(line.removeprefix("#SBATCH")):
                if word.startswith("--"):
                    found.add(word.partition("=")[0])
                elif word[:2] in _SHORT:
                    found.add(_SHORT[word[:2]])
        elif line.strip() and not line.startswith("#"):
            break  # Slurm reads no further than the first command
    return found


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text, comments=True)
    except ValueError:
        return text.split()


def inherited_options(
    script: str, fields: Mapping[str, str], environ: Mapping[str, str], *, own: bool = False
) -> list[str]:
    """The options a job was given beside its script, as far as Slurm tells, for one that follows it.

    Args:
        script: text of the script to submit; what it says itself is left to it, unless it is the running
            job's own: then what the job has, which may have been said on the command line, counts.
        own: whether it is.
        fields: of `job_fields`, for the running job.
        environ: of the running job: sbatch sets these variables if and only if it was asked for them.
    """
    given = script_options(script)
    options = [
        (option, value, {option})
        for option, value in (
            ("--account", fields.get("Account")),
            ("--partition", fields.get("Partition")),
            ("--qos", fields.get("QOS")),
            ("--time", fields.get("TimeLimit")),
            ("--nodes", fields.get("NumNodes")),
            ("--job-name", environ.get("SLURM_JOB_NAME")),
            ("--chdir", fields.get("WorkDir")),
            ("--cpus-per-task", environ.get("SLURM_CPUS_PER_TASK")),
        )
    ]
    # One word too many among these and sbatch refuses: all or none of each kind.
    options += [
        ("--gres", _gpu_request(fields.get("TresPerNode")), _GPUS),
        ("--gpus", _gpu_request(fields.get("TresPerJob")), _GPUS),
        ("--gpus-per-task", _gpu_request(fields.get("TresPerTask")), _GPUS),
        ("--ntasks", environ.get("SLURM_NTASKS"), _TASKS),
        ("--mem", environ.get("SLURM_MEM_PER_NODE"), _MEMORY),
        ("--mem-per-cpu", environ.get("SLURM_MEM_PER_CPU"), _MEMORY),
        ("--mem-per-gpu", environ.get("SLURM_MEM_PER_GPU"), _MEMORY),
    ]
    return [
        f"{option}={value}"
        for option, value, kind in options
        if value and not (kind & given) - ({option} if own else set())
    ]


def _gpu_request(tres: str | None) -> str | None:
    """`gres:gpu:6` (24.05 and later: `gres/gpu:6`) as an option's value; --gpus takes `gpu:6` too."""
    if tres is None:
        return None
    asked = [part for part in re.split(r",?gres[:/]", tres) if part.startswith("gpu")]
    return ",".join(asked) or None
