"""A launcher without processes: ranks end when the test says so, signals are written down."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from signal import Signals
from typing import Any

from hpcsched.contract.exits import SUSPENDED
from hpcsched.errors import LaunchError
from hpcsched.launch.base import LaunchPlan, attempt_code

FIRST_PID = 2**22 + 1  # beyond the kernel's largest pid: a fake pid that leaks harms nobody
FIRST_PORT = 29500
"""Where all fake ranks meet."""


@dataclass(kw_only=True)
class Script:
    """The behaviour of an attempt's ranks: they end at once with `codes`, or by each signal with its code."""

    codes: Sequence[int] | None = None
    on_signal: Mapping[signal.Signals, int] = field(
        default_factory=lambda: {
            signal.SIGTSTP: SUSPENDED,
            signal.SIGTERM: 128 + signal.SIGTERM,
            signal.SIGKILL: 128 + signal.SIGKILL,
        }
    )


class FakeLauncher:
    """Launches by `script`: what it returns the ranks do; what it raises `launch` raises.

    `launched` holds every attempt's plan and workers, in order; `forgotten` the jobs to be forgotten;
    `given_up` the attempts (job, number) not to be started any more. Plans of which `waits_for` is true are
    not ready;
    `kept` those whose state is being made durable, as the test says.
    """

    def __init__(self, script: Callable[[LaunchPlan], Script | LaunchError] | None = None) -> None:
        self.script = script or (lambda plan: Script())
        self.launched: list[tuple[LaunchPlan, FakeWorkers]] = []
        self.forgotten: list[int] = []
        self.given_up: list[tuple[int, int]] = []
        self.waits_for: Callable[[LaunchPlan], bool] = lambda plan: False
        self.kept: set[int] = set()
        self._next_pid = FIRST_PID

    def launch(self, plan: LaunchPlan) -> FakeWorkers:
        script = self.script(plan)
        if isinstance(script, LaunchError):
            raise script
        ranks = len(plan.devices) if plan.per_rank else plan.processes
        workers = FakeWorkers([self._next_pid + rank for rank in range(ranks)], script, plan.joins)
        self._next_pid += ranks
        self.launched.append((plan, workers))
        for rank, code in enumerate(script.codes or ()):
            workers.end(rank, code)
        return workers

    def ready_for(self, plan: LaunchPlan) -> bool:
        return not self.waits_for(plan)

    def give_up(self, job_id: int, attempt: int) -> None:
        self.given_up.append((job_id, attempt))

    def forget(self, job_id: int) -> None:
        self.forgotten.append(job_id)

    def keeping(self) -> set[int]:
        return set(self.kept)


class FakeWorkers:
    """Ranks that live until `end` or a signal; descriptors are real, so selectors work.

    `told` holds the orders, `expected` the further attempts that they are to become, `save_command` what is
    to save them from outside. `caught`, `saved_by`: as the test says.
    """

    def __init__(self, pids: Sequence[int], script: Script, joins: str | None = None) -> None:
        self.ready: bytes | None = None
        self.refused: bytes | None = None
        self.held: bytes | None = None
        self.record: bytes | None = None
        self.told_after_s = 0.0
        self.oom = ""
        self.over_limit = False
        self.where = joins or f"127.0.0.1:{FIRST_PORT}"
        self.told: list[Mapping[str, Any]] = []
        self.expected: list[int] = []
        self.processes = tuple((pid, 1000 + i) for i, pid in enumerate(pids))
        self.pidfds = tuple(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in pids)
        self.progress_fd: int | None
        self.progress_fd, self._write_end = os.pipe()
        os.set_blocking(self.progress_fd, False)
        self.signals: list[signal.Signals] = []
        self.caught: set[signal.Signals] = set()
        self.save_command: tuple[str, ...] = ()
        self.saved_by: tuple[int, str] | None = None
        self.saving = False
        self.closed = False
        self._script = script
        self._codes: dict[int, int] = {}

    def end(self, rank: int, code: int) -> None:
        """The rank ends now (a second end is not heard)."""
        if rank not in self._codes and not self.closed:
            self._codes[rank] = code
            os.eventfd_write(self.pidfds[rank], 1)

    def say(self, line: str) -> None:
        """Rank 0 writes to its progress descriptor."""
        os.write(self._write_end, line.encode())

    @property
    def living(self) -> int:
        return len(self.processes) - len(self._codes)

    def tell(self, order: Mapping[str, Any]) -> None:
        self.told.append(order)

    def expect(self, attempt: int) -> None:
        self.expected.append(attempt)

    def signal(self, sig: signal.Signals) -> None:
        self.signals.append(sig)
        if sig in self._script.on_signal:
            for rank in range(len(self.processes)):
                self.end(rank, self._script.on_signal[sig])

    def catches(self, sig: Signals) -> bool:
        return sig in self.caught

    def ask_to_save(self, sig: Signals) -> None:
        self.signal(sig if sig in self.caught else signal.SIGTERM)

    def save_by(self, command: Sequence[str], within_s: float) -> None:
        self.save_command = tuple(command)

    def failed_early(self) -> bool:
        ended = self._codes.values()
        return len(ended) < len(self.processes) and any(code not in (0, SUSPENDED) for code in ended)

    def reap(self) -> int | None:
        done = len(self._codes) == len(self.processes)
        return attempt_code(list(self._codes.values())) if done else None

    def left(self) -> int:
        return 0

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            for fd in (
                *self.pidfds,
                self._write_end,
                *([] if self.progress_fd is None else [self.progress_fd]),
            ):
                os.close(fd)
            self.pidfds, self.progress_fd = (), None
