"""The columns of `status`: squeue's letters, widths and order."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from types import MappingProxyType
from typing import Any

from hpcsched.cli.jobs import about_arrays, about_batches
from hpcsched.cli.jobs.about_arrays import Row
from hpcsched.core.exits import exit_pair
from hpcsched.core.states import JobState
from hpcsched.durations import clock
from hpcsched.errors import ConfigError
from hpcsched.printing import fitting, printables, said_cores
from hpcsched.store.status import NO_REASON, GpuStatus, JobStatus

FIELDS: dict[str, tuple[str, Callable[[JobStatus], str]]] = {
    "%i": ("JOBID", lambda j: str(j.id)),
    "%j": ("NAME", lambda j: j.name),
    "%u": ("USER", lambda j: j.user),
    "%t": ("ST", lambda j: j.state.code),
    "%T": ("STATE", lambda j: str(j.state)),
    "%M": ("TIME", lambda j: clock(j.elapsed_s)),
    "%l": ("TIME_LIMIT", lambda j: "-" if j.time_limit_s is None else clock(j.time_limit_s)),
    "%L": ("LEFT", lambda j: "-" if j.eta_s is None else clock(j.eta_s)),
    "%D": ("NODES", lambda j: str(len(j.hosts) or j.nodes)),
    "%b": ("GPUS", lambda j: gpus(j)),
    "%U": ("UTIL", lambda j: used(j)),
    "%C": ("CPUS", lambda j: _of_budget(j)),
    "%m": ("MODEL", lambda j: j.model),
    "%p": ("ROLE", lambda j: j.role or "-"),
    "%s": ("STEP", lambda j: steps(j)),
    "%S": ("SUSP", lambda j: str(j.suspensions)),
    "%z": ("RESIZED", lambda j: str(j.resizes)),
    "%a": ("ATTEMPT", lambda j: str(j.attempt)),
    "%e": ("EXIT", lambda j: "-" if j.exit is None else exit_pair(j.exit)),
    "%B": ("BATCH", lambda j: about_batches.batch(j)),
    "%W": ("WORKERS", lambda j: _counts(j) or about_batches.workers(j)),
    "%Q": ("PRIORITY", lambda j: str(j.priority)),
    "%K": ("INDEX", lambda j: "-" if j.array_index is None else str(j.array_index)),
    "%y": ("SIMILARITY", lambda j: about_batches.similarity(j)),
    "%k": ("SAVES", lambda j: j.saves or "-"),
    "%n": ("NOISE", lambda j: about_batches.noise_scale(j)),
    "%R": ("NODELIST(REASON)", lambda j: where(j)),
}
DEFAULT_FORMAT = "%i %j %u %t %M %L %b %s %R"
LONG_FORMAT = "%i %j %u %T %M %l %L %b %U %p %s %a %S %z %R"
_RIGHT = {"%i", "%M", "%l", "%L", "%D", "%U", "%s", "%S", "%z", "%a", "%e", "%B", "%y", "%n"}


_FIRST_TO_GO = ("%u", "%z", "%S", "%U", "%p", "%a", "%l", "%L")
"""Columns that a narrow terminal does without, in this order."""


def cores_held(job: JobStatus) -> str:
    """The CPU cores that a job holds, in the column of GPUs: 0.6c; empty if it holds none."""
    return said_cores(job.cores.held) if job.cores and job.cores.host else ""


def _of_budget(job: JobStatus) -> str:
    """The cores that a job holds, of its budget: 0.6/2."""
    return f"{job.cores.held:.4g}/{job.cores.budget:.4g}" if job.cores else "-"


def _counts(job: JobStatus) -> str:
    """The servers and workers of a job: 1+2; empty if it has none."""
    return f"{len(job.cores.servers)}+{len(job.cores.workers)}" if job.cores and job.cores.servers else ""


def gpus(job: JobStatus, shared: Container[int] = ()) -> str:
    """Its GPUs, with a + where others have one of them (`shared`) too."""
    if not job.gpus and job.cores is None:
        return "-"
    named = cores_held(job) or ",".join(map(str, job.gpus)) or "-"
    return f"{named}+" if any(gpu in shared for gpu in job.gpus) else named


def shared_gpus(jobs: Iterable[JobStatus]) -> set[int]:
    """The GPUs that several of a run's jobs have."""
    return {gpu for gpu, holders in Counter(gpu for job in jobs for gpu in job.gpus).items() if holders > 1}


def used(job: JobStatus, samples: Mapping[int, float] = MappingProxyType({})) -> str:
    """How busy its GPUs are now, in the mean of those that are sampled, whoever else has them too."""
    seen = [samples[gpu] for gpu in job.gpus if gpu in samples]
    return f"{sum(seen) / len(seen):.0%}" if seen else "-"


def samples_of(found: Iterable[GpuStatus]) -> dict[int, float]:
    """The utilisation of GPUs (0 to 1) by number, where it is measured."""
    return {gpu.index: gpu.utilisation for gpu in found if gpu.utilisation is not None}


def steps(job: JobStatus) -> str:
    done = "-" if job.step is None else str(job.step)
    return done if job.steps is None else f"{done}/{job.steps}"


