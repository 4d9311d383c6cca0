"""`hpcsched efficiency --records`: sums of a site's records by user, account, month and others."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from hpcsched.cli.common import say, say_json
from hpcsched.cli.jobs.columns import aligned
from hpcsched.errors import ConfigError
from hpcsched.printing import shortened
from hpcsched.store import site_records
from hpcsched.store.site_records import Life, Training

HOUR_S = 3600.0
WIDEST = 24
"""Characters of a name in the table (chosen)."""

Record = Training | Life

KEYS: Mapping[str, Callable[[Record], str]] = {
    "user": lambda record: record.user,
    "account": lambda record: record.account or "-",
    "partition": lambda record: record.partition or "-",
    "cluster": lambda record: record.cluster or "-",
    "month": lambda record: datetime.fromtimestamp(record.start, UTC).strftime("%Y-%m"),
    "batch_job": lambda record: record.batch_job or "-",
    "run": lambda record: record.run,
    "version": lambda record: record.version,
}
"""What records are summed up by; the month is that of their start, in UTC."""

USUAL = "user,account,month"


class Sum(msgspec.Struct, kw_only=True):
    """Hours of records together. `gpu_hours` were in the runs: `held_gpu_hours` by trainings and
    `idle_gpu_hours` by nobody. The GPUs of `sampled_gpu_hours` were looked at, and busy for
    `busy_gpu_hours` of these."""

    by: dict[str, str]
    runs: int = 0
    trainings: int = 0
    gpu_hours: float = 0.0
    held_gpu_hours: float = 0.0
    idle_gpu_hours: float = 0.0
    sampled_gpu_hours: float = 0.0
    busy_gpu_hours: float = 0.0
    cpu_hours: float = 0.0


def names_of(text: str) -> list[str]:
    """The keys that `--by` names. Raises ConfigError."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in KEYS:
            raise ConfigError(where="--by", got=repr(name), accepted=", ".join(KEYS))
    return list(dict.fromkeys(names))


def sums(records: Iterable[Record], by: Sequence[str]) -> list[Sum]:
    """Their sums by these keys, in their order."""
    found: dict[tuple[str, ...], Sum] = {}
    runs: dict[tuple[str, ...], set[str]] = {}
    jobs: dict[tuple[str, ...], set[tuple[str, int]]] = {}
    for record in records:
        key = tuple(KEYS[name](record) for name in by)
        total = found.setdefault(key, Sum(by=dict(zip(by, key, strict=True))))
        runs.setdefault(key, set()).add(record.run)
        hours = record.gpu_s / HOUR_S
        if isinstance(record, Life):
            total.gpu_hours += hours
            total.idle_gpu_hours += record.idle_gpu_s / HOUR_S
            continue
        jobs.setdefault(key, set()).add((record.run, record.job))
        total.held_gpu_hours += hours
        total.sampled_gpu_hours += record.sampled_gpu_s / HOUR_S
        total.busy_gpu_hours += (record.busy_gpu_s or 0.0) / HOUR_S
        total.cpu_hours += (record.cpu_s or 0.0) / HOUR_S
    for key, total in found.items():
        total.runs, total.trainings = len(runs[key]), len(jobs.get(key, ()))
        for name in total.__struct_fields__:
            if name.endswith("_hours"):
                setattr(total, name, round(getattr(total, name), 6))
    return [found[key] for key in sorted(found)]


def show(folder: Path, *, by: str, as_csv: bool, as_json: bool) -> None:
    """Print the sums of a folder of records."""
    names, wrong = names_of(by), list[str]()
    found = sums(site_records.read(folder, wrong=wrong), names)
    for line in wrong:
        say(f"hpcsched: {line}", err=True)
    if as_json:
        say_json({"schema": 1, "records": str(folder), "sums": found})
    elif as_csv:
        out = io.StringIO()
        fields = [name for name in Sum.__struct_fields__ if name != "by"]
        rows = csv.writer(out, lineterminator="\n")
        rows.writerow([*names, *fields])
        rows.writerows([*total.by.values(), *(getattr(total, name) for name in fields)] for total in found)
        say(out.getvalue().rstrip("\n"), lines=True)
    else:
        say(_table(names, found), lines=True)


def _table(names: Sequence[str], found: Sequence[Sum]) -> str:
    heads = (*(name.upper() for name in names), "RUNS", "TRAININGS", "GPU-H", "HELD", "IDLE", "UTIL", "CPU-H")
    rows = [heads]
    for total in found:
        sampled = total.sampled_gpu_hours
        hours = (total.gpu_hours, total.held_gpu_hours, total.idle_gpu_hours)
        rows.append(
            (
                *(shortened(word, WIDEST) for word in total.by.values()),
                str(total.runs),
                str(total.trainings),
                *(f"{hour:.2f}" for hour in hours),
                f"{total.busy_gpu_hours / sampled:.0%}" if sampled else "-",
                f"{total.cpu_hours:.2f}",
            )
        )
    columns = [list(column) for column in zip(*rows, strict=True)]
    return aligned(columns, [*[False] * len(names), *[True] * 7]).rstrip("\n")
