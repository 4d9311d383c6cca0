"""The program behind `replay = true`: does what a training program does, except the training.

`python -m hpcsched.worker.standin`. It keeps hpcsched's contract with training programs (signals,
STATE.json, progress lines, exit codes), and its steps go by at the speed of the job's profile.
Imports little: a set of thousand jobs starts it thousand times.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import time
from collections.abc import Mapping

from hpcsched.contract import exits, files, orders, variables
from hpcsched.contract.environment import Environment, needed
from hpcsched.contract.progress import Line
from hpcsched.contract.state import State
from hpcsched.errors import BadInput, HpcschedError
from hpcsched.planning.jobs.course import PAUSED_RATE_SHARE, Course

LEAVE = (signal.SIGTSTP, signal.SIGTERM)
TICK_S = 0.2  # between progress lines and looks at the parent, in real seconds
LISTENING_WITHIN_S = 10.0  # a rank that is not there by then never will be: stay rigid
STAGE_S = 0.02  # the last checkpoint is put on disk so long before the end, and only renamed at it


class StandIn:
    """One rank of an attempt. Rank 0 speaks and saves for all; the others only live and leave like it.

    Raises ConfigError, KeyError, TypeError and ValueError for an environment that does not keep the contract.
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        needed(env, variables.STANDIN)
        told = Environment.from_environ(env)
        task = told.standin or {}
        self.rank = told.rank or 0
        self.attempt = int(needed(env, variables.ATTEMPT))
        self.speed = float(task["speed"])
        self.launched_at = float(needed(env, variables.LAUNCHED_AT))
        job_dir = needed(env, variables.JOB_DIR)
        self.state_path = os.path.join(job_dir, files.STATE)  # noqa: PTH118 - pathlib costs start-up time
        self.ready_path = os.path.join(job_dir, files.ready(self.attempt))  # noqa: PTH118
        self.listening_paths = [
            os.path.join(job_dir, files.listening(self.attempt, rank))  # noqa: PTH118
            for rank in range(1, told.world_size or 1)
        ]
        steps = int(task["steps"])
        self.course = Course(
            from_step=min(self._resume_step(), steps) if told.resume else 0,
            steps=steps,
            rate=float(task["rate"]),
            start_s=float(task["start_s"]),
            suspend_s=float(task["suspend_s"]),
        )
        self.checkpoint_every_s = math.inf if told.checkpoint_every_s is None else told.checkpoint_every_s
        self.saved_step = self.course.from_step
        self.notify_pid = told.notify_pid or 0
        self.parent = self.notify_pid or os.getppid()
        self.progress_fd = told.progress_fd if self.rank == 0 else None
        if self.progress_fd is not None:
            os.set_blocking(self.progress_fd, False)  # an agent that does not read must not stop us
        self.control_fd = told.control_fd if self.rank == 0 else None
        if self.control_fd is not None:
            os.set_blocking(self.control_fd, False)
        self.rate, self.share = self.course.rate, 1.0
        self._orders = b""

    def run(self) -> int:
        """Follow the course to its end, or until asked to leave; returns the exit code."""
        self._say_ready()
        # At a high speed not every one: a save costs real time.
        every = max(self.checkpoint_every_s, TICK_S * self.speed)
        checkpoint = every
        staged = False
        while (now := self._now()) < (end := self.course.end_s):
            soon = end - STAGE_S * self.speed
            if not staged and now >= soon:
                self._stage(self.course.steps)
                staged, checkpoint = True, math.inf
            if now >= checkpoint:
                self._save(self.course.step_at(now))
                checkpoint = now + every
            self._report(self.course.step_at(now))
            until = min(end if staged else soon, checkpoint, now + TICK_S * self.speed)
            if self._asked_to_leave(until):
                return self._leave(*self._left_at(self._now()))
            if os.getppid() != self.parent:
                self._save(self.course.step_at(self._now()))
                return exits.SUSPENDED
            if not staged:
                checkpoint -= self._obey()
        return self._complete(staged)

    def _left_at(self, now: float) -> tuple[int, float]:
        """(step saved, when the devices are free) if it leaves now: in a pause no step is ever finished."""
        if self.share == 0:
            return self.course.step_at(now), now + self.course.suspend_s
        return self.course.suspend_at(now)

    def _obey(self) -> float:
        """Go at the newest pace that the agent has ordered; by how much its launch is taken to be later."""
        if self.control_fd is None:
            return 0.0
        try:
            data = os.read(self.control_fd, 65536)
        except BlockingIOError:
            return 0.0
        except OSError:
            data = b""
        if not data:
            self.control_fd = None  # the agent is gone
        *lines, self._orders = (self._orders + data).split(b"\n")
        share = self.share
        for line in lines:
            with contextlib.suppress(BadInput):
                for order in orders.decode(line):
                    share = order.share if isinstance(order, orders.Pace) else share
        if share == self.share:
            return 0.0
        self.course, later = self.course.at_rate(self._now(), self.rate * (share or PAUSED_RATE_SHARE))
        self.share, self.launched_at = share, self.launched_at + later / self.speed
        return later

    def _say_ready(self) -> None:
        """Rank 0 says so for all, once every other rank has said that it listens."""
        others = self.listening_paths
        if self.rank == 0:
            deadline = time.monotonic() + LISTENING_WITHIN_S
            while others and time.monotonic() < deadline:
                others = [path for path in others if not os.path.exists(path)]  # noqa: PTH110
                time.sleep(0.002 if others else 0.0)
        mine = others[self.rank - 1] if self.rank else self.ready_path
        if self.rank or not others:
            os.close(os.open(mine, os.O_WRONLY | os.O_CREAT, 0o600))

    def _complete(self, staged: bool) -> int:
        if not staged:
            self._stage(self.course.steps)
        self._commit()
        self._report(self.course.steps)
        return 0

    def _leave(self, step: int, free: float) -> int:
        """Save `step` and be gone at `free`; the costly part of saving is done ahead, within that time."""
        self._stage(step)
        while (left := (free - self._now()) / self.speed) > 0:
            time.sleep(left)
        if step == self.course.steps:
            return self._complete(staged=True)
        self._commit()
        self._report(step)
        # By its parent a process cannot be mistaken; a number alone may be another process by now.
        if self.rank == 0 and self.notify_pid and os.getppid() == self.notify_pid:
            os.kill(self.notify_pid, signal.SIGUSR1)
        return exits.SUSPENDED

    def _now(self) -> float:
        """Profile seconds since the launch."""
        return (time.monotonic() - self.launched_at) * self.speed

    def _asked_to_leave(self, until: float) -> bool:
        """Wait to `until` (profile seconds) or for a signal; whether one came."""
        wait_s = max(0.0, (until - self._now()) / self.speed)
        return signal.sigtimedwait(LEAVE, wait_s) is not None

    def _report(self, step: int) -> None:
        if self.progress_fd is None:
            return
        try:
            os.write(self.progress_fd, Line(step, time.time()).encode())
        except BlockingIOError:
            pass  # the pipe is full: the next line says more anyway
        except OSError:
            self.progress_fd = None  # nobody reads any more

    def _resume_step(self) -> int:
        """The step in STATE.json; 0 if there is none to read, as after a crash before the first save."""
        try:
            with open(self.state_path, "rb") as file:  # noqa: PTH123
                return State.decode(file.read()).step
        except (OSError, BadInput) as error:
            sys.stderr.write(f"standin: starting from step 0: {self.state_path}: {error}\n")
            return 0

    def _save(self, step: int) -> None:
        if step > self.saved_step:
            self._stage(step)
            self._commit()

    def _stage(self, step: int) -> None:
        """Put the checkpoint of `step` on disk under its temporary name."""
        if self.rank != 0:
            return
        state = State(step, checkpoint=self.state_path, attempt=self.attempt)
        with open(self.state_path + ".tmp", "wb", opener=_private) as file:
            file.write(state.encode())
            file.flush()
            os.fsync(file.fileno())
        self.saved_step = step

    def _commit(self) -> None:
        if self.rank == 0:
            os.replace(self.state_path + ".tmp", self.state_path)  # noqa: PTH105


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def main() -> int:
    """Run one rank; returns the exit code."""
    # Blocked before `ready` says that we listen; from here on they are only ever waited for.
    signal.pthread_sigmask(signal.SIG_BLOCK, LEAVE)
    try:
        standin = StandIn(os.environ)
    except (HpcschedError, KeyError, ValueError, TypeError) as error:
        sys.stderr.write(f"standin: the environment does not keep the contract: {error!r}\n")
        return exits.REFUSED
    return standin.run()


if __name__ == "__main__":
    # Without the interpreter's tidying up, whose milliseconds the course does not have.
    os._exit(main())
