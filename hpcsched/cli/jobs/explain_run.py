"""`hpcsched explain` without a job: what the run does with its GPUs, and what is left over at its end."""

from __future__ import annotations

import re
from collections import Counter
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

from hpcsched.cli.common import plural
from hpcsched.core.jobs import Job
from hpcsched.core.machine import Machine
from hpcsched.core.model import JobState
from hpcsched.durations import clock
from hpcsched.printing import gpus as named
from hpcsched.store import run_folders
from hpcsched.store.rundir import RunRecord

MOST_NAMED = 5
"""Jobs that are named; of more it is said how many they are."""


class Smaller(NamedTuple):
    """An allocation that what is left needs: `gpus` on each of `nodes` hosts."""

    nodes: int
    gpus: int


def page_of(machine: Machine, root: Path, record: RunRecord | None) -> dict[str, Any]:
    """What `--json` prints."""
    ledger, left = machine.ledger, machine.leftover
    return {
        "schema": 1,
        "jobs": _states(machine),
        "gpus": len(ledger.devices),
        "free": len(ledger.free),
        "left_over": [
            {"host": idle.host, "gpus": list(idle.gpus), "since_s": idle.since} for idle in left.idle()
        ],
        "could_give_back": [idle.host for idle in left.could_go()],
        "given_back": {back.host: back.at for back in machine.hosts.gone},
        "joined": [
            {"host": one.host, "gpus": list(one.gpus), "since_s": one.at, "left_s": one.left}
            for one in machine.hosts.guests
        ],
        "next": next_lines(machine, root, record),
    }


def lines_of(machine: Machine, root: Path, record: RunRecord | None) -> list[str]:
    """The same for people."""
    ledger, left = machine.ledger, machine.leftover
    states = ", ".join(f"{count} {state.lower()}" for state, count in _states(machine).items())
    lines = [f"jobs: {states or 'none'}"]
    if ledger.devices:
        busy = len(ledger.devices) - len(ledger.free)
        lines.append(f"{ledger.noun}s: {busy} of {len(ledger.devices)} busy")
    whom = "that waits could use" if machine.own.queue else "is left that could use"
    for idle in left.idle():
        since, them = clock(idle.since), "it" if len(idle.gpus) == 1 else "them"
        what = f"idle: {named(idle.gpus, ledger.noun)} on {idle.host} since {since} into the run"
        lines.append(f"{what}: no job {whom} {them}")
    if not left.idle() and (growing := _may_grow(machine)):
        lines.append(f"idle: {len(ledger.free)} free, which {growing} may still get")
    lines += [
        f"given back: {back.host} with {plural(len(back.gpus), ledger.noun)}, {clock(back.at)} into the run"
        for back in machine.hosts.gone
    ]
    for one in machine.hosts.guests:
        of = plural(len(one.gpus), ledger.noun)
        until = "" if one.left is None else f", left it at {clock(one.left)}"
        if one.left is None and (end := machine.hosts.end_of(one.host)) is not None:
            until = f", ends at {clock(end)}"
        lines.append(f"joined: {one.host} with {of}, {clock(one.at)} into the run{until}")
    return [*lines, *(f"next: {line}" for line in next_lines(machine, root, record))]


def _states(machine: Machine) -> dict[str, int]:
    counts = Counter(job.state for job in machine.run.jobs.values())
    return {str(state): counts[state] for state in JobState if counts[state]}


def _may_grow(machine: Machine) -> str:
    """The running jobs that may get GPUs that nobody who waits can use; "" where there are none of either."""
    run = machine.run
    if not machine.ledger.free or run.unfinished > len(run.active):
        return ""
    return _names([job for job in run.active.values() if machine.leftover.may_grow(job)])


def _names(jobs: list[Job]) -> str:
    names = [job.spec.name for job in jobs]
    more = [f"{len(names) - MOST_NAMED} more"] if len(names) > MOST_NAMED else []
    return ", ".join([*names[:MOST_NAMED], *more])


def next_lines(machine: Machine, root: Path, record: RunRecord | None) -> list[str]:
    """What is given back, or could be, and how the run goes on in a smaller allocation."""
    left, run = machine.leftover, machine.run
    lines = []
    could = [idle.host for idle in left.could_go()]
    kind = (record.allocation.get("kind") if record else None) or "none"
    if could and left.after_s is not None:
        when = min(idle.since for idle in left.could_go()) + left.after_s
        lines.append(f"{', '.join(could)}: given back to {kind} from {clock(when)} into the run on")
    elif could and kind != "none":
        option = "`run --release-idle-nodes MINUTES`"
        lines.append(f"{', '.join(could)}: {option} would give {'it' if len(could) == 1 else 'them'} back")
    if (smaller := smaller_allocation(machine)) is None:
        return lines
    active = list(run.active.values())
    need = plural(smaller.nodes * smaller.gpus, machine.ledger.noun)
    lines.append(
        f"{_names(active)} need{'s' * (len(active) == 1)} {need} at most{_for_how_long(machine, active)}"
    )
    if record:
        lines.append(f"to go on with no more: {commands(record, root, smaller)}")
    return lines


def smaller_allocation(machine: Machine) -> Smaller | None:
    """The allocation in which the jobs that run could go on as they are, where it is smaller than this one
    and no job waits; else None."""
    run, ledger = machine.run, machine.ledger
    jobs = list(run.active.values())
    if not machine.leftover.idle() or run.unfinished > len(jobs) or not jobs:
        return None
    if any(job.spec.cpus is not None or not job.current.gpus for job in jobs):
        return None  # of cores it is not known which are needed
    busy, per_host = len(ledger.devices) - len(ledger.free), max(ledger.capacity().by_host().values())
    widest = max(job.width for job in jobs)
    nodes = max(ceil(busy / per_host), max(job.spec.nodes for job in jobs))
    gpus = max(ceil(busy / nodes), widest)
    return Smaller(nodes, gpus) if nodes * gpus < len(ledger.devices) else None


def _for_how_long(machine: Machine, jobs: list[Job]) -> str:
    """The longest time that one of them will still take, where that is known of all."""
    left: list[float] = []
    for job in jobs:
        curve = machine.estimates.curve(job)
        rate = job.rate or (curve.rate(job.width) if curve else None)
        if job.remaining is None or not rate:
            return ""
        left.append(job.remaining / rate)
    return f", for about {clock(max(left))}"


def commands(record: RunRecord, root: Path, smaller: Smaller) -> str:
    """The commands that save all and go on in a smaller allocation."""
    where = run_folders.named(root)
    kind = record.allocation.get("kind") or "none"
    if kind == "slurm":
        again = f"sbatch --nodes={smaller.nodes} --gres=gpu:{smaller.gpus} SCRIPT"
    elif kind != "none":
        again = (
            f"the script again with {plural(smaller.nodes, 'host')} and {plural(smaller.gpus, 'GPU')} on each"
        )
    else:
        again = f"hpcsched run --resume{where} --devices {_devices(record.devices, smaller)}"
    return f"`hpcsched drain{where}`, then " + (f"`{again}`" if kind in ("slurm", "none") else again)


def _devices(spec: str, smaller: Smaller) -> str:
    """The same devices, as many as that."""
    kind = re.match(r"(cpu|cuda|replay)\b", spec)
    speed = re.search(r"@.*", spec)
    return f"{kind[1] if kind else 'cuda'}:{smaller.gpus}" + (speed[0] if speed else "")
