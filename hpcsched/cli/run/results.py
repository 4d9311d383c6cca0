"""From a machine to the result that `run` and `simulate` print."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from msgspec import UNSET

from hpcsched.cli.jobs.about_cpu import there
from hpcsched.cli.run.allocations import used_of
from hpcsched.core.actions import Action
from hpcsched.core.events import Event
from hpcsched.core.jobs import Job
from hpcsched.core.machine import Machine
from hpcsched.core.mechanisms.packing.mechanism import Packing
from hpcsched.core.mechanisms.sharing.shares import share_of, shares_a_gpu
from hpcsched.core.model import MOST_JOBS, Attempt, Ended, JobSpec, JobState, Role
from hpcsched.core.nouns import GPU
from hpcsched.core.profile import Profile
from hpcsched.report.idle import away_gpu_s, idle_of, most_gpus, there_gpu_s
from hpcsched.report.result import Result, summarise
from hpcsched.sim.blocks import Block
from hpcsched.sim.bounds import BoundJob, lower_bound_s, mean_jct_bound_s
from hpcsched.sim.engine import Simulation
from hpcsched.sim.interference import Interference

Watch = Callable[[Event, list[Action], Machine], None]
"""What a simulation calls with each event."""

MOST_STORIES = 10_000
"""Jobs; a simulation of more leaves out what only people look at."""


class Bounds(NamedTuple):
    """Lower bounds of every schedule of a set of jobs, in seconds; None where nothing is proven."""

    makespan_s: float | None
    mean_jct_s: float | None


def result_of(
    machine: Machine,
    *,
    downtime_s: float = 0.0,
    label: str = "",
    bounds: Bounds | None = None,
    keep_jobs: bool = True,
    blocks: Sequence[Block] = (),
) -> Result:
    """The measures of a run that has ended, or of a simulation.

    `label`, `keep_jobs`: see `summarise`. `bounds` are those of the same jobs on the same GPUs, where they
    are known already. `blocks` are the hosts of a simulation that come and go, all of them.
    """
    gpus, away = max((life.gpus for life in machine.run.lives), default=0), partial(away_gpu_s, machine)
    if machine.hosts.joined or len({life.gpus for life in machine.run.lives}) > 1:
        gpus = most_gpus(machine)
        away = partial(_not_there_gpu_s, machine, gpus)
    if bounds is None or any(job.state is not JobState.COMPLETED for job in _foreground(machine)):
        bounds = bounds_of(machine, blocks)
    return summarise(
        machine.run.jobs.values(),
        policy=machine.decisions.policy.name if machine.decisions.policy else "",
        label=label,
        gpus=gpus,
        lower_bound_s=bounds.makespan_s,
        mean_jct_bound_s=bounds.mean_jct_s,
        overheads=lambda job, attempt: overhead_s(machine, job, attempt),
        losses=lambda job, attempt: lost_work_s(machine, job, attempt),
        leaves_s=lambda job, attempt: job.leaves_s(attempt),
        held_from_s=machine.ledger.held_from_s,
        downtime_s=downtime_s,
        now_s=machine.run.now,
        keep_jobs=keep_jobs,
        cores=there(machine),
        away_gpu_s=away,
        idle=idle_of(machine) if keep_jobs and gpus else UNSET,
        devices=sorted(machine.ledger.kinds) if machine.ledger.noun != GPU else UNSET,
        allocations=used_of(machine, blocks) if blocks else UNSET,
    )


def _not_there_gpu_s(machine: Machine, gpus: int, end_s: float) -> float:
    return gpus * end_s - sum(there_gpu_s(machine, end_s).values())


def overhead_s(machine: Machine, job: Job, attempt: Attempt) -> float:
    """Seconds of an attempt that were no training: start or resume, and suspend or change in place.

    The start counts as it was measured; where it was not, by the profile if that has it, else until the
    program said it is ready. One that saves by itself does not say so: its start ends where its training
    began by the steps that were seen, and counts for nothing where it was not seen to train. What it trains
    on after it was asked to leave is training as far as it has saved it.
    """
    end_s = machine.run.now if attempt.end_s is None else attempt.end_s
    leaves_s = job.leaves_s(attempt)
    leaving_s = 0.0 if leaves_s is None else end_s - leaves_s
    if attempt.ended is Ended.RESIZED:
        leaving_s = min(attempt.stopped_s or 0.0, end_s - attempt.start_s)
    profile, cost = machine.estimates.profile(job), 0.0 if attempt.in_place else attempt.launch_s
    if cost is None and profile:
        cost = profile.launch_s(len(attempt.gpus) // job.spec.nodes, first=attempt.number == 1)
    if cost is None:
        cost = _started_s(job, attempt) - attempt.start_s
    return min(cost, end_s - attempt.start_s - leaving_s) + leaving_s


def _started_s(job: Job, attempt: Attempt) -> float:
    """When the attempt began to train, as was seen; else when it was ready, or was seen to train before."""
    trained, ready_s = job.trained_in(attempt.number), attempt.ready_s
    if trained is None:
        return attempt.start_s if ready_s is None or job.saves_by_itself else ready_s
    begun_s = trained.begun_s(attempt.from_step)
    if begun_s is None:
        begun_s = trained.first_s if ready_s is None else min(ready_s, trained.first_s)
    return max(attempt.start_s, begun_s)


def lost_work_s(machine: Machine, job: Job, attempt: Attempt) -> float:
    """Seconds of an attempt, besides its overhead, whose training came to nothing: its steps after the newest
    checkpoint were done again, or never.

    Steps of an attempt are taken to last equally long. Where none after the newest checkpoint were told of a
    program that saves by itself, it is the time from that until it was asked to leave, or ended. Of one that
    failed and told no steps it is all: how much its program had saved by itself is not known. Of others it is
    what they did again, where they went back without ending.
    """
    ended = attempt.ended in (Ended.FAILED, Ended.LOST, Ended.SUSPENDED)
    if attempt.end_s is None or not (ended or attempt.again):
        return 0.0
    following = job.attempts[attempt.number] if attempt.number < len(job.attempts) else None
    kept = (following.from_step if following else job.saved_step or 0) - attempt.from_step
    done = (attempt.to_step or 0) - attempt.from_step + attempt.again
    if not ended:
        kept = done - attempt.again
    if done <= 0:
        share = float(attempt.ended is not Ended.SUSPENDED)
    else:
        share = 1.0 - min(1.0, max(0.0, kept / done))
    if not share:
        trained = job.trained_in(attempt.number)
        saved_s = trained.saved_s if trained else None
        ends_s = attempt.end_s if attempt.signalled_s is None else attempt.signalled_s
        return 0.0 if saved_s is None else max(0.0, ends_s - saved_s)
    return share * (attempt.end_s - attempt.start_s - overhead_s(machine, job, attempt))


def bounds_of(machine: Machine, blocks: Sequence[Block] = ()) -> Bounds:
    """The bounds of a run's jobs on its GPUs, or on those of `blocks`; background jobs count as if there were
    none."""
    nothing = Bounds(None, None)
    # Of a run that did less than all its work, or whose rates were only seen in passing, nothing is proven;
    # jobs that train as one take less than what each of them takes alone.
    foreground = _foreground(machine)
    types = dict.fromkeys(block.gpu_type for block in blocks)
    on_types = {job.id: _on_types(machine, job, types) for job in foreground}
    for job in foreground:
        profiles = machine.estimates.profile(job, ""), *on_types[job.id].values()
        if (
            job.state is not JobState.COMPLETED
            or any(profile and profile.source == "learned" for profile in profiles)
            or machine.mechanism(Packing).packs.shared(job)
            or any(attempt.role is Role.PACKED for attempt in job.attempts)
        ):
            return nothing
    index = {job.spec.name: i for i, job in enumerate(foreground)}
    shares = _least_shares(job for job in foreground if shares_a_gpu(job.spec))
    jobs = [
        BoundJob(
            profile=machine.estimates.profile(job, ""),
            on_types=on_types[job.id],
            mixes=job.spec.mixes_types,
            steps=job.spec.steps,
            submit_s=job.submit_s,
            gpus_min=job.spec.gpus_min,
            gpus_max=job.spec.gpus_max or job.traits.usable,
            nodes=job.spec.nodes,
            after=tuple(index[name] for name in job.spec.after if name in index),
            in_place=job.in_place or any(attempt.ended is Ended.RESIZED for attempt in job.attempts),
            share=shares.get(job.id, 1.0),
        )
        for job in foreground
    ]
    if jobs and blocks:
        return Bounds(lower_bound_s(jobs, 0, blocks=blocks), mean_jct_bound_s(jobs, 0, blocks=blocks))
    hosts = Counter(device.host for device in machine.hosts.there_at_first)
    if (
        not jobs
        or len({life.gpus for life in machine.run.lives}) != 1
        or machine.hosts.joined
        or not machine.ledger.one_type
        or machine.ledger.lost  # they worked for a part of the time
        or any(machine.rooms.most_for(job) < job.spec.gpus_min for job in foreground)
    ):
        return nothing
    gpus = max(hosts.values(), default=0)
    return Bounds(lower_bound_s(jobs, gpus, len(hosts)), mean_jct_bound_s(jobs, gpus, len(hosts)))


def _on_types(machine: Machine, job: Job, types: Iterable[str]) -> dict[str, Profile]:
    """The job's profiles on GPUs of each of these types."""
    found = {each: machine.estimates.profile(job, each) for each in types}
    return {each: profile for each, profile in found.items() if profile}


