"""The arguments of LSF's commands, and the parsing of their output and of its variables; nothing here runs a
command."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcsched.batch.base import BatchJobState, EndReason
from hpcsched.contract.exits import CANNOT_SAVE, WORK_LEFT
from hpcsched.errors import BadInput, BatchError
from hpcsched.patience import patiently
from hpcsched.printing import printable

_STATES = {
    "PEND": BatchJobState.PENDING,
    "WAIT": BatchJobState.PENDING,
    "PROV": BatchJobState.PENDING,
    "RUN": BatchJobState.RUNNING,
    "PSUSP": BatchJobState.SUSPENDED,
    "USUSP": BatchJobState.SUSPENDED,
    "SSUSP": BatchJobState.SUSPENDED,
    "DONE": BatchJobState.ENDED,
    "EXIT": BatchJobState.ENDED,
    # UNKWN: LSF has lost the job's host; ZOMBI: killed while it was lost. Neither tells whether it runs.
    "UNKWN": BatchJobState.UNKNOWN,
    "ZOMBI": BatchJobState.UNKNOWN,
}

_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_DAY_S = 86_400.0


FORMS = ("json", "delimiter", "long")
"""The forms in which bjobs can print a job, the newest first: JSON since Fix Pack 2 of LSF 10.1, fields with
a delimiter since 9.1.3; the long form for people is as old as LSF."""


def jobs_argv(job_id: str, *fields: str, form: str = "json") -> tuple[str, ...]:
    """The command that prints these fields of a job in one of the FORMS; the long form has fixed fields."""
    if form == "long":
        return ("bjobs", "-a", "-l", job_id)
    words = " ".join(("jobid", *fields))
    if form == "delimiter":
        return ("bjobs", "-a", "-o", f"{words} delimiter='|'", job_id)
    return ("bjobs", "-a", "-json", "-o", words, job_id)


def job_record(
    text: str, job_id: str = "", *fields: str, form: str = "json", now: float = 0.0
) -> dict[str, str]:
    """The answer of bjobs to `jobs_argv` with the same arguments, by the names of its JSON.

    It has fields, of which FINISH_TIME is for `finish_time`, or ERROR. Text before it is skipped. The long
    form has STAT and FINISH_TIME, and takes the year from `now` (Unix time). Raises BatchError.
    """
    if form == "json":
        found = _of_json(text)
    else:
        found = _of_line(text, job_id, fields) if form == "delimiter" else _of_long(text, job_id, now)
    if found is None and (unknown := re.search(r"Job <[^>]*> is not found", text)):
        return {"JOBID": job_id, "ERROR": unknown[0]}
    if found is None:
        said = (text.strip().splitlines() or ["nothing"])[0]
        raise BatchError(f"bjobs did not answer with a job's record but: {said[:80]}")
    return found


def _of_json(text: str) -> dict[str, str] | None:
    from hpcsched.decoding import decode

    start = text.find("{")
    try:
        answer = decode(text[max(start, 0) :].encode(errors="replace"), dict[str, Any])
        record = answer["RECORDS"][0]
        return {str(key): str(value) for key, value in record.items()}
    except (BadInput, KeyError, IndexError, TypeError, AttributeError):
        return None


def _of_line(text: str, job_id: str, fields: Sequence[str]) -> dict[str, str] | None:
    """The line that begins with the job's number; an element of an array may be shown without its index."""
    names = ["JOBID", *(name.upper() for name in fields)]
    for line in text.splitlines():
        values = [value.strip() for value in line.split("|")]
        if len(values) == len(names) and values[0] in (job_id, job_id.partition("[")[0]):
            return dict(zip(names, values, strict=True))
    return None


_STAMP = r"^[A-Z][a-z]{2} (?P<when>[A-Z][a-z]{2} +\d{1,2} \d\d:\d\d:\d\d(?: \d{4})?):"
_STARTED = re.compile(_STAMP + r"(?: \[\d+\])? (?:[Ss]tarted (?:on|\d+ Task)|Starting \(Pid)", re.MULTILINE)
_LONG_LIMIT = re.compile(r"^ *RUNLIMIT\s+(\d+(?:\.\d+)?) min", re.MULTILINE)


