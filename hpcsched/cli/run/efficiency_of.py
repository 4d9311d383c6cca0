"""What jobs made of what they held: from the journal, and from what was sampled while they ran."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import msgspec
from msgspec import UNSET

from hpcsched.cli.run.results import lost_work_s, result_of
from hpcsched.core.machine import Machine
from hpcsched.report.result import JobResult
from hpcsched.store.job_use import JobUse

HOUR_S = 3600.0
KWH_J = 3.6e6


class Use(msgspec.Struct, kw_only=True):
    """What was held and what became of it. None: not measured.

    `gpu_hours` are held, of which `overhead_gpu_hours` went into starting, saving and changing, and
    `lost_gpu_hours` into steps after the newest checkpoint, which were done again or came to nothing: both by
    the journal. The utilisation was sampled for `sampled_gpu_hours` of them: `busy_gpu_hours`
    and `idle_gpu_hours` are their sum. `energy_kwh` is what the GPUs took in `energy_gpu_hours`. `cores` are
    the CPU cores in use, in the mean of `cpu_measured_h` hours, `memory_mib` the most resident memory.
    """

    gpu_hours: float = 0.0
    overhead_gpu_hours: float = 0.0
    lost_gpu_hours: float = 0.0
    sampled_gpu_hours: float = 0.0
    busy_gpu_hours: float | None = None
    idle_gpu_hours: float | None = None
    utilisation: float | None = None
    energy_kwh: float | None = None
    energy_gpu_hours: float = 0.0
    cpu_hours: float | None = None
    cpu_measured_h: float = 0.0
    cores: float | None = None
    memory_mib: float | None = None


class JobEfficiency(Use, kw_only=True):
    """That of a job."""

    id: int
    name: str
    state: str


class SetEfficiency(Use, kw_only=True):
    """That of jobs together. `memory_mib` is the most of one of them.

    Of all jobs of a run also the `gpus`, the hours that these were there (`there_gpu_hours`), and the part of
    them that nobody held. `shared_*` is of GPUs that several jobs had at once, which no job's numbers have;
    it is part of the set's. `energy_unheld_kwh` is what GPUs took that no job had.
    """

    jobs: int
    gpus: int | None = None
    makespan_s: float | None = None
    there_gpu_hours: float | None = None
    unheld_gpu_hours: float | None = None
    shared_sampled_gpu_hours: float = 0.0
    shared_busy_gpu_hours: float | None = None
    energy_unheld_kwh: float | None = None


def efficiency_of(
    machine: Machine, uses: Mapping[tuple[int, bool], JobUse], chosen: Collection[int] | None = None
) -> tuple[SetEfficiency, list[JobEfficiency]]:
    """Of these jobs (ids; None: all of the run) together, and of each."""
    result = result_of(machine)
    found = [one for one in result.jobs if chosen is None or one.id in chosen]
    nothing = JobUse(job=0)
    jobs = [
        JobEfficiency(
            id=one.id,
            name=one.name,
            state=str(one.state),
            gpu_hours=round(one.gpu_hours, 6),
            **_times(machine, one),
            **_measured([uses.get((one.id, False), nothing)]),
        )
        for one in found
    ]
    whole = chosen is None
    mine = [uses[one.id, False] for one in found if (one.id, False) in uses]
    shared = uses.get((0, True), nothing)
    together = SetEfficiency(
        jobs=len(jobs),
        gpu_hours=round(sum(job.gpu_hours for job in jobs), 6),
        overhead_gpu_hours=round(sum(job.overhead_gpu_hours for job in jobs), 6),
        lost_gpu_hours=round(sum(job.lost_gpu_hours for job in jobs), 6),
        **_measured([*mine, shared] if whole else mine),
    )
    if whole:
        held, idle, unheld = result.gpu_hours, result.idle, uses.get((0, False), nothing)
        together.gpus, together.makespan_s = result.gpus, round(result.makespan_s, 3)
        if idle is not UNSET:
            together.unheld_gpu_hours = round(idle.gpu_hours, 6)
        if result.utilisation:
            together.there_gpu_hours = round(held / result.utilisation, 6)
        together.shared_sampled_gpu_hours = round(shared.gpu_s / HOUR_S, 6)
        together.shared_busy_gpu_hours = _hours(shared.busy_gpu_s, shared.gpu_s)
        if unheld.energy_gpu_s:
            together.energy_unheld_kwh = round(unheld.energy_j / KWH_J, 6)
    return together, jobs


def _times(machine: Machine, found: JobResult) -> dict[str, float]:
    """Of a job the GPU-hours of its overhead, and those that were lost."""
    job = machine.run.jobs[found.id]
    overhead = sum(len(attempt.gpus) * attempt.overhead_s for attempt in found.attempts)
    lost = sum(len(attempt.gpus) * lost_work_s(machine, job, attempt) for attempt in job.attempts)
    return {
        "overhead_gpu_hours": round(overhead / HOUR_S, 6),
        "lost_gpu_hours": round(lost / HOUR_S, 6),
    }


def _measured(uses: Iterable[JobUse]) -> dict[str, Any]:
    total = JobUse(job=0)
    for use in uses:
        total.add(use)
    cpu = total.cpu_over_s > 0
    return {
        "sampled_gpu_hours": round(total.gpu_s / HOUR_S, 6),
        "busy_gpu_hours": _hours(total.busy_gpu_s, total.gpu_s),
        "idle_gpu_hours": _hours(max(0.0, total.gpu_s - total.busy_gpu_s), total.gpu_s),
        "utilisation": None if total.utilisation is None else round(total.utilisation, 4),
        "energy_kwh": round(total.energy_j / KWH_J, 6) if total.energy_gpu_s else None,
        "energy_gpu_hours": round(total.energy_gpu_s / HOUR_S, 6),
        "cpu_hours": _hours(total.cpu_s, total.cpu_over_s),
        "cpu_measured_h": round(total.cpu_over_s / HOUR_S, 6),
        "cores": round(total.cpu_s / total.cpu_over_s, 2) if cpu else None,
        "memory_mib": round(total.memory_mib, 1) or None,
    }


def _hours(seconds: float, of: float) -> float | None:
    return round(seconds / HOUR_S, 6) if of else None
