"""Processes that measure at the same time: each says `ready`, then answers `go` with a rate."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from gpu_day.boxes import MARK

from hpcsched.contract.variables import RUN_ID
from hpcsched.worker.background import mps

WAIT_S = 60.0


def measured_together(commands: Sequence[tuple[Sequence[str], Mapping[str, str]]]) -> list[float]:
    """The rates of processes, each started by a command in an environment and ended here.

    Raises RuntimeError when one does not begin, TimeoutError when one does not answer in WAIT_S.
    """
    started: list[subprocess.Popen[str]] = []
    try:
        for command, environ in commands:
            started.append(
                subprocess.Popen(
                    command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
                )
            )
        for one in started:
            if _answer(one) != "ready":
                raise RuntimeError("a process did not begin")
        for one in started:
            assert one.stdin is not None
            one.stdin.write("go\n")
            one.stdin.flush()
        return [float(_answer(one)) for one in started]
    finally:
        for one in started:
            one.kill()
            one.wait()
            for end in (one.stdin, one.stdout):
                with contextlib.suppress(OSError):  # what was not written is lost
                    assert end is not None
                    end.close()


def answer_rates(rate: Callable[[], float]) -> int:
    """In such a process, when it is warm: answer until nobody asks any more."""
    print("ready", flush=True)
    for _ in sys.stdin:
        print(json.dumps(rate()), flush=True)
    return 0


def _answer(process: subprocess.Popen[str]) -> str:
    lines: list[str] = []
    assert process.stdout is not None
    reader = threading.Thread(target=lambda: lines.append(process.stdout.readline().strip()), daemon=True)  # type: ignore[union-attr]
    reader.start()
    reader.join(WAIT_S)
    if not lines:
        raise TimeoutError("a process does not answer")
    if not lines[0]:
        raise RuntimeError("a process has ended")
    return lines[0]


def under_mps(lane: str = "foreground") -> dict[str, str]:
    """The environment of a client of this program's own MPS daemon, which is started. Raises ConfigError."""
    environ = _ours()
    mps.use(environ, lane=lane)
    return environ


def quit_mps() -> None:
    """End that daemon."""
    environ = _ours()
    ours = mps.variables(environ, lane="foreground")
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(
            [mps.CONTROL],
            input=b"quit\n",
            env={**environ, **ours},
            timeout=20,
            check=False,
            capture_output=True,
        )
    for folder in Path(ours["CUDA_MPS_PIPE_DIRECTORY"]).parents:
        if folder.name.endswith(environ[RUN_ID]):
            shutil.rmtree(folder, ignore_errors=True)


def _ours() -> dict[str, str]:
    """The environment with a run's id: daemons have it in the names of their folders, and nothing else of us.

    In a day on a GPU it tells the part, so that the daemon of one that is killed is found too.
    """
    return {**os.environ, RUN_ID: f"bench-{os.environ.get(MARK) or os.getpid()}"}
