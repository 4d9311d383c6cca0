"""One program under `hpcsched run`: undisturbed, suspended twice, or promoted; and what it printed."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from frameworks.examples import ROOT, Example

_LINE = re.compile(r"^(?:\[\w+\]:? ?)?(done )?step (\d+) loss (\S+)\s*$", re.MULTILINE)
LIMIT_S = 600.0
"""Time that one run may take (chosen): frameworks import for long on a busy machine."""


class Failed(Exception):
    """A run went another way than it should; the text says how."""


class TooShort(Exception):
    """The training was done before it had been suspended, or promoted: nothing was seen."""


@dataclass
class Printed:
    """The lines `step N loss X` that a program printed, by step: the last of each, as text."""

    losses: dict[int, str] = field(default_factory=dict)
    times: Counter[int] = field(default_factory=Counter)
    done: bool = False

    @classmethod
    def read(cls, text: str) -> Printed:
        """Of an output."""
        found = cls()
        for done, step, loss in _LINE.findall(text):
            if done:
                found.done = True
            else:
                found.losses[int(step)] = loss
                found.times[int(step)] += 1
        return found

    @property
    def repeated(self) -> int:
        """Steps that were done more than once."""
        return sum(count - 1 for count in self.times.values())

    def compared(self, other: Printed) -> tuple[bool, float, int]:
        """With an undisturbed run: whether all lines are the same to the last digit, the greatest difference
        of a loss, and how many steps one of them does not have."""
        both = self.losses.keys() & other.losses.keys()
        apart = max((abs(float(self.losses[n]) - float(other.losses[n])) for n in both), default=0.0)
        missing = len(self.losses.keys() ^ other.losses.keys())
        return self.losses == other.losses, apart, missing


@dataclass
class Course:
    """How a run went: what was printed, and how wide its attempts were. Times in seconds of this clock."""

    printed: Printed
    widths: list[int]
    took_s: float
    suspend_s: list[float] = field(default_factory=list)
    resume_s: list[float] = field(default_factory=list)


class Trial:
    """Runs one program of an example, each time in a folder of its own below `place`."""

    def __init__(self, example: Example, program: str, *, python: str, steps: int, place: Path) -> None:
        self.example, self.program = example, program
        self._python, self._steps, self._place = python, steps, place
        self._env = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
            "HF_HUB_OFFLINE": "1",
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "PATH": os.pathsep.join([str(Path(python).parent), os.environ.get("PATH", os.defpath)]),
        }
        job = example.job(program)
        if job is None:
            raise Failed(f"jobs.toml has no job with {program}")
        self._job: dict[str, Any] = job

    def undisturbed(self) -> Course:
        """From its beginning to its end."""
        return self._run("alone")

    def suspended(self, times: int = 2) -> Course:
        """Suspended and resumed in the middle, so many times."""
        points = [self._steps * (n + 1) // (times + 1) for n in range(times)]
        return self._run("suspended", suspend_at=points)

    def promoted(self) -> Course:
        """Begun on half of the slots, as a neighbour has the others, and given all when that has ended."""
        return self._run("promoted", promoted_at=self._steps // 3)

    def _run(self, name: str, *, suspend_at: Sequence[int] = (), promoted_at: int | None = None) -> Course:
        # As many slots each time: in one of more cores, sums are made in another order.
        slots = 2 * self.example.begins_on
        gpus = self.example.begins_on if promoted_at is None else slots
        place = self._place / self.program.partition(".")[0] / name
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        for file in self.example.folder.iterdir():
            if file.is_file():
                shutil.copy(file, place / file.name)
        (place / "jobs.json").write_text(json.dumps(self._jobs(gpus, promoted_at is not None)))
        (place / "jobs.toml").write_text(_toml(json.loads((place / "jobs.json").read_text())))
        argv = ["run", "jobs.toml", "--dir", "run", "--devices", f"cpu:{slots}"]
        argv += ["--policy", "equal"] if promoted_at is not None else []
        began = time.monotonic()
        with (place / "run.log").open("w") as log:
            agent = subprocess.Popen(
                [sys.executable, "-m", "hpcsched", *argv], cwd=place, env=self._env, stdout=log, stderr=log
            )
            try:
                course = self._follow(agent, place, suspend_at, promoted_at, began + LIMIT_S)
            finally:
                if agent.poll() is None:
                    agent.send_signal(signal.SIGTERM)
                    try:
                        agent.wait(60)
                    except subprocess.TimeoutExpired:
                        agent.kill()
                        agent.wait()
        course.took_s = time.monotonic() - began
        course.widths = self._widths(place)
        return course

    def _jobs(self, gpus: int, promoted: bool) -> dict[str, Any]:
        job = {**self._job, "name": "it", "steps": self._steps}
        for key in ("python", "venv", "conda"):
            job.pop(key, None)
        job["command"] = [*_without_steps(job["command"]), "--steps", str(self._steps)]
        if promoted:
            job["gpus"] = {"min": gpus // 2, "max": gpus, "multiple_of": gpus // 2}
            neighbour = {"name": "neighbour", "command": ["sh", "-c", "until [ -e go ]; do sleep 0.1; done"]}
            return {"schema": 1, "job": [job, {**neighbour, "gpus": gpus // 2}]}
        job["gpus"] = gpus
        return {"schema": 1, "job": [job]}

    def _follow(
        self,
        agent: subprocess.Popen[bytes],
        place: Path,
        suspend_at: Sequence[int],
        promoted_at: int | None,
        deadline: float,
    ) -> Course:
        course = Course(Printed(), [], 0.0)
        to_come = list(suspend_at)
        while agent.poll() is None:
            if time.monotonic() > deadline:
                raise Failed(f"not done after {LIMIT_S:.0f} s: {self._last(place)}")
            time.sleep(0.1)
            at = max(self._printed(place).losses, default=0)
            if promoted_at is not None and at >= promoted_at:
                (place / "go").touch()
                promoted_at = None
            if to_come and at >= to_come[0]:
                to_come.pop(0)
                self._suspend_and_resume(agent, place, course, deadline)
        if agent.returncode != 0:
            raise Failed(f"hpcsched run ended with {agent.returncode}: {self._last(place)}")
        if to_come:
            raise TooShort(f"done before it could be suspended: {self._last(place)}")
        course.printed = self._printed(place)
        return course

    def _suspend_and_resume(
        self, agent: subprocess.Popen[bytes], place: Path, course: Course, deadline: float
    ) -> None:
        began = time.monotonic()
        try:
            said = self._call(place, "suspend", "it")
        except Failed:
            if self._state(place) == "COMPLETED" and agent.wait(60) == 0:
                raise TooShort(f"done before it was asked: {self._last(place)}") from None
            raise
        self._until(place, ("SUSPENDED", "HELD"), deadline, f"suspend: {said}")
        course.suspend_s.append(time.monotonic() - began)
        lines = sum(self._printed(place).times.values())
        began = time.monotonic()
        self._call(place, "resume", "it")
        while sum(self._printed(place).times.values()) == lines:
            if time.monotonic() > deadline:
                raise Failed(f"it did not go on: {self._last(place)}")
            if self._state(place) in ("COMPLETED", "FAILED"):
                break
            time.sleep(0.05)
        course.resume_s.append(time.monotonic() - began)

    def _until(self, place: Path, states: Sequence[str], deadline: float, what: str) -> None:
        while (state := self._state(place)) not in states:
            if state == "COMPLETED":
                raise TooShort(f"{what}: done before; {self._last(place)}")
            if state in ("FAILED", "CANCELLED") or time.monotonic() > deadline:
                raise Failed(f"{what}: the job is {state}; {self._last(place)}")
            time.sleep(0.1)

    def _state(self, place: Path) -> str:
        found = json.loads(self._call(place, "status", "--json", "--states", "all"))
        return next(str(job["state"]) for job in found["jobs"] if job["name"] == "it").upper()

    @staticmethod
    def _widths(place: Path) -> list[int]:
        """Devices of each attempt, as the agent has said it."""
        told = re.findall(r"job 1 \(it\).* on (?:GPU|CPU slot)s? ([\d,]+)", (place / "run.log").read_text())
        return [len(gpus.split(",")) for gpus in told]

    def _call(self, place: Path, *words: str, check: bool = True) -> str:
        argv = [sys.executable, "-m", "hpcsched", words[0], *words[1:], "--dir", "run"]
        ended = subprocess.run(argv, cwd=place, env=self._env, capture_output=True, text=True, timeout=60)
        if ended.returncode not in (0, 3) and check:
            raise Failed(f"hpcsched {' '.join(words)}: {ended.stderr.strip() or ended.stdout.strip()}")
        return ended.stdout if ended.stdout else ended.stderr

    def _printed(self, place: Path) -> Printed:
        outputs = sorted((place / "run" / "jobs" / "1").glob("*.out"))
        return Printed.read("\n".join(output.read_text(errors="replace") for output in outputs))

    @staticmethod
    def _last(place: Path) -> str:
        found = [*sorted((place / "run" / "jobs" / "1").glob("*.out")), place / "run.log"]
        texts = [file.read_text(errors="replace").strip().splitlines() for file in found if file.exists()]
        return " | ".join(lines[-1][-200:] for lines in texts if lines)


def _without_steps(words: Sequence[str]) -> Iterator[str]:
    """A command without `--steps N`."""
    words = iter(words)
    for word in words:
        if word == "--steps":
            next(words, None)
        elif not word.startswith("--steps="):
            yield word


def _toml(table: Mapping[str, Any]) -> str:
    """A job file of JSON-like tables."""
    text = [f"schema = {table['schema']}"]
    for job in table["job"]:
        text.append("[[job]]")
        text += [f"{key} = {_value(value)}" for key, value in job.items()]
    return "\n".join(text) + "\n"


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f'"{key}" = {_value(one)}' for key, one in value.items()) + " }"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_value, value)) + "]"
    return json.dumps(value)
