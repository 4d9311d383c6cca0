"""The jobs of a past run, to be simulated under other policies: from its state to jobs, profiles and GPUs.

Pure: the state comes from a replay of the journal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hpcsched.core.jobs import Costs, Job
from hpcsched.core.machine import Machine
from hpcsched.core.model import Device, Ended, JobSpec, JobState, Kind
from hpcsched.core.profile import Profile
from hpcsched.errors import ConfigError

CANCELLED, FAILED = "cancelled", "failed"
UNKNOWN = "of unknown work"
UNMODELLED = "on CPU cores without a model of their training (--ps)"
WAITING = "waiting for one of these"
"""Why a job is left out."""

_RATE = 1000
"""Steps per second of a job that is known by its duration: steps of a millisecond."""

_WORKED = (Ended.COMPLETED, Ended.SUSPENDED, Ended.RESIZED)


@dataclass(frozen=True, kw_only=True)
class Past:
    """The jobs of a run, as a simulation takes them, with the profiles of those on GPUs.

    `ids` are the jobs' ids in the run. `left_out` are the ids of those that cannot be simulated, by
    reason; `rigid` of those that keep the GPU count and the time that they had, as their steps or their
    rates are not known.
    """

    jobs: tuple[JobSpec, ...]
    profiles: tuple[Profile, ...]
    ids: tuple[int, ...]
    left_out: Mapping[str, tuple[int, ...]]
    rigid: tuple[int, ...]


def past_of(machine: Machine, measured: Iterable[Profile] = (), trainings: Collection[str] = ()) -> Past:
    """The past of a run: its jobs with the times at which they came, the work they did or have to do.

    A completed job's work are the steps it did, one that is not over has the steps it was given. Profiles
    are the run's own, what it has learnt where there is none; `measured` come before both. What a start, a
    suspend or a change in place cost in the run stands in for what a profile does not say. Of jobs on CPU
    cores those are taken whose models are known: `trainings`.
    """
    given = {(p.model, p.nodes): p for p in measured}
    left_out: dict[int, str] = {}
    works: dict[int, tuple[JobSpec, Profile | None]] = {}
    rigid = []
    for job in machine.run.jobs.values():
        if job.state is JobState.CANCELLED or job.state.failed:
            left_out[job.id] = CANCELLED if job.state is JobState.CANCELLED else FAILED
        elif job.spec.cpus is not None:
            steps = _steps(job) if job.spec.kind is Kind.TRAINER else None
            if steps is not None and job.spec.model in trainings:
                works[job.id] = replace(job.spec, steps=steps), None
            else:
                left_out[job.id] = UNKNOWN if steps is None else UNMODELLED
        elif job.spec.gpus_max == 0:
            left_out[job.id] = UNKNOWN
        elif (work := _work(machine, job, given)) is not None:
            works[job.id] = work
        elif (work := _as_it_went(machine, job)) is not None:
            works[job.id] = work
            rigid.append(job.id)
        else:
            left_out[job.id] = UNKNOWN
    _leave_out_dependents(machine, left_out)

    jobs, profiles = [], {}
    for job_id, (spec, profile) in works.items():
        if job_id in left_out:
            continue
        job = machine.run.jobs[job_id]
        # Those that it waited for and that are not simulated are known by when they ended.
        before = [machine.run.jobs[machine.run.by_name[name]] for name in spec.after]
        gone = [other.ended_s or 0.0 for other in before if other.id in left_out]
        after = tuple(other.spec.name for other in before if other.id not in left_out)
        jobs.append(replace(spec, submit_at=max([job.submit_s, *gone]), after=after))
        if profile is not None:
            profiles[profile.model, profile.nodes] = profile
    reasons = dict.fromkeys(left_out.values())
    return Past(
        jobs=tuple(jobs),
        profiles=tuple(profiles.values()),
        ids=tuple(job_id for job_id in works if job_id not in left_out),
        left_out={reason: tuple(i for i, why in left_out.items() if why == reason) for reason in reasons},
        rigid=tuple(job_id for job_id in rigid if job_id not in left_out),
    )


def place_of(devices: Iterable[Device]) -> tuple[int, int]:
    """GPUs on each host, and hosts. Raises ConfigError if some hosts have more than others."""
    hosts = Counter(device.host for device in devices)
    counts = sorted(set(hosts.values()))
    if len(counts) != 1:
        got = (
            f"the run had hosts with {' and '.join(map(str, counts))} GPUs" if counts else "the run had none"
        )
        raise ConfigError(where="--gpus-per-node", got=got, accepted="GPUs per node to simulate")
    return counts[0], len(hosts)


def _work(
    machine: Machine, job: Job, given: Mapping[tuple[str, int], Profile]
) -> tuple[JobSpec, Profile] | None:
    """The job with its steps, and the profile it goes by; None if one of them is not known."""
    spec, model = job.spec, job.spec.model
    profile = given.get((model, spec.nodes)) or given.get((model, 1)) or machine.estimates.profile(job)
    steps = _steps(job)
    if profile is None or steps is None:
        return None
    costs = machine.estimates.costs.get(model, Costs())
    seen = {
        "start_s": costs.start_s if costs.starts.median is None else costs.starts.median,
        "suspend_s": costs.suspend_s if costs.quick_saves.median is None else costs.quick_saves.median,
        "grow_s": costs.grows.median,
        "shrink_s": costs.shrinks.median,
    }
    missing: dict[str, Any] = {name: cost for name, cost in seen.items() if getattr(profile, name) is None}
    return replace(spec, steps=steps), replace(profile, **missing)


def _steps(job: Job) -> int | None:
    """What it did, if it is completed, else what it has to do; None: not known."""
    return job.step if job.state is JobState.COMPLETED and job.step else job.spec.steps


def _as_it_went(machine: Machine, job: Job) -> tuple[JobSpec, Profile] | None:
    """A completed job with the GPU count that it always had, for as long as it had it.

    Attempts that failed or were lost have no part in this: their work was done again.
    """
    worked = [a for a in job.attempts if a.ended in _WORKED and a.end_s is not None]
    widths = {len(attempt.gpus) // job.spec.nodes for attempt in worked}
    if job.state is not JobState.COMPLETED or len(widths) != 1:
        return None
    (width,) = widths
    held_s = sum((attempt.end_s or 0.0) - attempt.start_s for attempt in worked)
    model = f"{job.spec.model}#{job.id}"
    costs = machine.estimates.costs.get(job.spec.model, Costs())
    profile = Profile(
        model=model,
        device="",
        nodes=job.spec.nodes,
        throughput={width: float(_RATE)},
        suspend_s=costs.suspend_s,
        source="fitted",
    )
    steps = max(1, round(held_s * _RATE))
    # What it lost of its own work is in those times.
    spec = replace(job.spec, model=model, steps=steps, gpus_min=width, gpus_max=width, restart=None)
    return spec, profile


def _leave_out_dependents(machine: Machine, left_out: dict[int, str]) -> None:
    """Nobody knows when those would start that still wait for a job left out.

    (Nobody waits for a completed one any more: it has no dependents.)
    """
    reached = list(left_out)
    for job_id in reached:
        for other_id in machine.waiting.dependents.get(job_id, ()):
            if other_id not in left_out:
                left_out[other_id] = WAITING
                reached.append(other_id)
