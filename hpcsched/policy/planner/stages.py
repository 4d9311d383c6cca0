"""Going by a stage plan: see `planning.jobs.stage_schedules`."""

from __future__ import annotations

from typing import Any

from hpcsched.core.jobs import Job
from hpcsched.core.model import Role
from hpcsched.core.plan import Plan
from hpcsched.core.reasons import Reason, Why
from hpcsched.core.view import Decision, LookAgain, Preempt, Resize, Start, View
from hpcsched.planning.jobs.list_schedules import CountChange
from hpcsched.planning.jobs.problem import Problem, Work
from hpcsched.planning.jobs.stage_schedules import STAGE_END_LAG_S, StagedTimeline, apply_stage, stage_at


def next_stage(view: View, plan: Plan) -> list[Decision]:
    """What a stage plan does now; nothing after its last stage, or for a plan without any."""
    number = stage_at([(stage.until, stage.gpus) for stage in plan.stages], view.now)
    if number is None:
        return []
    stage = plan.stages[number]
    jobs: list[Job] = []
    for job_id in stage.gpus:
        if job_id in view.queue:
            job = view.jobs[job_id]
            fits = view.free.fits(job.least, job.spec.nodes, room=view.room(job, view.free))
            if fits and view.in_time(job, jobs):
                jobs.append(job)
    problem = Problem(view, waiting=jobs)
    index = {work.job.id: i for i, work in enumerate(problem.works)}
    counts = {index[job_id]: gpus for job_id, gpus in stage.gpus.items() if job_id in index}
    timeline = StagedTimeline(problem)
    decisions: list[Decision] = []

    def told(change: CountChange) -> None:
        decision = _decision(problem, plan, number, change)
        if decision:
            decisions.append(decision)

    apply_stage(problem, timeline, counts, problem.waiting, told)
    until = stage.until + STAGE_END_LAG_S
    at = min(until, timeline.looks_at) if timeline.looks_at > view.now else until
    return [*decisions, LookAgain(at=at)]


def promised(plan: Plan, work: Work, gpus: int) -> dict[str, Any]:
    """What a plan promises, in words for a job that gets so many GPUs."""
    facts, unknown = plan.facts, plan.facts["unknown"]
    return {
        "fastest": f" ({work.optimal} would be its fastest count)" if gpus < work.optimal else "",
        "until": plan.at + facts["makespan_s"],
        "marble": plan.at + facts["marble_s"],
        "guessed": f"; {unknown} of its {facts['jobs']} jobs are of unknown work" if unknown else "",
    }


def _decision(problem: Problem, plan: Plan, number: int, change: CountChange) -> Decision | None:
    work, view = problem.works[change.job], problem.view
    job = work.job
    role = Role.PRIMARY  # it has what it is to have
    which = f"stage {number + 1} of the {len(plan.stages)} planned"
    facts = {"gpus": change.gpus, "old": change.old, "why": which}
    if not change.old:
        about = promised(plan, work, change.gpus)
        reason = Reason(Why.PLANNED, {**facts, "cap": change.gpus, **about})
        return Start(job=job, gpus=change.gpus, hosts=change.hosts, role=role, reason=reason)
    if view.switch_s(job, change.gpus or change.old, change.hosts) >= view.time_on(change.hosts):
        return None  # it could not go on before the allocation ends
    if not view.worth_changing(job, change.gpus):
        return None
    if not change.gpus:
        return Preempt(job=job, reason=Reason(Why.PREEMPTED, facts))
    reason = Reason(Why.RESIZED, facts)
    return Resize(job=job, gpus=change.gpus, hosts=change.hosts, role=role, reason=reason)
