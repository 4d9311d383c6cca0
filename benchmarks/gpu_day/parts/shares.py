"""Eight plain programs on one GPU: one after the other, side by side without us, and with shares."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import Scratch, hpcsched

from gpu_day.device import Gpus
from gpu_day.found import Found
from hpcsched.core.mechanisms.sharing.mechanism import Sharing
from hpcsched.mps_control import CONTROL
from hpcsched.policy import make_policy
from hpcsched.store.replay import replay
from hpcsched.store.rundir import RunDir

PROGRAM = Path(__file__).resolve().parents[1] / "plain.py"
SIZES = {"small": 1024, "large": 3072}
"""The layers' widths of two models: with its optimizer one has 0.1 GB, the other 0.6 GB."""
MODELS = ("small", "large", "small", "small", "large", "small", "large", "small")
LASTS_S = 12.0
"""What each is to train for, alone."""
PROBE_STEPS, CPU_STEPS = 300, 30
LEAST_S = 45.0
"""No way begins that has less time than that."""
GREEDY_MIB, CPU_GREEDY_MIB = 10**6, 1_000
"""What a program takes that had asked for a part of it; on a GPU more than there is."""
ASKS_MIB, CPU_ASKS_MIB = 4_000, 400
QUIET_S = 20.0
INFORMS = "for information"


@dataclass
class Way:
    """How long the eight took, all of them and each, in seconds; by model the memory that was measured."""

    makespan_s: float
    took_s: list[float]
    measured_mib: dict[str, float]


def run(found: Found) -> None:
    """Makespans, slowdowns, memory, and what one does to its neighbour that wants more than there is."""
    with Scratch.make() as scratch:
        shares = Shares(found, scratch)
        with found.trying("programs alone"):
            shares.probe()
        alone = shares.way("one after the other", 1)
        beside = shares.beside()
        part = 1 / len(shares.models)
        ways = {"parts": shares.way("parts", part)}
        if shutil.which(CONTROL) and not found.cpu:
            ways["parts under MPS"] = shares.way("parts under MPS", part, mps=True)
        else:
            found.number(mps=f"no {CONTROL} here" if not found.cpu else "not without a GPU")
        shares.greedy()
        if ways.get("parts under MPS"):
            shares.greedy(mps=True)
        if not found.cpu:  # nobody comes to a training of a second
            ways["measured"] = shares.way("measured", "share")
        for name, way in ways.items():
            if way and alone:
                _compare(found, name, way, alone, beside)
        shares.memory([way for way in ways.values() if way])


