"""The world of one schedule: its folder, its commands, its processes, and what is remembered of them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from livebench import COMMAND, Bench
from places import ROOT
from slurmstandin import Cluster

from hpcsched.cli.main import main
from hpcsched.store.rundir import agent_alive

from . import jobs, ledgers
from .ledgers import Line
from .places import Networks, Numbers, Place, Process, processes
from .schedule import Schedule
from .shim import Shim, library


@dataclass
class Life:
    """A `hpcsched run` (or `join`), its beginning and end. `walltime`: when its allocation ends."""

    process: subprocess.Popen[bytes]
    told: Path
    began: float
    words: tuple[str, ...]
    killed: bool = False
    """By a fault."""
    walltime: float | None = None
    over: float | None = None
    walltime_over: bool = False
    """It was killed at the end of its allocation."""
    late: bool = False
    """And there was work left."""
    forestalled: bool = False
    """The one that was begun as a second agent has come first."""

    @property
    def said(self) -> str:
        return self.told.read_text(errors="replace")


@dataclass(frozen=True)
class Answer:
    """A command of a user: its words, exit code and output, when it was called and when it had ended."""

    words: tuple[str, ...]
    code: int
    said: str
    began: float
    ended: float


def shown(life: Life, who: str) -> Iterator[str]:
    """What no output should have."""
    if "Traceback (most recent call last)" in life.said:
        yield f"{who} shows a traceback: {life.said.strip().splitlines()[-1]}"


def _forked(words: tuple[str, ...], env: Mapping[str, str], folder: Path, out: int) -> int:
    """The pid of a process that runs a command."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads: the command needs none of ours
        pid = os.fork()
    if pid:
        return pid
    try:
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(env)
        os.dup2(out, 1)
        os.dup2(out, 2)
        sys.stdin, sys.stdout, sys.stderr = (os.fdopen(n, m) for n, m in ((0, "r"), (1, "w"), (2, "w")))
        sys.argv = [COMMAND, *words]
        try:
            main()
            code: object = 0
        except SystemExit as end:
            code = end.code
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 0 if code is None else 1)
    finally:
        os._exit(99)


def _code(pid: int, timeout_s: float) -> int | None:
    """The exit code of a child; None if it had to be killed, as it took too long."""
    deadline = time.monotonic() + timeout_s
    while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return None
        time.sleep(0.01)
    return os.waitstatus_to_exitcode(ended[1])


