"""`hpcsched explain [JOB]`: replays the journal through the core and tells the job's story, or the run's."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click

from hpcsched.cli.common import (
    code_of,
    dir_option,
    find_run,
    hint_at_runs,
    job_names,
    json_option,
    name_one,
    plural,
    say,
    say_json,
)
from hpcsched.cli.jobs import (
    about_background,
    about_batches,
    about_burst,
    about_cpu,
    about_packing,
    about_sharing,
)
from hpcsched.cli.jobs.without_agent import explained
from hpcsched.client.waiting import waiting_by_job
from hpcsched.core.jobs import Job
from hpcsched.core.machine import Machine
from hpcsched.core.mechanisms.cpu.layout import said_seats
from hpcsched.core.model import JobState, Kind, Role
from hpcsched.core.needs import said_time
from hpcsched.core.nouns import reworded
from hpcsched.core.plan import Plan
from hpcsched.core.reasons import Reason
from hpcsched.core.saving import how_suspended
from hpcsched.durations import clock
from hpcsched.errors import NoSuchRun, StoreError, UnknownJob
from hpcsched.printing import hanging, printable, room
from hpcsched.store.run_folders import go_on, has_commands
from hpcsched.store.rundir import RunDir, agent_works, last_status
from hpcsched.store.status import NO_REASON, CoresStatus, ShortDisk, read_run, read_status


@click.command()
@click.argument("job", required=False, shell_complete=job_names)
@dir_option
@json_option
@click.pass_context
def explain(ctx: click.Context, job: str | None, dir_: str | None, as_json: bool) -> int:
    """Why JOB (id or name) waits, why it has this many GPUs or cores, and what is next for it.

    Without JOB: which GPUs of the run are idle with nothing left that could use them, and what can be done.
    Exit code 3: the run's agent is gone, and jobs are left.
    """
    gc.disable()  # as in `status`
    from hpcsched.policy import make_policy
    from hpcsched.store.replay import replay

    rundir = find_run(ctx, dir_)
    with hint_at_runs(ctx, dir_):
        rundir.require()
        if job is not None and explained(rundir, job, as_json=as_json):
            return 0
        begun = rundir.journal.exists()
        if job is None and not begun:
            raise NoSuchRun(f"the run in {rundir.root} has not started yet")
        machine = replay(rundir.journal, make_policy).machine if begun else Machine(make_policy)
        if job is None:
            return _explain_run(machine, rundir, as_json=as_json)
        found = machine.run.job_of(job)
        if found is None:
            raise _no_one_job(machine, job)
    told, noun = explanation(rundir, machine, found), machine.ledger.noun
    if as_json:
        story = [
            {
                "at_s": note.at,
                "code": str(note.reason.why),
                "text": note.reason.said(noun),
                "facts": note.reason.facts,
            }
            for note in found.story
        ]
        page = {
            "schema": 1,
            "id": found.id,
            "name": found.spec.name,
            "state": found.state,
            "reason": _reason(found, told),
            "role": found.role,
            "gpus": list(found.current.gpus) if found.state.active else [],
            "processes": told.processes or None,
            "saves": told.saves or None,
            "needs": told.needs or None,
            "next": told.following,
            "story": story,
            **({"cores": told.cores} if told.cores else {}),
            **({"plans": told.plans} if told.plans else {}),
        }
        say_json(page)
        return code_of(rundir)
    say(f"job {found.id} ({found.spec.name}) is {found.state}" + _where(found, noun))
    for what, line in told.lines():
        _say(f"  {what}: {line}", under=4)
    for disk in _short_disks(rundir):
        if found.id in disk.jobs:
            _say(f"  now: {disk.words}", under=4)
    say("story (time into the run):")
    for at, line in story_of(found, noun):
        _say(f"  {at:>10}  {line}", under=14)
    return code_of(rundir)


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What can be said of a job besides its story; `because` is its reason in words, `now` what it does,
    `following` what is next for it."""

    reason: Reason | None
    because: str
    cores: CoresStatus | None
    now: Sequence[str]
    saves: str
    processes: str
    needs: Sequence[str]
    following: Sequence[str]
    plans: Mapping[str, Any] | None

    def lines(self) -> list[tuple[str, str]]:
        """The same for people, line by line, as (what it is about, words)."""
        lines = [("because", self.because)] if self.because else []
        lines += [("now", line) for line in self.now]
        lines += [("saving", self.saves)] if self.saves else []
        lines += [("processes", self.processes)] if self.processes else []
        lines += [("needs", line) for line in self.needs]
        return lines + [("next", line) for line in self.following]


