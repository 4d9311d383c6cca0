"""Optimus: GPUs go one by one to the job that gains most by one more (Peng et al., EuroSys 2018).

Written from the paper's description of its resource allocation, with GPUs in place of workers and
parameter servers, and measured throughput in place of fitted models.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from heapq import heapify, heappop, heappush

from hpcsched.core.jobs import Job
from hpcsched.core.plan import Plan, Stage
from hpcsched.core.reasons import Reason, Why
from hpcsched.core.view import NO_RULES, Decision, LookAgain, Replan, Start, View
from hpcsched.planning.jobs.costs import time_left
from hpcsched.policy.baselines.targets import approach, coming, least_counts
from hpcsched.policy.options import NumberOption


class Optimus:
    """Marginal gain at fixed intervals.

    When the run starts, and then every `interval` seconds, all GPUs are handed out anew. First come, first
    served, each job gets its least count. Then the GPUs left go one at a time (one on each of its hosts, for
    a job with several) to the job whose remaining time falls most per GPU, until nobody gains. Running jobs
    whose count changes are resized, whatever that costs; those that get none wait again.

    The paper says nothing of the time between. Here what runs stays as it is until the next interval, as
    there; but GPUs that nobody is meant to have start waiting jobs, by the same rule, as soon as they are
    free. Were they to idle until the interval is over, short jobs would take ten minutes each.

    A job of unknown remaining time gets an equal share of all GPUs at first, and none of those left.
    A curve that falls and then rises again ends a job's growth at the fall, as in the paper's greedy rule.

    What an interval is meant to bring is a plan, kept in the journal: some jobs can grow only when others
    have saved and given up GPUs.
    """

    name = "optimus"
    work_conserving = False
    acts_when_full = True
    moves_packed = True
    reshapes = False
    spreads = True
    rules = NO_RULES
    OPTIONS = {"interval": NumberOption(least=1)}  # noqa: RUF012 - read, never written

    def __init__(self, *, interval: float = 600.0) -> None:
        self.interval = interval

    def watches(self, job: Job) -> bool:
        return True

    def decide(self, view: View) -> list[Decision]:
        if not view.running and not len(view.queue):
            return []
        plan = view.plan
        if plan is None or view.now >= plan.stages[0].until:
            return [Replan()]
        # Who was to wait and has started again since, on GPUs that came free, is not sent away once more.
        old = {job.id for job in view.running if job.current.start_s < plan.at}
        decisions = self._approach(view, {i: n for i, n in plan.caps.items() if n or i in old})
        started = {decision.job.id for decision in decisions if isinstance(decision, Start)}
        if view.free.left and len(started) == len(decisions) and not coming(view):
            decisions += self._approach(view, _hand_out(view, only_waiting=True, without=started))
        if view.running or decisions:
            decisions.append(LookAgain(at=plan.stages[0].until))
        return decisions

    def plan(self, view: View) -> Plan:
        """Who is to have how many GPUs until the next interval: `caps`, with 0 for who has to wait."""
        return self._until_next(view, dict.fromkeys((job.id for job in view.running), 0) | _hand_out(view))

    def fallback(self, view: View) -> Plan:
        counts = {job.id: job.width for job in view.running}
        return self._until_next(view, counts | dict.fromkeys(view.queue.walk(), 0))

    def _until_next(self, view: View, counts: Mapping[int, int]) -> Plan:
        until = view.now + self.interval
        return Plan(
            at=view.now,
            rule=self.name,
            order=tuple(counts),
            caps=counts,
            stages=(Stage(until=until, gpus=counts),),
            ends={},
            slack_s={},
            latest={},
            news=view.news,
        )

    def _approach(self, view: View, targets: Mapping[int, int]) -> list[Decision]:
        def why(job: Job, gpus: int) -> Reason:
            return Reason(Why.MARGINAL_GAIN, {"gpus": gpus, "total": view.capacity.left})

        def resizes(job: Job, gpus: int) -> str:
            if gpus > job.width:
                return "it gains most by them"
            return "other jobs gain more by them" if gpus else "earlier jobs need them"

        return approach(view, targets, why, resizes)


def _hand_out(view: View, *, only_waiting: bool = False, without: Collection[int] = ()) -> dict[int, int]:
    """GPU counts by job: all GPUs for all jobs, or the free ones for those that wait."""
    share = view.capacity.left // max(1, len(view.running) + view.waiting_count)

    def floor(job: Job) -> int:
        known = view.curve(job) and job.remaining is not None
        return 0 if known else share // job.spec.nodes

    counts, left = least_counts(view, floor, only_waiting=only_waiting, without=without)
    gains = [entry for i, gpus in counts.items() if (entry := _entry(view, view.jobs[i], gpus))]
    heapify(gains)
    while gains:
        _, _, i = heappop(gains)
        job = view.jobs[i]
        more = job.more_than(counts[i])
        if (more - counts[i]) * job.spec.nodes <= left:
            left -= (more - counts[i]) * job.spec.nodes
            counts[i] = more
            if entry := _entry(view, job, counts[i]):
                heappush(gains, entry)
    return counts


def _entry(view: View, job: Job, gpus: int) -> tuple[float, float, int] | None:
    """(minus the seconds saved per GPU by one more on each host, arrival, id); None: it gains nothing."""
    more = job.more_than(gpus)
    if more > view.limits(job)[1] or not view.curve(job):
        return None
    now, then = time_left(view, job, gpus), time_left(view, job, more)
    if now is None or then is None or then >= now:
        return None
    return (then - now) / ((more - gpus) * job.spec.nodes), job.submit_s, job.id
