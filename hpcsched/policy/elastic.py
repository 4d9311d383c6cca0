"""Which jobs grow or shrink by what they propose for their next epoch (JABAS, section 6.3), first come, first
served: nobody grows while another job waits, and who has grown gives that back when one comes.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any

from hpcsched.core.jobs import Job
from hpcsched.core.model import Role
from hpcsched.core.profile import Profile
from hpcsched.core.reasons import Reason, Why
from hpcsched.core.view import Resize, View

WORTH = 0.05
"""More GPUs are worth it for an epoch that is shorter by this share, at least: it was predicted."""


class WithElastic:
    """What makes a policy follow the jobs' proposals."""

    def reshape(self, view: View) -> list[Resize]:
        """Who grows or shrinks now, oldest first."""
        decisions: list[Resize] = []
        waits = next(view.waiting(lambda need, nodes: True), None) is not None
        for job in view.running:
            proposal = view.proposals.of.get(job.id)
            if proposal is None or not job.settled or job.spec.background:
                continue
            wanted = wanted_count(proposal.profile, *view.limits(job))
            before = view.proposals.grown.get(job.id, inf)
            facts = {"old": job.width, "batch": proposal.batch}
            if waits and before < min(job.width, wanted):
                wanted = int(before)
                found = self._resize(view, job, wanted, Reason(Why.GIVEN_BACK, {**facts, "gpus": wanted}))
            elif wanted != job.width and not (waits and wanted > job.width):
                found = self._scaled(view, job, wanted, proposal.profile, facts)
            else:
                found = None
            if found is not None:
                decisions.append(found)
        return decisions

    def _scaled(
        self, view: View, job: Job, wanted: int, profile: Profile, facts: Mapping[str, Any]
    ) -> Resize | None:
        """The change to what the job wants, or as near to it as there are GPUs, if it pays."""
        if wanted > job.width:
            have, _ = view.rooms.pick(wanted, job.spec.nodes, view.hosts_of(job))
            wanted = wanted_count(profile, job.width, max(have, job.width))
            if wanted == job.width:
                return None
        gain = profile.rate(wanted) / profile.rate(job.width) - 1
        why = Why.SCALED_UP if wanted > job.width else Why.SCALED_DOWN
        return self._resize(view, job, wanted, Reason(why, {**facts, "gpus": wanted, "gain": gain}))

    def _resize(self, view: View, job: Job, gpus: int, reason: Reason) -> Resize | None:
        """The change, unless it costs more than it can still gain."""
        own = view.hosts_of(job)
        _, hosts = view.rooms.pick(gpus, job.spec.nodes, own)
        cost_s, rate = view.switch_s(job, gpus, hosts), (view.profile(job) or _NOTHING).rate
        stay_s = min(view.left_s, inf if job.remaining is None else job.remaining / rate(job.width))
        then_s = inf if job.remaining is None else job.remaining / rate(gpus)
        grows = gpus > job.width
        if cost_s >= stay_s or (grows and then_s < inf and cost_s + then_s >= stay_s):
            return None
        if grows:
            view.rooms.take(hosts, gpus, own)
        return Resize(job=job, gpus=gpus, hosts=hosts, role=Role.PRIMARY, reason=reason)


_NOTHING = Profile(model="", device="", throughput={1: 1.0})


def wanted_count(profile: Profile, least: int, most: int) -> int:
    """How many GPUs are good by this speed, of `least` to `most`: the fewest that are nearly as fast as
    any."""
    best = profile.rate(profile.optimal(most, least))
    return next(gpus for gpus in range(least, most + 1) if profile.rate(gpus) >= best / (1 + WORTH))
