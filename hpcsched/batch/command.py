"""Running a command of a batch system, bounded in time."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from hpcsched.batch.base import COMMAND_TIMEOUT_S
from hpcsched.core.exits import said_exit
from hpcsched.errors import MOST_SHOWN, BatchError
from hpcsched.open_files import as_it_was
from hpcsched.printing import shortened


@dataclass(frozen=True, slots=True)
class CommandOutput:
    """The output of a command: its exit code (negative: the signal that ended it), stdout and stderr."""

    code: int
    out: str
    err: str = ""

    def complaint(self) -> str:
        """The line of its output that says why it failed."""
        lines = [line.strip() for line in (self.err or self.out).splitlines() if line.strip()]
        if lines:
            return shortened(lines[0], MOST_SHOWN)
        return said_exit(self.code)


class RunCommand(Protocol):
    """Runs `argv` in `environ` with `stdin` as its input, and waits until it ends.

    Raises BatchError when it cannot be started, or has not ended after COMMAND_TIMEOUT_S.
    """

    def __call__(
        self, argv: Sequence[str], *, environ: Mapping[str, str], stdin: str = ""
    ) -> CommandOutput: ...


def run_command(
    argv: Sequence[str],
    *,
    environ: Mapping[str, str],
    stdin: str = "",
    timeout_s: float = COMMAND_TIMEOUT_S,
) -> CommandOutput:
    """Run a command in a session of its own; see `RunCommand`.

    So a signal to our process group does not end it half way (a requeue sends one to the job that asks for
    it), and its children can be ended with it when it hangs.
    """
    import subprocess

    try:
        process = subprocess.Popen(
            argv,
            env=dict(environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except FileNotFoundError:
        raise BatchError(f"{argv[0]}: command not found; is the batch system on the PATH?") from None
    except OSError as error:
        raise BatchError(f"{argv[0]} cannot be started: {error.strerror}") from None
    as_it_was(process.pid)  # sbatch hands on the limits that it has
    with process:
        try:
            out, err = process.communicate(stdin, timeout_s)
        except subprocess.TimeoutExpired:
            raise BatchError(f"{argv[0]} did not answer within {timeout_s:g} s") from None
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
    return CommandOutput(process.returncode, out, err)


def command_output(
    run: RunCommand, argv: Sequence[str], *, environ: Mapping[str, str], stdin: str = ""
) -> str:
    """The stdout of a command. Raises BatchError if its exit code is not 0."""
    answer = run(argv, environ=environ, stdin=stdin)
    if answer.code != 0:
        raise BatchError(f"{argv[0]} failed: {answer.complaint()}")
    return answer.out
