"""From a machine to the result that `run` and `simulate` print."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from hpcsched.core.jobs import Job
from hpcsched.core.machine import Machine
from hpcsched.core.model import Attempt, JobSpec, JobState
from hpcsched.core.profile import Profile
from hpcsched.report.result import Result, summarise
from hpcsched.sim.bounds import BoundJob, lower_bound_s
from hpcsched.sim.engine import Simulation


def result_of(machine: Machine, *, downtime_s: float = 0.0) -> Result:
    """The measures of a run that has ended, or of a simulation."""
    gpus = max((life.gpus for life in machine.lives), default=0)
    return summarise(
        machine.jobs.values(),
        policy=machine.policy.name if machine.policy else "",
        gpus=gpus,
        lower_bound_s=_bound(machine),
        overheads=lambda job, attempt: overhead_s(machine, job, attempt),
        downtime_s=downtime_s,
        now_s=machine.now,
    )


def overhead_s(machine: Machine, job: Job, attempt: Attempt) -> float:
    """Seconds of an attempt that were no training: start or resume, and suspend.

    The start counts by the profile where that has it, else until the program said it is ready.
    """
    end_s = machine.now if attempt.end_s is None else attempt.end_s
    leaving_s = 0.0 if attempt.signalled_s is None else end_s - attempt.signalled_s
    profile = machine.profile(job)
    cost = (
        profile.launch_s(len(attempt.gpus) // job.spec.nodes, first=attempt.number == 1) if profile else None
    )
    if cost is None:
        cost = 0.0 if attempt.ready_s is None else attempt.ready_s - attempt.start_s
    return min(cost, end_s - attempt.start_s - leaving_s) + leaving_s


def _bound(machine: Machine) -> float | None:
    # Of a run that did less than all its work, or whose rates were only seen in passing, nothing is proven.
    for job in machine.jobs.values():
        profile = machine.profile(job)
        if job.state is not JobState.COMPLETED or (profile and profile.source == "learned"):
            return None
    index = {job.spec.name: i for i, job in enumerate(machine.jobs.values())}
    jobs = [
        BoundJob(
            profile=machine.profile(job),
            steps=job.spec.steps,
            submit_s=job.submit_s,
            gpus_min=job.spec.gpus_min,
            gpus_max=job.spec.gpus_max,
            nodes=job.spec.nodes,
            after=tuple(index[name] for name in job.spec.after),
        )
        for job in machine.jobs.values()
    ]
    hosts = Counter(device.host for device in machine.devices.values())
    if (
        not jobs
        or len({life.gpus for life in machine.lives}) != 1
        or any(machine.most_for(job) < job.spec.gpus_min for job in machine.jobs.values())
    ):
        return None
    return lower_bound_s(jobs, max(hosts.values(), default=0), len(hosts))


def simulated(
    jobs: Sequence[JobSpec],
    profiles: Sequence[Profile],
    *,
    gpus: int,
    nodes: int = 1,
    policy: str,
    options: Mapping[str, Any],
) -> Result:
    """What these jobs take under a policy on `nodes` hosts with `gpus` GPUs each.

    Raises ConfigError for jobs without profile or steps.
    """
    simulation = Simulation(jobs, profiles, gpus=gpus, nodes=nodes, policy=policy, options=options)
    return result_of(simulation.run())
