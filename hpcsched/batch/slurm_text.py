"""The arguments of Slurm's commands, and the parsing of what they print; nothing here runs a command."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from hpcsched.batch.base import BatchJobState, EndReason, Preemption
from hpcsched.batch.command import CommandOutput
from hpcsched.batch.hostlist import expand
from hpcsched.batch.numbers import whole

_STATES: dict[str, BatchJobState] = {
    word: state
    for state, words in (
        # A job being configured has hosts that are still booting: its script does not run yet.
        (
            BatchJobState.PENDING,
            "PENDING CONFIGURING REQUEUED REQUEUE_FED",
        ),
        (BatchJobState.HELD, "REQUEUE_HOLD SPECIAL_EXIT RESV_DEL_HOLD"),
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

_LIVELIEST = tuple(map(BatchJobState, ("RUNNING", "SUSPENDED", "PENDING", "HELD", "UNKNOWN", "ENDED")))


def state_of(state: str) -> BatchJobState:
    """The state for a word of squeue's long form ("CANCELLED by 0" too); UNKNOWN for unknown words."""
    word = state.split()[0].rstrip("+") if state.split() else ""
    return _STATES.get(word.upper(), BatchJobState.UNKNOWN)


# --- squeue ------------------------------------------------------------------


FEDERATED = 1 << 26
"""From this number on a job's id is a federation's, and names the same job on each of its clusters."""


def queue_argv(job_id: str, *asked: str) -> tuple[str, ...]:
    """The command that prints id, state, end time and reason of a job; of every task of an array.

    `asked`: which clusters, as options; none: this one alone. In a federation squeue shows by itself one of
    the copies of a job, be it one that waits in vain while another runs.
    """
    options = asked or ("--local",)
    show = ("--noheader", "--all", "--states=all", f"--jobs={job_id}", "--format=%A|%T|%e|%r")
    return ("squeue", *options, *show)


def show_argv(job_id: str, *options: str) -> tuple[str, ...]:
    """The command that prints all fields of a job of this cluster, in a line."""
    return ("scontrol", "--oneliner", "--local", *options, "show", "job", job_id)


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
    kept.pop("SLURM_CLUSTERS", None)
    return {**kept, "SLURM_TIME_FORMAT": "standard", "TZ": "UTC0", "LC_ALL": "C"}


def queue_rows(text: str) -> list[tuple[str, BatchJobState, float | str | None]]:
    """(id, life, end as Unix time) for each line of the answer; lines of another form are left out."""
    rows: list[tuple[str, BatchJobState, float | str | None]] = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split("|")]
        if len(fields) in (3, 4) and whole(fields[0]) is not None:
            state = state_of(fields[1])
            if state is BatchJobState.PENDING and is_held("".join(fields[3:])):
                state = BatchJobState.HELD
            rows.append((fields[0], state, utc_time(fields[2])))
    return rows


def is_held(reason: str) -> bool:
    """Whether squeue's reason is that of a job that somebody has to release.

    JobHeldUser, JobHeldAdmin, JobHoldMaxRequeue, "job requeued in held state", and after a prolog that failed
    "launch failed requeued held".
    """
    return re.search(r"held|JobHold", reason, re.IGNORECASE) is not None


def why_waiting(answer: CommandOutput, job_id: str) -> str:
    """The reason of a job that waits, as squeue has it; "" where it has none."""
    for line in answer.out.splitlines() if answer.code == 0 else ():
        found, state, _, why = [*(field.strip() for field in line.split("|")), "", "", ""][:4]
        if found == job_id and state_of(state) in (BatchJobState.PENDING, BatchJobState.HELD):
            return "" if why == "None" else why[:60]
    return ""


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
    return liveliest(states)


def liveliest(states: Iterable[BatchJobState]) -> BatchJobState:
    """The state of what is there several times: tasks of an array, copies on clusters of a federation."""
    found = set(states)
    return next((state for state in _LIVELIEST if state in found), BatchJobState.UNKNOWN)


GRACE_SLACK_S = 60.0
"""Time after its grace in which a preempted job may still be ended (chosen): Slurm checks now and then."""


# --- scontrol show job -------------------------------------------------------


_MOST_CHARS = 2**20
"""Characters of one job's line that are looked at (chosen)."""
_USER = re.compile(r" UserId=\S+\(\d+\) ")


def job_fields(text: str) -> dict[str, str]:
    """The `Key=value` words of `scontrol --oneliner show job`; of doubles the first, "(null)" left out.

    A job's name is left out: it may hold words of this form, and stands before most others. It ends before
    the last UserId; what a user writes into later fields (Command, WorkDir, Comment) is not searched.
    """
    text = text[:_MOST_CHARS]
    name = text.find(" JobName=")
    users = [found.start() for found in _USER.finditer(text.rpartition(" Command=")[0] or text, max(name, 0))]
    if name >= 0 and users:
        text = text[:name] + text[users[-1] :]
    fields: dict[str, str] = {}
    for key, equals, value in (word.partition("=") for word in text.split()):
        if key and equals and value not in ("", "(null)", "N/A", "None"):
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
        for host in expand(nodes):
            counts.setdefault(host, total)  # of a host in two components what the first has there
    return counts


def reason_in(answer: CommandOutput, job_id: str, restarts: int, grace_s: float | None = None) -> EndReason:
    """What `scontrol --oneliner show job` (22.05, in UTC) says of a job's end.

    `restarts` is how often the job had been put back into its queue when this life of it began, `grace_s`
    the time of grace before a preemption (0: there is none; None: not known).
    """
    fields = shown_in(answer, job_id)
    if fields is None:
        return EndReason.UNKNOWN
    state, why = fields.get("JobState", ""), fields.get("Reason", "")
    if (whole(fields.get("Restarts", "")) or 0) > restarts:
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


def shown_in(answer: CommandOutput, job_id: str) -> dict[str, str] | None:
    """The fields of one job in the answer to `show_argv`; None: it is not there."""
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
    grace_s = float(whole(grace) or 0)
    if not grace_s and re.search(r"^PreemptType\s*=\s*preempt/qos", config, re.MULTILINE) is None:
        return None
    return Preemption(grace_s=grace_s or None, requeues="REQUEUE" in ends)
