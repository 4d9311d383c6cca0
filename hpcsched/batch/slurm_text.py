"""The arguments of Slurm's commands, and the parsing of what they print; nothing here runs a command."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence

from hpcsched.batch.base import BatchJobState, EndReason, Preemption
from hpcsched.batch.command import CommandOutput
from hpcsched.batch.hostlist import expand, expand_counts
from hpcsched.contract.visibility import CUDA, OF_BATCH_STEPS
from hpcsched.errors import BatchError

_STATES: dict[str, BatchJobState] = {
    word: state
    for state, words in (
        # A job being configured has hosts that are still booting: its script does not run yet.
        (
            BatchJobState.PENDING,
            "PENDING CONFIGURING REQUEUED REQUEUE_FED REQUEUE_HOLD SPECIAL_EXIT RESV_DEL_HOLD",
        ),
        # A completing job still has processes somewhere.
        (BatchJobState.RUNNING, "RUNNING COMPLETING RESIZING SIGNALING"),
        (BatchJobState.SUSPENDED, "SUSPENDED STOPPED"),
        (
            BatchJobState.ENDED,
            "BOOT_FAIL CANCELLED COMPLETED DEADLINE FAILED LAUNCH_FAILED NODE_FAIL OUT_OF_MEMORY PREEMPTED "
            "RECONFIG_FAIL REVOKED STAGE_OUT TIMEOUT",
        ),
    )
    for word in words.split()
}

_LIVELIEST = tuple(map(BatchJobState, ("RUNNING", "SUSPENDED", "PENDING", "UNKNOWN", "ENDED")))


def state_of(state: str) -> BatchJobState:
    """The state for a word of squeue's long form ("CANCELLED by 0" too); UNKNOWN for unknown words."""
    word = state.split()[0].rstrip("+") if state.split() else ""
    return _STATES.get(word.upper(), BatchJobState.UNKNOWN)


# --- squeue ------------------------------------------------------------------


def queue_argv(job_id: str) -> tuple[str, ...]:
    """The command that prints id, state and end time of a job; of every task of an array."""
    return ("squeue", "--noheader", "--all", "--states=all", f"--jobs={job_id}", "--format=%A|%T|%e")


def cluster_in(config: str) -> str | None:
    """The cluster's name in `scontrol show config`."""
    found = re.search(r"^ClusterName\s*=\s*(\S+)", config, re.MULTILINE)
    return found[1] if found else None


def queue_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment in which squeue prints what `queue_rows` reads.

    Without the user's defaults (SQUEUE_STATES would hide jobs), in English, and in UTC: it prints local
    time without saying which, and in the hour that a change of the clocks repeats nobody could tell.
    """
    kept = {key: value for key, value in environ.items() if not key.startswith("SQUEUE_") and key != "LANG"}
    return {**kept, "SLURM_TIME_FORMAT": "standard", "TZ": "UTC0", "LC_ALL": "C"}


def queue_rows(text: str) -> list[tuple[str, BatchJobState, float | str | None]]:
    """(id, life, end as Unix time) for each line of the answer; lines of another form are left out."""
    rows: list[tuple[str, BatchJobState, float | str | None]] = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split("|")]
        if len(fields) == 3 and fields[0].isdigit():
            rows.append((fields[0], state_of(fields[1]), utc_time(fields[2])))
    return rows


def utc_time(text: str) -> float | str | None:
    """Unix time of `2026-11-21T06:37:43`; None for "no limit" and "not yet"; what is neither as it is."""
    from datetime import UTC, datetime

    if text.upper() in ("N/A", "NONE", "UNLIMITED", "INFINITE"):
        return None
    try:
        if re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d", text):
            return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()
    except ValueError:
        pass
    return text


def state_in(answer: CommandOutput, job_id: str) -> BatchJobState:
    """The state of a job in squeue's answer: a job that the controller has forgotten has ended."""
    if answer.code != 0:
        forgotten = "invalid job id specified" in answer.err.lower()
        return BatchJobState.ENDED if forgotten else BatchJobState.UNKNOWN
    rows = queue_rows(answer.out)
    # --clusters has a heading.
    if not rows and all(line.startswith("CLUSTER:") for line in answer.out.split("\n") if line.strip()):
        return BatchJobState.ENDED
    states = {state for found, state, _ in rows if found == job_id} or {state for _, state, _ in rows}
    return next((state for state in _LIVELIEST if state in states), BatchJobState.UNKNOWN)


