"""Workloads to simulate, read from CSV traces: when jobs came, and how long they took or what they had to do.

Columns go by their names in the first line; their order does not matter, others are not looked at.

| accepted names | what it is |
|---|---|
| `submit_s`, `arrival`, `arrival_s`, `submit_time`, `time` | when the job came, in seconds of the trace |
| `duration_s`, `duration`, `runtime_s` | seconds it ran on the GPUs asked for |
| `gpus`, `num_gpus`, `num_replicas` | the GPUs asked for |
| `name`, `job` | unique; job-1, job-2, ... where there is none |
| `model`, `app` | what is trained |
| `steps` | the whole job's work |
| `batch` | its global batch size, where steps are known by app (below) |
| `workload` | to which of several workloads in the file the job belongs |

- A job with a duration is of fixed size and runs exactly so long; it costs nothing to start. More GPUs than a
  host has are spread over as few hosts as will do, rounded up to the same count on each.
- A job with a model and steps, and no duration, is elastic, on one host: the policy chooses its GPUs, those
  asked for are not looked at. It needs a profile of that model.
- Where only an app is given whose steps to convergence came with hpcsched (`profiles/pollux-t4-steps.csv`),
  it is trained with the largest batch that is known there and not above its own (the smallest, if none is).
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import NoReturn

from hpcsched.core.model import JobSpec, Kind
from hpcsched.core.profile import Profile
from hpcsched.errors import ConfigError
from hpcsched.jobfile import NAME
from hpcsched.printing import printable, shortened
from hpcsched.store.profiles import shipped

_PER_S = 1_000_000
FIXED_DURATION = Profile(
    model="fixed duration",
    device="",
    throughput={1: float(_PER_S)},
    start_s=0.0,
    source="published",
    note="Jobs known by their duration: a step is a microsecond, on any number of GPUs.",
)
"""What jobs go by that are known by their duration: steps / rate is the very number in the file."""

COLUMNS = {
    "arrival": ("submit_s", "arrival", "arrival_s", "submit_time", "time"),
    "duration": ("duration_s", "duration", "runtime_s"),
    "gpus": ("gpus", "num_gpus", "num_replicas"),
    "name": ("name", "job"),
    "model": ("model", "app"),
    "steps": ("steps",),
    "batch": ("batch",),
    "workload": ("workload",),
}

_SECONDS = re.compile(r"[0-9]{1,10}(\.[0-9]*)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Jobs in the order in which they come, and the profile of those known by their duration.

    `left_out` counts jobs that ask for more GPUs than there are; `rounded` those that got more than they
    asked for, the same count on each of their hosts.
    """

    jobs: tuple[JobSpec, ...]
    profiles: tuple[Profile, ...]
    left_out: int
    rounded: int


