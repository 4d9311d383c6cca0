"""MARBLE's policy: FIFO, primary and secondary jobs, promotion by checkpoint (Algorithm 1).

The readings of what the paper leaves open are in docs/adr/0002-readings-of-algorithm-1.md.
"""

from __future__ import annotations

from hpcsched.core.jobs import Job
from hpcsched.core.model import JobState, Role
from hpcsched.core.reasons import Reason, Why
from hpcsched.core.view import Decision, FreeCount, Remark, Resize, Start, View
from hpcsched.planning.costs import time_left


class Marble:
    """Algorithm 1. Promotion comes before the next job starts (line 6 before line 10).

    `promote` = "always" promotes whenever the optimal count can be had, as the paper does;
    "pays" only if the job then ends sooner, its own suspend and resume included; "never".
    """

    name = "marble"
    work_conserving = True
    OPTIONS = {"promote": ("pays", "always", "never")}  # noqa: RUF012 - read, never written

    def __init__(self, *, promote: str = "pays") -> None:
        self.promote = promote

    def decide(self, view: View) -> list[Decision]:
        free = FreeCount(view.free)
        if not free.left:
            return []
        return self._promotions(view, free) + self._starts(view, free)

    def _promotions(self, view: View, free: FreeCount) -> list[Decision]:
        """Lines 6-8: secondaries, oldest first, that can have their optimal count now."""
        decisions: list[Decision] = []
        for job in view.running:
            if not free.left:
                break
            if job.role is not Role.SECONDARY or job.state is not JobState.RUNNING or job.wanted:
                continue
            least, most = job.limits(view.total)
            profile = view.profile(job)
            wanted = profile.optimal(most, least) if profile else len(job.gpus)
            if wanted <= len(job.gpus):
                continue
            # Figure 5 promotes a job on 3 GPUs to 4 when 3 come free: its own ones count as available.
            have = len(job.gpus) + free.left
            refusal = self._refusal(view, job, wanted, have)
            if isinstance(refusal, Reason):
                decisions.append(Remark(job=job, reason=refusal))
                continue
            facts = {"old": len(job.gpus), "gpus": wanted, "gain": refusal}
            decisions.append(
                Resize(job=job, gpus=wanted, role=Role.PRIMARY, reason=Reason(Why.PROMOTED, facts))
            )
            free.left -= wanted - len(job.gpus)
        return decisions

    def _refusal(self, view: View, job: Job, wanted: int, have: int) -> Reason | str:
        """Why the job is not promoted, or in words what it gains."""
        if self.promote == "never":
            return Reason(Why.NEVER_PROMOTE)
        if have < wanted:
            return Reason(Why.TOO_FEW_FREE, {"wanted": wanted, "have": have})
        if not job.ready:
            return Reason(Why.NOT_READY, {"wanted": wanted})
        if self.promote == "always":
            return "its fastest count is free"
        now, then = time_left(view, job, len(job.gpus)), time_left(view, job, wanted)
        if now is None or then is None:
            return Reason(Why.WORK_UNKNOWN, {"wanted": wanted})
        stay_s, cost_s = now + view.start_left_s(job), view.switch_s(job, wanted)
        if cost_s + then >= stay_s:
            return Reason(Why.DOES_NOT_PAY, {"wanted": wanted, "cost": cost_s, "saved": stay_s - then})
        return f"{cost_s:.0f} s of suspend and resume save {stay_s - then:.0f} s"

    def _starts(self, view: View, free: FreeCount) -> list[Decision]:
        """Lines 15-21: next jobs in FIFO order, on the optimal count or on what is left."""
        decisions: list[Decision] = []
        waiting = view.waiting_count
        for job in view.waiting(free):
            least, most = job.limits(view.total)
            profile = view.profile(job)
            if least == most:
                wanted, reason = most, Reason(Why.FIXED, {"gpus": most})
            elif profile:
                wanted = profile.optimal(most, least)
                facts = {
                    "gpus": wanted,
                    "model": job.spec.model,
                    "rate": profile.rate(wanted),
                    "source": profile.source,
                }
                reason = Reason(Why.OPTIMAL, facts)
            else:
                # Unknown: an equal share of what is free, at most half the node.
                share = min(free.left // waiting, view.total // 2)
                wanted = max(least, min(most, share), 1)
                facts = {"gpus": wanted, "model": job.spec.model, "total": view.total}
                reason = Reason(Why.NO_PROFILE, facts)
            gpus = min(wanted, free.left)
            role = Role.PRIMARY if gpus == wanted else Role.SECONDARY
            if role is Role.SECONDARY:
                facts = {"gpus": gpus, "wanted": wanted, "model": job.spec.model}
                reason = Reason(Why.LEFT_OVER, facts)
            decisions.append(Start(job=job, gpus=gpus, role=role, reason=reason))
            free.left -= gpus
            waiting -= 1
        return decisions