def _of_long(text: str, job_id: str, now: float) -> dict[str, str] | None:
    """State and end. The end is the start plus the run limit, as if the job had never been suspended."""
    text = _unfolded(text)
    status = re.search(rf"^Job <{re.escape(job_id)}>.*?, Status <(\w+)>", text, re.MULTILINE)
    if status is None:
        return None
    record = {"JOBID": job_id, "STAT": status[1], "FINISH_TIME": "-"}
    starts, limit = _STARTED.findall(text), _LONG_LIMIT.search(text)
    begun = _time_of(starts[-1], now=now, past=True) if starts else None
    if begun is not None and limit:
        end = time.localtime(begun + float(limit[1]) * 60)
        record["FINISH_TIME"] = f"{_MONTHS[end.tm_mon - 1]} {time.strftime('%d %H:%M:%S %Y', end)} L"
    return record


def _unfolded(text: str) -> str:
    """The long form is folded at 80 columns, in the middle of words, and goes on 21 columns further in."""
    return re.sub(r"\n {21}", "", text)


ASKED_TO_END = frozenset({"KILL", "TERM", "INT"})
"""The names in bhist of signals by which a person ends a job; bkill without a signal is KILL there."""

_TERMINATED = {
    **dict.fromkeys(("RUNLIMIT", "CPULIMIT", "DEADLINE", "WINDOW"), EndReason.LIMIT),
    **dict.fromkeys(("OWNER", "ADMIN", "FORCE_OWNER", "FORCE_ADMIN", "BUCKET_KILL"), EndReason.CANCELLED),
    **dict.fromkeys(("PREEMPT", "RC"), EndReason.PREEMPTED),
    **dict.fromkeys(("REQUEUE_OWNER", "REQUEUE_ADMIN", "MC_RECALL"), EndReason.REQUEUED),
    "ZOMBIE": EndReason.NODE_FAIL,
}


def end_reason(history: str) -> EndReason:
    """The reason why a job is being ended, from `bhist -l` since its last start; UNKNOWN if it has none.

    While a job runs, it has only the signals of people; the TERM_ words come when it has ended.
    """
    text = _unfolded(history)
    starts = list(_STARTED.finditer(text))
    since = text[starts[-1].end() :] if starts else text
    told = re.findall(r"\bTERM_([A-Z_]+)\b", since)
    if told:
        return _TERMINATED.get(told[-1], EndReason.UNKNOWN)
    if re.search(_STAMP + r"[^;<]*\b[Rr]equeue[^;]*requested by user", since, re.MULTILINE):
        return EndReason.REQUEUED
    asked = re.findall(r"Signal <(\w+)> requested by user or administrator", since)
    if "REQUEUE" in asked:
        return EndReason.REQUEUED
    return EndReason.CANCELLED if ASKED_TO_END & set(asked) else EndReason.UNKNOWN


def kill_wait(parameters: str) -> float | None:
    """Seconds from SIGINT to SIGKILL, from `bparams -l`; None if it does not say."""
    interval = re.search(r"JOB_TERMINATE_INTERVAL\s*=\s*(\d+(?:\.\d+)?)", parameters)
    return 2 * float(interval[1]) if interval else None


def state_of(record: Mapping[str, str]) -> BatchJobState:
    """The state in a record; one with ERROR instead is of a job that LSF has forgotten: it has ended."""
    if "STAT" in record:
        return _STATES.get(record["STAT"].strip().upper(), BatchJobState.UNKNOWN)
    return BatchJobState.ENDED if "not found" in record.get("ERROR", "").lower() else BatchJobState.UNKNOWN


def finish_time(text: str, *, now: float) -> float | None:
    """Unix time of `Apr 12 22:27:01 2026 L`, local time as bjobs prints it; None when no limit is meant.

    Without a year it is the first such time that is not over. Of the marks, L stands for the run limit and
    X for a limit that has been passed; E for an estimate, by which nobody ends the job.
    """
    when, mark = (
        (match[1], match[2]) if (match := re.fullmatch(r"(.*?)(?: +([A-Z]))?", text.strip())) else ("", "")
    )
    return None if mark == "E" else _time_of(when, now=now)


