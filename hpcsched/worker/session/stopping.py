"""How a training hears that it should save and leave."""

from __future__ import annotations

import contextlib
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
_SIGNALS = (signal.SIGTSTP, signal.SIGTERM)


class _Handlers:
    """The one handler of SIGTSTP and SIGTERM in this process: it takes a note for every flag that is open.

    So a framework's callback and the user's own loop can both listen. While no flag is open, and in a child
    that was forked, a signal does what it did before.
    """

    def __init__(self) -> None:
        self._pid = 0
        self._open: list[StopFlag] = []
        self._former: dict[int, Any] = {}

    def open(self, flag: StopFlag) -> None:
        """Take the signals, or take them again where somebody else has taken them since."""
        if self._pid != os.getpid():
            self._pid, self._open = os.getpid(), []
        for number in _SIGNALS:
            former = signal.signal(number, self._note)
            if former != self._note and not (self._open and number in self._former):
                self._former[number] = former
        if flag not in self._open:
            self._open.append(flag)

    def close(self, flag: StopFlag) -> None:
        """Give the signals back with the last flag; not those that somebody else has taken since."""
        if flag not in self._open:
            return
        self._open.remove(flag)
        # In another thread nothing can be given back: `_note` does it when a signal comes.
        if not self._open and threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if signal.getsignal(number) == self._note:
                    self._restore(number)
            if (former := self._former.pop(signal.SIGCHLD, None)) is not None:
                signal.signal(signal.SIGCHLD, former)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self._pid != os.getpid() or not self._open:
            if self._pid == os.getpid() or number == signal.SIGTERM:  # a child need not stop at ^Z of ours
                self._restore(number)
                os.kill(os.getpid(), number)
            return
        for flag in self._open:
            flag.note(signal.Signals(number).name)
        # A DataLoader's raises when a signal to the whole batch job has killed its workers: not in a save.
        if signal.SIGCHLD not in self._former:
            self._former[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    def _restore(self, number: int) -> None:
        former = self._former.get(number)
        signal.signal(number, signal.SIG_DFL if former is None else former)


_handlers = _Handlers()


class StopFlag:
    """Turns true when this process should save and leave.

    That is on SIGTSTP and SIGTERM, of which the handlers only take a note, when the stop file is there
    (`JobEnv.stop_file`: behind a launcher no signal may come), and when the agent is gone. Whoever owns the
    loop looks at `wanted` between two steps. A process can have several.
    """

    def __init__(self, notify_pid: int | None, stop_file: Path | None = None) -> None:
        self._notify_pid = notify_pid
        self._stop_file = stop_file
        self._next_look = 0.0
        self._reason: str | None = None
        self._next_check = 0.0
        self._child = os.getppid() == notify_pid
        self._hosted: HostedGuest | None = None

    def install(self) -> bool:
        """Take SIGTSTP and SIGTERM over; False if nothing can tell this process to save.

        Python takes signals in the main thread only: elsewhere the stop file is all, and one line says so. A
        guest in another job's process is told by its host instead.
        """
        self._hosted = hosted()
        if self._hosted is not None:
            return True
        if threading.current_thread() is threading.main_thread():
            _handlers.open(self)
            return True
        if self._stop_file is None:
            say("not in the main thread, so no signal can be handled: this job cannot be suspended")
            return False
        say(
            "not in the main thread, so no signal can be handled: told to save by a file, and SIGTERM ends it"
        )
        return True

    def close(self) -> None:
        """Put back the handlers that were there before, unless another flag of this process is open."""
        _handlers.close(self)

    def note(self, reason: str) -> None:
        """This process should save and leave, and why."""
        self._reason = reason

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
            with contextlib.suppress(OSError):  # a file system that answers nothing for a moment
                self._stop_file.stat()
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
