"""Launch plans: from the core's `Launch` and `Resize` actions to what a launcher is to start."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hpcsched.contract import files, variables
from hpcsched.contract.seats import Seat
from hpcsched.core.actions import Launch, Resize
from hpcsched.core.jobs import Job
from hpcsched.core.machine import Machine
from hpcsched.core.mechanisms.cpu.cores import device_of
from hpcsched.core.mechanisms.packing.mechanism import Packing
from hpcsched.core.mechanisms.packing.packs import is_packed, key_of
from hpcsched.core.mechanisms.sharing.shares import shares_a_gpu
from hpcsched.core.model import Device, Kind, PythonEnvironment
from hpcsched.core.needs import Needs
from hpcsched.core.profile import Profile
from hpcsched.errors import StoreError
from hpcsched.jobfile.outputs import filled
from hpcsched.launch.base import LaunchPlan
from hpcsched.launch.plans import checkpoint_dir, plan_attempt
from hpcsched.planning.jobs.costs import course_of
from hpcsched.store.files import write_atomically
from hpcsched.store.rundir import RunDir

FindLayers = Callable[[str, str], Mapping[str, Any] | None]
"""Gives the layer profile of a model on a type of device, in its JSON form; None where there is none."""


@dataclass(frozen=True, kw_only=True)
class Site:
    """The settings that all launches of an agent share.

    `stand_ins`: the devices are simulated, so every job runs as a stand-in of its profile. `layers` gives the
    layer profile of a model on a type of device, in its JSON form, where there is one. `checkpoints`: a
    directory for checkpoints, with a folder for each run and job; None: the job's folder in the run
    directory. `environment`: the Python environment of jobs that name none. `arrays` gives the id of each
    array's first job. `store_keys`: what the keys of the rendezvous begin with of jobs whose ranks were
    started by another agent.
    """

    rundir: RunDir
    run_id: str
    user: str
    speed: float
    stand_ins: bool
    checkpoints: Path | None = None
    environment: PythonEnvironment | None = None
    layers: FindLayers = lambda model, device: None
    arrays: Callable[[], Mapping[str, int]] = dict
    store_keys: Mapping[int, str] = field(default_factory=dict)

    def checkpoints_of(self, job_id: int) -> Path:
        """The folder of a job's checkpoints."""
        return checkpoint_dir(self.rundir.root, self.run_id, job_id, self.checkpoints)


def put_layers(job: Job, site: Site, device: str, folder: Path) -> None:
    """Put the layer profile of a burst job's model into its folder, where its program looks for it.

    A job that has one already keeps it, as it corrects it while it trains. Without a profile the program
    measures the layers itself.
    """
    strategy, file = job.spec.strategy, folder / files.LAYERS
    if strategy["kind"] != "burst" or {"plan", "profile"} & strategy.keys() or file.exists():
        return
    known = site.layers(job.spec.model, device)
    if known is not None:
        with contextlib.suppress(StoreError):
            write_atomically(file, json.dumps(known).encode())


def output_path(job: Job, site: Site, attempt: int, host: str) -> Path:
    """The path of a job's output: its pattern filled in, see `jobfile.outputs`; `host`: the (first) one."""
    array = job.spec.array
    values = {
        "j": str(job.id),
        "A": str(site.arrays().get(array.name, job.id) if array else job.id),
        "a": str(array.index if array else attempt),
        "x": job.spec.name,
        "N": host,
        "u": site.user,
    }
    return site.rundir.job(job.id) / filled(job.spec.output, values)


def launch_plan(
    job: Job,
    action: Launch,
    *,
    site: Site,
    devices: tuple[Device, ...],
    profile: Profile | None,
    shared: bool = False,
    continues: int | None = None,
    pack: str | None = None,
    room_mib: float | None = None,
) -> LaunchPlan:
    """The launch plan of a new attempt.

    `shared`: there are background jobs in the run. `continues`: the id of the job whose final state it begins
    with. `pack`: the name of its pack. `room_mib`: what it may take of its device's memory. Raises
    ValueError for a stand-in without a profile or a step count, and for a job without devices.
    """
    if not devices:
        raise ValueError(f"its mechanism ({action.role}) gives it neither GPUs nor seats")
    stand_in = None
    if site.stand_ins or job.spec.kind is Kind.REPLAY:
        stand_in = _course(job, action, profile, site.speed)
    # A CPU slot has no memory of its own: what its job may have is main memory.
    on_slot = shares_a_gpu(job.spec) and devices[0].kind == "cpu"
    plan = plan_attempt(
        job.spec,
        job_id=job.id,
        attempt=action.attempt,
        run_id=site.run_id,
        run_dir=site.rundir.root,
        output=output_path(job, site, action.attempt, devices[0].host),
        checkpoints=site.checkpoints,
        devices=devices,
        seats=action.seats,
        resume=action.resume,
        per_gpu=action.per_gpu,
        lane=_lane(job, shared),
        room_mib=None if on_slot else room_mib,
        from_step=job.saved_step,
        continues=continues,
        pack=pack,
        environment=site.environment,
        stand_in=stand_in,
    )
    if not on_slot or room_mib is None:
        return plan
    return replace(plan, needs=replace(plan.needs or Needs(), memory_mib=room_mib))


def seat_devices(seats: Sequence[Seat]) -> tuple[Device, ...]:
    """The devices that stand for the CPU cores of `seats`."""
    return tuple(device_of(seat) for seat in seats)


def pack_name(job: Job, action: Launch, machine: Machine, site: Site) -> str | None:
    """The name of the pack that a job is launched into: one for each GPU and kind of job in each life of an
    agent; None for a job that is not packed. One that has left its pack gets a pack of its own."""
    if not is_packed(job.spec) or site.stand_ins:
        return None
    kind = hashlib.sha256(repr(key_of(job.spec)).encode()).hexdigest()[:12]
    name = f"{site.run_id}/{len(machine.run.lives)}/{action.gpus[0]}/{kind}"
    return f"{name}/{job.id}" if job.id in machine.mechanism(Packing).packs.alone else name


def joining_plan(
    job: Job,
    action: Resize,
    *,
    site: Site,
    devices: tuple[Device, ...],
    staying: int,
    where: str,
    shared: bool = False,
) -> LaunchPlan:
    """The launch plan of the ranks that join an attempt, on `devices`; they are numbered from `staying`.

    Like the other ranks they are told all devices of the attempt, in rank order.
    """
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
        seats=action.seats,
        resume=True,
        environment=site.environment,
        lane=_lane(job, shared),
        gpus=action.gpus,
        first_rank=staying,
        joins=where,
    )
    if (key := site.store_keys.get(job.id)) is None:
        return plan
    return replace(plan, env={**plan.env, variables.STORE_KEY: key})


def _lane(job: Job, shared: bool) -> str | None:
    """What its program is told of the lane that it is on."""
    if job.spec.background:
        return "background"
    if shares_a_gpu(job.spec):
        return "shared"
    if is_packed(job.spec):
        return None  # it shares its GPU with those of its pack only
    return "foreground" if shared and job.spec.max_foreground_slowdown > 0 else None


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
