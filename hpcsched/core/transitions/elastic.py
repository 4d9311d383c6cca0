"""Jobs that find out themselves how many GPUs are good for them, and grow and shrink by that (JABAS, section
6.3)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hpcsched.core import events as ev
from hpcsched.core.model import Role
from hpcsched.core.profile import Profile
from hpcsched.core.reasons import Reason, Why
from hpcsched.core.resources.proposals import Proposal
from hpcsched.core.transitions.decisions import Deciding
from hpcsched.core.view import Reshaping

WORTH = 0.05
"""More GPUs are worth it for an epoch that is shorter by this share, at least: it was only predicted."""


def worthwhile(rates: Mapping[int, float]) -> dict[int, float]:
    """The same speeds by GPU count, without what more GPUs would gain by less than `WORTH`: all who go by
    them then agree which count is best."""
    found: dict[int, float] = {}
    good = 0.0
    for count, rate in sorted(rates.items()):
        if rate > good * (1 + WORTH):
            good = rate
        found[count] = min(rate, good)
    return found


class Elastic(Deciding):
    """A run's state in which jobs propose how many GPUs they are to have; the policy disposes."""

    def _scaling_proposed(self, event: ev.ScalingProposed) -> None:
        job = self.active.get(event.job_id)
        if job is None or job.attempt != event.attempt or not event.rates:
            self.stale += 1
            return
        before, former, known = self.proposals.of.get(job.id), self.profile(job), self.loaded(job)
        rates = worthwhile(event.rates)
        bare = Profile(model=job.spec.model, device="", throughput=rates, nodes=job.spec.nodes)
        profile = replace(
            known or bare,
            throughput=rates,
            nodes=job.spec.nodes,
            source="learned",
            spread=None,
            note="",
        )
        self.proposals.of[job.id] = Proposal(profile=profile, batch=event.batch)
        least, most = job.limits(self.most_for(job))
        best = profile.optimal(most, least)
        if former is None or former.optimal(most, least) != best:
            self.news += 1
        if best != job.width and (before is None or before.profile.optimal(most, least) != best):
            facts = {"gpus": best, "batch": event.batch, "rate": profile.rate(best), "old": job.width}
            self._note(job, Reason(Why.PROPOSED, facts))
        self._decide_after = True

    def _reshape(self) -> None:
        """Let elastic jobs grow and shrink, after all else was decided."""
        if self.proposals.of and isinstance(self.policy, Reshaping) and not self._plan_asked:
            for decision in self.policy.reshape(self.view()):
                job, before = decision.job, (decision.job.width, decision.job.role or Role.PRIMARY)
                self._change(job, decision)
                if decision.gpus > before[0]:
                    self.proposals.grown.setdefault(job.id, before)
                elif decision.gpus <= self.proposals.grown.get(job.id, before)[0]:
                    self.proposals.grown.pop(job.id, None)
