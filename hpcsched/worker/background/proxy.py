"""A background job's own process while the job is a guest in its foreground's. No torch.

For the agent it is the job: it has the job's pid, signals, output and exit code. All it does is to pass
things on. When the host goes, it looks for the next one and hands the job over again, from its newest
checkpoint; the agent sees nothing of that but steps that are done twice. Where there is no host, it becomes
an ordinary worker.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import MutableMapping, Sequence
from math import inf
from pathlib import Path
from types import FrameType
from typing import Any

from hpcsched.contract import exits, variables
from hpcsched.contract.orders import Pace
from hpcsched.worker.background import settings
from hpcsched.worker.background.protocol import GuestConnection, connect
from hpcsched.worker.process.contract import JobEnv, OrderReader, say

HOST_WITHIN_S = 20.0
"""How long to look for a host: the foreground may be starting, or starting again."""
BEGUN_WITHIN_S = 120.0
"""How long a host may take until the job's training has begun there."""
_LOOK_S = 0.1
_AGENT_CHECK_S = 2.0


def be_guest(environ: MutableMapping[str, str]) -> int | None:
    """Have the job run by its foreground, to its end; None: it is to go on in this process, as any other job.

    Returns the job's exit code. In the case of None `environ` says where to go on from. Raises ConfigError
    when the environment makes no sense.
    """
    env = JobEnv.from_environ(environ)
    address = settings.address(environ)
    if env is None or address is None or env.world_size > 1:
        return None
    if (why := _why_alone(env)) is not None:
        say(f"in a process of its own: {why}")
        return None
    return _Proxy(env, address, environ).run()


def _why_alone(env: JobEnv) -> str | None:
    try:
        return settings.note_of_fault(env.job_dir).read_text().strip()
    except OSError:
        return None


def _leave_at_once(number: int, frame: FrameType | None) -> None:
    """All there is of the job is saved, until its training has begun again and takes the signals over."""
    os._exit(exits.SUSPENDED)


class Proxy(ABC):
    """A job's own process while another one does the job's work: it hears signals, and sees its agent go."""

    def __init__(self, env: JobEnv, environ: MutableMapping[str, str]) -> None:
        self._env, self._environ = env, environ
        self._stop: str | None = None
        self._agent_gone = False
        self._parent = os.getppid()
        self._woken, self._wakes = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._next_check = 0.0

    def run(self) -> int | None:
        """Have the job done; its exit code, or None: it is to go on in this process."""
        former = {number: signal.signal(number, self._note) for number in (signal.SIGTSTP, signal.SIGTERM)}
        former_wakeup = signal.set_wakeup_fd(self._wakes, warn_on_full_buffer=False)
        code: int | None = exits.SUSPENDED
        try:
            code = self._run()
            return code
        finally:
            signal.set_wakeup_fd(former_wakeup)
            for number, handler in former.items():
                # As a guest the job may have said that it can be suspended, and this holds while its training
                # begins again.
                signal.signal(number, _leave_at_once if code is None else handler)
            os.close(self._woken)
            os.close(self._wakes)

    @abstractmethod
    def _run(self) -> int | None:
        """The same, while signals are heard: they are in `_stop`."""

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self._stop = signal.Signals(number).name

    def _guest(self) -> dict[str, Any]:
        """Who the job is, for a host."""
        return {
            "job": self._env.job_id,
            "environ": dict(self._environ),
            "cwd": str(Path.cwd()),
            "python": sys.prefix,
        }

    def _descriptors(self) -> list[int]:
        """What goes with that."""
        return [1, 2] + ([] if self._env.progress_fd is None else [self._env.progress_fd])

    def _resume_from_newest(self) -> None:
        """What a host had of the job is saved, or lost: from here on the newest checkpoint counts."""
        self._environ[variables.RESUME] = "1"
        self._environ.pop(variables.FROM_STEP, None)

    def _await(self, descriptors: Sequence[int], within_s: float) -> list[int]:
        """Those that have become readable, in time or until a signal comes; looks for the agent, too."""
        readable, _, _ = select.select([*descriptors, self._woken], [], [], min(_AGENT_CHECK_S, within_s))
        with contextlib.suppress(BlockingIOError):
            while os.read(self._woken, 4096):
                pass
        if time.monotonic() >= self._next_check:
            self._next_check = time.monotonic() + _AGENT_CHECK_S
            if os.getppid() != self._parent:
                self._agent_gone, self._stop = True, self._stop or "the agent is gone"
        return readable


