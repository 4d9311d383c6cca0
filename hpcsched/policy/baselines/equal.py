"""Equal shares (EQUI): all jobs present share the GPUs equally, whatever they are.

EQUI (equipartition; Edmonds, STOC 1999) shares evenly and needs no knowledge of the jobs. Here a job gets no
more than its fastest count, where that is known.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from hpcsched.core.jobs import Job
from hpcsched.core.reasons import Reason, Why
from hpcsched.core.view import NO_RULES, Decision, View
from hpcsched.planning.jobs.costs import lost_s, time_left
from hpcsched.policy.baselines.targets import approach, least_counts


class Equal:
    """At each arrival and each end all GPUs are shared anew among the jobs that run or wait.

    Every job gets its least count, first come, first served. Then always who has fewest gets one more (on
    each of its hosts), up to its most or its fastest count, until none are left. Who gets none waits: jobs
    do not take turns.

    `resize` = "always" gives running jobs their new share whatever it costs; "pays" lets them grow only if
    they then end sooner, suspend and resume included, and shrink only if they would otherwise run for longer
    than that takes. Jobs of which that is not known get their new share.
    """

    name = "equal"
    work_conserving = False
    acts_when_full = True
    moves_packed = True
    reshapes = False
    spreads = True
    rules = NO_RULES
    OPTIONS = {"resize": ("pays", "always")}  # noqa: RUF012 - read, never written

    def __init__(self, *, resize: str = "pays") -> None:
        self.resize = resize

    def watches(self, job: Job) -> bool:
        return self.resize == "pays"

    def decide(self, view: View) -> list[Decision]:
        def why(job: Job, gpus: int) -> Reason:
            return Reason(Why.EQUAL_SHARE, {"gpus": gpus, "total": view.capacity.left})

        def resizes(job: Job, gpus: int) -> str:
            return self._words(view, job, gpus)

        return approach(view, shares(view), why, resizes)

    def _words(self, view: View, job: Job, gpus: int) -> str:
        if gpus == 0:
            return "earlier jobs need them"
        words, now, then = (
            "its equal share now",
            *(time_left(view, job, count) for count in (job.width, gpus)),
        )
        if self.resize == "always" or now is None or then is None or not view.curve(job):
            return words
        stay_s = view.start_left_s(job) + now
        go_s = lost_s(view, job, gpus, None, now, then) + (then if gpus > job.width else 0.0)
        return words if go_s < stay_s else ""


def shares(view: View) -> dict[int, int]:
    """The equal share of each job that runs or waits; who gets none that runs has 0."""
    counts, left = least_counts(view, lambda job: 0)
    fewest = [(gpus, k, view.jobs[i]) for k, (i, gpus) in enumerate(counts.items())]
    heapify(fewest)
    most: dict[int, int] = {}
    while fewest:
        gpus, k, job = heappop(fewest)
        more = job.more_than(gpus)
        if job.id not in most:
            most[job.id] = _most(view, job)
        if more <= most[job.id] and (more - gpus) * job.spec.nodes <= left:
            counts[job.id] = more
            left -= (more - gpus) * job.spec.nodes
            heappush(fewest, (more, k, job))
    return dict.fromkeys((job.id for job in view.running), 0) | counts


def _most(view: View, job: Job) -> int:
    least, most = view.limits(job)
    profile = view.curve(job)
    return job.fastest(profile, most, least) if profile else most
