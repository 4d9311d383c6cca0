"""`hpcsched.Job`: a job of a run, from Python."""

from __future__ import annotations

from concurrent.futures import CancelledError
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from hpcsched.agent.inbox import Command
from hpcsched.client import display, functions, waiting
from hpcsched.client.requests import StillThere, ask_or_leave
from hpcsched.contract import files
from hpcsched.contract.codec import SMALL_BYTES
from hpcsched.contract.state import State
from hpcsched.core.model import JobState
from hpcsched.decoding import read_file, read_tail
from hpcsched.errors import BadInput, HpcschedError, StoreError, UnknownJob
from hpcsched.patience import patiently
from hpcsched.printing import printable
from hpcsched.store.metrics import read_points
from hpcsched.store.rundir import agent_works

if TYPE_CHECKING:
    from hpcsched.client.run import Run
from hpcsched.store.status import JobStatus

TAIL_BYTES = 2**11
"""The end of a job's output that is told with its failure (chosen)."""


class JobFailed(HpcschedError):
    """A job has not completed.

    `state` is its last one, `exit` the exit code of its program (None: it never ran), `output` the last of
    what it has written.
    """

    def __init__(self, name: str, state: str, *, exit: int | None, detail: str, output: str) -> None:
        what = f"job {name} is {state}" + (f": {detail}" if detail else "")
        super().__init__("\n".join([what, *(f"  {line}" for line in output.splitlines()[-10:])]))
        self.state, self.exit, self.output = state, exit, output


class Job:
    """A job of a run, by its name. What it is at is read from the run's directory at each call."""

    def __init__(self, run: Run, name: str) -> None:
        self.run, self.name = run, name

    @property
    def id(self) -> int:
        """Its number. One that waits for an agent may still get another."""
        return self._status().id

    @property
    def state(self) -> str:
        """PENDING, RUNNING, SUSPENDED, COMPLETED, FAILED and so on, as `hpcsched status --json` has it."""
        return str(self._status().state)

    @property
    def done(self) -> bool:
        """Whether it has ended, however."""
        return self._status().state.final

    @property
    def step(self) -> int | None:
        """Steps done in all; None for a program that does not tell them."""
        return self._status().step

    def record(self) -> dict[str, Any]:
        """All that is known of it, with the keys of `hpcsched status --json`."""
        found: dict[str, Any] = msgspec.to_builtins(self._status())
        return found

    # -- what it gives -----------------------------------------------------------------------

    def wait(self, timeout: float | None = None) -> str:
        """Wait until it has ended; its state. Raises TimeoutError after `timeout` seconds, NoSuchRun where no
        agent is there to run it."""
        try:
            found = self.run._wait({self.name}, timeout)
        except StillThere as error:
            raise TimeoutError(f"job {self.name}: {error}") from None
        if not found:
            raise UnknownJob(f"job {self.name} was taken back")
        return str(found[0].state)

    def result(self, timeout: float | None = None) -> Any:
        """Wait until it has ended; what its function has returned, or of a program its metrics, as a dict.

        Raises what the function has raised; JobFailed for another failure; CancelledError; TimeoutError and
        NoSuchRun as `wait`.
        """
        self.wait(timeout)
        return self._result_of(self._status())

    def _result_of(self, job: JobStatus) -> Any:
        """What the job of this status, which has ended, has come to; raises as `result`."""
        state = job.state
        found = functions.outcome(self.run._rundir, job.id)
        if found is not None and found.error is not None:
            found.error.add_note(f"in job {self.name} of {self.run.dir}:\n{found.text}")
            raise found.error
        if state == JobState.CANCELLED:
            raise CancelledError(f"job {self.name} was cancelled")
        if state != JobState.COMPLETED:
            raise JobFailed(self.name, state, exit=job.exit, detail=job.why, output=self.log(TAIL_BYTES))
        if found is None:
            return dict(job.metrics)
        if found.text:
            raise JobFailed(self.name, state, exit=job.exit, detail=found.text, output="")
        return found.value

    def metrics(self, *, after: int = -1) -> list[dict[str, Any]]:
        """What it has logged `after` this step, oldest first: one dict a point.

        `step`, `t` (Unix seconds), and the values by name: `pandas.DataFrame(job.metrics())` takes it so.
        """
        points = read_points(self._folder() / files.METRICS)
        return [{"step": one.step, "t": one.t, **one.values} for one in points if one.step > after]

    def checkpoint(self) -> Path | None:
        """Its newest complete checkpoint, a file or a folder; None as long as there is none."""
        try:
            path = self._folder() / files.STATE
            state = State.decode(patiently(lambda: read_file(path, most_bytes=SMALL_BYTES)))
        except FileNotFoundError:
            return None
        except (OSError, BadInput) as error:
            raise StoreError(f"the checkpoint of job {self.name} is not known: {error}") from error
        return Path(state.checkpoint) if state.checkpoint else None

    def log(self, most_bytes: int = 2**20) -> str:
        """The end of its output, at most `most_bytes` of it; control characters are shown, not passed on."""
        output = self._status().output
        if not output:
            return ""
        try:
            return printable(patiently(lambda: read_tail(Path(output), most_bytes)), lines=True)
        except FileNotFoundError:
            return ""
        except (OSError, BadInput) as error:
            raise StoreError(f"cannot read {output}: {error}") from error

    # -- what is done to it ------------------------------------------------------------------

    def cancel(self) -> bool:
        """End it for good; whether there was something to end. Without an agent the next one does it."""
        status = self._status()
        gone = kept = set[str]()
        if waiting.waits(status) or (status.state.final and not agent_works(self.run._rundir)):
            gone, kept = waiting.take_back(self.run._rundir, [status])
        return bool(gone or kept) or (not waiting.waits(status) and self._ask("cancel"))

    def suspend(self) -> bool:
        """Have it save and leave its GPUs until `resume`; whether that could be done."""
        return self._ask("suspend")

    def resume(self) -> bool:
        """Let it go on after `suspend`; whether that could be done. Without an agent the next one does it."""
        return self._ask("resume")

    def retry(self) -> bool:
        """Run it again, from its newest checkpoint; whether that could be done."""
        return self._ask("retry")

    def _ask(self, command: str) -> bool:
        return bool(ask_or_leave(self.run._rundir, Command(command=command), [self._status()]))

    # -- its place ---------------------------------------------------------------------------

    def _status(self) -> JobStatus:
        return self.run._status_of(self.name)

    def _folder(self) -> Path:
        return self.run._rundir.job(self.id)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Job) and (self.run.dir, self.name) == (other.run.dir, other.name)

    def __hash__(self) -> int:
        return hash((self.run.dir, self.name))

    def __repr__(self) -> str:
        return f"Job({self.name!r})"

    def _repr_html_(self) -> str:
        """How a notebook shows it."""
        try:
            return display.jobs([self._status()])
        except HpcschedError as error:
            return display.line(str(error))
