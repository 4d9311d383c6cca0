"""A process with a time box: after it the process ends, and whatever it has started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcsched.launch.orphans import Process, end_processes
from hpcsched.launch.proc import stat

MARK = "GPU_DAY_PART"
"""The variable by which all that a part has started is found again, in whatever session it is. Its value is
in the environment of MPS daemons too, which are started with few variables: in the names of their folders."""

KILL_AFTER_S = 10.0


@dataclass(frozen=True)
class Ended:
    """How it ended: `code` as of subprocess; `stray`: processes it left behind, which were ended."""

    code: int
    over_time: bool
    seconds: float
    stray: int


def run_in_box(
    command: Sequence[str],
    *,
    box_s: float,
    log: Path,
    env: Mapping[str, str],
    kill_after_s: float = KILL_AFTER_S,
) -> Ended:
    """Run a process in a session of its own, its output in `log`.

    When the box is over, or this function is left by an exception, it gets SIGTERM, and `kill_after_s` later
    its group SIGKILL. No process that it has started outlives it.
    """
    token = f"{os.getpid()}.{time.monotonic_ns()}"
    began, over_time, stray = time.monotonic(), False, 0
    with log.open("wb") as output:
        child = subprocess.Popen(
            command,
            env={**env, MARK: token},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        child.wait(box_s)
    except subprocess.TimeoutExpired:
        over_time = True
    finally:
        _end(child, kill_after_s)
        left = marked(token)
        stray = len(left)
        end_processes(left, grace_s=0.5)
    return Ended(child.returncode, over_time, time.monotonic() - began, stray)


def _end(child: subprocess.Popen[bytes], kill_after_s: float) -> None:
    if child.poll() is not None:
        return
    child.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(kill_after_s)
    if child.poll() is None:
        # It leads its group and was not waited for: the number cannot be anybody else's.
        os.killpg(child.pid, signal.SIGKILL)
        child.wait(KILL_AFTER_S)


def marked(token: str) -> list[Process]:
    """Live processes of this user with `token` in their environment, but for this one: pids, start times."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or (pid := int(entry.name)) == os.getpid():
            continue
        with contextlib.suppress(OSError):  # gone meanwhile, or not ours to look into
            seen = stat(pid)
            if seen is None or seen.state in "ZX" or entry.stat().st_uid != os.getuid():
                continue
            if token.encode() in (entry / "environ").read_bytes():
                found.append((pid, seen.start_ticks))
    return sorted(found)
