"""What policies would have made of a run that is over, for its page: simulated, or why that is not known."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from hpcsched.cli.common import plural
from hpcsched.core.machine import Machine
from hpcsched.core.mechanisms.sharing.shares import shares_a_gpu
from hpcsched.core.model import Device, JobState, Role
from hpcsched.core.reasons import Why
from hpcsched.errors import HpcschedError
from hpcsched.sim.past_run import past_of

if TYPE_CHECKING:
    from hpcsched.core.jobs import Job
    from hpcsched.report.result import Result
    from hpcsched.sim.past_run import Past

POLICIES = ("exclusive", "marble", "planner")

MOST_SIMULATED = 200
"""Jobs (chosen): the page is to be there in seconds."""

WITHIN_S = 10.0
"""Seconds for all policies together (chosen)."""


class _TooLong(Exception):
    """The time for simulations is over."""


def under_policies(machine: Machine) -> tuple[Sequence[Result], str]:
    """The results of the run's jobs under each policy, and what a reader should know of them; without results
    it is the reason. A run that goes on has neither."""
    if not machine.run.finished:
        return (), ""
    past = past_of(machine)
    if why := next(_reasons(machine, past), None):
        return (), f"Not simulated: {why}."
    try:
        results = _simulated(machine, past)
    except _TooLong:
        return (), f"Not simulated: it takes more than {WITHIN_S:.0f} s; hpcsched simulate --run does it."
    except HpcschedError as error:
        return (), f"Not simulated: {error}."
    left_out = ", ".join(f"{len(ids)} {reason}" for reason, ids in past.left_out.items())
    return results, f"Jobs that are not simulated, but measured: {left_out}." if left_out else ""


def _reasons(machine: Machine, past: Past) -> Iterator[str]:
    """Why a simulation would be a guess, or take too long."""
    jobs = list(machine.run.jobs.values())
    if len(jobs) > MOST_SIMULATED:
        yield f"more than {MOST_SIMULATED} jobs; hpcsched simulate --run does it"
    if any(job.spec.cpus is not None for job in jobs):
        yield "there are jobs on CPU cores"
    if any(job.spec.background or shares_a_gpu(job.spec) or _packed(job) for job in jobs):
        yield "there are jobs that share a GPU, and how that slows them under others was not measured"
    if machine.ledger.lost or machine.hosts.joined or len(set(map(_alike, machine.hosts.devices))) != 1:
        yield f"the run did not have the same {machine.ledger.noun}s all the time"
    if any(note.reason.why in (Why.HELD, Why.USER_SUSPENDED) for job in jobs for note in job.story):
        yield "somebody held or suspended jobs, which no policy knows of"
    if len(machine.ledger.kinds) > 1 or len(set(_by_host(machine).values())) != 1:
        yield f"its hosts, or its {machine.ledger.noun}s, were not all alike"
    if not past.jobs:
        yield "no job completed"
    completed = [job for job in jobs if job.state is JobState.COMPLETED]
    if unknown := [job for job in completed if not _known(machine, job, past)]:
        others = f" and {plural(len(unknown) - 1, 'other job')}" if unknown[1:] else ""
        what = f"the steps, or the speed on each number of {machine.ledger.noun}s,"
        yield f"{what} of {unknown[0].spec.name}{others} are not known: see hpcsched profile run"


def _by_host(machine: Machine) -> Counter[str]:
    """The number of GPUs of each host."""
    return Counter(device.host for device in machine.hosts.there_at_first)


def _alike(devices: Iterable[Device]) -> tuple[tuple[str, ...], ...]:
    """The kinds of the devices on each host, whatever the hosts are called."""
    hosts: dict[str, list[str]] = {}
    for device in devices:
        hosts.setdefault(device.host, []).append(device.kind)
    return tuple(sorted(tuple(sorted(kinds)) for kinds in hosts.values()))


def _packed(job: Job) -> bool:
    return any(attempt.role in (Role.PACKED, Role.SHARED) for attempt in job.attempts)


def _known(machine: Machine, job: Job, past: Past) -> bool:
    """Whether the job's steps are known, and its speed on each GPU count that a policy might give it."""
    if job.id not in past.ids or job.id in past.rigid:
        return False
    least, most = job.limits(max(_by_host(machine).values()))
    loaded = machine.estimates.loaded(job)
    if loaded is not None and loaded.source != "learned":  # known between its counts, not beyond them
        return most <= max(loaded.throughput)
    seen = machine.estimates.profile(job)
    if seen is None:
        return False
    return all(count in seen.throughput for count in range(least, most + 1) if job.allows(count))


def _simulated(machine: Machine, past: Past) -> list[Result]:
    from hpcsched.cli.run.results import Bounds, result_of
    from hpcsched.sim.engine import Simulation

    own = machine.decisions
    options: dict[str, dict[str, Any]] = {name: {} for name in POLICIES}
    if own.policy is not None:
        options[own.policy.name] = dict(own.options)
    hosts = _by_host(machine)
    until = time.monotonic() + WITHIN_S

    def watch(*_: object) -> None:
        if time.monotonic() > until:
            raise _TooLong

    results = []
    for policy, given in options.items():
        simulation = Simulation(
            past.jobs,
            past.profiles,
            gpus=max(hosts.values()),
            nodes=len(hosts),
            parallel=tuple(sorted(machine.estimates.parallel)),
            policy=policy,
            options=given,
            stories=False,
            watch=watch,
        )
        said = ", ".join(f"{name}={value}" for name, value in given.items())
        label = f"{policy} with {said}" if said else ""
        result = result_of(simulation.run(), label=label, bounds=Bounds(None, None), keep_jobs=False)
        if result.jobs_completed < result.jobs_total:
            raise HpcschedError(f"under {policy} some jobs never start")
        results.append(result)
    return results
