"""What a Slurm site allows, for `doctor`: limits of controller, partition, account and QOS, in words."""

from __future__ import annotations

import functools
import getpass
import re
from collections.abc import Iterator, Mapping, Sequence

from hpcsched.batch import slurm_text
from hpcsched.batch.command import RunCommand, command_output, run_command
from hpcsched.batch.numbers import whole
from hpcsched.contract.exits import WORK_LEFT
from hpcsched.errors import BatchError

ASKED_FOR_S = 5.0
"""Longest wait for each of the answers (chosen): a site may forbid the question, or have no database."""

MOST = 6
"""Most partitions and accounts that are told of (chosen)."""

Limit = tuple[str, str]
"""What is limited, and the limit with what it means for a run."""

_NO_LIMIT = ("", "(null)", "N/A", "NONE", "None", "UNLIMITED", "INFINITE", "NO", "Unlimited")


def limits(
    environ: Mapping[str, str],
    *,
    run: RunCommand | None = None,
    user: str | None = None,
) -> Iterator[Limit]:
    """The limits that Slurm tells of: for the job around us, outside one for all partitions and accounts.

    What cannot be asked is left out. `user`: None means this process's.
    """
    asked = slurm_text.queue_environ(environ)
    command = run or functools.partial(run_command, timeout_s=ASKED_FOR_S)

    def ask(*argv: str) -> str:
        try:
            return command_output(command, argv, environ=asked)
        except BatchError:
            return ""

    job_id, partition = environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_JOB_PARTITION", "")
    config = config_fields(ask("scontrol", "show", "config"))
    if not config:
        return
    yield from of_controller(config)
    shown = ask("scontrol", "--oneliner", "show", "partition", *([partition] if partition else []))
    rows = [slurm_text.job_fields(line) for line in shown.splitlines() if line.startswith("PartitionName=")]
    for fields in rows[:MOST]:
        yield from of_partition(fields, config, briefly=len(rows) > 1)
    if config.get("AccountingStorageType", "").endswith("none"):
        return
    job = {}
    if job_id:
        job = slurm_text.job_fields(ask(*slurm_text.show_argv(job_id)))
    who = user or getpass.getuser()
    cluster = config.get("ClusterName", "")
    columns = ",".join(ACCOUNT_COLUMNS)
    show = ("sacctmgr", "--noheader", "--parsable2", "--readonly", "show")
    own = ask(*show, "assoc", f"user={who}", f"cluster={cluster}", f"format={columns}")
    accounts = account_rows(own)
    if job.get("Account"):
        accounts = [row for row in accounts if row["Account"] == job["Account"]]
    names = ",".join(dict.fromkeys(row["Account"] for row in accounts[:MOST]))
    if names:
        query = ("assoc", f"account={names}", "user=", f"cluster={cluster}", f"format={columns}")
        accounts = [*account_rows(ask(*show, *query)), *accounts]
    yield from of_accounts(accounts[: 2 * MOST], config)
    qos = job.get("QOS") or ",".join(sorted({name for row in accounts for name in row["QOS"].split(",")}))
    if qos.strip(","):
        said = ask(*show, "qos", f"name={qos.strip(',')}", f"format={','.join(QOS_COLUMNS)}")
        yield from of_qos(said, config)


def config_fields(text: str) -> dict[str, str]:
    """The settings in `scontrol show config`."""
    found = re.findall(r"^(\w+)\s*= (.*?)\s*$", text, re.MULTILINE)
    return {key: value for key, value in found if value not in ("(null)", "")}


