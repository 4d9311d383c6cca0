"""The bounded planner: never worse than MARBLE by the profiles, and close to a provable optimum.

MARBLE gives each job its fastest count, where the last GPUs add almost nothing. The planner looks for an
order and smaller counts (`planning.jobs.search`), and takes what it finds only if all is done no later than
under MARBLE and no job ends later than 1 + eps times the later of its ends under MARBLE and under one job
at a time. MARBLE itself is always a candidate.

It plans anew when something happens that the plan did not foresee: jobs come, go or fail, devices are lost,
throughputs turn out other than thought. In between it follows its plan (`planning.jobs.list_schedules`).
"""

from __future__ import annotations

from math import inf, isfinite
from typing import Any

from hpcsched.core.jobs import Job
from hpcsched.core.model import JobState, Role
from hpcsched.core.plan import Plan, Stage
from hpcsched.core.reasons import Reason, Why
from hpcsched.core.view import NO_RULES, Decision, LookAgain, Replan, Resize, Start, View
from hpcsched.planning.jobs.list_schedules import CountChange, ListSchedule, apply, shrink, simulate
from hpcsched.planning.jobs.problem import Problem, Work
from hpcsched.planning.jobs.search import MIN_ABS_GAIN, ScheduleSearch, measure, value
from hpcsched.planning.jobs.stage_schedules import best_stages
from hpcsched.planning.jobs.timeline import Timeline
from hpcsched.policy.exclusive import Exclusive
from hpcsched.policy.marble import Marble
from hpcsched.policy.options import NumberOption
from hpcsched.policy.planner.rollout import rollout
from hpcsched.policy.planner.stages import next_stage, promised

WINDOW = 1000
"""Waiting jobs that a plan covers at most."""

FULL_EFFORT = 100
"""With this many jobs twice the budget is spent: there is most to gain. With more of them less, so that a
plan takes no longer."""

TOLERANCE = 0.05
"""Share of a job's planned time by which its end may miss the plan, at least; two of its profile's spreads
if that is more."""

JITTER_S = 5.0
"""And this many seconds: what launches and signals take varies."""

NEVER_NEWS_S = 1e18