def _least_shares(jobs: Iterable[Job]) -> dict[int, float]:
    """By id weights of jobs that share GPUs: those of all that can be on one GPU at once sum to at most 1, as
    their shares do, and as there are at most so many of them."""
    asked = {job.id: share_of(job.spec) for job in jobs}
    if all(asked.values()):
        return asked
    even = 1 / MOST_JOBS
    mixed = any(asked.values())
    return {job_id: (share + even) / 2 if mixed else even for job_id, share in asked.items()}


def _foreground(machine: Machine) -> list[Job]:
    return [job for job in machine.run.jobs.values() if not job.spec.background]


def simulated(
    jobs: Sequence[JobSpec],
    profiles: Sequence[Profile],
    *,
    gpus: int,
    nodes: int = 1,
    policy: str,
    options: Mapping[str, Any],
    interference: Interference | None = None,
    bounds: Bounds | None = None,
    keep_jobs: bool = True,
    watch: Watch | None = None,
) -> Result:
    """The result of jobs under a policy on `nodes` hosts with `gpus` GPUs each.

    `bounds` and `keep_jobs`: see `result_of`; `interference` and `watch`: see `Simulation`. Raises
    ConfigError for jobs without profile or steps.
    """
    simulation = Simulation(
        jobs,
        profiles,
        gpus=gpus,
        nodes=nodes,
        policy=policy,
        options=options,
        interference=interference,
        stories=len(jobs) <= MOST_STORIES,
        watch=watch,
    )
    return result_of(simulation.run(), bounds=bounds, keep_jobs=keep_jobs)
