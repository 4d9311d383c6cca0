"""A small computation by torch on each GPU of this host, for `hpcsched doctor`.

Each in a process of its own: nothing is left on the GPU, and one that hangs is ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Sequence

from hpcsched.core.model import Device
from hpcsched.devices import Devices
from hpcsched.launch.interpreters import Interpreter

ANSWER_WITHIN_S = 120.0
"""Importing torch takes that long on a shared filesystem that is busy."""

_ENDS_WITHIN_S = 5.0

_READ_WITHIN_S = 1.0
"""So long each is listened to though the time is over: another, which hangs, may have used it up."""

PROGRAM = ("-m", "hpcsched.worker.gpu")


def check_gpus(
    devices: Devices, chosen: Sequence[Device], interpreter: Interpreter, *, within_s: float = ANSWER_WITHIN_S
) -> list[tuple[str, bool, str]]:
    """For each device what it is, whether torch can compute on it, and what was found; takes `within_s`, and
    little more, at most. `interpreter`: the one with that torch, which runs trainers."""
    until = time.monotonic() + within_s
    running = []
    for device in chosen:
        process = subprocess.Popen(
            (interpreter.python, *PROGRAM),
            env=interpreter.activated({**os.environ, **devices.environment([device])}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        running.append((f"GPU {device.index}", process))
    return [(what, *_answer(process, until, within_s)) for what, process in running]


def _answer(process: subprocess.Popen[str], until: float, within_s: float) -> tuple[bool, str]:
    with contextlib.ExitStack() as stack:
        if process.stdout:
            stack.enter_context(process.stdout)
        try:
            said, _ = process.communicate(timeout=max(_READ_WITHIN_S, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # a driver that hangs may hold it
                process.wait(_ENDS_WITHIN_S)
            return False, f"torch has not computed anything there within {within_s:.0f} s"
    last = (said.strip().splitlines() or [""])[-1]
    try:
        answer = json.loads(last)
        return bool(answer["ok"]), str(answer["found"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return False, f"exit code {process.returncode}: {last or 'no word'}"
