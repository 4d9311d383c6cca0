"""NVIDIA's multi-process service: which names of GPUs work, limits of memory, clients that are killed."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gpu_day.device import Gpus
from gpu_day.found import Found, Refused
from hpcsched.worker.background import mps

LIMIT_MIB, ABOVE_MIB, BELOW_MIB = 4096, 6000, 500
WORK_S, CPU_WORK_S = 1.0, 0.05
LEAST_S = 15.0
STAND_IN = """#!/bin/sh
# In place of NVIDIA's program, where there is no GPU: makes what the real one makes, and nothing else.
there="$CUDA_MPS_PIPE_DIRECTORY/control"
if [ "$1" = -d ]; then : > "$there"; exit; fi
read line
[ -e "$there" ] || exit 1
[ "$line" != quit ] || rm "$there"
"""


def run(found: Found) -> None:
    """Each with a daemon of its own, so that one that goes wrong harms no other."""
    with tempfile.TemporaryDirectory(prefix="gpu-day-mps-") as folder:
        if found.cpu:
            program = Path(folder) / mps.CONTROL
            program.write_text(STAND_IN)
            program.chmod(0o700)
            os.environ["PATH"] = f"{folder}:{os.environ['PATH']}"
            found.number(service="a stand-in, as there is no GPU")
        if shutil.which(mps.CONTROL) is None:
            raise Refused(f"no {mps.CONTROL} here")
        for number, part in enumerate((_product, _names, _limits, _percentages, _killed)):
            name = part.__name__.strip("_")
            if found.left_s < LEAST_S:
                found.check(name, "measured", "not reached in time", None)
                continue
            with found.trying(name):
                part(found, Path(folder) / str(number))


class Client:
    """A process that computes, and answers."""

    def __init__(self, found: Found, env: Mapping[str, str]) -> None:
        self._within_s = 15.0
        self._process = subprocess.Popen(
            [sys.executable, "-m", "gpu_day.mps_client", "cpu" if found.cpu else "cuda:0"],
            env=dict(env),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def answer(self) -> dict[str, Any]:
        """Its next line; {"error": ...} where none comes."""
        lines: list[str] = []
        stream = self._process.stdout
        assert stream is not None
        reader = threading.Thread(target=lambda: lines.append(stream.readline()), daemon=True)
        reader.start()
        reader.join(self._within_s)
        if not lines:
            return {"error": f"no answer within {self._within_s:.0f} s"}
        return json.loads(lines[0]) if lines[0] else {"error": "it has ended"}

    def tell(self, word: str, number: float) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(f"{word} {number}\n")
            self._process.stdin.flush()

    def ask(self, word: str, number: float) -> dict[str, Any]:
        self.tell(word, number)
        return self.answer()

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        """End it at once, with no word to the service."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Let it end by itself, as a client should."""
        for stream in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                assert stream is not None
                stream.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        self.kill()


@contextlib.contextmanager
def _clients(found: Found, *envs: Mapping[str, str]) -> Iterator[list[Client]]:
    """As many that are ready, or say by `error` why not."""
    clients = [Client(found, env) for env in envs]
    try:
        yield clients
    finally:
        for client in clients:
            client.close()


@contextlib.contextmanager
def _daemon(folder: Path, visible: str | None) -> Iterator[dict[str, str]]:
    """A daemon with these GPUs (None: the variable is not set); the environment of its clients."""
    env = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    for name in ("pipe", "log"):
        (folder / name).mkdir(parents=True)
        env[f"CUDA_MPS_{name.upper()}_DIRECTORY"] = str(folder / name)
    own = env if visible is None else {**env, "CUDA_VISIBLE_DEVICES": visible}
    subprocess.run([mps.CONTROL, "-d"], env=own, check=True, timeout=20, stdin=subprocess.DEVNULL)
    try:
        yield env
    finally:
        _control(env, "quit")


