"""The stream workers of a trainer are measured on this host's devices, by processes of their own (JABAS,
section 5.1)."""

from __future__ import annotations

import contextlib
import json
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import hpcsched
from hpcsched.contract import variables
from hpcsched.contract.codec import SMALL_BYTES
from hpcsched.core.exits import said_exit
from hpcsched.core.model import Device, JobSpec
from hpcsched.decoding import decode
from hpcsched.devices.base import Devices
from hpcsched.errors import BadInput, ConfigError, LaunchError
from hpcsched.launch.base import Launcher
from hpcsched.planning.vsw.configure import ClusterGpu
from hpcsched.planning.vsw.costs import AllReduceCost, AllReduceCosts
from hpcsched.planning.vsw.profile import VswProfile
from hpcsched.profiling.probing import ProbeFailed, ProbeRun, Say, kept_if_it_fails, started
from hpcsched.profiling.trial import output_of, plan_of


@dataclass(frozen=True, kw_only=True)
class VswProbeSettings:
    """Settings of a measurement: local batches in a range (None: from 1 to the trainer's global batch), at
    most `at_once` workers (None: as many as gain something), each point for `seconds`.

    `global_batch` are the bounds of an adaptive one (None: it is not), which is measured with room for the
    two halves of a gradient. `timeout_s` is the longest wait for a sign of life.
    """

    local_batch: tuple[int, int] | None = None
    at_once: int | None = None
    seconds: float = 1.0
    global_batch: tuple[int, int] | None = None
    timeout_s: float = 120.0


_ROW = ("local_batch", "at_once", "samples_s", "memory_mib")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRound:
    """One measured point. Times are of a round, in which each worker computes a local batch; `memory_mib` is
    a GPU's at the peak."""

    local_batch: int
    at_once: int
    read_s: float
    forward_s: float
    backward_s: float
    samples_s: float
    memory_mib: float | None


@dataclass(frozen=True, kw_only=True)
class VswListener:
    """Callbacks of a measurement: each `row`, of a kind of device, the profile so far (`keep`), and what
    there is to `say`."""

    row: Callable[[str, MeasuredRound], None] = lambda kind, row: None
    keep: Callable[[VswProfile], None] = lambda profile: None
    say: Say = lambda text: None