class Planner:
    """Makes plans, and goes by them.

    `goal`: what is to be small, relative to MARBLE: the makespan, the mean job completion time (`jct`), or
    their sum (`both`). `eps`: see above; `inf` leaves the order free. `budget`: futures tried in hill
    climbing for each plan. `seed`: the same one gives the same plans.
    """

    name = "planner"
    work_conserving = False
    acts_when_full = True
    moves_packed = True
    reshapes = True
    spreads = False
    rules = NO_RULES
    OPTIONS = {  # noqa: RUF012 - read, never written
        "goal": ("both", "makespan", "jct"),
        "eps": NumberOption(least=0, or_inf=True),
        "budget": NumberOption(least=0, most=100_000, whole=True),
        "seed": NumberOption(whole=True),
    }

    def __init__(self, *, goal: str = "both", eps: float = 1.0, budget: int = 200, seed: int = 1) -> None:
        self.goal, self.eps, self.budget, self.seed = goal, eps, budget, seed
        self._marble = Marble()

    def watches(self, job: Job) -> bool:
        return True

    def decide(self, view: View) -> list[Decision]:
        if not view.running and not view.waiting_count:
            return []
        plan = view.plan
        if plan is None or _outdated(view, plan):
            return [Replan()]
        if plan.rule == "marble":
            return self._marble.decide(view)
        return next_stage(view, plan) or _next(view, plan)

    def plan(self, view: View) -> Plan:
        problem = Problem(view, window=WINDOW)
        works, old = problem.works, view.plan
        unplaced = tuple(problem.unplaced)
        if not works:  # there is nothing to plan, as long as nothing else happens
            return _as_marble(view, unplaced)
        marble, alone = rollout(problem, self._marble), rollout(problem, Exclusive())
        base = measure(problem, marble)
        known = _carried_on(problem, old) if old and old.rule == "list" else None
        kept = simulate(problem, known) if known else None
        latest = []
        for i, work in enumerate(works):
            limit = self._latest(work.job, max(marble.ends[i], alone.ends[i]), old)
            # A promise that cannot be kept any more must not forbid what comes nearest to it.
            latest.append(max(limit, min(marble.ends[i], kept.ends[i] if kept else inf)) * (1 + MIN_ABS_GAIN))
        effort = round(self.budget * _effort(len(works)))
        search = ScheduleSearch(
            problem=problem,
            latest=latest,
            by=problem.now + base.makespan_s * (1 + MIN_ABS_GAIN),
            base=base,
            goal=self.goal,
            budget=effort,
            seed=self.seed,
        )
        search.run([known] if known else [])
        staged = best_stages(search) if self.goal == "makespan" else None
        chosen: ListSchedule | None
        timeline: Timeline
        facts: dict[str, Any] = {
            "marble_s": base.makespan_s,
            "exclusive_s": measure(problem, alone).makespan_s,
            "marble_jct_s": base.mean_jct_s,
            "tried": search.tried,
            "jobs": len(works),
            "unknown": sum(not work.known for work in works),
        }
        if staged:
            chosen, timeline, facts["what"] = staged[0].rest, staged[1], "patterns of the configuration LP"
        elif search.plan is None or search.timeline is None or search.best >= value(self.goal, base, base):
            chosen, timeline, facts["what"] = None, marble, "MARBLE itself"
        else:
            chosen, timeline, facts["what"] = search.plan, search.timeline, search.what
        best = measure(problem, timeline)
        facts |= {"makespan_s": best.makespan_s, "mean_jct_s": best.mean_jct_s}
        ids = [work.job.id for work in works]
        caps = chosen.caps if chosen else tuple(work.optimal for work in works)
        order = chosen.order if chosen else (*problem.waiting, *problem.blocked)
        return Plan(
            at=problem.now,
            rule="stages" if staged else "list" if chosen else "marble",
            order=(
                *(ids[i] for i in dict.fromkeys((*(() if staged else problem.running), *order))),
                *unplaced,
            ),
            caps=dict(zip(ids, caps, strict=True)),
            strict=chosen.strict if chosen else False,
            stages=tuple(
                Stage(until=until, gpus={ids[i]: gpus for i, gpus in counts.items()})
                for until, counts in (staged[0].stages if staged else ())
            ),
            shrink=tuple(
                ids[i]
                for i in problem.running
                if chosen and not staged and works[i].resizable and caps[i] < works[i].width
            ),
            ends={ids[i]: timeline.ends[i] for i in range(len(works))},
            slack_s={
                ids[i]: _slack_s(view, work, caps[i], timeline.ends[i] - problem.now)
                for i, work in enumerate(works)
            },
            latest={ids[i]: limit for i, limit in enumerate(latest) if isfinite(limit)},
            news=view.news,
            facts=facts,
        )

    def fallback(self, view: View) -> Plan:
        return _as_marble(view, tuple(view.queue.walk()))

    def _latest(self, job: Job, reference: float, old: Plan | None) -> float:
        """When the job has to end: fixed by the first plan that it is in."""
        if old and job.id in old.ends:
            return old.latest.get(job.id, inf)
        return job.submit_s + (1 + self.eps) * (reference - job.submit_s)


def _as_marble(view: View, order: tuple[int, ...]) -> Plan:
    """The plan to do what MARBLE does until there is news; `order`: the waiting jobs that are none."""
    return Plan(
        at=view.now,
        rule="marble",
        order=order,
        caps={},
        ends={},
        slack_s={},
        latest={},
        news=view.news,
    )


def _outdated(view: View, plan: Plan) -> bool:
    """Whether something happened that the plan did not foresee."""
    planned = sum(1 for job_id in plan.order if job_id in view.queue)
    if view.waiting_count > planned:
        # Of a queue longer than a plan, its end can wait until half of the plan is done.
        return view.waiting_count <= WINDOW or planned < WINDOW // 2
    return view.news != plan.news


def _effort(jobs: int) -> float:
    return 1 + jobs / FULL_EFFORT if jobs <= FULL_EFFORT else 2 * (FULL_EFFORT / jobs) ** 2


def _slack_s(view: View, work: Work, gpus: int, seconds: float) -> float:
    """By how much a job's end may miss the plan: nothing is news of a job whose work is not known."""
    profile = view.curve(work.job)
    if not work.known or profile is None:
        return NEVER_NEWS_S
    spread = (profile.spread or {}).get(gpus, 0.0)
    unknown_s = view.launch_s(work.job, work.least, first=True) if profile.start_s is None else 0.0
    return JITTER_S + unknown_s + max(TOLERANCE, 2 * spread) * seconds


