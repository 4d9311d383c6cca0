"""Trainings are measured alone and packed on one device, by a process of their own (pack, section 4.2)."""

from __future__ import annotations

import contextlib
import json
import socket
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import hpcsched
from hpcsched.contract import variables
from hpcsched.contract.codec import SMALL_BYTES
from hpcsched.core.exits import said_exit
from hpcsched.core.model import JobSpec
from hpcsched.decoding import decode
from hpcsched.devices.base import Devices
from hpcsched.errors import BadInput, ConfigError
from hpcsched.launch.base import Launcher, LaunchPlan
from hpcsched.profiling.packing_results import MeasuredPacks, PackPoint, Pair
from hpcsched.profiling.probing import ProbeFailed, ProbeRun, Say, kept_if_it_fails, started
from hpcsched.profiling.trial import output_of, plan_of


@dataclass(frozen=True, kw_only=True)
class PackProbeSettings:
    """Settings of a measurement of packs: of so many of a model (`counts`), each for `seconds`, in a `mode`.

    `timeout_s` is the longest wait for a sign of life.
    """

    counts: tuple[int, ...] = (1, 2, 4, 8)
    seconds: float = 2.0
    mode: str = "auto"
    timeout_s: float = 120.0


def measure_model(
    job: JobSpec,
    *,
    devices: Devices,
    launcher: Launcher,
    settings: PackProbeSettings,
    say: Say = lambda text: None,
) -> MeasuredPacks:
    """A trainer's model alone and packed with itself, on the first device; nothing is left running.

    Must run in the main thread (see `sweep`). `say(text)` follows the measurement. A number of models that
    memory is too small for ends the packs. Raises ProbeFailed or LaunchError; its output is then kept.
    """
    packs = [[0] * count for count in settings.counts]
    found = _probe([job], packs, devices=devices, launcher=launcher, settings=settings, say=say)
    (batch,) = found["batches"]
    full = len(found["full"]) if found["full"] else None
    if full:
        say(f"{job.model}: {full} of it do not fit into the memory of one {devices.kind}")
    unstackable = [pack["unstackable"] for pack in found["packs"] if pack["unstackable"]]
    at = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    about = f"measured by hpcsched {hpcsched.__version__} on {socket.gethostname()} at {at}"
    return MeasuredPacks(
        model=job.model,
        device=devices.kind,
        batch=batch,
        alone_s=tuple(batch * s for s in found["alone_s"][0]),
        input_s=tuple(batch * s for s in found["input_s"][0]),
        points=tuple(
            PackPoint(
                models=len(pack["members"]),
                windows_s=tuple(batch * s for s in pack["sample_s"]),
                mode=pack["mode"],
                memory_mib=pack["memory_mib"],
                join_s=pack["join_s"],
                leave_s=pack["leave_s"],
            )
            for pack in found["packs"]
        ),
        loads_s=tuple(found["load_s"]),
        full=full,
        stackable=any(pack["stackable"] for pack in found["packs"]),
        unstackable=unstackable[0] if unstackable else "",
        note=f"{about}: {job.trainer}; {found['about']}, alone, by `profile pack`",
    )


def measure_pair(
    one: JobSpec,
    other: JobSpec,
    *,
    devices: Devices,
    launcher: Launcher,
    settings: PackProbeSettings,
    say: Say = lambda text: None,
) -> Pair | None:
    """Two trainers' models alone and in a pack, as `measure_model`; None if memory is too small for both."""
    found = _probe([one, other], [[0, 1]], devices=devices, launcher=launcher, settings=settings, say=say)
    if not found["packs"]:
        say(f"{one.model} and {other.model} do not fit into the memory of one {devices.kind} together")
        return None
    (pack,) = found["packs"]
    return Pair(
        models=(one.model, other.model),
        batches=tuple(found["batches"]),
        device=devices.kind,
        separate_s=sum(map(median, found["alone_s"])),
        packed_s=median(pack["sample_s"]),
        mode=pack["mode"],
        memory_mib=pack["memory_mib"],
    )


def plan_probe(
    jobs: Sequence[JobSpec],
    packs: Sequence[Sequence[int]],
    *,
    devices: Devices,
    settings: PackProbeSettings,
    folder: Path,
    result: Path,
) -> LaunchPlan:
    """The launch plan: the first trainer's own start, but with the probe in the place of the training."""
    plan = plan_of(jobs[0], devices, devices.inventory()[:1], folder, attempt=1)
    request = {
        "jobs": [{"trainer": job.trainer, "args": dict(job.args)} for job in jobs],
        "packs": [list(pack) for pack in packs],
        "result": str(result),
        "seconds": settings.seconds,
        "mode": settings.mode,
    }
    env = {**jobs[-1].env, **plan.env, variables.PACKS: json.dumps(request)}
    return replace(plan, module="hpcsched.worker.packing.probe", env=env, arena=False)


def _probe(
    jobs: Sequence[JobSpec],
    packs: Sequence[Sequence[int]],
    *,
    devices: Devices,
    launcher: Launcher,
    settings: PackProbeSettings,
    say: Say,
) -> dict[str, Any]:
    """What the probe finds (its `Found`)."""
    scratch = Path(tempfile.mkdtemp(prefix="hpcsched-packs-"))
    folder, result = scratch / "packs", scratch / "result.json"
    folder.mkdir(mode=0o700)
    run = _Run(output_of(folder), settings.timeout_s, jobs, say)
    plan = plan_probe(jobs, packs, devices=devices, settings=settings, folder=folder, result=result)
    with kept_if_it_fails(scratch, folder):
        with started(launcher, plan) as workers:
            code = run.follow(workers)
        return run.read(code, result)


@dataclass(frozen=True)
class _Run(ProbeRun):
    """One run of the probe."""

    jobs: Sequence[JobSpec]
    say: Say

    def _tell(self, line: bytes) -> None:
        with contextlib.suppress(BadInput, KeyError, TypeError, IndexError):  # what others write there
            report = decode(line, dict[str, Any], most_bytes=SMALL_BYTES)
            if "alone_s" in report:
                self.say(f"{self.jobs[report['job']].model}: {1e3 * report['alone_s']:.3f} ms a step alone")
            elif "members" in report:
                what = f"{len(report['members'])} in a pack" if len(self.jobs) == 1 else "as a pair"
                self.say(f"{self._who}: {what}, {1e3 * report['step_s']:.3f} ms a step ({report['mode']})")

    def read(self, code: int, result: Path) -> dict[str, Any]:
        """The answer that the probe found; if it was killed at a larger pack, what it had found."""
        said = self.said
        if code == ConfigError.exit_code and said:
            raise ProbeFailed(f"{self._who}: {said[-1]}")
        found: dict[str, Any] = json.loads(result.read_bytes()) if result.exists() else {}
        if code > 128 and found.get("packs"):
            after = len(found["packs"][-1]["members"])
            self.say(
                f"{self._who}: ended with {said_exit(code)} after packs of {after}; larger ones are missing"
            )
        elif code:
            raise ProbeFailed(f"{self._who}: it ended with {said_exit(code)}{self.ends}", output=True)
        return found

    @property
    def _who(self) -> str:
        return " and ".join(job.model for job in self.jobs)

    @property
    def _nothing_done(self) -> str:
        return f"{self._who}: it made no step"
