"""CPU cores of jobs by the rules that NEARCHUS is compared with: nodes of one size (section V).

What they go by, live runs do not know. FA-BF has the best counts of servers and workers within its budget,
found by trying all, from its start to its end, so that it starts when its whole budget is free. Optimus
begins with one server and two workers, and every ten minutes adds the one for which its model of speed says
most, as long as its budget lasts and a node is free.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from hpcsched.core.jobs import Job
from hpcsched.core.mechanisms.cpu.cores import WHOLE
from hpcsched.core.mechanisms.cpu.mechanism import Cpu
from hpcsched.core.mechanisms.cpu.view import CoresDecision, CoresView, Reseat, StartOnCores
from hpcsched.core.reasons import Reason, Why
from hpcsched.core.transitions.decisions import PolicyMaker
from hpcsched.core.view import Policy
from hpcsched.planning.ps.training import PsTraining
from hpcsched.planning.ps.whatif.best import NODE_CORES, best_fixed
from hpcsched.planning.ps.whatif.optimus import (
    FIRST_NODES,
    NODE_INTERVAL_S,
    Fit,
    next_node,
    profiled,
    sampled,
)
from hpcsched.policy import make_policy
from hpcsched.policy.around import with_rules
from hpcsched.policy.cpu.allocation import granted, seated
from hpcsched.policy.cpu.configurations import CpuShape
from hpcsched.policy.marble import Marble

NODE_PARTS = round(WHOLE * NODE_CORES)

MIN_CORES = {"dtconfig": 0.3, "optimus": NODE_CORES * sum(FIRST_NODES), "fixed": NODE_CORES * 2}
"""By what a job's configuration can be chosen, and the fewest cores for it."""

Counts = tuple[int, int]
"""Servers and workers."""


@dataclass(frozen=True, slots=True)
class _Grown:
    """When a job was last given a node."""

    at: float


class FixedNodes:
    """A rule for CPU cores: first come, first served with nodes of one size.

    Args:
        begin: servers and workers to start a job with.
        more: which counts come next for a job with these, and None if it stays so.
    """

    def __init__(
        self, *, begin: Callable[[Job], Counts], more: Callable[[Job, Counts], Counts | None]
    ) -> None:
        self._begin, self._more = begin, more

    def allot(self, view: CoresView) -> list[CoresDecision]:
        """Who starts; and who gets one more node, as it was last given one long enough ago."""
        (host, cores), *_ = view.hosts.items()
        room = view.room(host, lent=True)
        decisions: list[CoresDecision] = []
        for job in view.waiting():
            shape = _shape(self._begin(job))
            if shape.cores > sum(room.values()):
                break
            grant = granted(shape.cores, {}, room, cores.numa)
            room = {core: part - grant.get(core, 0) for core, part in room.items()}
            seats, _ = seated((), shape, host, grant, cores.numa)
            facts = {"seats": str(shape), "cores": shape.cores / WHOLE, "budget": job.spec.cpus or 0}
            memory, reason = _Grown(view.now), Reason(Why.SEATED, facts)
            decisions.append(
                StartOnCores(job=job, host=host, seats=seats, grant=grant, memory=memory, reason=reason)
            )
        for job in view.running:
            allotment = view.of[job.id]
            grown, usage = allotment.memory, allotment.usage
            if not (
                job.settled and isinstance(grown, _Grown) and usage and view.now >= grown.at + NODE_INTERVAL_S
            ):
                continue
            now = CpuShape.of(job.current.seats)
            counts = self._more(job, (len(now.servers), len(now.workers)))
            shape = _shape(counts) if counts else now
            if shape.cores <= now.cores or shape.cores - now.cores > sum(room.values()):
                continue
            grant = granted(shape.cores, allotment.grant, room, cores.numa)
            room = {c: part - max(0, grant.get(c, 0) - allotment.grant.get(c, 0)) for c, part in room.items()}
            seats, keep = seated(job.current.seats, shape, host, grant, cores.numa)
            facts = {"old": str(now), "seats": str(shape), "rate": usage.rate, "had": now.cores / WHOLE}
            reason = Reason(Why.MORE_CORES, {**facts, "efficiency": WHOLE * sum(usage.cpu) / now.cores})
            decisions.append(
                Reseat(job=job, seats=seats, keep=keep, grant=grant, memory=_Grown(view.now), reason=reason)
            )
        return decisions


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One of MIN_CORES, as a simulation takes it: what makes its policy, and how trainings behave."""

    make: PolicyMaker
    trainings: Mapping[str, PsTraining]

    @classmethod
    def of(
        cls, name: str, trainings: Mapping[str, PsTraining], cores: float, measured: Sequence[Counts] = ()
    ) -> Rule:
        """The rule of this name for these models, where there are so many cores.

        `measured` are the configurations that Optimus measures first (none: those of `sampled`).
        """
        if name == "optimus":
            first = measured or sampled(int(cores / NODE_CORES))
            fits = {model: profiled(each.model, first, each.link) for model, each in trainings.items()}
            paced = {model: _paced(each) for model, each in trainings.items()}
            return cls(make=lambda name, options: _by(optimus(fits)), trainings=paced)
        if name == "fixed":

            @cache
            def best(model: str, budget: float) -> Counts:
                found = best_fixed(trainings[model].model, budget, trainings[model].link)
                return found.servers, found.workers

            return cls(make=lambda name, options: _by(fixed(best)), trainings=trainings)
        return cls(make=make_policy, trainings=trainings)


def _paced(training: PsTraining) -> PsTraining:
    """The same, measured when Optimus decides: it does not wait for anything to be steady."""
    begun_s = min(training.start_s, training.build_s + training.change_s)
    return replace(training, stable_s=max(0.0, NODE_INTERVAL_S - begun_s))


def _by(rule: FixedNodes) -> Policy:
    """A policy that gives CPU cores away by this rule."""
    policy = with_rules(Marble())
    policy.rules = {**policy.rules, Cpu.name: rule}
    return policy


def fixed(best: Callable[[str, float], Counts]) -> FixedNodes:
    """FA-BF; `best` gives the best counts of a model within a budget."""
    return FixedNodes(
        begin=lambda job: best(job.spec.model, job.spec.cpus or 0.0), more=lambda job, counts: None
    )


def optimus(fits: Mapping[str, Fit]) -> FixedNodes:
    """Optimus, with its models of speed."""

    def more(job: Job, counts: Counts) -> Counts | None:
        servers, workers = counts
        if NODE_CORES * (servers + workers + 1) > (job.spec.cpus or 0.0):
            return None
        match next_node(fits[job.spec.model], servers, workers):
            case "server":
                return servers + 1, workers
            case "worker":
                return servers, workers + 1
        return None

    return FixedNodes(begin=lambda job: FIRST_NODES, more=more)


def _shape(counts: Counts) -> CpuShape:
    return CpuShape(servers=(NODE_PARTS,) * counts[0], workers=(NODE_PARTS,) * counts[1])
