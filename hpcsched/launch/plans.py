"""Launch plans of attempts: argv and environment, as the contract with programs says (docs/contract.md)."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from hpcsched.contract import files, variables
from hpcsched.contract.environment import Environment
from hpcsched.contract.seats import Seat
from hpcsched.contract.version import VERSION
from hpcsched.core.model import AUTO, Device, JobSpec, Kind, PythonEnvironment
from hpcsched.core.processes import launcher_of
from hpcsched.errors import ConfigError
from hpcsched.launch.base import LaunchPlan
from hpcsched.launch.environment import attempt_variables
from hpcsched.launch.remote.keys import store_key
from hpcsched.ownership import make_private
from hpcsched.patience import patiently


def job_dir(run_dir: Path, job_id: int) -> Path:
    """A job's folder in a run directory; programs may know it from RUN_DIR and JOB_ID alone."""
    return run_dir / f"{files.JOBS}/{job_id}"


def checkpoint_dir(run_dir: Path, run_id: str, job_id: int, checkpoints: Path | None) -> Path:
    """The folder of a job's checkpoints: in its own folder, or in the lasting `checkpoints`."""
    if checkpoints is None:
        return job_dir(run_dir, job_id) / files.CHECKPOINT
    return checkpoints / f"{run_id}/{job_id}"


def claim_checkpoints(checkpoints: Path, run_id: str) -> None:
    """See to it that the folder of a run's checkpoints in the lasting `checkpoints` is this user's alone.

    Raises ConfigError if somebody else could put there what jobs go on from.
    """
    folder = checkpoints / run_id
    with contextlib.suppress(OSError):  # no room, as for checkpoints: jobs wait for that
        patiently(partial(make_private, folder))
    with contextlib.suppress(OSError):
        seen = patiently(folder.lstat)
        ours = stat.S_ISDIR(seen.st_mode) and seen.st_uid in (os.geteuid(), 0)
        if not ours or seen.st_mode & stat.S_IWOTH:
            got = f"{folder} is a link, somebody else's, or one that everybody may write"
            raise ConfigError(where="--checkpoints", got=got, accepted="a folder of yours alone")


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
    seats: Sequence[Seat] = (),
    resume: bool,
    per_gpu: bool = True,
    lane: str | None = None,
    room_mib: float | None = None,
    from_step: int | None = None,
    continues: int | None = None,
    pack: str | None = None,
    environment: PythonEnvironment | None = None,
    stand_in: Mapping[str, float] | None = None,
    gpus: Sequence[int] | None = None,
    first_rank: int = 0,
    joins: str | None = None,
) -> LaunchPlan:
    """The launch plan of an attempt of `spec` on `devices`.

    `checkpoints`: a directory for checkpoints that outlives the allocation and that all hosts see; None: the
    job's folder. `seats`: those of the attempt, for processes on CPU cores. `per_gpu`: one process on each
    device; else as many as the job says, or its launcher starts. `lane`: "foreground" or "background", where
    there are jobs for both lanes of its GPUs, "shared" for one that is content with a part of one; on CPU
    slots the background gets the time that the foreground leaves. `room_mib`: what it may take of the
    device's memory there, unless its `env` says. `from_step`: the step that it is expected to resume from.
    `continues`: the id of the job whose final state it begins with. `pack`: the name of its pack.
    `environment`: the Python environment, if the job names none. `stand_in`: the course of a stand-in, which
    runs in place of the job's own program.

    For ranks that join a running attempt: `joins` ("host:port") is where its rank 0 awaits them, `first_rank`
    the number of the first of them, `gpus` the indices of all devices of the attempt, by rank.
    """
    folder = job_dir(run_dir, job_id)
    trainer = stand_in is None and spec.kind is Kind.TRAINER
    argv = spec.command
    if stand_in is not None:
        argv = (sys.executable, "-P", "-m", "hpcsched.worker.standin")
    if gpus is None:
        gpus = [device.index for device in devices]
    command = spec.kind is Kind.COMMAND
    told = Environment(
        contract=VERSION,
        run_id=run_id,
        run_dir=str(run_dir),
        job_dir=str(folder),
        job_id=job_id,
        job_name=spec.name,
        array_index=spec.array.index if spec.array else None,
        attempt=attempt,
        devices=() if seats else tuple(map(str, gpus)),
        seats=None if command or not seats else tuple(seats),
        checkpoint_dir=str(checkpoint_dir(run_dir, run_id, job_id, checkpoints)),
        checkpoint_every_s=spec.checkpoint_every_s,
        keep=spec.keep_checkpoints,
        resume=resume,
        from_step=from_step,
        continues=None if continues is None else str(checkpoint_dir(run_dir, run_id, continues, checkpoints)),
        steps=spec.steps,
        epochs=spec.epochs,
        args=spec.args if spec.args or spec.kind is Kind.TRAINER else None,
        trainer=spec.trainer or "" if trainer else None,
        strategy=spec.strategy if trainer else None,
        standin=stand_in,
        lane=lane,
        pack=pack,
        store_key=store_key(job_id),
    ).to_environ()
    limits = {} if room_mib is None else {variables.LANE_MEMORY_MIB: str(max(1, int(room_mib)))}
    per_gpu = per_gpu or stand_in is not None
    each = spec.processes if isinstance(spec.processes, int) else 1
    asks = spec.restart.signal if spec.restart else ""
    launcher = None if stand_in is not None else launcher_of(spec.command)
    once = launcher.once if launcher else spec.processes == AUTO
    parallel = per_gpu or (launcher is None and not once and each * spec.nodes > 1)
    if parallel:
        told |= attempt_variables(run_id=run_id, job_id=job_id, attempt=attempt, retries=spec.retries)
    return LaunchPlan(
        job_id=job_id,
        attempt=attempt,
        argv=argv,
        module="hpcsched.worker" if trainer else "",
        environment=None if stand_in is not None or spec.container else spec.environment or environment,
        env={**limits, **spec.env, **told},
        cwd=Path(spec.workdir),
        folder=folder,
        output=output,
        devices=devices,
        per_rank=per_gpu,
        processes=each,
        once=once,
        parallel=parallel,
        arena=(per_gpu or len(devices) == each == 1) and not (launcher or stand_in or spec.container),
        idle=lane == "background" and all(device.kind == "cpu" for device in devices),
        share=seats[0].share if command and seats else None,
        asks=signal.Signals[asks] if command and asks else None,
        needs=None if stand_in is not None else spec.needs,
        first_rank=first_rank,
        world_size=None if joins is None else len(seats or gpus),
        joins=joins,
        container=None if stand_in is not None else spec.container,
    )