def explanation(rundir: RunDir, machine: Machine, job: Job) -> Explanation:
    """What can be said of a job, by the journal and, where the agent lives, by its snapshot."""
    from hpcsched.store.snapshot import cores_status

    active, noun = job.state.active, machine.ledger.noun
    reason = machine.waiting_reason(job) or job.reason
    if active and job.current.why:
        reason = job.current.why
    cores = cores_status(job)
    plans = about_burst.compared(rundir, job) if active else None
    now = about_batches.as_it_is(rundir, job.id) if active else []
    now += [*about_cpu.as_it_is(cores), *about_sharing.as_it_is(machine, job), *about_burst.as_it_is(plans)]
    is_command = job.spec.kind is Kind.COMMAND and not cores
    return Explanation(
        reason=reason,
        because=reason.said(noun) if reason else "",
        cores=cores,
        now=now,
        saves=_saves(rundir, machine, job),
        processes=reworded(str(machine.estimates.shape(job)), noun) if is_command else "",
        needs=_needs(machine, job),
        following=_following(rundir, machine, job),
        plans=plans,
    )


def _reason(job: Job, told: Explanation) -> dict[str, str] | None:
    if told.reason:
        return {"code": str(told.reason.why), "text": told.because}
    return {"code": NO_REASON, "text": ""} if job.state.final else None


def story_of(job: Job, noun: str) -> list[tuple[str, str]]:
    """What the job went through, as (time into the run, words); `noun`: what its devices are called."""
    return [(clock(note.at), note.reason.said(noun)) for note in job.story]


def _saves(rundir: RunDir, machine: Machine, job: Job) -> str:
    """How a job that saves by itself is suspended, and what that costs: now, where the agent lives."""
    if not job.state.active:
        return ""
    with contextlib.suppress(NoSuchRun, StoreError):
        page = read_status(rundir, only=())
        if not page.run.stale:
            return next((one.saves for one in page.jobs if one.id == job.id), "")
    return how_suspended(job, machine.run.now, machine.estimates.unsaved_s(job))


def _following(rundir: RunDir, machine: Machine, job: Job) -> list[str]:
    left, word = _left_to_next(rundir, job), last_status(rundir)
    if left or job.state.active or job.state.final or word is None or word.state != "STOPPED":
        return [*left, *what_is_next(machine, job)]
    return [f"the run has stopped: `{go_on(rundir.root)}` goes on, unless it comes back by itself"]


def _left_to_next(rundir: RunDir, job: Job) -> list[str]:
    """What the next agent does to the job, where none lives."""
    if not has_commands(rundir) or agent_works(rundir):
        return []
    waiting = waiting_by_job(rundir).get(job.id, ())
    return [f"a {command} waits: `{go_on(rundir.root)}` does it" for command in waiting]


def _short_disks(rundir: RunDir) -> list[ShortDisk]:
    """Where the next saves may not find room, while the agent lives."""
    with contextlib.suppress(StoreError, NoSuchRun):
        run = read_run(rundir)
        return run.short_disks if run.alive else []
    return []


def _no_one_job(machine: Machine, key: str) -> UnknownJob:
    jobs = machine.run.jobs.values()
    array = {job.spec.name: job.state for job in jobs if job.spec.array and job.spec.array.name == key}
    if array:
        return name_one(key, array)
    return UnknownJob(f"no job {key!r}; `hpcsched status --states all` lists them", name=key)


def _explain_run(machine: Machine, rundir: RunDir, *, as_json: bool) -> int:
    from hpcsched.cli.jobs.explain_run import lines_of, page_of

    record, short = rundir.read_record(), _short_disks(rundir)
    if as_json:
        say_json({**page_of(machine, rundir.root, record), **({"short_disks": short} if short else {})})
        return code_of(rundir)
    say(f"run in {rundir.root}, {clock(machine.run.now)} after its beginning")
    for line in [*lines_of(machine, rundir.root, record), *(f"disk: {disk.words}" for disk in short)]:
        _say(f"  {line}", under=4)
    return code_of(rundir)


def _say(text: str, *, under: int) -> None:
    say(hanging(printable(text), under=under, width=room()), lines=True)


def _needs(machine: Machine, job: Job) -> list[str]:
    """What a job needs besides a number of GPUs, and how long it may still run."""
    needs = job.spec.needs
    if needs is None:
        return []
    lines = [str(needs)] if needs.places else []
    if needs.modules:
        lines.append(f"modules {', '.join(needs.modules)}")
    left_s = job.time_left_s(machine.run.now)
    if needs.time_s is not None and left_s is not None:
        left = "" if job.state.final else f", of which {clock(max(0.0, left_s))} are left"
        lines.append(f"at most {said_time(needs.time_s)} of running time{left}")
    return lines