GRACE_SLACK_S = 60.0
"""Time after its grace in which a preempted job may still be ended (chosen): Slurm checks now and then."""


# --- scontrol show job -------------------------------------------------------


def job_fields(text: str) -> dict[str, str]:
    """The `Key=value` words of `scontrol --oneliner show job`; of doubles the first, "(null)" left out.

    A job's name is left out: it may hold words of this form, and stands before most others.
    """
    text = re.sub(r" JobName=.*? (?=UserId=\S+\(\d+\) )", " ", text)
    fields: dict[str, str] = {}
    for key, value in re.findall(r"(\S+?)=(\S*)", text):
        if value not in ("", "(null)", "N/A", "None"):
            fields.setdefault(key, value)
    return fields


def gpu_counts(text: str) -> dict[str, int]:
    """The number of GPUs of a job by host, from `scontrol --details --oneliner show job`.

    Raises ValueError when a list of hosts cannot be read.
    """
    counts: dict[str, int] = {}
    for nodes, gres in re.findall(r"\bNodes=(\S+) CPU_IDs=\S* Mem=\S* GRES=(\S*)", text):
        # gpu:6(IDX:0-5), gpu:a100:2(IDX:0,3),gpu:v100:1(IDX:2), gpu:a100_1g.5gb:2(IDX:0-1)
        total = sum(int(n) for n in re.findall(r"\bgpu:(?:[^,:()]+:)?(\d+)\b", gres))
        counts.update(dict.fromkeys(expand(nodes), total))
    return counts


def reason_in(answer: CommandOutput, job_id: str, restarts: int, grace_s: float | None = None) -> EndReason:
    """What `scontrol --oneliner show job` (22.05, in UTC) says of a job's end.

    `restarts` is how often the job had been put back into its queue when this life of it began, `grace_s`
    the time of grace before a preemption (0: there is none; None: not known).
    """
    fields = _shown(answer, job_id)
    if fields is None:
        return EndReason.UNKNOWN
    state, why = fields.get("JobState", ""), fields.get("Reason", "")
    times = fields.get("Restarts", "")
    if times.isdigit() and int(times) > restarts:
        return EndReason.REQUEUED
    running = state_of(state) in (BatchJobState.RUNNING, BatchJobState.SUSPENDED) and state != "COMPLETING"
    preempted, ended = (utc_time(fields.get(key, "NONE")) for key in ("PreemptTime", "EndTime"))
    if state == "PREEMPTED":
        return EndReason.PREEMPTED
    if isinstance(preempted, float) and _by_preemption(preempted, ended, grace_s, running=running):
        return EndReason.PREEMPTED
    if running:
        return EndReason.NONE
    if state in ("NODE_FAIL", "BOOT_FAIL") or why == "NodeDown":
        return EndReason.NODE_FAIL
    if why == "TimeLimit" or state in ("TIMEOUT", "DEADLINE"):
        return EndReason.LIMIT
    return EndReason.CANCELLED if state in ("COMPLETING", "CANCELLED") else EndReason.UNKNOWN


def restarts_in(answer: CommandOutput, job_id: str) -> int | None:
    """How often a job has been put back into its queue, by the same words."""
    times = (_shown(answer, job_id) or {}).get("Restarts", "")
    return int(times) if times.isdigit() else None


def _shown(answer: CommandOutput, job_id: str) -> dict[str, str] | None:
    lines = answer.out.splitlines() if answer.code == 0 else []
    # The id of an array's last task is that of the whole array, of which all tasks are shown.
    return next((f for line in lines if (f := job_fields(line)).get("JobId") == job_id), None)


