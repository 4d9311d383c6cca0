"""Measuring a model's layers: the probe is started on one device as a job would be, watched, and read."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import hpcsched
from hpcsched.core.model import JobSpec
from hpcsched.devices.base import Devices
from hpcsched.errors import ConfigError, HpcschedError
from hpcsched.launch.base import Launcher, LaunchPlan, Workers
from hpcsched.planning.burst.graph import LayerProfile
from hpcsched.profiling.sweep import ending_signals
from hpcsched.profiling.trial import output_of, plan_of, stop

LOOK_S = 0.2
"""Between looks at a probe that says nothing."""

_OURS = "hpcsched: "
"""What the lines begin with that the probe writes on purpose."""


class ProbeFailed(HpcschedError):
    """The layers could not be measured; says why, and where the program's output is."""

    exit_code = 2

    def __init__(self, message: str, *, output: bool = False) -> None:
        super().__init__(message)
        self.output = output
        """Whether the program's output is kept for the user to read."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How to measure: at these `batches` (empty: 1, 2, 4, ... up to the trainer's global batch).

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
    settings: Settings,
    watch: Callable[[float, str], None] = lambda share, what: None,
    say: Callable[[str], None] = lambda text: None,
) -> LayerProfile:
    """The layers of a trainer's model, timed on the first device; nothing is left running at the end.

    Must run in the main thread (see `sweep`). `watch(share, what)` follows the measurement, `say(text)` gets
    what was left out. Raises ProbeFailed or LaunchError; the program's output is then kept.
    """
    scratch = Path(tempfile.mkdtemp(prefix="hpcsched-layers-"))
    run = _Run(scratch / "layers", scratch / "result.json", settings.timeout_s, watch)
    try:
        with ending_signals():
            workers = launcher.launch(run.plan(spec, devices, settings))
            try:
                code = run.follow(workers)
            finally:
                try:
                    stop(workers)
                finally:
                    workers.close()
        profile = run.read(code, say)
    except ProbeFailed as error:
        shutil.rmtree(run.folder if error.output else scratch, ignore_errors=True)
        raise
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    shutil.rmtree(scratch, ignore_errors=True)
    return profile


@dataclass(frozen=True)
class _Run:
    """One run of the probe, with the job's folder it gets and the file it writes."""

    folder: Path
    result: Path
    timeout_s: float
    watch: Callable[[float, str], None]

    def plan(self, spec: JobSpec, devices: Devices, settings: Settings) -> LaunchPlan:
        """What to launch: the trainer's own start, but with the probe in the place of the training."""
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
        argv = (sys.executable, "-m", "hpcsched.worker.layers")
        env = {**plan.env, "HPCSCHED_LAYERS": json.dumps(request)}
        return replace(plan, argv=argv, env=env, arena=False)

    def follow(self, workers: Workers) -> int:
        """Read its progress until it has ended; its exit code. Raises ProbeFailed when it says nothing."""
        fd, rest, last_news = workers.progress_fd, b"", time.monotonic()
        poll = select.poll()
        for descriptor in (*workers.pidfds, *([] if fd is None else [fd])):
            poll.register(descriptor, select.POLLIN)
        while (code := workers.reap()) is None:
            for descriptor, _ in poll.poll(1000 * LOOK_S):
                data = os.read(descriptor, 1 << 16) if descriptor == fd else b""
                if not data:
                    poll.unregister(descriptor)
                    continue
                last_news = time.monotonic()
                *lines, rest = (rest + data).split(b"\n")
                self._tell(lines[-1:])
            if time.monotonic() - last_news > self.timeout_s:
                raise ProbeFailed(
                    f"no layer was finished in {self.timeout_s:g} s; a longer --timeout may help"
                    f"{self._ends()}",
                    output=True,
                )
        return code

    def _tell(self, lines: list[bytes]) -> None:
        for line in lines:
            with contextlib.suppress(ValueError, KeyError, TypeError):  # what others write there
                report = json.loads(line)
                self.watch(report["step"] / report["of"], f"batch {report['batch']}")

    def read(self, code: int, say: Callable[[str], None]) -> LayerProfile:
        """What it found; what it had found, if it did not get to its end."""
        said = [line.removeprefix(_OURS) for line in self._lines() if line.startswith(_OURS)]
        try:
            answer = json.loads(self.result.read_bytes())
        except FileNotFoundError:
            if code == ConfigError.exit_code and said:
                raise ProbeFailed(said[-1]) from None
            raise ProbeFailed(f"it ended with exit code {code}{self._ends()}", output=True) from None
        for line in said:
            say(line)
        profile = LayerProfile.parse(answer["profile"], where=str(self.result))
        if code:
            done = f"batch {profile.most_samples}"
            say(f"the measurement ended with exit code {code} after {done}; larger ones are missing")
        return profile

    def _lines(self) -> list[str]:
        try:
            text = output_of(self.folder).read_bytes()[-65536:].decode(errors="replace")
        except OSError:
            return []
        return [line.strip() for line in text.splitlines() if line.strip()]

    def _ends(self) -> str:
        lines = self._lines()
        return f"; {output_of(self.folder)} ends: {lines[-1][:200]}" if lines else "; it wrote no output"