@dataclass
class World:
    """All of one schedule."""

    schedule: Schedule
    folder: Path
    place: Place = field(default_factory=Place)
    lives: list[Life] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    struck: Counter[str] = field(default_factory=Counter)
    killed: Counter[str] = field(default_factory=Counter)
    """How often a job's process was killed by a fault."""
    disturbed: list[tuple[float, str]] = field(default_factory=list)
    """When what went wrong, by the host's monotonic clock."""
    saved: dict[str, list[tuple[float, int]]] = field(default_factory=dict)
    """By job: the steps of its STATE.json, and since when it was seen there."""
    said: list[str] = field(default_factory=list)
    """What was done, for people."""
    wrong: list[str] = field(default_factory=list)
    """Violations seen on the way."""

    def __post_init__(self) -> None:
        self.bench = Bench(self.folder)
        self.mark = f"CHAOS_MARK={self.folder}"
        self.began = time.monotonic()
        jobs.write(self.folder)
        if self.schedule.flavour == "pids":
            self.place = Numbers()
        elif self.schedule.flavour == "net":
            self.place = Networks(self.schedule.hosts, self.folder, os.getpid())
        env = self.bench.env
        env |= {
            "CHAOS_MARK": str(self.folder),
            "PYTHONPATH": f"{self.folder}:{os.environ.get('CHAOS_UNDER_TEST', ROOT)}",
            "TZ": "UTC",
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
        }
        env |= self.place.environment(env["PATH"])
        self.cluster = self._cluster() if self.schedule.life_s else None
        self.guests: list[Life] = []
        """Each `hpcsched join`, which starts another head where that of the run has died."""
        self.shim: Shim | None = None
        if library():
            self.shim = Shim(self.folder / "shim", self.bench.dir)
            env |= self.shim.environment()

    def _cluster(self) -> Cluster:
        """A Slurm that kills three seconds after SIGTERM: nearer ends than that are not planned for."""
        cluster = Cluster(self.bench)
        path = cluster.folder / "scontrol"
        answer = '[ "$1 $2" = "show config" ] && echo "KillWait = 3 sec" && exit'
        path.write_text(path.read_text().replace("#!/bin/sh\n", f"#!/bin/sh\n{answer}\n"))
        return cluster

    @property
    def now(self) -> float:
        return time.monotonic() - self.began

    def note(self, what: str) -> None:
        self.said.append(f"{self.now:7.2f} {what}")

    # --- commands -----------------------------------------------------------------------------------

    def command(self, *words: str, real: bool = False, timeout_s: float = 90.0) -> Answer:
        """What a user calls, to its end. One that does not end in time is a violation.

        Unless `real` it is called in a fork of this process: Python has started there already.
        """
        began = time.monotonic()
        env = {key: value for key, value in self.bench.env.items() if key not in ("LD_PRELOAD", "CHAOS_SHIM")}
        told = self.folder / "command.out"
        with told.open("wb") as out:
            if real or self.place.prefix:
                argv = [*self.place.prefix, COMMAND, *words]
                pid = subprocess.Popen(argv, env=env, cwd=self.folder, stdout=out, stderr=out).pid
            else:
                pid = _forked(words, env, self.folder, out.fileno())
        code = _code(pid, timeout_s)
        if code is None:
            self.wrong.append(f"`{' '.join(words)}` has not ended within {timeout_s:.0f} s")
        said = told.read_text(errors="replace")
        answer = Answer(words, -99 if code is None else code, said, began, time.monotonic())
        if "Traceback" in answer.said:
            self.wrong.append(
                f"`{' '.join(words)}` shows a traceback: {answer.said.strip().splitlines()[-1]}"
            )
        self.answers.append(answer)
        self.note(f"`{' '.join(words)}` -> {answer.code}: {answer.said.strip()[-200:]}")
        return answer

    def start(self, *words: str) -> Life:
        """A `hpcsched run` or `tune` in the background."""
        if self.cluster:
            self.cluster.ends_in(3600)
        self.lives.append(self.begun(f"agent-{len(self.lives)}.err", *words))
        return self.lives[-1]

    def begun(self, name: str, *words: str) -> Life:
        """A command in the background, whose output is in the file of this name."""
        told = self.folder / name
        argv = [*self.place.prefix, COMMAND, *words]
        with told.open("wb") as out:
            process = subprocess.Popen(
                argv, env=self.bench.env, cwd=self.folder, stdout=out, stderr=out, start_new_session=True
            )
        return Life(process, told, time.monotonic(), words)

    def invite(self) -> None:
        """A host of another allocation joins the run, if one is to."""
        if self.schedule.flavour == "join" and (self.guest is None or self.guest.process.poll() is not None):
            words = ("--hosts", self.schedule.hosts[1], "--launcher", "local", "--wait", "2m")
            self.guests.append(self.begun(f"guest-{len(self.guests)}.err", "join", *words))

    @property
    def guest(self) -> Life | None:
        """The newest."""
        return self.guests[-1] if self.guests else None

    @property
    def led(self) -> bool:
        """Whether an agent leads the run, whoever has started it."""
        return agent_alive(self.bench.rundir, self.bench.rundir.read_record())

    def shorten(self, life: Life) -> None:
        """The allocation now ends so soon, which the agent is told by a warning, once it listens."""
        run = self.page()["run"]  # written by this agent, which follows signals then
        if self.cluster and run["state"] == "RUNNING" and run["agent"]["pid"] == life.process.pid:
            assert self.schedule.life_s
            self.cluster.ends_in(self.schedule.life_s)
            life.walltime = time.monotonic() + self.schedule.life_s
            life.process.send_signal(signal.SIGUSR2)
            self.note(f"the allocation ends in {self.schedule.life_s:.1f} s")

    def words(self, *, resume: bool) -> tuple[str, ...]:
        """The words of a life."""
        one = self.schedule
        verb = "tune" if one.flavour == "tune" else "run"
        file = () if resume and verb == "run" else (str(jobs.job_file(one, self.folder)),)
        options = ["--devices", f"cpu:{one.slots}", "--grace", "2", "-q"]
        if verb == "run" and not resume:
            options += ["--policy", one.policy]
        if not one.warm:
            options += ["--warm", "off"]
        if one.flavour == "net":
            options += ["--hosts", ",".join(one.hosts), "--launcher", "ssh", "--interface", "10.77.0.1"]
        elif one.flavour == "join":
            options += ["--hosts", one.hosts[0], "--launcher", "local", "--joinable"]
        elif one.hosts:
            options += ["--hosts", ",".join(one.hosts), "--launcher", "local"]
        if one.life_s or one.flavour == "join":
            options += ["--margin", "3"]
        return (verb, *file, *(["--resume"] if resume else []), *options)

    # --- processes ----------------------------------------------------------------------------------

    def processes(self, role: str = "") -> list[Process]:
        found = processes(self.mark)
        return [one for one in found if one.role == role] if role else found

    def agents(self) -> list[Process]:
        """The process of the newest life (its parent, where that only waits for it, is none)."""
        if self.guest and (record := self.bench.rundir.read_record()):
            return [one for one in self.processes() if one.pid == record.pid]
        pid = self.lives[-1].process.pid
        found = [one for one in self.processes("agent") if one.words[0] != "nsenter"]
        return [one for one in found if one.pid == pid or self.place.prefix]

    def worker(self, name: str) -> list[Process]:
        """The process of a job's newest attempt that its ledger tells of."""
        lines = self.ledger(name)
        if not lines:
            return []
        return [one for one in self.processes() if one.inner == lines[-1].pid and one.role != "agent"]

    # --- files --------------------------------------------------------------------------------------

    def ledger(self, name: str) -> list[Line]:
        return ledgers.read(self.folder / "ledger" / name)

    def ledgers(self) -> Iterator[str]:
        """The names of all jobs that have a ledger."""
        yield from sorted(path.name for path in (self.folder / "ledger").iterdir())

    def page(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError):
            found: dict[str, Any] = json.loads(self.bench.rundir.status.read_bytes())
            return found
        return {"run": {"state": ""}, "jobs": []}

    def look(self) -> None:
        """Remember what is durable now: whatever begins later goes on from there, or later."""
        folder = self.bench.dir / "jobs"
        with contextlib.suppress(OSError):
            for one in os.scandir(folder):
                now = time.monotonic()
                with contextlib.suppress(OSError, ValueError, KeyError):
                    step = int(json.loads(Path(one.path, "STATE.json").read_bytes())["step"])
                    seen = self.saved.setdefault(one.name, [])
                    if not seen or seen[-1][1] != step:
                        seen.append((now, step))

    def disturb(self, what: str) -> None:
        self.disturbed.append((time.monotonic(), what))
        self.struck[what] += 1
        self.note(f"** {what}")

    def end(self) -> None:
        """Kill all that is left of it."""
        for _ in range(50):
            left = self.processes()
            for one in left:
                one.kill()
            if not left:
                break
            time.sleep(0.05)
        for life in (*self.lives, *self.guests):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                life.process.send_signal(signal.SIGKILL)
            life.process.wait()
        if self.shim:
            self.shim.close()
        self.place.close()
