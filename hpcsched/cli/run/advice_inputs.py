"""What `hpcsched advise` rests on: the work that is known, the partitions, and what is known about
waiting."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpcsched import jobfile
from hpcsched.cli.common import database_path
from hpcsched.cli.run import policies
from hpcsched.cli.run.simulation_inputs import SHIPPED, CpuOptions, ProfileSource
from hpcsched.core.jobs import MOST_GPUS
from hpcsched.durations import YEAR_S
from hpcsched.errors import BatchError, ConfigError, StoreError

if TYPE_CHECKING:
    from hpcsched.allocations.advice import Missing
    from hpcsched.allocations.outcomes import Work
    from hpcsched.allocations.tried import Asked
    from hpcsched.allocations.waits import Past, Waits
    from hpcsched.batch.queue import Partition, Queue, Shape
    from hpcsched.core.model import JobSpec
    from hpcsched.core.profile import Profile

COMMANDS = {"slurm": "sbatch", "lsf": "bsub"}
"""Where one of these is, so is its batch system."""
NUMBERS = "a number, several with commas, or a range such as 1-8"
_MOST_NUMBERS = 64
TIMES = "times such as 30m, 2h, 2:00:00, with commas"


def numbers(where: str, text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,6})(?:\s*-\s*(\d{1,6}))?\s*", part)
        low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if low < 1 or high < low or high - low >= _MOST_NUMBERS:
            raise ConfigError(where=where, got=repr(text), accepted=NUMBERS)
        if high > MOST_GPUS:
            raise ConfigError(where=where, got=str(high), accepted=f"at most {MOST_GPUS}")
        found |= set(range(low, high + 1))
    return tuple(sorted(found))


def times_in(text: str | None) -> tuple[float, ...]:
    from hpcsched.cli.site.script import seconds_of

    found = tuple(s for part in text.split(",") if (s := seconds_of(part))) if text else ()
    if max(found, default=0.0) > YEAR_S:
        raise ConfigError(where="--time", got=repr(text), accepted="at most a year: 365d")
    return found


def asked_for(given: dict[str, Any]) -> Asked:
    """The GPUs, nodes and time limits of the options. Raises ConfigError."""
    from hpcsched.allocations.tried import Asked

    gpus, nodes = numbers("--gpus-per-node", given["gpus"]), numbers("--nodes", given["nodes"])
    if (total := max(gpus, default=1) * max(nodes, default=1)) > MOST_GPUS:
        accepted = f"at most {MOST_GPUS} in all"
        raise ConfigError(where="--nodes", got=f"{total} GPUs on all nodes", accepted=accepted)
    return Asked(gpus=gpus, nodes=nodes, limits_s=times_in(given["times"]))


def without_room(work: Work, partitions: Sequence[Partition], asked: Asked) -> str:
    """The first job that fits in no allocation that may be tried, and what it needs; "": there is none."""

    def fits(job: JobSpec, partition: Partition) -> bool:
        need = job.gpus_min if job.cpus is None else 0
        counts = [n for n in (asked.gpus if need and asked.gpus else partition.hosts) if n >= need]
        tops = [partition.nodes_for(count) for count in counts]
        return any(job.nodes <= n <= top for top in tops for n in asked.nodes or (top,))

    for job in work.jobs:
        if not any(fits(job, partition) for partition in partitions):
            nodes = f"{job.nodes} nodes" if job.nodes > 1 else "a node"
            return f"job {job.name} needs {nodes} with {max(1, job.gpus_min)} GPUs: no allocation has them"
    return ""


def system_of(batch: str) -> str:
    """The batch system that is asked about."""
    if batch != "auto":
        return batch
    return next((kind for kind, command in COMMANDS.items() if shutil.which(command)), "none")


def work_of(
    ctx: click.Context, path: Path, file: jobfile.JobFile, given: dict[str, Any]
) -> tuple[Work, list[Missing]]:
    """What is known to be done, and the jobs of which something is missing. Raises ConfigError if that is
    all."""
    from hpcsched.allocations.advice import Missing
    from hpcsched.allocations.candidates import profile_of
    from hpcsched.allocations.outcomes import Work

    policies.check_file(file, path)
    chosen = policies.for_simulation(
        ctx, given["policy"], given["policy_option"], (file.policy, file.policy_options)
    )
    if len(chosen) > 1:
        raise ConfigError(where="--policy", got=", ".join(chosen), accepted="one: the run has one")
    ((policy, options),) = chosen.items()
    on_gpus = [job for job in file.jobs if job.cpus is None]
    source = ProfileSource(given["profiles"], given["database"], given["device_type"])
    profiles = source.of({job.model for job in on_gpus})
    missing = []
    for job in on_gpus:
        lacks = [
            what
            for what, lacking in (
                ("steps", job.steps is None),
                ("profile", profile_of(job, profiles) is None),
            )
            if lacking
        ]
        if lacks:
            missing.append(Missing(name=job.name, missing=tuple(lacks)))
    unknown = {one.name for one in missing}
    jobs = [_without(job, unknown) for job in file.jobs if job.name not in unknown]
    if not jobs:
        listed = ", ".join(f"{one.name}: no {' and no '.join(one.missing)}" for one in missing[:3])
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        accepted = (
            f"`steps` in {path.name}, and profiles: `hpcsched profile run {path.name}` measures them, "
            "or --profiles"
        )
        got = f"nothing is known of any job ({listed}{more})"
        raise ConfigError(where=path.name, got=got, accepted=accepted)
    some = len(on_gpus) < len(file.jobs)
    on_cores = CpuOptions(given["cpus"], given["ps"])
    return Work(
        jobs=jobs,
        profiles=profiles,
        policy=policy,
        options=options,
        parallel=source.parallel({job.model for job in on_gpus}),
        trainings=replace(on_cores, files=on_cores.files or (SHIPPED,)).trainings() if some else {},
        cpus=on_cores.check(jobs, str(path), on_cores.cpus),
        speed=_speed(given["devices"]),
        margin_s=given["margin"],
    ), missing


def _without(job: JobSpec, unknown: set[str]) -> JobSpec:
    """The job without waiting for those that are not counted."""
    after = tuple(name for name in job.after if name not in unknown)
    return replace(job, after=after) if len(after) < len(job.after) else job


def _speed(devices: str | None) -> float:
    """How much faster than the clock the run's devices are; 1 but of stand-ins."""
    match = re.fullmatch(r"replay:.+@([\d.]+)", devices or "")
    try:
        return float(match[1]) or 1.0 if match else 1.0
    except ValueError:
        return 1.0


