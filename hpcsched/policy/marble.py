"""MARBLE's policy: FIFO, primary and secondary jobs, promotion by checkpoint (Algorithm 1).

The readings of what the paper leaves open are in docs/adr/0002-readings-of-algorithm-1.md.
"""

from __future__ import annotations

from hpcsched.core.jobs import Job
from hpcsched.core.mechanisms.sharing.shares import share_of, shares_a_gpu
from hpcsched.core.model import JobState, Role
from hpcsched.core.processes import shape_of
from hpcsched.core.reasons import Reason, Why, said_cost
from hpcsched.core.view import NO_RULES, Decision, Remark, Resize, Start, View
from hpcsched.planning.jobs.costs import lost_s, time_left


class Marble:
    """Algorithm 1. Promotion comes before the next job starts (line 6 before line 10).

    `promote` = "always" promotes whenever the optimal count can be had, as the paper does;
    "pays" only if the job then ends sooner, what the change costs it included; "never".
    """

    name = "marble"
    work_conserving = True
    acts_when_full = False
    moves_packed = True
    reshapes = True
    spreads = True
    rules = NO_RULES
    OPTIONS = {"promote": ("pays", "always", "never")}  # noqa: RUF012 - read, never written

    def __init__(self, *, promote: str = "pays") -> None:
        self.promote = promote

    def watches(self, job: Job) -> bool:
        return self.promote == "pays" and job.role is Role.SECONDARY

    def decide(self, view: View) -> list[Decision]:
        if not view.free.left:
            return []
        return self._promotions(view) + self._starts(view)

    def _promotions(self, view: View) -> list[Decision]:
        """Lines 6-8: secondaries, oldest first, that can have their optimal count now."""
        decisions: list[Decision] = []
        for job in view.secondaries:
            if not view.free.left:
                break
            if job.state is not JobState.RUNNING or job.wanted or job.resizing:
                continue
            least, most = view.limits(job)
            profile = view.profile(job)
            wanted = job.fastest(profile, most, least) if profile else job.width
            if wanted <= job.width:
                continue
            # Figure 5 promotes a job on 3 GPUs to 4 when 3 come free: its own ones count as available.
            own = view.hosts_of(job)
            have, hosts = view.pick(job, wanted, own)
            refusal = self._refusal(view, job, wanted, have, hosts)
            if isinstance(refusal, Reason):
                decisions.append(Remark(job=job, reason=refusal))
                continue
            reason = Reason(Why.PROMOTED, {"old": job.width, "gpus": wanted, "gain": refusal})
            decisions.append(Resize(job=job, gpus=wanted, hosts=hosts, role=Role.PRIMARY, reason=reason))
            view.free.take(hosts, wanted, own)
        return decisions

    def _refusal(self, view: View, job: Job, wanted: int, have: int, hosts: tuple[str, ...]) -> Reason | str:
        """Why the job is not promoted, or in words what it gains."""
        if self.promote == "never":
            return Reason(Why.NEVER_PROMOTE)
        if have < wanted:
            return Reason(Why.TOO_FEW_FREE, {"wanted": wanted, "have": have})
        if not job.ready:
            return Reason(Why.NOT_READY, {"wanted": wanted})
        cost_s, in_place = view.switch_s(job, wanted, hosts), view.in_place(job, wanted, hosts)
        facts = {"wanted": wanted, "cost": cost_s, "in_place": in_place}
        unsaved_s = 0.0 if in_place else view.unsaved_s(job)
        if unsaved_s:
            facts["unsaved"] = unsaved_s
        left_s = view.time_on(hosts)
        too_short = Reason(Why.TIME_TOO_SHORT, {**facts, "left": left_s})
        if cost_s >= left_s:
            return too_short
        if self.promote == "always":
            return "its fastest count is free"
        now, then = time_left(view, job, job.width), time_left(view, job, wanted)
        if now is None or then is None:
            return Reason(Why.WORK_UNKNOWN, {"wanted": wanted})
        stay_s, costs = (
            now + view.start_left_s(job),
            said_cost(cost_s, in_place=in_place, unsaved_s=unsaved_s),
        )
        off_s = lost_s(view, job, wanted, hosts, now, then)
        if min(stay_s, off_s + then) > left_s:
            # It ends in a later allocation either way: what counts is how far it gets in this one.
            steps = (left_s - view.start_left_s(job)) / now, (left_s - off_s) / then
            if steps[1] <= steps[0]:
                return too_short
            return f"{costs}, and more steps before the allocation ends"
        saved_s = stay_s - then - (off_s - cost_s)
        if off_s + then >= stay_s:
            return Reason(Why.DOES_NOT_PAY, {**facts, "saved": max(0.0, saved_s)})
        return f"{costs} save {saved_s:.0f} s"

    def _starts(self, view: View) -> list[Decision]:
        """Lines 15-21: next jobs in FIFO order, on the optimal count or on what is left."""
        decisions: list[Decision] = []
        waiting, free = view.waiting_count, view.free
        for job in view.waiting(free.fits):
            least, most = view.limits(job)
            node = view.capacity.most(1)
            profile = view.profile(job)
            if most == job.traits.usable and not job.spec.gpus_max:
                wanted = max(least, most)
                facts = {"gpus": wanted, "because": shape_of(job.spec, None, ()).because}
                reason = Reason(Why.NOT_PARALLEL, facts)
            elif least == most:
                wanted, reason = most, Reason(Why.FIXED, {"gpus": most, "hosts": _on_each(job)})
            elif profile:
                wanted = job.fastest(profile, most, least)
                facts = {
                    "gpus": wanted,
                    "model": job.spec.model,
                    "rate": profile.rate(wanted),
                    "source": profile.source,
                }
                reason = Reason(Why.OPTIMAL, facts)
            else:
                # Unknown: an equal share of what is free, at most half the node.
                share = min(free.left // waiting // job.spec.nodes, node // 2)
                wanted = job.fitting(max(least, min(most, share), 1))
                facts = {"gpus": wanted, "model": job.spec.model, "total": node}
                reason = Reason(Why.NO_PROFILE, facts)
            gpus, hosts = view.pick(job, wanted)
            if gpus < least:
                continue  # what suits it is given to others by now
            role = Role.PRIMARY if gpus == wanted else Role.SECONDARY
            if role is Role.SECONDARY:
                facts = {"gpus": gpus, "wanted": wanted, "model": job.spec.model}
                reason = Reason(Why.LEFT_OVER, facts)
            decisions.append(Start(job=job, gpus=gpus, hosts=hosts, role=role, reason=reason))
            free.take(hosts, gpus)
            waiting -= 1
        return decisions


def _on_each(job: Job) -> str:
    if shares_a_gpu(job.spec):
        return f", or {share:g} of one" if (share := share_of(job.spec)) else ", or a share of one"
    return f" on each of {job.spec.nodes} hosts" if job.spec.nodes > 1 else ""