def _by_preemption(
    preempted: float, ended: float | str | None, grace_s: float | None, *, running: bool
) -> bool:
    """Whether it is the preemption that ends the job, or is going to, and not a cancel in the time of grace.

    The end it has then is that of the grace; when it comes some releases move PreemptTime there too.
    PreemptTime is also set when a job was suspended for another, and ends nothing.
    """
    if not isinstance(ended, float):
        return not running or grace_s is None
    after_s = ended - preempted
    if running:
        return grace_s is None or after_s <= grace_s + GRACE_SLACK_S
    if after_s <= 1.0:
        return True
    return bool(grace_s) and -2.0 <= after_s - (grace_s or 0.0) <= GRACE_SLACK_S


def kill_wait_in(text: str) -> float | None:
    """Seconds of `KillWait = 30 sec` in `scontrol show config`."""
    found = re.search(r"^KillWait\s*=\s*(\d+) sec", text, re.MULTILINE)
    return float(found[1]) if found else None


def preemption_in(partition: str, config: str) -> Preemption | None:
    """From `scontrol --oneliner show partition` and `scontrol show config`; None: no notice is given.

    Where a QOS decides who is preempted, the grace is the QOS's own, which users are not told.
    """
    fields = job_fields(partition)
    mode, grace = fields.get("PreemptMode", ""), fields.get("GraceTime", "")
    ends = {"REQUEUE", "CANCEL"} & set(mode.split(","))
    if not ends:
        return None
    grace_s = float(grace) if grace.isdigit() else 0.0
    if not grace_s and re.search(r"^PreemptType\s*=\s*preempt/qos", config, re.MULTILINE) is None:
        return None
    return Preemption(grace_s=grace_s or None, requeues="REQUEUE" in ends)


# --- sbatch ------------------------------------------------------------------

_KEPT_FOR_SBATCH = {"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "SLURM_CLUSTERS"}
_OF_ONE_JOB = {
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


# --- srun --------------------------------------------------------------------

_SIZES = re.compile(
    "SRUN_.*|SLURM_(?:NTASKS|NPROCS|NNODES|TASKS_PER|CPUS_PER|CPU_BIND|CPU_FREQ|GPU|GRES|MEM|TRES|ACCEL|THREADS"
    "|CORE_SPEC|HINT|EXACT|EXCLUSIVE|OVERLAP|OVERCOMMIT|WHOLE|DISTRIBUTION|TIMELIMIT|IMMEDIATE|WAIT|KILL_BAD"
    "|HOSTFILE|MULTI_PROG|STD(?:IN|OUT|ERR)MODE|UNBUFFEREDIO|LABELIO|OPEN_MODE|EXPORT_ENV|RELATIVE|STEP_"
    "|SPREAD_JOB|USE_MIN|RESV_PORTS|PROLOG|EPILOG|TASK_PROLOG|TASK_EPILOG|NO_KILL|ARRAY_INX|REQ_SWITCH).*"
)


def step_argv(
    job_id: str, host: str, gpus: int | None, environ: Mapping[str, str], argv: Sequence[str]
) -> tuple[str, ...]:
    """One job step of one process on one host, beside all others, with all that the job has there.

    srun takes each of its options from a variable too, and sbatch leaves many of them in a job's
    environment with the meaning they had for the whole job: with SLURM_GPUS=12 a step on one of two hosts
    is refused, with SLURM_GPUS_PER_TASK=3 it sees three of six GPUs. Those variables are taken out.

    `gpus` is how many the job has on that host. It is always said, as --gpus: left out, a step gets what a
    task or the whole job asked for; as --gres it is refused where the hosts of a job have different numbers.
    """
    unset = [word for key in sorted(environ) if _SIZES.fullmatch(key) for word in ("-u", key)]
    return (
        *(("env", *unset) if unset else ()),
        "srun",
        "--quiet",
        f"--jobid={job_id}",
        "--overlap",
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
    digits = (text or "").rpartition(":")[2]
    return int(digits) if digits.isdigit() else 0


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
                raise BatchError(f"{name}: {error}") from None
            return tuple(dict.fromkeys(hosts))
    raise BatchError("SLURM_JOB_NODELIST is not set: this is not inside a running Slurm job")
