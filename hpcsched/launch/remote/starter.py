"""The commands (srun, ssh ...) that run the node agents, from their start to their end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from hpcsched.launch.spawn import ignoring_signals
from hpcsched.patience import patiently

KILLED_WITHIN_S = 2.0
"""Time to wait for the end after SIGKILL (chosen): a process that hangs in the kernel cannot be helped."""

TAIL_BYTES = 4096
"""The part of the log that is searched for its last line (chosen)."""

NOTHING_SAID = ('Try "srun --help"', "Usage:")
"""Lines by which commands end after the one that says what is wrong."""

SSH_FAILED = 255
"""The exit code of ssh when its remote command was killed, but also when only its connection has broken."""


class NodeAgentCommand:
    """One running command (srun, ssh ...) in a session of its own; its output is appended to a file.

    It stays a zombie until all processes of its group have been killed: no other process can have the number
    before. A command that cannot be started counts as one that has ended; `why` is the reason.

    `shielded`: signals that a batch system sends to it too, as to all of the job. It is started with them
    ignored: what it runs must not end with it before it has saved. SIGTERM of ours is then SIGKILL.
    """

    def __init__(
        self,
        argv: Sequence[str],
        hosts: Sequence[str],
        log: Path,
        *,
        shielded: frozenset[signal.Signals] = frozenset(),
    ) -> None:
        self.hosts = tuple(hosts)
        self.name = Path(command_of(argv)).name
        self.why = ""
        """The way it ended, in words; "" while it lives."""
        self.ended_at: float | None = None
        self.by_itself = False
        """Whether it ended without a signal from us and, as far as it knows, with what it ran."""
        self.succeeded = False
        """Whether it ended by itself with exit code 0."""
        self._signalled = False
        self._shielded = shielded
        self.pidfd: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        try:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            descriptor = patiently(lambda: os.open(log, flags, 0o600))
            with os.fdopen(descriptor, "wb") as file, ignoring_signals(shielded):
                self._process = subprocess.Popen(
                    argv, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
                )
            self.pidfd = os.pidfd_open(self._process.pid)
        except OSError as error:
            self.signal(signal.SIGKILL)  # started, but there is no descriptor left to watch it by
            self._over(f"{error.filename or self.name}: {error.strerror or error}")

    def _over(self, why: str) -> None:
        self.why, self.ended_at = why, time.monotonic()

    def look(self) -> bool:
        """Whether it has ended; then no process of its group is left. Never blocks."""
        if self.ended_at is None and self._process is not None:
            found = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if found is None:
                return False
            signalled = self._signalled
            self.signal(signal.SIGKILL)
            code = self._process.wait()
            self.by_itself = not signalled and not (self.name == "ssh" and code == SSH_FAILED)
            self.succeeded = self.by_itself and code == 0
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            self._over(f"`{self.name}` {how}")
        return self.ended_at is not None

    def signal(self, sig: signal.Signals) -> None:
        """Send a signal to its process group, as long as that is surely its own."""
        if self._process is not None and self._process.returncode is None:
            self._signalled = True
            sig = signal.SIGKILL if sig in self._shielded else sig
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, sig)

    def close(self) -> None:
        """Close the descriptor; ends no process."""
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None


def end_all(commands: Sequence[NodeAgentCommand], grace_s: float) -> bool:
    """End commands by SIGTERM, after `grace_s` by SIGKILL; False if one still lives KILLED_WITHIN_S later."""
    for sig, patience_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, KILLED_WITHIN_S)):
        for command in commands:
            if not command.look():
                command.signal(sig)
        deadline = time.monotonic() + patience_s
        while not all(command.look() for command in commands) and time.monotonic() < deadline:
            time.sleep(0.01)
    return all(command.look() for command in commands)


def command_of(argv: Sequence[str]) -> str:
    """The command that `argv` runs: of `env -u NAME ... COMMAND` it is COMMAND."""
    words = list(argv)
    if words[0] == "env":
        del words[0]
        while words[:1] == ["-u"]:
            del words[:2]
    return words[0] if words else argv[0]


def last_log_line(log: Path) -> str:
    """The last line of the commands' log that says something, shortened; "" if there is none."""
    try:
        with log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - TAIL_BYTES))
            lines = file.read().decode(errors="replace").replace("\r", "\n").split("\n")
    except OSError:
        return ""
    said = (line.strip()[:300] for line in reversed(lines) if line.strip())
    return next((line for line in said if not line.startswith(NOTHING_SAID)), "")