def of_controller(config: Mapping[str, str]) -> Iterator[Limit]:
    """What the controller's settings mean."""
    if wait := re.match(r"(\d+) sec", config.get("KillWait", "")):
        yield (
            "KillWait",
            f"{wait[1]} s from SIGTERM to SIGKILL when Slurm ends a job: what has not saved by then is lost",
        )
    match config.get("JobRequeue"):
        case "1":
            yield (
                "JobRequeue",
                "1: jobs are put back into the queue (--requeue), unless submitted with --no-requeue",
            )
        case "0":
            yield (
                "JobRequeue",
                "0: for --requeue the script needs #SBATCH --requeue; where that is forbidden, --chain",
            )
    for key, what in (("RequeueExit", "requeues"), ("RequeueExitHold", "requeues and holds")):
        codes = config.get(key, "")
        if codes:
            ours = f", also a run that stops with work left ({WORK_LEFT}), so drained ones"
            yield key, f"{codes}: Slurm {what} jobs that end so{ours if has_code(codes, WORK_LEFT) else ''}"
    options = config.get("SchedulerParameters", "").split(",")
    for option in options:
        key, _, value = option.partition("=")
        if key == "max_batch_requeue":
            yield (
                key,
                f"{value}: after so many requeues Slurm may hold a job, as JobHoldMaxRequeue",
            )
        elif key == "disable_job_shrink":
            yield key, "--release-idle-nodes is refused"
        elif key == "nohold_on_prolog_fail":
            yield key, "a job whose prolog fails waits in the queue again, and is not held"
    if config.get("OverTimeLimit", "0 min").split()[0] not in ("0", "UNLIMITED"):
        yield (
            "OverTimeLimit",
            f"{config['OverTimeLimit']} beyond a limit jobs live on; a run does not count on it",
        )
    exempt = config.get("PreemptExemptTime", "00:00:00")
    if exempt not in ("00:00:00", *_NO_LIMIT):
        yield "PreemptExemptTime", f"{exempt}: so long a job is not preempted after its start"
    tracking = config.get("ProctrackType", "").rpartition("/")[2]
    if tracking and tracking != "cgroup":
        yield "ProctrackType", f"{tracking}: what leaves its process group may outlive a job"


def has_code(codes: str, code: int) -> bool:
    """Whether `3,70-79` has an exit code."""
    for part in codes.split(","):
        first, _, last = part.strip().partition("-")
        if (low := whole(first)) is not None and low <= code <= (low if whole(last) is None else int(last)):
            return True
    return False


_MEMORY = {
    "DefMemPerCPU": "a job that asks for no memory gets so many MiB for each CPU",
    "DefMemPerNode": "a job that asks for no memory gets so many MiB on each node",
    "DefMemPerGPU": "a job that asks for no memory gets so many MiB for each GPU",
    "MaxMemPerCPU": "at most so many MiB for each CPU",
    "MaxMemPerNode": "at most so many MiB on each node",
}


def of_partition(
    fields: Mapping[str, str], config: Mapping[str, str], *, briefly: bool = False
) -> Iterator[Limit]:
    """What a partition's settings mean: a line for each, or `briefly` one for all."""
    name = fields.get("PartitionName", "?") + (" (default)" if fields.get("Default") == "YES" else "")
    parts: list[Limit] = []
    if fields.get("State", "UP") != "UP":
        parts.append((f"State={fields['State']}", "no job starts there now"))
    if _limited(fields, "MaxTime"):
        parts.append((f"MaxTime={fields['MaxTime']}", "the longest --time; longer sets come back"))
    if _limited(fields, "DefaultTime"):
        parts.append((f"DefaultTime={fields['DefaultTime']}", "the time of a job without --time"))
    if _limited(fields, "MaxNodes"):
        parts.append((f"MaxNodes={fields['MaxNodes']}", "the most --nodes"))
    parts += _preemption(fields, config)
    for key, meaning in _MEMORY.items():
        source = fields if _limited(fields, key) else config
        if _limited(source, key):
            parts.append((f"{key}={source[key]}", f"{meaning}{_OWN_MEMORY if key.startswith('Def') else ''}"))
    if _limited(fields, "QoS"):
        parts.append((f"QoS={fields['QoS']}", "its limits hold for all jobs there"))
    if fields.get("OverSubscribe", "NO").startswith("FORCE"):
        parts.append((f"OverSubscribe={fields['OverSubscribe']}", "other jobs compute on the same CPUs"))
    if briefly:
        yield f"partition {name}", ", ".join(word for word, _ in parts) or "no limits"
        return
    for word, meaning in parts:
        yield f"partition {name}", f"{word}: {meaning}"
    if not parts:
        yield f"partition {name}", "no limits"


_OWN_MEMORY = "; more by --mem"