def _control(env: Mapping[str, str], words: str) -> str:
    """What the daemon answers."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(
            [mps.CONTROL], input=f"{words}\n", env=dict(env), timeout=20, capture_output=True, text=True
        )
        return (done.stdout + done.stderr).strip()
    return "no answer"


def _work_s(found: Found) -> float:
    return CPU_WORK_S if found.cpu else WORK_S


def _names(found: Found, folder: Path) -> None:
    """Whether a client finds its GPU, by how the daemon's and its own variable name it."""
    uuid = "GPU-0" if found.cpu else str(Gpus().facts()[0]["uuid"])
    works: dict[str, str] = {}
    for number, daemon in enumerate((None,) if found.cpu else (None, "0", uuid)):
        with _daemon(folder / str(number), daemon) as env:
            ways = ("0", uuid)
            envs = [{**env, "CUDA_VISIBLE_DEVICES": "" if found.cpu else way} for way in ways]
            with _clients(found, *envs) as clients:
                for way, client in zip(ways, clients, strict=True):
                    short = [name if name in (None, "0") else "UUID" for name in (daemon, way)]
                    works[f"daemon {short[0]}, client {short[1]}"] = client.answer().get("error", "works")
    found.number(names=works)
    usual = works["daemon None, client UUID"]
    found.check("daemon without the variable, client by UUID", "works", usual, usual == "works")


def _product(found: Found, folder: Path) -> None:
    """As background jobs use it."""
    del folder
    from side_by_side import quit_mps, under_mps

    try:
        envs = [under_mps(lane) for lane in ("foreground", "background")]
        with _clients(found, *envs) as clients:
            said = [client.answer().get("error", "works") for client in clients]
            found.check("two clients, as jobs are", "both work", said, said == ["works"] * 2)
            for client in clients:
                client.tell("work", _work_s(found))
            found.number(foreground_and_background_rates=[client.answer().get("rate") for client in clients])
    finally:
        quit_mps()


def _limits(found: Found, folder: Path) -> None:
    with _daemon(folder, None) as env:
        limited = {**env, "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": f"0={LIMIT_MIB}M"}
        with _clients(found, limited) as (client,):
            client.answer()
            below = client.ask("take", 1 if found.cpu else BELOW_MIB)
            above = client.ask("take", 1 if found.cpu else ABOVE_MIB)
            found.number(limit=[below, above])
            good = "took" in below and "error" in above
            said = f"{below}, {above}"
            goal = f"{BELOW_MIB} MiB fit, {ABOVE_MIB} do not"
            found.check(f"a limit of {LIMIT_MIB} MiB", goal, said, None if found.cpu else good)


def _percentages(found: Found, folder: Path) -> None:
    """One client at work, with a part of the processors."""
    percents = (100, 50, 25)
    with _daemon(folder, None) as env:
        envs = [{**env, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(percent)} for percent in percents]
        with _clients(found, *envs) as clients:
            for client in clients:
                client.answer()
            rates = [client.ask("work", _work_s(found)).get("rate") for client in clients]
    found.number(rate_by_percent=dict(zip(percents, rates, strict=True)))


def _killed(found: Found, folder: Path) -> None:
    """What becomes of the other client: one is told to end, then one is killed in the midst of its work."""
    for number, politely in enumerate((True, False)):
        with _daemon(folder / str(number), None) as env, _clients(found, env, env) as (victim, other):
            victim.answer()
            other.answer()
            for client in (victim, other):
                client.tell("work", 2 * _work_s(found))
            if politely:
                server = _control(env, "get_server_list").split()[-1:]
                said = _control(env, f"terminate_client {' '.join(server)} {victim.pid}")
                found.number(terminate_client=said)
            victim.kill()
            answers = [other.answer(), other.ask("work", _work_s(found))]
            good = all(answer.get("finite") for answer in answers)
            name = "terminate_client" if politely else "SIGKILL"
            found.check(f"a client beside one that ends by {name}", "goes on", answers, good)
            with _clients(found, env) as (late,):
                error = late.answer().get("error", "works")
                found.check(f"a client that comes after {name}", "works", error, error == "works")