class _Proxy(Proxy):
    def __init__(self, env: JobEnv, address: str, environ: MutableMapping[str, str]) -> None:
        super().__init__(env, environ)
        self._address = address
        self._orders = OrderReader(env.control_fd)
        self._pace = 1.0
        self._begun = False
        self._accepted = False
        self._found_by = 0.0

    def run(self) -> int | None:
        code = super().run()
        if code is None:
            self._orders.look()
            self._environ[variables.PACE] = Pace(self._orders.pace).encode()  # nobody will say it again
        return code

    def _run(self) -> int | None:
        self._found_by = time.monotonic() + HOST_WITHIN_S
        while True:
            line = self._find()
            if self._stop is not None:
                return exits.SUSPENDED  # all that there is of it is saved
            if line is None:
                say("no foreground on this device takes guests: in a process of its own")
                return None
            try:
                code, host_gone = self._follow(line)
            finally:
                line.close()
            if self._begun:
                self._resume_from_newest()
            if not host_gone:
                return code
            if self._stop is not None:
                return exits.SUSPENDED
            if (why := _why_alone(self._env)) is not None:
                say(f"in a process of its own: {why}")
                return None
            if self._accepted:
                self._found_by = time.monotonic() + HOST_WITHIN_S
            else:
                self._await((), _LOOK_S)

    def _find(self) -> GuestConnection | None:
        while self._stop is None and time.monotonic() < self._found_by:
            if (line := connect(self._address)) is not None:
                return line
            self._await((), _LOOK_S)
        return None

    def _follow(self, line: GuestConnection) -> tuple[int | None, bool]:
        """Be a guest; returns the exit code (None: go on in this process), and whether the host has gone."""
        self._accepted, self._pace = False, 1.0
        if not line.say({"guest": self._guest()}, self._descriptors()):
            return None, True
        begun = stopped = False
        deadline = time.monotonic() + HOST_WITHIN_S
        while True:
            left_s = inf if begun else deadline - time.monotonic()
            if left_s <= 0:
                say("in a process of its own: the foreground on this device does not come to take it in")
                return (exits.SUSPENDED if self._stop is not None else None), False
            if self._stop is not None and not stopped:
                stopped = True
                line.say({"stop": self._stop})
            self._pass_on_pace(line)
            if line.socket.fileno() not in self._await([line.socket.fileno(), *self._control()], left_s):
                continue
            word = line.hear(0.0)
            if word is None and line.closed:
                if self._accepted:
                    self._blame("the foreground's process died while this job was a guest in it")
                return None, True
            if not word:
                continue
            if "accepted" in word:
                self._accepted, deadline = True, time.monotonic() + BEGUN_WITHIN_S
            if "begun" in word:
                self._begun = begun = True
            if "refused" in word:
                say(f"in a process of its own: {word['refused']}")
                return (exits.SUSPENDED if self._stop is not None else None), False
            if "left" in word:
                say(f"{word['left']}: looking for another foreground")
                return None, True
            if "exit" in word:
                if word.get("fault"):
                    self._blame("it failed while it was a guest in its foreground's process")
                return int(word["exit"]), False

    def _control(self) -> list[int]:
        return [] if self._orders.descriptor is None else [self._orders.descriptor]

    def _pass_on_pace(self, line: GuestConnection) -> None:
        self._orders.look()
        if self._orders.pace != self._pace:
            self._pace = self._orders.pace
            line.say({"pace": self._pace})

    def _blame(self, why: str) -> None:
        """One fault is enough: the job is nobody's guest any more."""
        with contextlib.suppress(OSError):
            settings.note_of_fault(self._env.job_dir).write_text(f"{why}\n")
