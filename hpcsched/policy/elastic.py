"""Which jobs grow or shrink by what they propose for their next epoch (JABAS, section 6.3), first come, first
served: nobody grows while a job waits that could start instead, and who has grown gives that back when one
comes.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any

from hpcsched.core.jobs import Job
from hpcsched.core.mechanisms.elastic.proposals import Proposals
from hpcsched.core.model import Role
from hpcsched.core.profile import Profile
from hpcsched.core.reasons import Reason, Why
from hpcsched.core.resources.gpus import GpusByHost, shares
from hpcsched.core.view import Resize, View


class FollowProposals:
    """Follows the jobs' proposals."""

    def reshape(self, view: View, proposals: Proposals) -> list[Resize]:
        """Who grows or shrinks now, oldest first."""
        decisions: list[Resize] = []
        waits = next(view.waiting(_with_what_was_grown(view, proposals).fits), None) is not None
        for job in view.running:
            proposal = proposals.of.get(job.id)
            if proposal is None or not job.settled or job.spec.background:
                continue
            least, most = view.limits(job)
            wanted = job.fastest(proposal.profile, most, least)
            before, role = proposals.grown.get(job.id, (job.width, Role.PRIMARY))
            facts = {"old": job.width, "batch": proposal.batch}
            found = None
            if waits and before < min(job.width, wanted):
                found = _resize(
                    view,
                    job,
                    before,
                    role,
                    proposal.profile,
                    Reason(Why.GIVEN_BACK, {**facts, "gpus": before}),
                )
            elif wanted != job.width and not (waits and wanted > job.width):
                found = _scaled(view, job, wanted, proposal.profile, facts)
            if found is not None:
                decisions.append(found)
        return decisions


def _with_what_was_grown(view: View, proposals: Proposals) -> GpusByHost:
    """The GPUs that a waiting job could have: those that are free, and those that jobs have grown by, or are
    about to give back."""
    free = GpusByHost(view.free.by_host(), spreads=view.free.spreads)
    for job in view.running:
        least, _ = proposals.grown.get(job.id, (job.width, None))
        if job.becoming is not None:
            least = len(job.becoming.gpus) // job.spec.nodes
        if job.settled or job.becoming is not None:
            own = view.hosts_of(job)
            if job.spec.uneven and free.spreads:
                for host, kept in shares(least, own).items():
                    free.give((host,), own[host] - kept)
            else:
                free.give(own, max(0, job.width - least))
    return free


def _scaled(view: View, job: Job, wanted: int, profile: Profile, facts: Mapping[str, Any]) -> Resize | None:
    """The change to what the job wants, or as near to it as there are GPUs, if it pays."""
    gpus = wanted
    if wanted > job.width:
        have, _ = view.pick(job, wanted, view.hosts_of(job))
        gpus = job.fastest(profile, max(have, job.width), job.width)
        if gpus == job.width:
            return None
    gain = profile.rate(gpus) / profile.rate(job.width) - 1
    why = Why.SCALED_UP if gpus > job.width else Why.SCALED_DOWN
    role = Role.PRIMARY if gpus == wanted or job.role is None else job.role
    return _resize(view, job, gpus, role, profile, Reason(why, {**facts, "gpus": gpus, "gain": gain}))


def _resize(view: View, job: Job, gpus: int, role: str, profile: Profile, reason: Reason) -> Resize | None:
    """The change, unless it costs more than it can still gain."""
    own = view.hosts_of(job)
    room, uneven = view.room(job, view.free), job.spec.uneven
    _, hosts = view.free.pick(gpus, job.spec.nodes, own, room, uneven=uneven)
    cost_s, time_s = view.switch_s(job, gpus, hosts), view.time_on(hosts)
    if not _pays(view, job, gpus, profile, cost_s, time_s):
        return None
    if gpus > job.width:
        view.free.take(hosts, gpus, own)
    return Resize(job=job, gpus=gpus, hosts=hosts, role=role, reason=reason)


def _pays(view: View, job: Job, gpus: int, profile: Profile, cost_s: float, time_s: float) -> bool:
    """Whether the job is done sooner, or farther when the allocation ends; of a smaller count only whether
    there is time for it, as others gain by that."""
    now, then = (profile.rate(count) for count in (job.width, gpus))
    left = inf if job.remaining is None else float(job.remaining)
    stay_s, then_s = left / now, left / then
    if cost_s >= min(stay_s, time_s):
        return False
    if gpus < job.width or left == inf:
        return view.worth_changing(job, gpus)
    if min(stay_s, cost_s + then_s) > time_s:
        return (time_s - cost_s) * then > time_s * now
    return cost_s + then_s < stay_s
