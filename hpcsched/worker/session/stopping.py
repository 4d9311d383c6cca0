"""How a training hears that it should save and leave."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

from hpcsched.worker.process.contract import say
from hpcsched.worker.process.guest import GuestGone, HostedGuest, hosted

_PARENT_CHECK_S = 2.0
_FILE_CHECK_S = 0.5


class StopFlag:
    """Turns true when this process should save and leave.

    That is on SIGTSTP and SIGTERM, of which the handlers only take a note, when the stop file is there
    (`JobEnv.stop_file`: behind a launcher no signal may come), and when the agent is gone. Whoever owns the
    loop looks at `wanted` between two steps.
    """

    def __init__(self, notify_pid: int | None, stop_file: Path | None = None) -> None:
        self._notify_pid = notify_pid
        self._stop_file = stop_file
        self._next_look = 0.0
        self._reason: str | None = None
        self._next_check = 0.0
        self._child = os.getppid() == notify_pid
        self._former: dict[int, Any] = {}
        self._hosted: HostedGuest | None = None

    def install(self) -> bool:
        """Take SIGTSTP and SIGTERM over; False, with a warning, where Python does not allow it.

        A guest in another job's process is told by its host instead.
        """
        self._hosted = hosted()
        if self._hosted is not None:
            return True
        if threading.current_thread() is not threading.main_thread():
            say("not in the main thread, so no signal can be handled: this job cannot be suspended")
            return False
        for number in (signal.SIGTSTP, signal.SIGTERM):
            self._former[number] = signal.signal(number, self._note)
        return True

    def close(self) -> None:
        """Put back the handlers that were there before."""
        while self._former:
            number, handler = self._former.popitem()
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    @property
    def wanted(self) -> str | None:
        """Why to stop, or None. Looks for the stop file at most every 0.5 s, for the agent every 2 s.

        Raises Gone for a guest that must not save any more.
        """
        now = time.monotonic()
        if self._hosted is not None and self._hosted.gone:
            raise GuestGone
        if self._reason is None and self._hosted is not None:
            self._reason = self._hosted.stop
        if self._reason is None and self._stop_file is not None and now >= self._next_look:
            self._next_look = now + _FILE_CHECK_S
            if self._stop_file.exists():
                self._reason = self._stop_file.name
        if self._reason is None and self._notify_pid is not None and now >= self._next_check:
            self._next_check = now + _PARENT_CHECK_S
            if self._agent_gone(self._notify_pid):
                self._reason = "the agent is gone"
        return self._reason

    @property
    def agent_gone(self) -> bool:
        """Whether the agent has ended, as far as can be seen now."""
        return self._notify_pid is not None and self._agent_gone(self._notify_pid)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self._reason = signal.Signals(number).name
        # A DataLoader's raises when a signal to the whole batch job has killed its workers: not in a save.
        self._former.setdefault(signal.SIGCHLD, signal.signal(signal.SIGCHLD, signal.SIG_DFL))

    def _agent_gone(self, pid: int) -> bool:
        if self._child:
            return os.getppid() != pid
        # Started through a wrapper script: the agent is further up.
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:  # the pid is someone else's by now
            return True
        return False