def _preemption(fields: Mapping[str, str], config: Mapping[str, str]) -> Iterator[Limit]:
    mode = fields.get("PreemptMode", config.get("PreemptMode", "OFF"))
    if mode in ("OFF", *_NO_LIMIT) or config.get("PreemptType", "").endswith("none"):
        return
    preemption = slurm_text.preemption_in(f"PreemptMode={mode} GraceTime={fields.get('GraceTime', '0')}", "")
    grace = preemption.grace_s if preemption else None
    notice = f"{grace:g} s of grace to save in" if grace else "no notice but KillWait"
    then = "requeued" if "REQUEUE" in mode else "cancelled" if "CANCEL" in mode else "suspended"
    how = "keeping all memory" if then == "suspended" else f"with {notice}"
    yield (
        f"PreemptMode={mode} GraceTime={fields.get('GraceTime', '0')}",
        f"jobs may have to make way: {then}, {how}",
    )


ACCOUNT_COLUMNS = (
    *("Account", "User", "Partition", "QOS", "MaxJobs", "MaxSubmit", "MaxWall", "MaxTRES"),
    *("GrpJobs", "GrpSubmit", "GrpTRES", "GrpTRESMins", "GrpWall"),
)
QOS_COLUMNS = (
    *("Name", "MaxWall", "MaxTRES", "MaxTRESPU", "MaxJobsPU", "MaxSubmitPU"),
    *("GrpTRES", "GrpJobs", "GraceTime", "PreemptMode"),
)
_MEANS = {
    "MaxJobs": "at most {} jobs at a time",
    "MaxSubmit": "at most {} jobs in the queue (a chain needs one more)",
    "MaxWall": "at most {} for each job (--time)",
    "MaxTRES": "at most {} for each job",
    "MaxTRESPU": "at most {} for each user",
    "MaxJobsPU": "at most {} jobs of a user at a time",
    "MaxSubmitPU": "at most {} jobs of a user in the queue (a chain needs one more)",
    "GrpJobs": "at most {} jobs of all its users at a time",
    "GrpSubmit": "at most {} jobs of all its users in the queue",
    "GrpTRES": "at most {} for all its users together",
    "GrpTRESMins": "{} minutes in all",
    "GrpWall": "{} of running jobs in all",
    "GraceTime": "{} of grace when preempted",
    "PreemptMode": "preempted by {}",
}


def account_rows(text: str) -> list[dict[str, str]]:
    """The rows of `sacctmgr --parsable2 show assoc` in ACCOUNT_COLUMNS; other lines are left out."""
    return _rows(text, ACCOUNT_COLUMNS)


def of_accounts(rows: Sequence[Mapping[str, str]], config: Mapping[str, str]) -> Iterator[Limit]:
    """What users and accounts may, row by row."""
    for row in rows:
        said = _meant(row)
        whose = f", of user {row['User']}" if row["User"] else ""
        where = f" in partition {row['Partition']}" if row["Partition"] else ""
        if said:
            yield f"account {row['Account']}{whose}{where}", f"{'; '.join(said)}{_unenforced(config)}"


def of_qos(text: str, config: Mapping[str, str]) -> Iterator[Limit]:
    """What a QOS allows, from `sacctmgr --parsable2 show qos` in QOS_COLUMNS."""
    for row in _rows(text, QOS_COLUMNS)[:MOST]:
        if said := _meant(row):
            yield f"QOS {row['Name']}", f"{'; '.join(said)}{_unenforced(config)}"


def _rows(text: str, columns: Sequence[str]) -> list[dict[str, str]]:
    lines = (line.split("|") for line in text.splitlines())
    return [dict(zip(columns, line, strict=True)) for line in lines if len(line) == len(columns)]


def _meant(row: Mapping[str, str]) -> list[str]:
    values = ((words, row.get(key, "")) for key, words in _MEANS.items())
    nothing = (*_NO_LIMIT, "cluster", "00:00:00")
    return [words.format(value) for words, value in values if value not in nothing]


def _unenforced(config: Mapping[str, str]) -> str:
    enforced = config.get("AccountingStorageEnforce", "limits")
    return "" if {"limits", "safe", "all"} & set(enforced.lower().split(",")) else " (not enforced here)"


def _limited(fields: Mapping[str, str], key: str) -> bool:
    return fields.get(key, "") not in (*_NO_LIMIT, "0")