def _time_of(text: str, *, now: float, past: bool = False) -> float | None:
    """Unix time of `Apr 12 22:27:01 2026`, local time; None for anything else.

    Without seconds they are 0. Without a year it is the first such time that is not over, or of the past
    ones the last; a day more or less does not count.
    """
    from datetime import datetime

    match = re.fullmatch(r"([A-Z][a-z]{2}) +(\d{1,2}) +(\d\d):(\d\d)(?::(\d\d))?(?: +(\d{4}))?", text.strip())
    if match is None or match[1] not in _MONTHS:
        return None
    month, day = _MONTHS.index(match[1]) + 1, int(match[2])
    clock = int(match[3]), int(match[4]), int(match[5] or 0)
    this_year = datetime.fromtimestamp(now).year
    # 29 February needs up to eight years.
    nearest = range(this_year + 1, this_year - 9, -1) if past else range(this_year - 1, this_year + 9)
    for year in (int(match[6]),) if match[6] else nearest:
        try:
            found = datetime(year, month, day, *clock).timestamp()
        except ValueError:
            continue
        if match[6] or (found < now + _DAY_S if past else found > now - _DAY_S):
            return found
    return None


def gpu_alloc(text: str) -> dict[str, tuple[str, ...]]:
    """The GPUs by host of `h1:0,1;h2:0,1`; parts that cannot be read are left out."""
    found: dict[str, tuple[str, ...]] = {}
    for part in text.split(";"):
        host, _, numbers = part.strip().rpartition(":")
        names = tuple(name.strip() for name in numbers.split(",") if name.strip())
        if host and names and all(name.isdigit() for name in names):
            found[host] = names
    return found


def slots_of(environ: Mapping[str, str]) -> dict[str, int]:
    """Slots by host, in LSF's order, from the job's environment; raises BatchError."""
    file = environ.get("LSB_DJOB_HOSTFILE", "")
    if file:
        try:
            names = patiently(Path(file).read_text).split()
        except OSError as error:
            names = []
            reason = f"LSB_DJOB_HOSTFILE {file}: {error.strerror}"
        else:
            reason = f"LSB_DJOB_HOSTFILE {file} is empty"
        if names:
            return _counted(names)
    else:
        reason = "none of LSB_DJOB_HOSTFILE, LSB_MCPU_HOSTS, LSB_HOSTS is set: not inside a running LSF job"
    pairs = environ.get("LSB_MCPU_HOSTS", "").split()
    if pairs:
        counts = pairs[1::2]
        if len(pairs) % 2 or not all(count.isdigit() for count in counts):
            raise BatchError(
                f"LSB_MCPU_HOSTS is not pairs of host and slots: {printable(' '.join(pairs))[:80]}"
            )
        slots: dict[str, int] = {}
        for host, count in zip(pairs[::2], counts, strict=True):
            slots[host] = slots.get(host, 0) + int(count)
        return slots
    names = environ.get("LSB_HOSTS", "").split()
    if names:
        return _counted(names)
    raise BatchError(reason)


def _counted(names: Sequence[str]) -> dict[str, int]:
    slots: dict[str, int] = {}
    for name in names:
        slots[name] = slots.get(name, 0) + 1
    return slots


def is_launch_node(first: str, others: Sequence[str]) -> bool:
    """Whether the first host is named after another pattern than all others: batch5 before h36n09, h36n10."""
    return bool(others) and _pattern(first) not in {_pattern(name) for name in others}


def _pattern(name: str) -> str:
    return re.sub(r"\d+", "#", name.partition(".")[0].lower())


def requeue_code(text: str) -> int | None:
    """An exit code by which a job comes back, by LSB_EXIT_REQUEUE; None if there is none.

    It is a list of codes (`99 100`), or `all` and those that are not meant (`all ~1 ~2`). Codes under EXCLUDE
    (`99 EXCLUDE(12)`) bring the job back too, but not to the same hosts: they serve when there is no other.
    """
    words = re.sub(r"EXCLUDE\s*\([^)]*\)", " ", text, flags=re.IGNORECASE).lower().split()
    elsewhere = re.findall(r"\d+", " ".join(re.findall(r"EXCLUDE\s*\(([^)]*)\)", text, flags=re.IGNORECASE)))
    not_meant = {word[1:] for word in words if word.startswith("~")}
    codes = [word for word in words if word.isdecimal()]
    if "all" in words:
        codes = [str(code) for code in (DEFAULT_REQUEUE_CODE, *_FREE_CODES) if str(code) not in elsewhere]
    for code in (*codes, *elsewhere):
        if code not in not_meant and 1 <= int(code) <= 255:
            return int(code)
    return None


DEFAULT_REQUEUE_CODE = 99
"""The exit code that LSF's documentation uses for requeueing."""

_FREE_CODES = (*range(100, 126), *range(WORK_LEFT + 1, 99), *range(3, CANNOT_SAVE))
"""Exit codes without another meaning: not those of shells and signals (from 126 on), nor our own."""