def _where(job: Job, noun: str) -> str:
    if not job.state.active:
        return ""
    if seats := job.current.seats:
        role = "" if job.role is Role.CORES else f" as {job.role}"
        return f" with {said_seats(seats)} cores on {seats[0].host}{role}"
    gpus = ", ".join(map(str, job.current.gpus))
    return f" on {noun}{'s' * (len(job.current.gpus) != 1)} {gpus} as {job.role}"


def what_is_next(machine: Machine, job: Job) -> list[str]:
    """The future of a job, as far as it is decided or can be said."""
    noun = machine.ledger.noun
    if job.spec.cpus is not None:
        return [*_rest(machine, job), *about_cpu.what_is_next(machine, job)]
    if job.spec.background:
        return [*_rest(machine, job), *about_background.beside(machine, job)]
    if job.state is JobState.SUSPENDING and job.target:
        return [f"it starts again on {plural(len(job.target.gpus), noun)} as soon as it has saved"]
    if job.state is JobState.RUNNING and job.target:
        gpus = plural(len(job.target.gpus), noun)
        return [f"it goes on on {gpus} without a restart, as soon as that is prepared"]
    if job.state in (JobState.STARTING, JobState.RUNNING):
        lines = [*_rest(machine, job), *about_packing.together(machine, job)]
        lines += [*_changes(machine, job), *about_background.beside(machine, job)]
        return [*lines, *_no_better(machine), *_planned_end(machine, job)]
    if job.id in machine.own.queue:
        free = f"{len(machine.ledger.free)} of {plural(len(machine.ledger.devices), noun)} free"
        before = plural(_jobs_before(machine, job), "job")
        line = f"{before} before it; {free}; it wants {_wants(machine, job)}"
        others = [*about_packing.why_not(machine, job), *about_sharing.why_not(machine, job)]
        return [line, *others, *_no_better(machine), *_planned_end(machine, job)]
    return [] if job.state.final or job.held or job.state is JobState.HELD else _planned_end(machine, job)


def _rest(machine: Machine, job: Job) -> list[str]:
    """The remaining time of a running job that stays as it is."""
    rate = job.rate
    if rate is None and job.state.active:
        curve, usage = machine.estimates.curve(job), job.current.usage
        on_cores = usage.rate if usage else None
        rate = curve.rate(job.width) if curve and job.spec.cpus is None else on_cores
    if job.remaining is None or rate is None or job.state not in (JobState.STARTING, JobState.RUNNING):
        return []
    steps = f"{job.remaining} of {job.steps} steps left at {rate:.4g} steps/s"
    return [f"{steps}: about {clock(job.remaining / rate)}"]


def _changes(machine: Machine, job: Job) -> list[str]:
    """Whether a running job is to get another count, and what stands in the way."""
    lines, noun = [], machine.ledger.noun
    plan, promote, best = _plan(machine), _promotes(machine), _fastest(machine, job)
    if promote and job.role is Role.SECONDARY and best is not None and best > job.width:
        pays = " and it pays" if promote == "pays" else ""
        lines.append(f"promoted to {_count(job, best, noun)} when they can be had{pays}")
    if plan and job.id in plan.shrink and job.width > plan.caps[job.id] and job.current.start_s < plan.at:
        lines.append(f"planned to go down to {_count(job, plan.caps[job.id], noun)}")
    if plan and (change := _stage_change(machine, plan, job)):
        at, gpus = change
        what = f"go to {_count(job, gpus, noun)}" if gpus else "save and wait"
        lines.append(f"planned to {what} at {clock(at)} into the run")
    if not job.ready and job.saves_by_itself:
        lines.append("it has not begun to train yet: until then it keeps what it has")
    elif job.cannot_save:
        lines.append(
            "it has not said that it can save: it keeps what it has, and begins anew if it is ended before "
            "it is done; of one that saves by itself `restartable` or `checkpoints` in its job file say so"
        )
    elif not job.ready:
        lines.append("it has not said yet that it can be suspended: until it does it keeps what it has")
    return [*lines, *_same_batch(machine, job)]