def doubt_of(profiles: Sequence[Profile]) -> float | None:
    """The largest relative spread of the rates; None where one was not measured."""
    spreads = [max(profile.spread.values()) for profile in profiles if profile.spread]
    return max(spreads) if spreads and len(spreads) == len(profiles) else None


def partitions_of(
    system: str, work: Work, asked: Asked, given: dict[str, Any], notes: list[str]
) -> tuple[Queue | None, list[Partition]]:
    """The queue, where it can be asked, and the partitions to look at. Raises ConfigError for unknown
    ones."""
    from hpcsched.allocations.candidates import MOST_GPUS as MOST_TRIED
    from hpcsched.allocations.candidates import useful_gpus
    from hpcsched.allocations.outcomes import as_used
    from hpcsched.batch import queue_of
    from hpcsched.batch.queue import Partition

    wanted = [name.strip() for name in (given["partition"] or "").split(",") if name.strip()]
    queue = queue_of(system, environ=os.environ)
    if queue is not None:
        try:
            found = queue.partitions()
        except BatchError as error:
            notes.append(f"{error}: nothing is known of partitions and of waiting")
            queue = None
        else:
            names = [one.name for one in found]
            if unknown := [name for name in wanted if name not in names]:
                raise ConfigError(
                    where="--partition", got=unknown[0], accepted=", ".join(names) or "none is up"
                )
            gpus = any(job.cpus is None for job in work.jobs)
            able = [one for one in found if (not gpus or max(one.hosts) > 0)]
            chosen = [one for one in able if one.name in wanted or not wanted]
            if not chosen:
                where = f" in {', '.join(wanted)}" if wanted else ""
                accepted = "others; where Slurm knows of no GPUs: --batch none --gpus-per-node N"
                raise ConfigError(
                    where="--partition", got=f"no usable node with GPUs{where}", accepted=accepted
                )
            return queue, sorted(chosen, key=lambda one: not one.default)
    if system == "none" and given["wait_min"] is None:
        notes.append("no Slurm and no LSF is here (no sbatch, no bsub): partitions and waits are not known")
    elif system == "lsf":
        notes.append("LSF does not say when a job would start: waits by --wait alone")
    least = max((job.gpus_min for job in work.jobs if job.cpus is None), default=0)
    useful = useful_gpus(as_used(work, gpus=max(least, MOST_TRIED)), work.profiles)
    most = max(asked.gpus, default=0) or max(least, min(useful, MOST_TRIED))
    nodes = max([*asked.nodes, *(job.nodes for job in work.jobs)], default=1)
    return None, [Partition(name=name, hosts={most: nodes}) for name in wanted or [""]]


def waits_of(
    queue: Queue | None,
    system: str,
    shapes: Sequence[Sequence[Shape]],
    options: Sequence[str],
    given: dict[str, Any],
    notes: list[str],
) -> Waits:
    """What is known about waiting, by all that can be asked; about the first of the `shapes` first."""
    from hpcsched.allocations.waits import Waits, ask, planned_for

    if given["wait_min"] is not None:
        return Waits(given_s=60.0 * given["wait_min"])
    waits = Waits()
    if queue is not None:
        waits = ask(queue, *shapes, options=options, now=time.time)
        notes += waits.notes
        if not waits.asked:
            try:
                waits.pending = planned_for(queue.pending(), time.time())
            except BatchError as error:
                notes.append(str(error))
    if system != "none":
        waits.past = _past(database_path(given["database"]), system, notes)
    return waits


def _past(store: Path, kind: str, notes: list[str]) -> list[Past]:
    """How long the user's earlier allocations waited."""
    from hpcsched.allocations.waits import Past
    from hpcsched.batch.queue import Shape

    if not store.exists():
        return []
    from hpcsched.store.allocations import allocations
    from hpcsched.store.database import Database

    try:
        with Database(store) as opened:
            found = allocations(opened, kind)
    except StoreError as error:
        notes.append(f"{error}: the history of waits is not known")
        return []
    return [
        Past(
            shape=Shape(
                partition=one.partition, nodes=one.nodes, gpus=one.gpus, limit_s=one.limit_s
            ),
            waited_s=one.waited_s,
        )
        for one in found
    ]  # fmt: skip


def batch_options(ctx: click.Context, given: dict[str, Any]) -> list[str]:
    """What the batch script will say besides the shape: account, directives and CPUs of the settings."""
    table = ctx.obj.values.get("script", {})
    account = given["account"] or table.get("account")
    options = [f"--account={account}"] if account else []
    for line in table.get("directives", []):
        options += shlex.split(line)
    if cpus := given["cpus"] or table.get("cpus"):
        options.append(f"--cpus-per-task={cpus}")
    return options
