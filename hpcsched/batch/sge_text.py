"""What SGE prints and writes, read: jobs in XML, queues, the host file of a parallel environment."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from xml.etree import ElementTree

from hpcsched.batch.base import BatchJobState
from hpcsched.errors import BatchError

MOST_CHARS = 64 * 2**20
"""The longest answer in XML that is read (chosen): a listing of some ten thousand jobs."""

_STATE = re.compile(r"[dhrRstTSwqEzPN]{1,12}", re.ASCII)
"""The letters that qstat documents."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """A job, or tasks of an array job, in qstat's listing: `state` in its letters, such as "r" or "hqw".

    `tasks` is its text for tasks, such as "2" or "3-7:2,9"; empty where the job is no array.
    """

    job: str
    state: str
    tasks: str = ""

    def has(self, task: str | None) -> bool:
        """Whether this is the task, or any task of the job where none is named."""
        return (
            task is None or not self.tasks or any(task_in(int(task), part) for part in self.tasks.split(","))
        )


def task_in(task: int, text: str) -> bool:
    """Whether "7", "3-9" or "3-9:2" names the task."""
    found = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9})(?::(\d{1,9}))?)?", text.strip(), re.ASCII)
    if found is None:
        return False
    first = int(found[1])
    last, step = int(found[2] or first), int(found[3] or 1)
    return first <= task <= last and step > 0 and (task - first) % step == 0


def tree(text: str) -> ElementTree.Element:
    """An answer in XML. Raises BatchError for what is none, and for one with definitions of its own."""
    if len(text) > MOST_CHARS:
        raise BatchError(f"qstat answered with {len(text)} characters, of which {MOST_CHARS} are read")
    if "<!" in text.replace("<![CDATA[", ""):
        raise BatchError("qstat answered with XML that defines entities, which is not read")
    try:
        return ElementTree.fromstring(text)  # nosec B314 # nothing with entities of its own comes here
    except ElementTree.ParseError as error:
        raise BatchError(f"qstat did not answer with XML but {text.strip()[:60]!r} ({error})") from None


def listing(text: str) -> list[Listed]:
    """The jobs of `qstat -xml`. Raises BatchError."""
    return [
        Listed(
            job=_said(row, "JB_job_number"),
            state=_said(row, "state"),
            tasks=_said(row, "tasks"),
        )
        for row in tree(text).iter("job_list")
    ]


def state_of(rows: list[Listed], job: str, task: str | None) -> BatchJobState:
    """The state of a job or of its task among those listed; one that is not listed has ended."""
    letters = [row.state for row in rows if row.job == job and row.has(task)]
    if not letters:
        return BatchJobState.ENDED
    found = {_state(each) for each in letters}
    for state in (BatchJobState.RUNNING, BatchJobState.SUSPENDED, BatchJobState.PENDING):
        if state in found:
            return state
    return BatchJobState.UNKNOWN


def _state(letters: str) -> BatchJobState:
    if not _STATE.fullmatch(letters):
        return BatchJobState.UNKNOWN
    if "q" in letters or "w" in letters:
        return BatchJobState.PENDING
    if set(letters) & {"s", "S", "T"}:
        return BatchJobState.SUSPENDED
    return BatchJobState.RUNNING if set(letters) & {"r", "t", "R"} else BatchJobState.UNKNOWN


@dataclass(frozen=True, slots=True, kw_only=True)
class Detail:
    """A job as `qstat -xml -j` tells of it: owner, hard requests, starts of its tasks (Unix time)."""

    owner: str
    requests: Mapping[str, str]
    starts: Mapping[str, float]


def detail(text: str) -> Detail | None:
    """The first job of `qstat -xml -j ID`; None where SGE knows no such job. Raises BatchError."""
    found = tree(text)
    job = found.find("djob_info/element")
    if job is None:
        if found.tag == "unknown_jobs":
            return None
        raise BatchError("qstat -j answered without a job")
    requests = {
        _said(row, "CE_name"): _said(row, "CE_stringval")
        for row in job.iterfind("JB_hard_resource_list/qstat_l_requests")
    }
    starts: dict[str, float] = {}
    for task in job.iterfind("JB_ja_tasks/*"):
        start = _said(task, "JAT_start_time")
        if re.fullmatch(r"[1-9][0-9]{0,12}", start):
            # Newer releases count milliseconds.
            starts[_said(task, "JAT_task_number")] = int(start) / (1000 if len(start) > 11 else 1)
    return Detail(owner=_said(job, "JB_owner"), requests=requests, starts=starts)


def _said(row: ElementTree.Element, name: str) -> str:
    return (row.findtext(name) or "").strip()


def seconds(text: str) -> float | None:
    """`600`, `0:10:00`, `::30`; None for INFINITY. Raises ValueError."""
    text = text.strip()
    if text.upper() in ("INFINITY", "NONE", "UNDEFINED"):
        return None
    if not re.fullmatch(r"\d{1,12}(\.\d+)?|\d{0,9}:\d{0,9}:\d{0,9}", text, re.ASCII):
        raise ValueError(f"{text[:40]!r} is no time such as 600 or 0:10:00")
    if ":" not in text:
        return float(text)
    hours, minutes, rest = (int(part or 0) for part in text.split(":"))
    return float(hours * 3600 + minutes * 60 + rest)


def queue_values(text: str, host: str) -> dict[str, str]:
    """The settings of `qconf -sq QUEUE`, as they hold on a host: `INFINITY,[node1=0:10:0]`."""
    found = {}
    for line in text.replace("\\\n", " ").splitlines():
        name, _, value = line.partition(" ")
        usual, *others = re.split(r",\s*(?=\[)", value.strip())
        own = [part.strip("[] ").partition("=") for part in others]
        found[name] = next((said for at, _, said in own if same_host(at, host)), usual)
    return found


def same_host(one: str, other: str) -> bool:
    """Whether two names, with or without their domains, are one host's."""
    return one.partition(".")[0] == other.partition(".")[0]