def _same_batch(machine: Machine, job: Job) -> list[str]:
    """The counts to which its global batch binds a running job."""
    if not job.keeps_batch:
        return []
    noun = machine.ledger.noun
    counts = [gpus for gpus in range(1, machine.rooms.most_for(job) + 1) if job.allows(gpus)]
    what = f"it is neither promoted nor shrunk: it began on {_count(job, job.width, noun)}"
    if counts != [job.width]:
        what = f"it may have {', '.join(map(str, counts))} {noun}s"
    allow = 'batch = "scales" in its job file lets it change'
    return [f"{what}, on others its global batch would be another one ({allow})"]


def _no_better(machine: Machine) -> list[str]:
    """That the planner has found nothing better than MARBLE's policy, and goes by that."""
    plan = _plan(machine)
    found = plan is None or plan.rule != "marble"
    return [] if found else ["no plan was found that is better than MARBLE's policy: jobs go by that"]


def _planned_end(machine: Machine, job: Job) -> list[str]:
    """The time at which the plan expects the job to end, if that is more than a guess and not over yet."""
    plan = _plan(machine)
    if plan is None or job.remaining is None or not machine.estimates.curve(job):
        return []
    end = plan.ends.get(job.id)
    if end is None or end < machine.run.now:
        return []
    return [f"planned to end {clock(end)} into the run, give or take {clock(plan.slack_s[job.id])}"]


def _jobs_before(machine: Machine, job: Job) -> int:
    """The number of jobs that could start before this one: in the plan's order, else in that of arrival."""
    plan = _plan(machine)
    order = plan.order if plan and plan.rule == "list" else ()
    rank = {job_id: k for k, job_id in enumerate(order)}

    def key(one: Job) -> tuple[int, float, int]:
        return rank.get(one.id, len(rank)), one.submit_s, one.id

    return sum(one.id in machine.own.queue and key(one) < key(job) for one in machine.run.jobs.values())


def _wants(machine: Machine, job: Job) -> str:
    """The GPUs that the policy will give a waiting job, as far as that is decided."""
    plan, noun = _plan(machine), machine.ledger.noun
    least, most = job.limits(machine.rooms.most_for(job))
    if least == most:
        return _count(job, most, noun)
    if plan and plan.rule == "list":
        if job.id in plan.caps:
            cap = plan.caps[job.id]
            return f"{'' if plan.strict else 'at most '}{_count(job, cap, noun)} (planned)"
    elif plan and (change := _stage_change(machine, plan, job)):
        return f"{_count(job, change[1], noun)} (planned, from {clock(change[0])} into the run on)"
    elif _by_marble(machine) and (best := _fastest(machine, job)):
        return f"{_count(job, best, noun)} (its fastest count)"
    elif machine.decisions.policy and machine.decisions.policy.name == "exclusive":
        return f"{_count(job, most, noun)} (all that it may have)"
    return f"at least {_count(job, least, noun)}"


def _stage_change(machine: Machine, plan: Plan, job: Job) -> tuple[float, int] | None:
    """From when on the stages of a plan give the job another count than it has (0: it waits), and which."""
    has, begin = job.width if job.state.active else 0, machine.run.now
    for stage in plan.stages:
        if stage.until > machine.run.now:
            gpus = stage.gpus.get(job.id, 0)
            if gpus != has:
                return begin, gpus
            begin = stage.until
    return None


def _plan(machine: Machine) -> Plan | None:
    """The plan in force; None where there is none, or its times are not known (as Optimus' are not)."""
    plan = machine.run.plan
    valid = plan and plan.ends and plan.news == machine.run.news and not machine.deadline.draining
    return plan if valid else None


def _by_marble(machine: Machine) -> bool:
    """Whether MARBLE's rules decide: those of its policy, or where the planner found nothing better."""
    plan = _plan(machine)
    name = machine.decisions.policy.name if machine.decisions.policy else ""
    return name == "marble" or bool(plan and plan.rule == "marble")


def _promotes(machine: Machine) -> str:
    """The rule by which running jobs are promoted: "pays" or "always"; empty if they are not."""
    if machine.deadline.draining or not _by_marble(machine):
        return ""
    promote = getattr(machine.decisions.policy, "promote", "pays")
    return "" if promote == "never" else str(promote)


def _fastest(machine: Machine, job: Job) -> int | None:
    """The job's fastest count on each of its hosts, by what MARBLE goes by; None if it is not known."""
    profile, (least, most) = machine.estimates.profile(job), job.limits(machine.rooms.most_for(job))
    return job.fastest(profile, most, least) if profile and least <= most else None


def _count(job: Job, gpus: int, noun: str) -> str:
    """A number of devices on each of the job's hosts, in words."""
    each = f" on each of {job.spec.nodes} hosts" if job.spec.nodes > 1 else ""
    return plural(gpus, noun) + each
