"""Slurm through the pyslurm package, where one is installed that was built for this Slurm.

libslurm keeps Python's lock while it waits for the controller, so pyslurm is loaded by a process of its own,
which is asked in lines and ended when it does not answer in time: `python -m hpcsched.batch.pyslurm`.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from hpcsched.batch import slurm_text
from hpcsched.batch.base import COMMAND_TIMEOUT_S, BatchJobState
from hpcsched.batch.command import RunCommand, run_command
from hpcsched.batch.numbers import whole
from hpcsched.batch.slurm import Slurm, one_line, requeue_error
from hpcsched.contract.exits import WORK_LEFT
from hpcsched.errors import BatchError

AskPySlurm = Callable[..., Any]
"""Asks one of `pyslurm_calls` by name; raises BatchError with the complaint of Slurm, or for no answer."""


class PySlurm(Slurm):
    """Asks slurmctld through pyslurm (its API of 25.11) instead of by starting commands.

    What pyslurm has no reliable call for (submitting with a script's #SBATCH lines, steps, counts of GPUs by
    host, why a job ends) is done as `Slurm` does it. Check `usable` first.

    Args:
        ask: stands in for the process that has pyslurm loaded (tests).
        others: as for `Slurm`.
    """

    def __init__(
        self,
        environ: Mapping[str, str],
        *,
        run: RunCommand = run_command,
        launcher: str = "srun",
        hostname: str | None = None,
        ask: AskPySlurm | None = None,
    ) -> None:
        super().__init__(environ, run=run, launcher=launcher, hostname=hostname)
        self._ask = ask or PySlurmProcess(environ)
        self._given = ask is not None

    def usable(self) -> str | None:
        """The reason why pyslurm cannot be used here, in one line; None when it can.

        It is tried in a process of its own: libslurm ends the process that loads it, without an exception,
        when it finds no slurm.conf that it can read.
        """
        if self._given:
            found = str(self._ask("version"))
        else:
            if importlib.util.find_spec("pyslurm") is None:
                return "pyslurm is not installed"
            script = "import pyslurm; print(pyslurm.__version__); pyslurm.Job, pyslurm.JobSubmitDescription"
            try:
                tried = self._run((sys.executable, "-c", script), environ=self._environ)
            except BatchError as error:
                return f"pyslurm cannot be imported: {error}"
            if tried.code != 0:
                last = tried.err.strip().splitlines()[-1:] or [tried.complaint()]
                return f"pyslurm cannot be imported: {last[0]}"
            found = tried.out.strip()
        try:
            slurm = super().version().removeprefix("Slurm ")
        except BatchError as error:
            return str(error)
        if _release(found) != _release(slurm) or _release(found) is None:
            return f"pyslurm {found} was made for another release than the Slurm here, {slurm}"
        return None

    def end_time(self) -> float | None:
        job_id = self._job_id()
        try:
            end = self._ask("end_time", int(job_id))
        except BatchError as error:
            raise BatchError(f"Slurm does not tell of job {job_id}: {error}") from None
        return None if end is None else float(end)

    def job_state(self, job_id: str) -> BatchJobState:
        if whole(job_id) is None:
            return super().job_state(job_id)
        try:
            state = slurm_text.state_of(str(self._ask("state", int(job_id))))
            # Whether it is held is in another of its fields.
            return super().job_state(job_id) if state is BatchJobState.PENDING else state
        except BatchError as error:
            forgotten = "invalid job id specified" in str(error).lower()
            return BatchJobState.ENDED if forgotten else BatchJobState.UNKNOWN

    def requeue(self) -> int:
        job_id = self._job_id()
        try:
            self._ask("requeue", int(job_id))
        except BatchError as error:
            raise requeue_error(job_id, str(error)) from None
        return WORK_LEFT

    def comment(self, text: str) -> None:
        job_id = self._job_id()
        try:
            self._ask("comment", int(job_id), one_line(text))
        except BatchError as error:
            raise BatchError(f"Slurm does not take a comment on job {job_id}: {error}") from None

    def version(self) -> str:
        return f"{super().version()}, pyslurm {self._ask('version')}"


def pyslurm_calls(module: Any) -> dict[str, Callable[..., Any]]:
    """The calls of the package that can be asked for, by name. Each raises the package's RPCError."""
    return {
        "version": lambda: str(module.__version__),
        "end_time": lambda job: module.Job.load(job).end_time,
        "state": lambda job: module.Job.load(job).state,
        "requeue": lambda job: module.Job(job).requeue(),
        "comment": lambda job, text: module.Job(job).modify(module.JobSubmitDescription(comment=text)),
    }


class PySlurmProcess:
    """The process that has pyslurm loaded; started at the first question, and again after it hung.

    One question at a time, from any thread. It ends with us, as its input does.
    """

    def __init__(
        self,
        environ: Mapping[str, str],
        *,
        argv: tuple[str, ...] = (sys.executable, "-P", "-m", "hpcsched.batch.pyslurm"),
        timeout_s: float = COMMAND_TIMEOUT_S,
    ) -> None:
        self._environ, self._argv, self._timeout_s = environ, argv, timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._free = threading.Lock()

    def __call__(self, name: str, *words: Any) -> Any:
        """The answer to a question. Raises BatchError with Slurm's complaint, or for no answer in time."""
        question = json.dumps([name, *words]).encode() + b"\n"
        if not self._free.acquire(timeout=self._timeout_s):
            raise BatchError("pyslurm did not answer the question before this one")
        try:
            said = json.loads(self._line(question))
            answer, error = said.get("answer"), said.get("error")
        except (OSError, ValueError, AttributeError) as failed:
            self._end()
            raise BatchError(f"pyslurm did not answer: {failed}") from None
        finally:
            self._free.release()
        if error is not None:
            raise BatchError(str(error))
        return answer

    def _line(self, question: bytes) -> bytes:
        deadline = time.monotonic() + self._timeout_s
        if self._process is None or self._process.poll() is not None:
            self._end()
            # A session of its own: signals to our process group are not for it.
            self._process = subprocess.Popen(
                self._argv,
                env=dict(self._environ),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                start_new_session=True,
            )
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(question)
        got = b""
        while not got.endswith(b"\n"):
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not select.select([process.stdout], [], [], left_s)[0]:
                raise OSError(f"nothing within {self._timeout_s:g} s")
            more = os.read(process.stdout.fileno(), 65536)
            if not more:
                raise OSError(f"it ended with {process.wait(1.0)}")
            got += more
        return got

    def close(self) -> None:
        """End the process."""
        self._end()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1.0)  # a process that hangs in the kernel is left to the system


def serve(module: Any) -> None:
    """Answer the questions on standard input, one a line, until it ends."""
    # A batch system ends all of a job at once, but whoever asks us still has a requeue to ask for.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    known = pyslurm_calls(module)
    for line in sys.stdin:
        name, *words = json.loads(line)
        try:
            said = {"answer": known[name](*words)}
        except module.RPCError as error:
            said = {"error": str(error)}
        sys.stdout.write(json.dumps(said) + "\n")
        sys.stdout.flush()


def _release(version: str) -> tuple[int, int] | None:
    """(25, 11) of "25.11.2"; Slurm writes 22.05 what pyslurm writes 22.5."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else None


if __name__ == "__main__":
    serve(importlib.import_module("pyslurm"))
