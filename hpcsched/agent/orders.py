"""From the core's "launch this attempt" to what is to be started here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from hpcsched.core.actions import Launch, Resize
from hpcsched.core.jobs import Job
from hpcsched.core.model import Device, Kind
from hpcsched.core.profile import Profile
from hpcsched.launch.base import LaunchPlan
from hpcsched.launch.contract import plan_attempt
from hpcsched.planning.costs import course_of
from hpcsched.store.rundir import RunDir


@dataclass(frozen=True, kw_only=True)
class Site:
    """What all launches of an agent share.

    `stand_ins`: the devices are pretended ones, so every job runs as a stand-in of its profile.
    `checkpoints`: where checkpoints go, in a folder for each run and job; None: the job's folder in the run
    directory.
    """

    rundir: RunDir
    run_id: str
    user: str
    speed: float
    stand_ins: bool
    checkpoints: Path | None = None


def output_path(job: Job, site: Site, attempt: int, host: str) -> Path:
    """Where a job's output goes: its pattern, with sbatch's %j %x %N %u %% (and %a, the attempt).

    `host` is the (first) host it runs on.
    """
    values = {
        "j": str(job.id),
        "x": job.spec.name,
        "N": host,
        "u": site.user,
        "a": str(attempt),
        "%": "%",
    }
    parts = job.spec.output.split("%%")
    for key, value in values.items():
        parts = [part.replace(f"%{key}", value) for part in parts]
    return site.rundir.job(job.id) / "%".join(parts)


def plan_of(
    job: Job,
    action: Launch,
    *,
    site: Site,
    devices: tuple[Device, ...],
    profile: Profile | None,
) -> LaunchPlan:
    """What to start for this attempt.

    Raises ValueError when a stand-in is asked for without a profile or a step count.
    """
    stand_in = None
    if site.stand_ins or job.spec.kind is Kind.REPLAY:
        stand_in = _course(job, action, profile, site.speed)
    return plan_attempt(
        job.spec,
        job_id=job.id,
        attempt=action.attempt,
        run_id=site.run_id,
        run_dir=site.rundir.root,
        output=output_path(job, site, action.attempt, devices[0].host),
        checkpoints=site.checkpoints,
        devices=devices,
        resume=action.resume,
        from_step=job.saved_step,
        stand_in=stand_in,
    )


def joining_plan(
    job: Job, action: Resize, *, site: Site, devices: tuple[Device, ...], staying: int, where: str
) -> LaunchPlan:
    """What to start for the ranks that join an attempt, on `devices`: numbered from `staying`."""
    attempt = action.attempt + 1
    plan = plan_attempt(
        job.spec,
        job_id=job.id,
        attempt=attempt,
        run_id=site.run_id,
        run_dir=site.rundir.root,
        output=output_path(job, site, attempt, devices[0].host),
        checkpoints=site.checkpoints,
        devices=devices,
        resume=True,
    )
    return replace(plan, first_rank=staying, world_size=len(action.gpus), joins=where)


def _course(job: Job, action: Launch, profile: Profile | None, speed: float) -> dict[str, float]:
    if profile is None or job.spec.steps is None:
        raise ValueError("a stand-in needs a profile of its model and `steps`")
    course = course_of(
        profile,
        len(action.gpus) // job.spec.nodes,
        from_step=job.step,
        steps=job.spec.steps,
        first=action.attempt == 1,
    )
    return {
        "rate": course.rate,
        "start_s": course.start_s,
        "suspend_s": course.suspend_s,
        "steps": course.steps,
        "speed": speed,
    }
