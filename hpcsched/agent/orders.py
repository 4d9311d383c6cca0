"""From "launch this attempt" to argv and environment: our side of the contract with programs."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpcsched.core.actions import Launch
from hpcsched.core.jobs import Job
from hpcsched.core.model import Device, Kind
from hpcsched.core.profile import Profile
from hpcsched.launch.base import LaunchPlan
from hpcsched.planning.costs import course_of
from hpcsched.store.rundir import RunDir


@dataclass(frozen=True, kw_only=True)
class Site:
    """What all launches of an agent share.

    `stand_ins`: the devices are pretended ones, so every job runs as a stand-in of its profile.
    """

    rundir: RunDir
    run_id: str
    host: str
    user: str
    speed: float
    stand_ins: bool


def output_path(job: Job, site: Site, attempt: int) -> Path:
    """Where a job's output goes: its pattern, with sbatch's %j %x %N %u %% (and %a, the attempt)."""
    values = {
        "j": str(job.id),
        "x": job.spec.name,
        "N": site.host,
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
    device_env: Mapping[str, str],
    profile: Profile | None,
) -> LaunchPlan:
    """What to start for this attempt.

    Raises ValueError when a stand-in is asked for without a profile or a step count.
    """
    spec, folder = job.spec, site.rundir.job(job.id)
    ours = {
        "RUN_ID": site.run_id,
        "RUN_DIR": str(site.rundir.root),
        "JOB_DIR": str(folder),
        "JOB_ID": str(job.id),
        "JOB_NAME": spec.name,
        "ATTEMPT": str(action.attempt),
        "DEVICES": ",".join(str(d.index) for d in devices),
        "CHECKPOINT_DIR": str(folder / "checkpoint"),
        "CHECKPOINT_EVERY_S": repr(spec.checkpoint_every_s),
        "KEEP": str(spec.keep_checkpoints),
        "RESUME": str(int(action.resume)),
        "NOTIFY_PID": str(os.getpid()),
    }
    if spec.steps is not None:
        ours["STEPS"] = str(spec.steps)
    if site.stand_ins or spec.kind is Kind.REPLAY:
        argv: tuple[str, ...] = (sys.executable, "-m", "hpcsched.worker.standin")
        ours["STANDIN"] = _course(job, action, profile, site.speed)
    elif spec.kind is Kind.TRAINER:
        argv = (sys.executable, "-m", "hpcsched.worker")
        ours["TRAINER"] = spec.trainer or ""
        ours["ARGS"] = json.dumps(spec.args)
        ours["STRATEGY"] = json.dumps(spec.strategy)
    else:
        argv = spec.command
        if spec.args:
            ours["ARGS"] = json.dumps(spec.args)
    contract = {f"HPCSCHED_{name}": value for name, value in ours.items()}
    return LaunchPlan(
        job_id=job.id,
        attempt=action.attempt,
        argv=argv,
        env={**device_env, **spec.env, **contract},
        cwd=Path(spec.workdir),
        output=output_path(job, site, action.attempt),
        devices=devices,
        per_rank=spec.processes == "per-gpu" or spec.kind is not Kind.COMMAND,
    )


def _course(job: Job, action: Launch, profile: Profile | None, speed: float) -> str:
    if profile is None or job.spec.steps is None:
        raise ValueError("a stand-in needs a profile of its model and `steps`")
    course = course_of(
        profile,
        len(action.gpus),
        from_step=job.step,
        steps=job.spec.steps,
        first=action.attempt == 1,
    )
    return json.dumps(
        {
            "rate": course.rate,
            "start_s": course.start_s,
            "suspend_s": course.suspend_s,
            "steps": course.steps,
            "speed": speed,
            "launched_at": time.monotonic(),
        }
    )