def _carried_on(problem: Problem, old: Plan) -> ListSchedule:
    """The old plan for the jobs there are now; jobs that it does not know come last."""
    rank = {job_id: k for k, job_id in enumerate(old.order)}
    jobs = [*problem.waiting, *problem.blocked]
    order = sorted(jobs, key=lambda i: (rank.get(problem.works[i].job.id, len(rank)), i))
    caps = []
    for i, work in enumerate(problem.works):
        cap = work.width if i in problem.running else old.caps.get(work.job.id, work.optimal)
        caps.append(min(max(cap, work.least), work.most))
    return ListSchedule(tuple(order), tuple(caps), old.strict)


def _next(view: View, plan: Plan) -> list[Decision]:
    """What a list plan does now."""
    jobs: list[Job] = []
    fits = view.free.fits
    for job_id in plan.order:
        if job_id in view.queue and view.free.left:
            job = view.jobs[job_id]
            there = fits(job.least, job.spec.nodes, room=view.room(job, view.free))
            if there and view.in_time(job, jobs[: view.free.left]):
                jobs.append(job)
    problem = Problem(view, waiting=jobs)
    caps = tuple(_cap(work, plan) for work in problem.works)
    list_plan = ListSchedule(tuple(problem.waiting), caps, plan.strict)
    timeline = Timeline(problem)
    decisions: list[Decision] = []
    started: set[int] = set()

    def told(change: CountChange) -> None:
        if not change.old:
            started.add(change.job)
        elif change.job in started:
            return  # at no cost it could be resized at once: not before it is there
        decision = _decision(problem, timeline, plan, change)
        if decision:
            decisions.append(decision)

    shrink(problem, timeline, list_plan, told)
    # One that was set aside will wait when it has left.
    leaving = any(job.state is JobState.SUSPENDING and not job.target for job in view.running)
    grow = view.waiting_count == len(jobs) and not (plan.stages and leaving)
    apply(problem, timeline, list_plan, list(problem.waiting), grow=grow, told=told)
    return [*decisions, LookAgain(at=timeline.looks_at)] if timeline.looks_at > view.now else decisions


def _cap(work: Work, plan: Plan) -> int:
    """A running job's cap is below its count only if the plan was to shrink it and has not yet."""
    job = work.job
    cap = min(max(plan.caps.get(job.id, work.optimal), work.least), work.most)
    if not work.width:
        return cap
    return cap if job.id in plan.shrink and job.current.start_s < plan.at else work.width


def _decision(problem: Problem, timeline: Timeline, plan: Plan, change: CountChange) -> Start | Resize | None:
    work, view = problem.works[change.job], problem.view
    job, cap = work.job, plan.caps.get(work.job.id, change.gpus)
    role = Role.PRIMARY if change.gpus >= cap else Role.SECONDARY
    facts = {"gpus": change.gpus, "old": change.old, "cap": cap, **promised(plan, work, change.gpus)}
    if not change.old:
        reason = Reason(Why.PLANNED, facts)
        return Start(job=job, gpus=change.gpus, hosts=change.hosts, role=role, reason=reason)
    if change.gpus > change.old:
        end = timeline.resized_end(change.job, change.gpus)
        stay = timeline.ends[change.job]
        left_s = view.time_on(change.hosts)
        cost_s = view.switch_s(job, change.gpus, change.hosts)
        facts["in_place"] = view.in_place(job, change.gpus, change.hosts)
        if end - view.now > left_s and not _further(work, timeline, change, left_s, cost_s):
            return None
        if not facts["in_place"] and (unsaved_s := view.unsaved_s(job)):
            facts["unsaved"] = unsaved_s
        reason = Reason(Why.GROWN, {**facts, "cost": cost_s, "saved": stay - end})
    elif not view.worth_changing(job, change.gpus):
        return None
    else:
        reason = Reason(Why.SHRUNK, facts)
    return Resize(job=job, gpus=change.gpus, hosts=change.hosts, role=role, reason=reason)


def _further(work: Work, timeline: Timeline, change: CountChange, left_s: float, cost_s: float) -> bool:
    """Whether a job that cannot end before the allocation does gets further in it on more GPUs."""
    stay = max(0.0, left_s - max(0.0, timeline.begin(change.job) - timeline.now)) * work.rate[change.old]
    return max(0.0, left_s - cost_s) * work.rate[change.gpus] > stay
