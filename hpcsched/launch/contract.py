"""Our side of the contract with programs: argv and environment of an attempt (docs/elastic.md)."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

from hpcsched.core.model import AUTO, Device, JobSpec, Kind
from hpcsched.core.processes import launcher_of
from hpcsched.launch.base import LaunchPlan
from hpcsched.launch.environment import attempt_variables
from hpcsched.launch.keys import store_key


def job_dir(run_dir: Path, job_id: int) -> Path:
    """A job's folder in a run directory; programs may know it from RUN_DIR and JOB_ID alone."""
    return run_dir / "jobs" / str(job_id)


def checkpoint_dir(run_dir: Path, run_id: str, job_id: int, checkpoints: Path | None) -> Path:
    """Where a job's checkpoints are: in its folder, or in `checkpoints`, which outlives the allocation."""
    if checkpoints is None:
        return job_dir(run_dir, job_id) / "checkpoint"
    return checkpoints / run_id / str(job_id)


def plan_attempt(
    spec: JobSpec,
    *,
    job_id: int,
    attempt: int,
    run_id: str,
    run_dir: Path,
    output: Path,
    checkpoints: Path | None = None,
    devices: tuple[Device, ...],
    resume: bool,
    per_gpu: bool = True,
    lane: str | None = None,
    from_step: int | None = None,
    continues: int | None = None,
    pack: str | None = None,
    stand_in: Mapping[str, float] | None = None,
) -> LaunchPlan:
    """What to start for an attempt of `spec` on `devices`.

    `per_gpu`: one process on each; else as many as the job says, or its launcher starts. `checkpoints`: a
    directory that outlives the allocation and that all hosts see, to put checkpoints in instead of the job's
    folder. `lane`: on which lane of its GPUs it is, "foreground" or "background", where there are jobs for
    both; on CPU slots the background gets what the foreground leaves. `from_step`: the step that it is
    expected to go on from. `continues`: the id of the job whose final state it begins with. `pack`: the name
    of the pack that it belongs to. `stand_in`: the course that a stand-in follows in place of the job's own
    program.
    """
    folder = job_dir(run_dir, job_id)
    ours = {
        "RUN_ID": run_id,
        "RUN_DIR": str(run_dir),
        "JOB_DIR": str(folder),
        "JOB_ID": str(job_id),
        "JOB_NAME": spec.name,
        "ATTEMPT": str(attempt),
        "DEVICES": ",".join(str(d.index) for d in devices),
        "CHECKPOINT_DIR": str(checkpoint_dir(run_dir, run_id, job_id, checkpoints)),
        "CHECKPOINT_EVERY_S": repr(spec.checkpoint_every_s),
        "KEEP": str(spec.keep_checkpoints),
        "RESUME": str(int(resume)),
        "STORE_KEY": store_key(job_id),
    }
    if lane is not None:
        ours["LANE"] = lane
    if from_step is not None:
        ours["FROM_STEP"] = str(from_step)
    if spec.steps is not None:
        ours["STEPS"] = str(spec.steps)
    if spec.epochs is not None:
        ours["EPOCHS"] = repr(spec.epochs)
    if pack is not None:
        ours["PACK"] = pack
    if continues is not None:
        ours["CONTINUES"] = str(checkpoint_dir(run_dir, run_id, continues, checkpoints))
    argv = spec.command
    if stand_in is not None:
        argv = (sys.executable, "-m", "hpcsched.worker.standin")
        ours["STANDIN"] = json.dumps(dict(stand_in))
    elif spec.kind is Kind.TRAINER:
        argv = (sys.executable, "-m", "hpcsched.worker")
        ours["TRAINER"] = spec.trainer or ""
        ours["STRATEGY"] = json.dumps(spec.strategy)
    if spec.args or spec.kind is Kind.TRAINER:
        ours["ARGS"] = json.dumps(spec.args)
    per_gpu = per_gpu or stand_in is not None
    each = spec.processes if isinstance(spec.processes, int) else 1
    launcher = None if stand_in is not None else launcher_of(spec.command)
    once = launcher.once if launcher else spec.processes == AUTO
    parallel = per_gpu or (launcher is None and not once and each * spec.nodes > 1)
    contract = {f"HPCSCHED_{name}": value for name, value in ours.items()}
    if parallel:
        contract |= attempt_variables(run_id=run_id, job_id=job_id, attempt=attempt, retries=spec.retries)
    return LaunchPlan(
        job_id=job_id,
        attempt=attempt,
        argv=argv,
        env={**spec.env, **contract},
        cwd=Path(spec.workdir),
        folder=folder,
        output=output,
        devices=devices,
        per_rank=per_gpu,
        processes=each,
        once=once,
        parallel=parallel,
        arena=(per_gpu or len(devices) == each == 1) and launcher is None and stand_in is None,
        idle=lane == "background" and all(device.kind == "cpu" for device in devices),
    )