class Measurement:
    """The measurement of a trainer's workers on one device of each kind, and of sums over all devices.

    Args:
        job: with the trainer.
        devices: on the first of each kind workers are measured, on all of them together sums.
        launcher: starts the processes that measure.
        settings: what to measure.
        watch: who is told.
    """

    def __init__(
        self,
        job: JobSpec,
        *,
        devices: Devices,
        launcher: Launcher,
        settings: VswProbeSettings,
        watch: VswListener,
    ) -> None:
        self._job, self._devices, self._launcher = job, devices, launcher
        self._settings, self._watch = settings, watch
        self._found: dict[str, VswProfile] = {}
        self._line: AllReduceCost | None = None
        self.global_batch = 0
        """The trainer's own."""

    def run(self) -> VswProfile:
        """Measure; nothing is left running. Must run in the main thread (see `sweep`).

        If a program fails, what it has found before is kept. Raises ProbeFailed if it has found nothing, or
        is silent for too long, and LaunchError; the program's output is then kept.
        """
        first: dict[str, Device] = {}
        for device in self._devices.inventory():
            first.setdefault(device.kind, device)
        for device in first.values():
            self._workers(device)
        if len(self._devices.inventory()) > 1:
            self._sums()
        self._watch.keep(self.profile)
        return self.profile

    @property
    def ranks(self) -> int:
        """Over so many sums were measured; 1 if they were not."""
        return len(self._devices.inventory()) if self._line else 1

    @property
    def profile(self) -> VswProfile:
        """The profile known so far, of one device at least."""
        inventory, found = self._devices.inventory(), list(self._found.values())
        costs = found[-1].costs
        within = self._line or costs.network.within
        if self._line:
            sums = f"all-reduce over {self.ranks} ranks of this host, taken to be the same between hosts"
        else:
            each = f"{1e3 * within.latency_s:g} ms and {1e9 * within.per_byte_s:g} ms for each MB"
            sums = f"all-reduce not measured, taken to be {each}"
        return replace(
            found[-1],
            costs=replace(
                costs,
                gpus={kind: own.costs.gpus[kind] for kind, own in self._found.items()},
                network=AllReduceCosts(within=within, between=within),
            ),
            cluster=tuple(ClusterGpu(kind=d.kind, host=d.host) for d in inventory if d.kind in self._found),
            global_batch=self._settings.global_batch,
            note="; ".join([*(own.note for own in found), sums]),
        )

    def _workers(self, device: Device) -> None:
        """Measure them on this device."""
        settings = self._settings
        at = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        about = f"measured by hpcsched {hpcsched.__version__} on {socket.gethostname()} at {at}"
        args = f" {json.dumps(dict(self._job.args))}" if self._job.args else ""
        request = {
            "model": self._job.model,
            "device": device.kind,
            "note": f"{about}: {self._job.trainer}{args}",
            "local_batch": settings.local_batch,
            "at_once": settings.at_once,
            "seconds": settings.seconds,
            "halves": settings.global_batch is not None,
        }

        def learn(answer: dict[str, Any]) -> None:
            self._found[device.kind] = VswProfile.parse(answer["profile"], where="what was measured")
            self.global_batch = answer["global_batch"]
            self._watch.keep(self.profile)

        with self._running((device,), request, learn) as (run, code):
            if device.kind not in self._found:
                if code == ConfigError.exit_code and run.said:
                    raise ProbeFailed(run.said[-1])
                raise ProbeFailed(f"it ended with {said_exit(code)}{run.ends}", output=True)
            for line in run.said:
                self._watch.say(line)
            if code:
                last = self._found[device.kind].local_batches[-1]
                why = f"ended with {said_exit(code)}{run.ends}"
                self._watch.say(f"the measurement {why}; what comes after local batch {last} is missing")

    def _sums(self) -> None:
        """Measure the all-reduce on all devices; without it a guess has to do."""

        def learn(answer: dict[str, Any]) -> None:
            self._line = AllReduceCost(**answer["line"])

        request = {"sum_bytes": max(self.profile.costs.buckets)}
        try:
            with self._running(self._devices.inventory(), request, learn) as (run, code):
                if self._line is None:
                    raise ProbeFailed(f"it ended with {said_exit(code)}{run.ends}", output=True)
        except (ProbeFailed, LaunchError) as error:
            self._watch.say(f"the all-reduce could not be measured: {error}")

    @contextmanager
    def _running(
        self, chosen: tuple[Device, ...], request: dict[str, Any], learn: Callable[[dict[str, Any]], None]
    ) -> Iterator[tuple[_Points, int]]:
        """Start a rank on each device, and learn what they find; inside they have ended, with this exit code.

        If they have failed, their output is kept.
        """
        scratch = Path(tempfile.mkdtemp(prefix="hpcsched-vsw-"))
        folder, result = scratch / "vsw", scratch / "result.json"
        folder.mkdir(mode=0o700)
        plan = plan_of(self._job, self._devices, chosen, folder, attempt=1)
        env = {**plan.env, variables.VSW: json.dumps({**request, "result": str(result)})}
        plan = replace(plan, module="hpcsched.worker.vsw", env=env, arena=False)
        watch, timeout_s = self._watch, self._settings.timeout_s
        row = partial(watch.row, chosen[0].kind)
        run = _Points(output_of(folder), timeout_s, result, row, learn)
        with kept_if_it_fails(scratch, folder) as keep:
            with started(self._launcher, plan) as workers:
                code = run.follow(workers)
            run.learn()
            if code not in (0, ConfigError.exit_code):
                keep()
            yield run, code


@dataclass(frozen=True)
class _Points(ProbeRun):
    """A run that tells of points, and replaces the file `result` by all that it knows."""

    result: Path
    row: Callable[[MeasuredRound], None]
    learned: Callable[[dict[str, Any]], None]

    def _tell(self, line: bytes) -> None:
        try:
            point = decode(line, dict[str, Any], most_bytes=SMALL_BYTES)
            row = MeasuredRound(**point["round"], **{key: point[key] for key in _ROW})
        except (BadInput, ValueError, KeyError, TypeError):  # what others write there, and signs of life
            return
        self.row(row)
        self.learn()

    def learn(self) -> None:
        """Take over what is in the file, if there is one."""
        with contextlib.suppress(FileNotFoundError):
            self.learned(json.loads(self.result.read_bytes()))

    @property
    def _nothing_done(self) -> str:
        return "it made no step"
