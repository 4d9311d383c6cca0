"""A command that saves a program from outside, such as CRIU's or DMTCP's: run once, beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hpcsched.launch.bounded_run import run_bounded
from hpcsched.threads import started

NOT_IN_TIME = 124
"""The exit code of one that took too long, as that of timeout(1)."""

NOT_STARTED = 127
"""That of one which could not be started, as a shell has it."""


class SaveCommand:
    """Runs once, in a thread, with a deadline; `{pid}` in it becomes the pid of rank 0.

    It has the environment and the directory of the program that it saves.
    """

    def __init__(
        self, command: Sequence[str], pid: int, environ: Mapping[str, str], cwd: str, within_s: float
    ) -> None:
        self._argv = [word.replace("{pid}", str(pid)) for word in command]
        self._environ, self._cwd, self._within_s = environ, cwd, within_s
        self.result: tuple[int, str] | None = None
        """Its exit code, and the last line that it wrote; None until it is over."""
        try:
            started(self._run, "suspend command")
        except OSError as error:
            self.result = NOT_STARTED, str(error)

    def _run(self) -> None:
        try:
            code, out, err = run_bounded(
                self._argv, environ=self._environ, within_s=self._within_s, cwd=self._cwd
            )
            self.result = code, _last_line(err) or _last_line(out)
        except TimeoutError:
            self.result = NOT_IN_TIME, f"not done within {self._within_s:.0f} s"
        except (OSError, ValueError) as error:
            self.result = NOT_STARTED, str(error)


def _last_line(said: bytes) -> str:
    lines = [line.strip() for line in said.decode(errors="replace").splitlines()]
    return next((line[:200] for line in reversed(lines) if line), "")