def host_slots(text: str) -> dict[str, int]:
    """Slots by host, in the file's order, the host of the batch script first; one may have several queues."""
    slots: dict[str, int] = {}
    for line in text.splitlines():
        if not line.strip():
            continue
        words = line.split()
        if len(words) < 2 or not re.fullmatch(r"[0-9]{1,6}", words[1]):
            raise BatchError(f"PE_HOSTFILE: {line.strip()[:60]!r} is no host with its slots")
        slots[words[0]] = slots.get(words[0], 0) + int(words[1])
    if not slots:
        raise BatchError("PE_HOSTFILE names no host")
    return slots


def job_config(text: str) -> dict[str, str]:
    """The settings with which this job was started, from `config` in its spool directory on its host."""
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)


def kill_notice(config: Mapping[str, str]) -> tuple[signal.Signals, float] | None:
    """The signal that warns of a kill, and the seconds from it to SIGKILL; None: there is no warning."""
    notify = config.get("notify", "")
    if not re.fullmatch(r"[1-9][0-9]{0,8}", notify):
        return None
    name = config.get("notify_kill", "default").upper()
    if name in ("DEFAULT", ""):
        return signal.SIGUSR2, float(notify)
    try:
        return signal.Signals["SIG" + name.removeprefix("SIG")], float(notify)
    except KeyError:
        return None


def gpu_names(text: str) -> tuple[str, ...]:
    """`0 1` or `0,1`, UUIDs and names of MIG instances too; nothing where a word is no name of a GPU."""
    words = re.split(r"[\s,]+", text.strip()) if text.strip() else []
    named = all(re.fullmatch(r"\d{1,4}|(GPU|MIG)-[\w/-]{1,80}", word, re.ASCII) for word in words)
    return tuple(words) if named else ()
