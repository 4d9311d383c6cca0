"""When a run's queue ends with the allocations that there are, and with one more: by the product's own core
on a virtual clock.

Pure. The rest of each job's work is simulated, on hosts that come and go as their allocations do. When all
of them have ended, others are asked for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hpcsched.core.events import HostEndMoved
from hpcsched.core.machine import Machine
from hpcsched.core.model import JobSpec, JobState
from hpcsched.core.processes import Program
from hpcsched.core.profile import Profile
from hpcsched.errors import ConfigError
from hpcsched.pool.deciding import Forecast
from hpcsched.sim.blocks import SIM_HOST, Block, joining, placed
from hpcsched.sim.engine import Simulation
from hpcsched.sim.past_run import CANCELLED, FAILED, past_of

MOST_JOBS = 1000
"""Jobs that are simulated in a round (chosen): with more of them it is not known when they end."""
AGAIN_S = 60.0
"""From the end of the last allocation to the work of the next one, besides its wait (chosen)."""
MOST_LATER = 5
"""So many of these are simulated one after the other, the last one without an end (chosen)."""


@dataclass(frozen=True, kw_only=True)
class Rest:
    """What is left to do, and how. `speed`: seconds of the run in one of the clock (1, but of stand-ins)."""

    jobs: Sequence[JobSpec]
    profiles: Sequence[Profile]
    policy: str = "marble"
    options: Mapping[str, Any] = field(default_factory=dict)
    parallel: Sequence[Program] = ()
    speed: float = 1.0


def rest_of(machine: Machine, speed: float) -> Rest | None:
    """What a run has still to do; None where that is not known of some job, or there are too many."""
    past = past_of(machine)
    unknown = [job for why, ids in past.left_out.items() if why not in (CANCELLED, FAILED) for job in ids]
    left = {job.id for job in machine.run.jobs.values() if not job.state.final}
    if set(unknown) & left:
        return None
    jobs = []
    for job_id, spec in zip(past.ids, past.jobs, strict=True):
        job = machine.run.jobs[job_id]
        if job.state.final or job.state is JobState.HELD:
            continue
        done = job.step or 0
        jobs.append(replace(spec, submit_at=0.0, steps=max(1, (spec.steps or 1) - done)))
    if len(jobs) > MOST_JOBS:
        return None
    names = {spec.name for spec in jobs}
    held = {job.spec.name for job in machine.run.jobs.values() if job.state is JobState.HELD}
    ready = [spec for spec in jobs if not held & set(spec.after)]
    ready = [replace(one, after=tuple(name for name in one.after if name in names)) for one in ready]
    policy = machine.decisions.policy
    return Rest(
        jobs=ready,
        profiles=past.profiles,
        policy=policy.name if policy else "marble",
        options=machine.decisions.options,
        parallel=tuple(sorted(machine.estimates.parallel)),
        speed=speed,
    )


def followed(blocks: Sequence[Block], one: Block) -> list[Block]:
    """The blocks, and those like `one`, with its wait, that are asked for when all others have ended."""
    found = list(blocks)
    for number in range(1, MOST_LATER + 1):
        end_s = max(block.end_s for block in found)
        if math.isinf(end_s):
            break
        lasts_s = one.lasts_s if number < MOST_LATER else math.inf
        found.append(replace(one, start_s=end_s + AGAIN_S + one.start_s, lasts_s=lasts_s))
    return found


def forecast(rest: Rest, blocks: Sequence[Block], idle_s: float) -> Forecast | None:
    """When the rest is done in these blocks; None where that cannot be simulated.

    `idle_s`: after so long hosts that nothing uses are given back.
    """
    if not blocks:
        return Forecast(end_s=math.inf, gpu_s=math.inf)
    first = min(blocks, key=lambda one: (one.start_s, -one.lasts_s))
    others = [one for one in blocks if one is not first]
    speed, begins = rest.speed, first.start_s
    timed = [
        replace(one, start_s=(one.start_s - begins) * speed, lasts_s=one.lasts_s * speed) for one in others
    ]
    there = placed(timed, after=first)
    end_s = first.lasts_s * speed
    names = [f"{SIM_HOST}{number + 1}" for number in range(first.nodes if end_s < math.inf else 0)]
    try:
        machine = Simulation(
            rest.jobs,
            rest.profiles,
            gpus=first.gpus,
            nodes=first.nodes,
            policy=rest.policy,
            options=rest.options,
            happenings=[*(HostEndMoved(at=0.0, host=name, end=end_s) for name in names), *joining(there)],
            parallel=rest.parallel,
        ).run()
    except ConfigError:
        return None
    jobs = machine.run.jobs.values()
    if not all(job.state.final for job in jobs):
        return Forecast(end_s=math.inf, gpu_s=math.inf)
    over = max((job.ended_s or 0.0 for job in jobs), default=0.0) / speed
    gpu_s = min(over, first.lasts_s) * first.gpus_in_all
    busy: dict[int, float] = {}
    for job in jobs:
        for attempt in job.attempts:
            for gpu in attempt.gpus:
                busy[gpu] = max(busy.get(gpu, 0.0), (attempt.end_s or 0.0) / speed)
    for block, one in zip(others, there, strict=True):
        start = block.start_s - begins
        for gpus in one.hosts.values():
            last = max((busy.get(i, 0.0) for i in gpus), default=0.0)
            leaves = min(over, max(last, start) + idle_s, start + block.lasts_s)
            gpu_s += max(0.0, leaves - start) * len(gpus)
    return Forecast(end_s=begins + over, gpu_s=gpu_s)
