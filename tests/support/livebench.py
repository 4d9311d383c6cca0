"""Helpers of the live tests: the real command line, real agents, real programs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hpcsched.core.actions import Action, Launch, Suspend
from hpcsched.core.machine import Machine
from hpcsched.launch.orphans import end_processes, find_orphans
from hpcsched.policy import make_policy
from hpcsched.store import journal
from hpcsched.store.rundir import RunDir

COMMAND = str(Path(sys.executable).with_name("hpcsched"))

PATIENCE_S = 150.0
"""How long anything may take that is not about time; shorter than the `sleep 600` that must be ended."""

FOREVER = 100_000
"""Steps of a job that is not to end by itself."""

SLOW_AT_FIRST = "$((2 - HPCSCHED_ATTEMPT))"
"""A pause of a second in the first attempt, none in the second: the first is surely not over too soon."""

SAVES = """
# Saves and leaves when asked; counts to $HPCSCHED_STEPS, a step every {pause} s.
cd "$HPCSCHED_JOB_DIR"; step=0; asked=
save() {{
    printf '{{"step": %d, "attempt": %d}}' $step $HPCSCHED_ATTEMPT > STATE.tmp && mv STATE.tmp STATE.json
}}
trap 'asked=1' TSTP TERM; trap '' PIPE
[ $HPCSCHED_RESUME = 1 ] && step=$(sed 's/.*"step": *\\([0-9]*\\).*/\\1/' STATE.json)
echo "from $step on $HPCSCHED_DEVICES"
: > ready.$HPCSCHED_ATTEMPT
while [ $step -lt $HPCSCHED_STEPS ]; do
    sleep {pause}; step=$((step + 1))
    echo "{{\\"step\\": $step, \\"t\\": $(date +%s.%N)}}" >&$HPCSCHED_PROGRESS_FD
    if [ "$asked" ]; then save; kill -USR1 $HPCSCHED_NOTIFY_PID; exit 75; fi