def read_trace(path: Path, *, gpus: int, hosts: int, workload: str = "") -> Workload:
    """The jobs of a CSV file, for `hosts` hosts of `gpus` GPUs each.

    `workload` says which one to take of a file that holds several. Durations are read to the microsecond.
    Raises ConfigError naming the file, the line and the column, what was found and what is accepted.
    """
    jobs: list[JobSpec] = []
    seen: dict[str, int] = {}
    first: _Line | None = None
    left_out = rounded = 0
    for line in _lines(path):
        if workload and line.cells.get("workload") != workload:
            continue
        first = first or line
        if line.cells.get("workload") != first.cells.get("workload"):
            found = " and ".join(repr(each.cells["workload"]) for each in (first, line))
            line.refuse("workload", f"{found} in one file", "one of them, chosen with --workload")
        name = line.name() or f"job-{len(seen) + 1}"
        if name in seen:
            line.refuse("name", f"{name} again, after line {seen[name]}", "a name that no other job has")
        seen[name] = line.number
        if not line.has("duration"):
            model, steps = line.work()
            jobs.append(_replay(line, name, model, steps))
            continue
        steps, asked = line.microseconds("duration"), line.count("gpus")
        nodes = -(-asked // gpus)
        each = -(-asked // nodes)
        if nodes > hosts:
            left_out += 1
        else:
            rounded += each * nodes > asked
            jobs.append(_replay(line, name, FIXED_DURATION.model, steps, each=each, nodes=nodes))
    if first is None:
        got = f"no jobs of workload {workload!r}" if workload else "no jobs"
        raise ConfigError(where=str(path), got=got, accepted="a line for each job")
    jobs.sort(key=lambda job: job.submit_at)
    profiles = (FIXED_DURATION,) if any(job.model == FIXED_DURATION.model for job in jobs) else ()
    return Workload(jobs=tuple(jobs), profiles=profiles, left_out=left_out, rounded=rounded)


def _replay(
    line: _Line, name: str, model: str, steps: int, *, each: int | None = None, nodes: int = 1
) -> JobSpec:
    """A job on `each` GPUs of each host, elastic if that is None."""
    return JobSpec(
        name=name,
        kind=Kind.REPLAY,
        model=model,
        steps=steps,
        gpus_min=each or 1,
        gpus_max=each,
        nodes=nodes,
        submit_at=float(line.seconds("arrival")),
    )


@dataclass(frozen=True, slots=True)
class _Line:
    """A line of the file: where it is, what each of our columns is called there, and what stands in it."""

    path: Path
    number: int
    names: dict[str, str]
    cells: dict[str, str]

    def refuse(self, column: str, got: str, accepted: str) -> NoReturn:
        where, key = f"{self.path}:{self.number}", self.names.get(column, column)
        raise ConfigError(where=where, key=key, got=got, accepted=accepted)

    def has(self, column: str) -> bool:
        return bool(self.cells.get(column))

    def name(self) -> str:
        name = self.cells.get("name", "")
        if name and not NAME.fullmatch(name):
            self.refuse("name", repr(name), "1 to 64 of A-Z a-z 0-9 . _ = -")
        return name

    def seconds(self, column: str) -> Decimal:
        text = self.cells.get(column, "")
        if not _SECONDS.fullmatch(text):
            self.refuse(column, repr(text) if text else "nothing", "seconds, such as 90 or 12.5")
        return Decimal(text)

    def microseconds(self, column: str) -> int:
        found = round(self.seconds(column) * _PER_S)
        if not found:
            self.refuse(column, "no time at all", "seconds, more than 0")
        return found

    def count(self, column: str) -> int:
        text = self.cells.get(column, "")
        if not re.fullmatch("0*[1-9][0-9]{0,14}", text):
            self.refuse(column, repr(text) if text else "nothing", "a whole number of at least 1")
        return int(text)

    def work(self) -> tuple[str, int]:
        """The model of a job without a duration, and its steps."""
        model = self.cells.get("model", "")
        if not model:
            self.refuse("duration", "nothing", "seconds; or a model, and its steps")
        if self.has("steps"):
            return model, self.count("steps")
        known = _steps_known()
        if model not in known:
            apps = f"a column steps, or duration_s, or one of the apps {', '.join(known)}"
            self.refuse("model", f"{model!r} without steps", apps)
        batches = known[model]
        most = self.count("batch") if self.has("batch") else max(batches)
        batch = max((b for b in batches if b <= most), default=min(batches))
        return f"{model} (global batch {batch})", batches[batch]


def _lines(path: Path) -> Iterator[_Line]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            header = [name.strip() for name in next(reader, [])]
            names = _columns(path, header)
            at = {column: header.index(name) for column, name in names.items()}
            for row in reader:
                if not row:
                    continue
                line = reader.line_num
                if len(row) != len(header):
                    accepted = f"{len(header)}: {shortened(printable(', '.join(header)), 100)}"
                    raise ConfigError(where=f"{path}:{line}", got=f"{len(row)} values", accepted=accepted)
                yield _Line(path, line, names, {column: row[i].strip() for column, i in at.items()})
    except (OSError, UnicodeError, csv.Error) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(where=str(path), got=str(why), accepted="a readable CSV file") from error


def _columns(path: Path, header: list[str]) -> dict[str, str]:
    """What each of our columns is called in the file; ConfigError where that is not clear."""
    names: dict[str, str] = {}
    for column, accepted in COLUMNS.items():
        found = [name for name in header if name.lower() in accepted]
        if len(found) > 1:
            given = " and ".join(found)
            raise ConfigError(where=f"{path}:1", got=f"columns {given}", accepted="one of them")
        if found:
            names[column] = found[0]
    needed = {"arrival": ("arrival",), "duration": ("duration", "model"), "GPUs": ("gpus", "model")}
    for what, either in needed.items():
        if not names.keys() & set(either):
            names_of = " | ".join(name for column in either for name in COLUMNS[column])
            got = f"no column for the {what} among {', '.join(header) or 'none'}"
            raise ConfigError(where=f"{path}:1", got=got, accepted=names_of)
    return names


@cache
def _steps_known() -> dict[str, dict[int, int]]:
    """Steps to convergence by app and global batch, as shipped."""
    known: dict[str, dict[int, int]] = {}
    beside = shipped().get("pollux-t4")
    table = beside.with_name("pollux-t4-steps.csv") if beside else None
    if table and table.exists():
        with table.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                known.setdefault(row["app"], {})[int(row["batch"])] = int(row["steps"])
    return known