class Shares:
    """The programs, and the ways to run them."""

    def __init__(self, found: Found, scratch: Scratch) -> None:
        self._found, self._scratch, self._device = found, scratch, "cpu" if found.cpu else "cuda:0"
        self.models = MODELS[:2] if found.cpu else MODELS
        self._steps = dict.fromkeys(SIZES, CPU_STEPS)
        self._real_mib: dict[str, float] = {}

    def _argv(self, name: str, model: str, steps: int, *more: int) -> list[str]:
        size = SIZES[model] // (16 if self._found.cpu else 1)
        return [sys.executable, str(PROGRAM), name, *map(str, (steps, size, self._device, *more))]

    def probe(self) -> None:
        """How fast each model is alone, and how much of a GPU it has in use then, by the driver."""
        if self._found.cpu:
            return
        idle_mib = Gpus().used_mib()
        for model in SIZES:
            with self._program(self._argv("probe", model, PROBE_STEPS)) as program:
                program.wait(self._found.left_s)
            page = self._page("probe")
            self._steps[model] = max(PROBE_STEPS, round(LASTS_S / page["median_step_s"]))
            self._real_mib[model] = page["used_mib"] - idle_mib
        self._found.number(steps=self._steps, real_mib=self._real_mib)

    def beside(self) -> Way | None:
        """All at once, without us."""
        if not self._time("side by side"):
            return None
        with contextlib.ExitStack() as stack:
            began = time.time()
            programs = [
                stack.enter_context(self._program(self._argv(f"p{i}", model, self._steps[model])))
                for i, model in enumerate(self.models)
            ]
            for program in programs:
                program.wait(max(1.0, self._found.left_s))
        with self._found.trying("side by side"):
            return self._noted("side by side", began, {})
        return None

    def way(self, name: str, gpus: float | str, *, mps: bool = False) -> Way | None:
        """The same with `hpcsched run`."""
        if not self._time(name):
            return None
        jobs = [
            self._job(f"p{i}", self._argv(f"p{i}", model, self._steps[model]), gpus, mps, model)
            for i, model in enumerate(self.models)
        ]
        with self._found.trying(name):
            began = time.time()
            folder = self._run(jobs)
            sharing = replay(folder.journal, make_policy).machine.mechanism(Sharing)
            known = {model: use.memory_mib for model, use in sharing.shares.models.items() if use.memory_mib}
            return self._noted(name, began, known)
        return None

    def greedy(self, *, mps: bool = False) -> None:
        """A training, and one that takes more than it has asked for, and more than there is."""
        name = "one that takes too much" + " under MPS" * mps
        if not self._time(name):
            return
        cpu = self._found.cpu
        asks, takes = (CPU_ASKS_MIB, CPU_GREEDY_MIB) if cpu else (ASKS_MIB, GREEDY_MIB)
        steps = round(self._steps["small"] * (3 if cpu else QUIET_S / LASTS_S))
        memory = f'{"memory" if cpu else "gpu_memory"} = "{asks}M"\nretries = 0'
        jobs = [
            self._job("quiet", self._argv("quiet", "small", steps), 0.25, mps),
            self._job("greedy", self._argv("greedy", "small", 0, takes), 0.25, mps, more=memory),
        ]
        with self._found.trying(name):
            folder = self._run(jobs, fails=True)
            states = {job["name"]: job["state"] for job in json.loads(folder.status.read_bytes())["jobs"]}
            good = states["quiet"] == "COMPLETED" and states["greedy"] in ("FAILED", "OUT_OF_MEMORY")
            self._found.check(name, "ends itself alone", states, good)
            took = self._page("greedy")["took_mib"]
            self._found.number(**{f"{name}: took_mib": took})
            if mps:
                self._found.check(f"{name}: MiB that it got", f"<= {asks}", took, took <= asks)

    def memory(self, ways: list[Way]) -> None:
        """What was measured of each model, against what it has alone by the driver."""
        for model, real in self._real_mib.items():
            for way in ways:
                if (measured := way.measured_mib.get(model)) is not None:
                    off = measured / real - 1
                    name = f"memory of {model}, measured against real"
                    self._found.check(name, "within 25%", f"{off:+.0%}", abs(off) <= 0.25)

    def _time(self, name: str) -> bool:
        if self._found.left_s >= LEAST_S:
            return True
        self._found.check(name, "measured", "not reached in time", None)
        return False

    def _job(
        self, name: str, argv: list[str], gpus: float | str, mps: bool, model: str = "", more: str = ""
    ) -> str:
        env = ['env = { HPCSCHED_LANE_MODE = "mps" }'] if mps else []
        lines = [
            "[[job]]", f'name = "{name}"', f'model = "{model or name}"', f"command = {json.dumps(argv)}",
            f"gpus = {json.dumps(gpus)}", "restartable = true", f'checkpoints = "none-{name}-*"',
            "progress_pattern = 'step (\\d+)'", *env, more,
        ]  # fmt: skip
        return "\n".join(lines)

    def _run(self, jobs: list[str], *, fails: bool = False) -> RunDir:
        """Run them to their end; where it is kept."""
        (self._scratch.folder / "jobs.toml").write_text("\n".join(["schema = 1", *jobs, ""]))
        folder = self._scratch.folder / "run"
        shutil.rmtree(folder, ignore_errors=True)
        command = hpcsched("run", "jobs.toml", "--dir", folder, "--devices", self._found.devices)
        with self._scratch.start(command) as agent:
            agent.communicate(timeout=max(1.0, self._found.left_s))
        if agent.returncode != 0 and not fails:
            raise RuntimeError(f"exit code {agent.returncode}; {self._scratch.errors[-200:]}")
        return RunDir(folder)

    @contextlib.contextmanager
    def _program(self, argv: list[str]) -> Iterator[subprocess.Popen[bytes]]:
        where = {"cwd": self._scratch.folder, "env": self._scratch.env}
        program = subprocess.Popen(argv, **where, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        try:
            yield program
        finally:
            program.kill()
            program.wait()

    def _page(self, name: str) -> dict[str, Any]:
        """What a program has left; it is removed."""
        file = self._scratch.folder / f"{name}.json"
        page: dict[str, Any] = json.loads(file.read_bytes())
        file.unlink()
        return page

    def _noted(self, name: str, began: float, measured: dict[str, float]) -> Way:
        pages = [self._page(f"p{i}") for i in range(len(self.models))]
        way = Way(
            makespan_s=max(page["ended"] for page in pages) - began,
            took_s=[page["ended"] - page["began"] for page in pages],
            measured_mib=measured,
        )
        self._found.number(**{f"{name}: makespan_s": way.makespan_s, f"{name}: took_s": way.took_s})
        self._found.number(**{f"{name}: slowest_step_s": [page["slowest_step_s"] for page in pages]})
        if measured:
            self._found.number(**{f"{name}: measured_mib": measured})
        return way


def _compare(found: Found, name: str, way: Way, alone: Way, beside: Way | None) -> None:
    """A way against one after the other, and against all of them side by side without us."""
    gain = alone.makespan_s / way.makespan_s
    found.speed(f"{name}: against one after the other", "> 1x", f"{gain:.2f}x", gain > 1)
    worst = max(took / own for took, own in zip(way.took_s, alone.took_s, strict=True))
    if name == "measured":  # only there somebody looks after it
        found.speed(f"{name}: worst slowdown", "<= 2x", f"{worst:.2f}x", worst <= 2)
    else:
        found.check(f"{name}: worst slowdown", INFORMS, f"{worst:.2f}x", None)
    if beside:
        ratio = way.makespan_s / beside.makespan_s
        found.check(f"{name}: makespan against side by side without us", INFORMS, f"{ratio:.2f}x", None)
