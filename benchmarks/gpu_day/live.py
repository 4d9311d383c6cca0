"""`hpcsched run` as a user starts it, in a folder of its own, and its processes seen from outside."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from common import Scratch, hpcsched

from gpu_day.boxes import MARK, marked
from gpu_day.found import Found
from hpcsched.launch.orphans import Process, end_processes

SMALL: dict[str, dict[str, Any]] = {
    "resnet50": {"width": 0.05, "image": 32},
    "vgg16": {"width": 0.05, "image": 32},
    "mobilenet-v2": {"width": 0.1, "image": 32},
    "densenet121": {"width": 0.05, "image": 32},
    "inception-v3": {"width": 0.05, "image": 96},
    "transformer": {"width": 0.1, "blocks": 1, "length": 16},
}
"""Arguments that make the networks tiny, for CPUs."""


class LiveRun:
    """A run of the jobs in `text`; `steps_per_s`: what is known of models before."""

    def __init__(
        self, scratch: Scratch, found: Found, text: str, devices: str, steps_per_s: Mapping[str, float] | None
    ) -> None:
        self._scratch, self.folder = scratch, scratch.folder
        self._dir = self.folder / "run"
        (self.folder / "jobs.toml").write_text(text)
        (self.folder / "records").mkdir()
        command = hpcsched("run", "jobs.toml", "--dir", self._dir, "--devices", devices, "--json")
        if steps_per_s:
            profiles = self.folder / "profiles.json"
            kind = "cpu" if found.cpu else found.device
            table = [
                {"model": model, "device": kind, "throughput": {"1": rate}, "memory_mib": {"1": 4000.0}}
                for model, rate in steps_per_s.items()
            ]
            page = {"schema": 1, "profiles": [{**one, "source": "measured"} for one in table]}
            profiles.write_text(json.dumps(page))
            command += ["--profiles", str(profiles)]
        self._page = self.folder / "page.json"
        with self._page.open("wb") as output:
            self._agent = subprocess.Popen(
                command, cwd=self.folder, env=scratch.env, stdin=subprocess.DEVNULL, stdout=output
            )

    @classmethod
    @contextlib.contextmanager
    def of(
        cls,
        found: Found,
        text: str,
        *,
        devices: str | None = None,
        steps_per_s: Mapping[str, float] | None = None,
    ) -> Iterator[LiveRun]:
        """Start it, on one device by default; all of its processes are ended at the end of the block.

        {folder} in the text is where it runs.
        """
        with Scratch.make() as scratch:
            text = text.replace("{folder}", str(scratch.folder))
            run = cls(scratch, found, text, devices or found.devices, steps_per_s)
            try:
                yield run
            finally:
                for end in (run._agent.terminate, run._agent.kill):
                    if run._agent.poll() is None:
                        end()
                        with contextlib.suppress(subprocess.TimeoutExpired):
                            run._agent.wait(3)
                end_processes(processes(), grace_s=0.2)  # they write into the folder, which goes now

    def jobs(self) -> dict[str, dict[str, Any]]:
        """The jobs in `status.json`, by name; none while there is no such file."""
        try:
            status = json.loads((self._dir / "status.json").read_bytes())
        except (OSError, ValueError):
            return {}
        return {job["name"]: job for job in status["jobs"]}

    def state(self, name: str) -> str:
        return str(self.jobs().get(name, {}).get("state", ""))

    def trains(self, name: str) -> bool:
        """Whether a job runs and has made a step in this attempt."""
        job = self.jobs().get(name, {})
        return job.get("state") == "RUNNING" and len(self.records(name)) > 0 and bool(job.get("ready"))

    def order(self, order: str, name: str) -> float:
        """`hpcsched suspend NAME` and the like; returns the seconds it took."""
        began = time.monotonic()
        self._scratch.run(hpcsched(order, name, "--dir", self._dir), deadline_s=30)
        return time.monotonic() - began

    def until(
        self, condition: Callable[[], bool], what: str, within_s: float, *, every_s: float = 0.05
    ) -> float:
        """Wait; returns how long it took, in seconds. Raises RuntimeError when it takes too long."""
        began = time.monotonic()
        while not condition():
            if time.monotonic() - began > within_s:
                states = {name: job["state"] for name, job in self.jobs().items()}
                raise RuntimeError(f"{what}: not within {within_s:.0f} s; {states}")
            if self._agent.poll() is not None and not condition():
                raise RuntimeError(
                    f"{what}: the run has ended before, with exit code {self._agent.returncode}"
                )
            time.sleep(every_s)
        return time.monotonic() - began

    def ended(self, within_s: float) -> dict[str, dict[str, Any]]:
        """Wait for its end; what it says of its jobs, by name. Raises RuntimeError."""
        try:
            code = self._agent.wait(max(1.0, within_s))
        except subprocess.TimeoutExpired:
            states = {name: job["state"] for name, job in self.jobs().items()}
            raise RuntimeError(f"the run's end: not within {within_s:.0f} s; {states}") from None
        page = self._page.read_bytes()
        if not page:
            raise RuntimeError(f"the run has ended with exit code {code} and no word")
        return {job["name"]: job for job in json.loads(page)["jobs"]}

    def records(self, name: str) -> list[dict[str, Any]]:
        """What `gpu_day.trainers.Recorded` has noted for a job: its processes, the oldest first."""
        try:
            text = (self.folder / "records" / name).read_text()
        except OSError:
            return []
        return [json.loads(line) for line in text.splitlines() if line.endswith("}")]

    def output(self, name: str) -> str:
        """The end of a job's output."""
        job = self.jobs().get(name)
        return "" if job is None else Path(job["output"]).read_text(errors="replace")[-2000:]


def processes(word: str = "") -> list[Process]:
    """What this part has started and is alive, with `word` in its command line: pids and start times."""
    token = os.environ.get(MARK, "")
    found = marked(token) if token else []
    return [one for one in found if word in command_line(one[0])]


def command_line(pid: int) -> str:
    """Of a process; nothing where it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def nvidia_files(pid: int) -> list[str]:
    """The files of NVIDIA's driver that a process has open."""
    found = []
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                target = str(entry.readlink())
                found += [target] if target.startswith("/dev/nvidia") else []
    return found


def job(name: str, network: str, steps: int, found: Found, more: str = "", **args: Any) -> str:
    """A job of `gpu_day.trainers.Recorded` as a job file's text."""
    given = {"network": network, "batch": 4 if found.cpu else 32, "record": f"{{folder}}/records/{name}"}
    given |= {**(SMALL[network] if found.cpu else {}), **args}
    table = ", ".join(f"{key} = {json.dumps(value)}" for key, value in given.items())
    return f"""
[[job]]
name = "{name}"
trainer = "gpu_day.trainers:Recorded"
args = {{ {table} }}
steps = {steps}
{more}
"""
