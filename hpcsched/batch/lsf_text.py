"""What LSF's commands print and what its environment says; nothing here runs anything."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpcsched.batch.base import JobLife
from hpcsched.errors import BatchError

_LIVES = {
    "PEND": JobLife.PENDING,
    "WAIT": JobLife.PENDING,
    "PROV": JobLife.PENDING,
    "RUN": JobLife.RUNNING,
    "PSUSP": JobLife.SUSPENDED,
    "USUSP": JobLife.SUSPENDED,
    "SSUSP": JobLife.SUSPENDED,
    "DONE": JobLife.ENDED,
    "EXIT": JobLife.ENDED,
    # UNKWN: LSF has lost the job's host; ZOMBI: killed while it was lost. Neither tells whether it runs.
    "UNKWN": JobLife.UNKNOWN,
    "ZOMBI": JobLife.UNKNOWN,
}

_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_DAY_S = 86_400.0


def jobs_argv(job_id: str, *fields: str) -> tuple[str, ...]:
    """Asks for these fields of one job."""
    return ("bjobs", "-a", "-json", "-o", " ".join(("jobid", *fields)), job_id)


def job_record(text: str) -> dict[str, str]:
    """The one record in bjobs' JSON, with whatever stands before it skipped; raises BatchError."""
    import msgspec

    start = text.find("{")
    try:
        answer = msgspec.json.decode(text[max(start, 0) :].encode())
        record = answer["RECORDS"][0]
        return {str(key): str(value) for key, value in record.items()}
    except (msgspec.DecodeError, KeyError, IndexError, TypeError, AttributeError):
        said = (text.strip().splitlines() or ["nothing"])[0]
        raise BatchError(f"bjobs did not answer with a job's record but: {said[:80]}") from None


def life_of(record: Mapping[str, str]) -> JobLife:
    """A record with ERROR instead of a state is of a job that LSF has forgotten."""
    if "STAT" in record:
        return _LIVES.get(record["STAT"].strip().upper(), JobLife.UNKNOWN)
    return JobLife.ENDED if "not found" in record.get("ERROR", "").lower() else JobLife.UNKNOWN


def finish_time(text: str, *, now: float) -> float | None:
    """Unix time of `Apr 12 22:27:01 2026 L`, local time as bjobs prints it; None when no limit is meant.

    Without a year it is the first such time that is not over. Of the marks, L stands for the run limit and
    X for a limit that has been passed; E for an estimate, by which nobody ends the job.
    """
    from datetime import datetime

    match = re.fullmatch(
        r"([A-Z][a-z]{2}) +(\d{1,2}) +(\d\d):(\d\d)(?::(\d\d))?(?: +(\d{4}))?(?: +([A-Z]))?", text.strip()
    )
    if match is None or match[1] not in _MONTHS or match[7] == "E":
        return None
    month, day = _MONTHS.index(match[1]) + 1, int(match[2])
    clock = int(match[3]), int(match[4]), int(match[5] or 0)
    this_year = datetime.fromtimestamp(now).year
    # 29 February needs up to eight years; a job that is just over its limit belongs to this year.
    years = (int(match[6]),) if match[6] else range(this_year, this_year + 9)
    for year in years:
        try:
            end = datetime(year, month, day, *clock).timestamp()
        except ValueError:
            continue
        if match[6] or end > now - _DAY_S:
            return end
    return None


def gpu_alloc(text: str) -> dict[str, tuple[str, ...]]:
    """`h1:0,1;h2:0,1` -> the GPUs by host; what cannot be read is left out."""
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
            names = Path(file).read_text().split()
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
            raise BatchError(f"LSB_MCPU_HOSTS is not pairs of host and slots: {' '.join(pairs)[:80]}")
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
    """The first exit code in LSB_EXIT_REQUEUE (`99`, `99 EXCLUDE(12)`, `EXCLUDE(12) 99`); None without one.

    Codes under EXCLUDE bring the job back too, but not to the same hosts: they serve when there is no other.
    """
    plain = re.findall(r"\b\d+\b", re.sub(r"EXCLUDE\s*\([^)]*\)", " ", text, flags=re.IGNORECASE))
    for code in plain or re.findall(r"\b\d+\b", text):
        if 1 <= int(code) <= 255:
            return int(code)
    return None
