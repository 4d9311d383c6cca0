"""Measuring a model's layers: the probe is started on one device as a job would be, watched, and read."""

from __future__ import annotations

import contextlib
import json
import socket
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
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
from hpcsched.planning.burst.graph import LayerProfile
from hpcsched.profiling.probing import ProbeFailed, ProbeRun, kept_if_it_fails, started
from hpcsched.profiling.trial import output_of, plan_of


@dataclass(frozen=True, kw_only=True)
class LayerProbeSettings:
    """Settings of a measurement of layers: at these `batches` (empty: 1, 2, 4, ... up to the global batch).

    `seconds` is what the measured runs of a layer at a batch may take, `timeout_s` the longest wait for the
    next layer.
    """

    batches: tuple[int, ...] = ()
    seconds: float = 0.05
    timeout_s: float = 120.0


def probe(
    spec: JobSpec,
    *,
    devices: Devices,
    launcher: Launcher,
    settings: LayerProbeSettings,
    watch: Callable[[float, str], None] = lambda share, what: None,
    say: Callable[[str], None] = lambda text: None,
) -> LayerProfile:
    """The layers of a trainer's model, timed on the first device; nothing is left running at the end.

    Must run in the main thread (see `sweep`). `watch(share, what)` follows the measurement, `say(text)` gets
    what was left out. Raises ProbeFailed or LaunchError; the program's output is then kept.
    """
    scratch = Path(tempfile.mkdtemp(prefix="hpcsched-layers-"))
    folder = scratch / "layers"
    run = _Run(output_of(folder), settings.timeout_s, folder, scratch / "result.json", watch)
    with kept_if_it_fails(scratch, folder):
        with started(launcher, run.plan(spec, devices, settings)) as workers:
            code = run.follow(workers)
        return run.read(code, say)


@dataclass(frozen=True)
class _Run(ProbeRun):
    """One run of the probe, with the job's folder it gets and the file it writes."""

    folder: Path
    result: Path
    watch: Callable[[float, str], None]

    def plan(self, spec: JobSpec, devices: Devices, settings: LayerProbeSettings) -> LaunchPlan:
        """The launch plan: the trainer's own start, but with the probe in the place of the training."""
        self.folder.mkdir(mode=0o700)
        plan = plan_of(spec, devices, devices.inventory()[:1], self.folder, attempt=1)
        at = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        about = f"measured by hpcsched {hpcsched.__version__} on {socket.gethostname()} at {at}"
        program = f"{spec.trainer} {json.dumps(spec.args)}" if spec.args else spec.trainer
        request = {
            "model": spec.model,
            "device": devices.kind,
            "result": str(self.result),
            "note": f"{about}: {program}",
            "seconds": settings.seconds,
            "batches": list(settings.batches),
        }
        env = {**plan.env, variables.LAYERS: json.dumps(request)}
        return replace(plan, module="hpcsched.worker.layers", env=env, arena=False)

    def _tell(self, line: bytes) -> None:
        with contextlib.suppress(BadInput, KeyError, TypeError, ZeroDivisionError):  # what others write there
            report = decode(line, dict[str, Any], most_bytes=SMALL_BYTES)
            self.watch(report["step"] / report["of"], f"batch {report['batch']}")

    @property
    def _nothing_done(self) -> str:
        return "no layer was finished"

    def read(self, code: int, say: Callable[[str], None]) -> LayerProfile:
        """The profile that the probe found; of an incomplete run, what it had found."""
        said = self.said
        try:
            answer = json.loads(self.result.read_bytes())
        except FileNotFoundError:
            if code == ConfigError.exit_code and said:
                raise ProbeFailed(said[-1]) from None
            raise ProbeFailed(f"it ended with {said_exit(code)}{self.ends}", output=True) from None
        for line in said:
            say(line)
        profile = LayerProfile.parse(answer["profile"], where=str(self.result))
        if code:
            done = f"batch {profile.most_samples}"
            say(f"the measurement ended with {said_exit(code)} after {done}; larger ones are missing")
        return profile