def where(job: JobStatus) -> str:
    reason = f"({job.reason})" if job.reason and not (job.hosts and job.reason == NO_REASON) else ""
    return " ".join(filter(None, [",".join(job.hosts), reason])) if job.hosts else reason


_SORTED_BY: dict[str, Callable[[JobStatus], Any]] = {
    "%i": lambda j: j.id,
    "%Q": lambda j: j.priority,
    "%K": lambda j: -1 if j.array_index is None else j.array_index,
    "%t": lambda j: list(JobState).index(j.state),
    "%T": lambda j: list(JobState).index(j.state),
    "%M": lambda j: j.elapsed_s,
    "%l": lambda j: inf if j.time_limit_s is None else j.time_limit_s,
    "%D": lambda j: len(j.hosts) or j.nodes,
    "%L": lambda j: inf if j.eta_s is None else j.eta_s,
    "%b": lambda j: len(j.gpus),
    "%s": lambda j: -1 if j.step is None else j.step,
    "%S": lambda j: j.suspensions,
    "%z": lambda j: j.resizes,
    "%a": lambda j: j.attempt,
    "%e": lambda j: -1 if j.exit is None else j.exit,
}
"""Columns that are sorted by a number; others by their text."""

_COLUMN = re.compile(r"(?:%(?P<right>\.?)(?P<width>\d{0,3}))?(?P<letter>[A-Za-z])")


@dataclass(frozen=True)
class _Column:
    """A column as squeue's formats have it: "%.18i" is at most 18 characters wide, and to the right."""

    key: str
    right: bool
    width: int | None


def columns_of(format_: str) -> list[_Column]:
    """The columns of a format such as "%i %.9M %R" or "%i,%M"; raises ConfigError."""
    words = format_.replace(",", " ").split()
    return [_column(word, where="--format") for word in words or [format_]]


def in_order(jobs: list[JobStatus], keys: str) -> list[JobStatus]:
    """The jobs sorted by columns such as "-M,i": a minus turns the order round; raises ConfigError."""
    for word in reversed(keys.replace(",", " ").split()):
        column = _column(word.lstrip("+-"), where="--sort")
        by = _SORTED_BY.get(column.key) or FIELDS[column.key][1]
        jobs = sorted(jobs, key=by, reverse=word.startswith("-"))
    return jobs


def _column(word: str, *, where: str) -> _Column:
    found = _COLUMN.fullmatch(word)
    key = f"%{found['letter']}" if found and (where == "--sort" or word.startswith("%")) else ""
    if found is None or key not in FIELDS:
        accepted = ", ".join(f"{k} {name}" for k, (name, _) in FIELDS.items())
        raise ConfigError(where=where, got=repr(word), accepted=accepted)
    width = int(found["width"]) if found["width"] else None
    return _Column(key, bool(found["right"]) if width else key in _RIGHT, width)


def table(
    jobs: list[JobStatus],
    columns: Sequence[_Column],
    *,
    header: bool,
    shared: Container[int] = (),
    samples: Mapping[int, float] = MappingProxyType({}),
    rows: Sequence[Row] | None = None,
    parsable: bool = False,
    room: int | None = None,
) -> str:
    """Columns for these jobs, of which some have `shared` GPUs; `rows`: the lines of arrays.

    `samples`: see `samples_of`. `parsable`: a vertical bar between columns, nothing cut. `room`: the width of
    the terminal, on which columns that matter least are left out.
    """
    keys = [column.key for column in columns]
    of_run = {"%b": partial(gpus, shared=shared), "%U": partial(used, samples=samples)}
    texts = [of_run.get(key) or FIELDS[key][1] for key in keys]
    if rows is None:
        cells = [[text(job) for job in jobs] for text in texts]
    else:
        cells = [
            [about_arrays.text(row, key, text) for row in rows] for key, text in zip(keys, texts, strict=True)
        ]
    if header:
        cells = [[FIELDS[key][0], *column] for key, column in zip(keys, cells, strict=True)]
    if parsable:
        return "".join(["|".join(row) + "\n" for row in zip(*map(printables, cells), strict=True)])
    for at, column in enumerate(columns):
        if (width := column.width) is not None:
            padded = f"%{'' if column.right else '-'}{width}.{width}s"
            cells[at] = [padded % cell for cell in printables(cells[at])]
    if room is not None:
        widths = [max(map(len, printables(column)), default=0) for column in cells]
        ranks = {key: len(_FIRST_TO_GO) - at for at, key in enumerate(_FIRST_TO_GO)}
        kept = fitting(widths, [ranks.get(key, 0) for key in keys], room)
        columns, cells = [columns[at] for at in kept], [cells[at] for at in kept]
    return aligned(cells, [column.right for column in columns])


def aligned(columns: list[list[str]], right: list[bool]) -> str:
    """Lines of columns, each as wide as its widest text; those of `right` to the right."""
    columns = [printables(column) for column in columns]
    widths = [max(map(len, column), default=0) for column in columns]
    aligned = [f"%{'' if r else '-'}{width}s" for r, width in zip(right, widths, strict=True)]
    if not right[-1]:
        aligned[-1] = "%s"  # no blanks at the end of a line
    line = "  ".join(aligned) + "\n"
    return "".join([line % row for row in zip(*columns, strict=True)])