done
save
"""
"""A shell program that keeps the contract; `{pause}` is the length of a step."""


def job(name: str, script: str | None = None, **keys: Any) -> str:
    """A [[job]] table: a shell script as one process, or whatever `keys` say."""
    table: dict[str, Any] = {"name": name, **keys}
    if script is not None:
        table |= {"command": ["sh", "-c", script], "processes": "one"}
    lines = [f"{key} = {_toml(value)}" for key, value in table.items()]
    return "\n".join(["[[job]]", *lines, ""])


def saves(name: str, *, steps: int, pause: float | str = 0.02, **keys: Any) -> str:
    """A [[job]] that keeps the contract; `pause` may be an expression of the shell."""
    return job(name, SAVES.format(pause=pause), steps=steps, **keys)


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{k} = {_toml(v)}" for k, v in value.items()) + " }"
    return json.dumps(value)


class Agent:
    """A `hpcsched run` that goes on in the background; what it says is in `said`."""

    def __init__(self, process: subprocess.Popen[bytes], told: Path) -> None:
        self.process, self._told = process, told

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def said(self) -> str:
        return self._told.read_text()

    def wait(self, timeout_s: float = PATIENCE_S) -> int:
        """Its exit code."""
        return self.process.wait(timeout_s)

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        self.process.send_signal(number)


class Bench:
    """A place for one run: a directory, a database of its own, and the command line in it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.dir = folder, folder / "run"
        self.rundir = RunDir(self.dir)
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("HPCSCHED_")}
        self.env = {
            **inherited,
            "HPCSCHED_DATABASE": str(folder / "database.sqlite"),
            "HPCSCHED_DIR": str(self.dir),
            "XDG_CONFIG_HOME": str(folder),
            "XDG_STATE_HOME": str(folder / "state"),
            "HPCSCHED_SITE_CONFIG": str(folder / "none.toml"),
        }
        self.agents: list[Agent] = []

    def set_of(self, *jobs: str, name: str = "set.toml", head: str = "") -> Path:
        """A job file."""
        path = self.folder / name
        path.write_text("schema = 1\n" + head + "\n".join(jobs))
        return path

    def __call__(self, *words: object, timeout_s: float = 2 * PATIENCE_S) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        argv = [COMMAND, *map(str, words)]
        return subprocess.run(
            argv,
            env=self.env,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def start(self, *words: object, command: str = "run") -> Agent:
        """Start `hpcsched run` (or `tune`) in the background."""
        told = self.folder / f"agent-{len(self.agents)}.err"
        with told.open("wb") as out:
            process = subprocess.Popen(
                [COMMAND, command, *map(str, words)], env=self.env, cwd=self.folder, stdout=out, stderr=out
            )
        self.agents.append(Agent(process, told))
        return self.agents[-1]

    def status(self) -> dict[str, Any]:
        """What is in status.json; nothing if it is not there yet."""
        try:
            page: dict[str, Any] = json.loads(self.rundir.status.read_bytes())
        except FileNotFoundError:
            return {"run": {"state": ""}, "jobs": []}
        return page

    def states(self) -> dict[str, str]:
        return {j["name"]: j["state"] for j in self.status()["jobs"]}

    def until(self, met: Callable[[], Any], what: str = "", timeout_s: float = PATIENCE_S) -> Any:
        """Wait until something is so; returns what `met` gave."""
        deadline = time.monotonic() + timeout_s
        while not (found := met()):
            told = self.agents[-1].said[-2000:] if self.agents else ""
            assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}\n{self.status()}\n{told}"
            time.sleep(0.02)
        return found

    def job(self, name: str) -> dict[str, Any]:
        """A job's entry in status.json; {} while there is none."""
        found: dict[str, Any] = next((j for j in self.status()["jobs"] if j["name"] == name), {})
        return found

    def ready(self, *names: str) -> None:
        """Wait until these jobs run and can be suspended."""
        self.until(lambda: all(self.job(n).get("ready") for n in names), f"{names} ready")

    def output(self, job_id: int = 1) -> str:
        return (self.dir / "jobs" / str(job_id) / f"hpcsched-{job_id}.out").read_text()

    def replayed(self, folder: Path | None = None) -> tuple[Machine, list[Action]]:
        """The machine that the journal leads to, and all that it asked for on the way."""
        rundir = RunDir(folder) if folder else self.rundir
        machine, actions = Machine(make_policy), list[Action]()
        for event, _ in journal.read(rundir.journal):
            actions += machine.handle(event)
        return machine, actions

    def live_workers(self) -> list[int]:
        """Processes of this run that live."""
        record = self.rundir.read_record()
        return [pid for pid, _ in find_orphans(record.id, [])] if record else []

    def listening(self) -> set[str]:
        """The addresses on which processes of this run listen, by TCP."""
        theirs = {socket for pid in self.live_workers() for socket in _sockets(pid)}
        return {address for inode, address in _listening() if inode in theirs}

    def all_gone(self) -> bool:
        """Whether nothing of this run lives; who was killed a moment ago may take one to die."""
        return bool(self.until(lambda: not self.live_workers(), "all gone", 10.0))

    def close(self) -> None:
        """End what a test has left."""
        for agent in self.agents:
            with contextlib.suppress(ProcessLookupError):
                agent.kill()
            agent.wait()
        record = self.rundir.read_record()
        if record:  # its agent may be one that a `join` has started
            end_processes([(record.pid, record.started), *find_orphans(record.id, [])], 0.0)


def _sockets(pid: int) -> set[str]:
    """The inodes of a process's sockets."""
    found = set()
    with contextlib.suppress(OSError):  # it ends
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                found.add(str(descriptor.readlink()).removeprefix("socket:[").removesuffix("]"))
    return found


def _listening() -> Iterator[tuple[str, str]]:
    """Inode and address of each socket of this host that listens."""
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path("/proc/net", name).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                words = bytes.fromhex(fields[1].partition(":")[0])
                turned = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
                yield fields[9], socket.inet_ntop(family, turned)


def placements(actions: list[Action]) -> list[tuple[Any, ...]]:
    """Launches and suspends in order, without their times."""
    found: list[tuple[Any, ...]] = []
    for action in actions:
        if isinstance(action, Launch):
            found.append(
                ("launch", action.job_id, action.attempt, action.gpus, str(action.role), action.resume)
            )
        elif isinstance(action, Suspend):
            found.append(("suspend", action.job_id, action.attempt))
    return found


def launched_once(actions: list[Action]) -> bool:
    """Whether no attempt was launched twice."""
    counts = Counter((a.job_id, a.attempt) for a in actions if isinstance(a, Launch))
    return set(counts.values()) <= {1}
