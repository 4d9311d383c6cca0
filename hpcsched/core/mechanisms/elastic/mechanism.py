"""Elastic jobs: they find out themselves how many GPUs are good for them, and grow and shrink by that (JABAS,
section 6.3)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

from hpcsched.core import events as ev
from hpcsched.core.jobs import Job
from hpcsched.core.mechanisms.base import Handlers, Mechanism
from hpcsched.core.mechanisms.elastic.proposals import Proposal, Proposals
from hpcsched.core.model import Role
from hpcsched.core.parts import Parts
from hpcsched.core.profile import Profile
from hpcsched.core.reasons import Reason, Why
from hpcsched.core.view import Resize, View

MIN_REL_GAIN = 0.05
"""The share by which more GPUs must shorten an epoch to be worth it: it was only predicted (chosen)."""


class ElasticRule(Protocol):
    """Says which jobs grow or shrink by what they propose, after all else that is decided."""

    def reshape(self, view: View, proposals: Proposals) -> list[Resize]:
        """The jobs that change now: a pure function of what it is given."""
        ...


def worthwhile(rates: Mapping[int, float]) -> dict[int, float]:
    """The same speeds by GPU count, without what more GPUs would gain by less than `MIN_REL_GAIN`: all who go
    by them then agree which count is best."""
    found: dict[int, float] = {}
    good = 0.0
    for count, rate in sorted(rates.items()):
        if rate > good * (1 + MIN_REL_GAIN):
            good = rate
        found[count] = min(rate, good)
    return found


class Elastic(Mechanism):
    """Takes the proposals of jobs on GPUs of their own; the policy's rule disposes."""

    name = "elastic"

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self.proposals = Proposals()
        self._run, self._out, self._rooms = parts.run, parts.out, parts.rooms
        self._estimates, self._decisions = parts.estimates, parts.decisions

    def handlers(self) -> Handlers:
        return {ev.ScalingProposed: self._proposed}

    def _proposed(self, event: ev.ScalingProposed) -> None:
        job = self._run.active.get(event.job_id)
        if job is None or job.attempt != event.attempt or not event.rates:
            self._run.count_stale()
            return
        before, former = self.proposals.of.get(job.id), self._estimates.profile(job)
        rates, nodes = worthwhile(event.rates), job.spec.nodes
        bare = Profile(model=job.spec.model, device="", throughput=rates, nodes=nodes)
        known = self._estimates.loaded(job) or bare
        profile = replace(known, throughput=rates, nodes=nodes, source="learned", spread=None, note="")
        self.proposals.of[job.id] = Proposal(profile=profile, batch=event.batch)
        self._estimates.say(job, profile)
        least, most = job.limits(self._rooms.most_for(job))
        best = job.fastest(profile, most, least)
        if former is None or job.fastest(former, most, least) != best:
            self._run.count_news()
        if best != job.width and (before is None or job.fastest(before.profile, most, least) != best):
            facts = {"gpus": best, "batch": event.batch, "rate": profile.rate(best), "old": job.width}
            self._out.note(job, Reason(Why.PROPOSED, facts))
        self._out.ask_policy()

    def forget(self, job: Job) -> None:
        self.proposals.of.pop(job.id, None)
        self.proposals.grown.pop(job.id, None)

    def started(self, job: Job) -> None:
        self.proposals.grown.pop(job.id, None)

    def may_grow(self, job: Job) -> bool:
        proposes = job.id in self.proposals.of or job.spec.strategy["kind"] == "vsw"
        return proposes and self._decisions.rule(self.name) is not None

    def decide(self) -> None:
        """Let elastic jobs grow and shrink."""
        if not self.proposals.of or self._decisions.plan_asked:
            return
        rule: ElasticRule | None = self._decisions.rule(self.name)
        if rule is None:
            return
        grown = self.proposals.grown
        for decision in rule.reshape(self._decisions.view(), self.proposals):
            job, before = decision.job, (decision.job.width, decision.job.role or Role.PRIMARY)
            self._decisions.change(job, decision)
            if decision.gpus > before[0]:
                grown.setdefault(job.id, before)
            elif decision.gpus <= grown.get(job.id, before)[0]:
                grown.pop(job.id, None)
