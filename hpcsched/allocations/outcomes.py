"""What becomes of jobs in allocations of one shape: the product's own core on a virtual clock, in as many
lives as it takes.

Pure. A life is what `run` does in one allocation: it begins where the one before has ended, saves in time
before its end, and whether the run comes back is decided as the agent decides it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hpcsched import mechanisms
from hpcsched.agent.allocation.requeue import RequeuePlan, RunProgress, why_not_requeued
from hpcsched.core import events as ev
from hpcsched.core.actions import Action
from hpcsched.core.machine import Machine
from hpcsched.core.model import JobSpec
from hpcsched.core.processes import Program
from hpcsched.core.profile import Profile
from hpcsched.planning.ps.training import PsTraining
from hpcsched.policy import make_policy
from hpcsched.sim.blocks import Block, placed
from hpcsched.sim.engine import Simulation

STARTUP_S = 2.0
"""Seconds from the start of a batch job to the first decision in it, and LEAVING_S from the last job's end to
that of the batch job: measured by `benchmarks/advise.py` on a real Slurm, on a machine with two cores."""
LEAVING_S = 1.0
MOST_RESTARTS = 20
"""How often a run comes back, as `hpcsched script` has it where nothing else is said."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is to be run, and how.

    `cpus`: cores of each host for jobs without GPUs. `speed`: run seconds in a second of the clock (1, but of
    stand-ins). `margin_s`: seconds of the clock kept before the end, as `--margin`.
    """

    jobs: Sequence[JobSpec]
    profiles: Sequence[Profile]
    policy: str
    options: Mapping[str, Any] = field(default_factory=dict)
    parallel: Sequence[Program] = ()
    trainings: Mapping[str, PsTraining] = field(default_factory=dict)
    cpus: int = 0
    speed: float = 1.0
    margin_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What comes of the work: seconds of the clock for which each allocation is held, one after the other.

    `why_not`: why it does not come to its end; None if it does.
    """

    held_s: tuple[float, ...]
    why_not: str | None = None

    @property
    def running_s(self) -> float:
        """Seconds in which it runs, all allocations together."""
        return math.fsum(self.held_s)

    def gpu_hours(self, gpus: int) -> float:
        """GPU-hours charged for allocations of so many GPUs in all: those that idle are charged too."""
        return self.running_s * gpus / 3600


def outcome_of(
    work: Work, *, gpus: int, nodes: int, limit_s: float = math.inf, most_restarts: int = MOST_RESTARTS
) -> Outcome:
    """The outcome of work in allocations of `gpus` GPUs on each of `nodes` hosts for `limit_s` seconds each.

    Raises ConfigError for a job that has no profile or no step count.
    """
    mechanisms.load()
    machine = Machine(make_policy, stories=False)
    plan = RequeuePlan(how="requeue", most=most_restarts)
    held: list[float] = []
    while True:
        begins = machine.run.now
        machine.handle(_begin(work, gpus, nodes, at=begins))
        if not held:
            machine.handle(ev.ProfilesLoaded(at=begins, profiles=tuple(work.profiles)))
            machine.handle(ev.JobsSubmitted(at=begins, first_id=1, jobs=tuple(work.jobs)))
        before = RunProgress.of(machine)
        over = _live(work, machine, limit_s)
        held.append(STARTUP_S + (over - begins) / work.speed + LEAVING_S)
        if machine.run.finished:
            return Outcome(held_s=tuple(held))
        if why := why_not_requeued(machine, plan, before=before):
            return Outcome(held_s=tuple(held), why_not=why)


def as_used(work: Work, *, gpus: int) -> tuple[JobSpec, ...]:
    """The jobs, each with the most GPUs on a node of `gpus` that it can use: a program that runs once has no
    use for a second one, whatever its profile says."""
    mechanisms.load()
    machine = Machine(make_policy, stories=False)
    machine.handle(_begin(work, gpus, max((job.nodes for job in work.jobs), default=1), at=0.0))
    machine.handle(ev.ProfilesLoaded(at=0.0, profiles=tuple(work.profiles)))
    machine.handle(ev.JobsSubmitted(at=0.0, first_id=1, jobs=tuple(work.jobs)))
    usable = {job.spec.name: job.traits.usable for job in machine.run.jobs.values()}
    return tuple(
        job if (most := usable[job.name]) is None or job.gpus_max else replace(job, gpus_max=most)
        for job in work.jobs
    )


def _begin(work: Work, gpus: int, nodes: int, *, at: float) -> ev.AgentStarted:
    [there] = placed([Block(gpus=gpus, nodes=nodes)])
    return ev.AgentStarted(
        rules=ev.RULES,
        at=at,
        wall=at,
        devices=tuple(there.devices),
        policy=work.policy,
        policy_options=dict(work.options),
        parallel=tuple(work.parallel),
        cores=there.cores(work.cpus),
        reserve_s=work.margin_s * work.speed,
        stays=next(iter(there.hosts)),
        reads_inbox=True,  # so that nothing is decided before the simulation follows
    )


def _live(work: Work, machine: Machine, limit_s: float) -> float:
    """Go on until the agent would leave; when that is, in seconds of the run's clock."""
    begins = machine.run.now
    over: float | None = None

    def watch(event: ev.Event, actions: list[Action], machine: Machine) -> None:
        nonlocal over
        if not (machine.run.finished or machine.stopped or machine.stuck):
            over = None
        elif over is None:
            over = event.at

    facts: list[ev.Event] = []
    if math.isfinite(limit_s):
        left_s = max(0.0, limit_s - STARTUP_S) * work.speed
        facts.append(ev.DeadlineMoved(at=begins, deadline=begins + left_s))
    facts.append(ev.InboxRead(at=begins))
    simulation = Simulation(
        (),
        work.profiles,
        machine=machine,
        happenings=facts,
        trainings=work.trainings,
        stories=False,
        watch=watch,
    )
    simulation.run()
    return machine.run.now if over is None else over
