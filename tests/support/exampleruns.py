"""Runs of examples under `hpcsched run`, whole or suspended in their midst, and the lines that they print."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
_WITHIN_S = 300.0
_MAIN = "from hpcsched.cli.main import main; main()"


def python(program: str, *arguments: str) -> list[str]:
    """The command that runs an example by this Python: `python("jax/train.py", "--steps", "100")`."""
    return [sys.executable, str(EXAMPLES / program), *arguments]


class ExampleRun:
    """One job, in a run directory of its own under `folder`; the keys of the job are TOML."""

    def __init__(self, folder: Path, command: list[str], keys: str = "gpus = 1") -> None:
        self.folder, self._deadline = folder, time.monotonic() + _WITHIN_S
        folder.mkdir()
        job = f'schema = 1\n[[job]]\nname = "x"\ncommand = {command!r}\n{keys}\n'
        (folder / "jobs.toml").write_text(job)
        self._environ = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent)}
        self._environ["PATH"] = f"{Path(sys.executable).parent}:{self._environ['PATH']}"
        arguments = ["jobs.toml", "--devices", "cpu:2", "--warm", "off", "--database", "db.sqlite"]
        self._process = self._start("run", *arguments)

    def suspended(self, *at: int) -> ExampleRun:
        """Suspended once at each of these steps, or soon after, and resumed."""
        for step in at:
            self._until(lambda step=step: self.steps()[-1:] >= [step], f"step {step}")
            self._command("suspend", "1")
            self._until(lambda: '"SUSPENDED"' in self._command("status", "--json"), "leaving")
            self._command("resume", "1")
        return self

    def lines(self) -> list[str]:
        """The lines about steps, once it is done."""
        code = self._process.wait(max(1.0, self._deadline - time.monotonic()))
        assert code == 0, self._text()
        return re.findall(r"^(?:step|done) .*$", self._text(), re.MULTILINE)

    def steps(self) -> list[int]:
        return [int(step) for step in re.findall(r"^step (\d+) loss", self._text(), re.MULTILINE)]

    def said(self) -> str:
        """What the agent has said."""
        return (self.folder / "run.log").read_text()

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(30)

    def _text(self) -> str:
        return "".join(path.read_text() for path in self.folder.glob("hpcsched-run/jobs/1/hpcsched-1.out"))

    def _start(self, *words: str) -> subprocess.Popen[str]:
        with (self.folder / "run.log").open("w") as log:
            command = [sys.executable, "-c", _MAIN, *words]
            return subprocess.Popen(
                command, cwd=self.folder, env=self._environ, stdout=log, stderr=subprocess.STDOUT, text=True
            )

    def _command(self, *words: str) -> str:
        command = [sys.executable, "-c", _MAIN, *words]
        return subprocess.run(
            command, cwd=self.folder, env=self._environ, capture_output=True, text=True, timeout=60
        ).stdout

    def _until(self, done: Callable[[], bool], what: str) -> None:
        while not done():
            assert time.monotonic() < self._deadline, f"no {what}: {self.said()}{self._text()}"
            assert self._process.poll() is None, f"over before {what}: {self.said()}{self._text()}"
            time.sleep(0.1)
