"""What the programs of a search leave: a folder for each trial, and the metric, in their output or in a file.

A metric that was read once is kept beside the job's output: the next rung may write the same file again, and
whoever goes on after a crash has to decide as it was decided.
"""

from __future__ import annotations

import contextlib
import json
import math
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

from hpcsched.contract import codec, files
from hpcsched.core.jobs import Job
from hpcsched.core.machine import Machine
from hpcsched.core.model import JobState
from hpcsched.decoding import decode_object, last_lines, read_file
from hpcsched.dialects import number_pattern
from hpcsched.errors import BadInput, StoreError
from hpcsched.patience import kind_of, patiently
from hpcsched.printing import printable
from hpcsched.store.files import write_atomically
from hpcsched.store.rundir import RunDir
from hpcsched.tuning.command import output_of, result_file, values_of
from hpcsched.tuning.feeding import Trials, outcomes_of
from hpcsched.tuning.search import Search
from hpcsched.tuning.source import TrialOutcome, place_of

MOST_OUTPUT = 2**20
"""The part at the end of an output in which the metric is looked for, in bytes (chosen)."""

_MOST_SHOWN = 80


class ProgramTrials(Trials):
    """The trials of a search whose jobs run a program.

    What was read of a job stays as it is: each is looked at once.

    Args:
        root: the run directory.
    """

    def __init__(self, search: Search, root: Path) -> None:
        self._search, self._rundir = search, RunDir(root)
        self._pattern = number_pattern(search.result) if search.result else None
        self._budgets = {
            (bracket.s, rung): budget
            for bracket in search.brackets()
            for rung, (_, budget) in enumerate(bracket.rungs)
        }
        self._read: dict[tuple[int, int], float | None] = {}
        self._missing: dict[str, str] = {}

    def outcomes(self, machine: Machine) -> dict[str, TrialOutcome]:
        """As the run knows them; of jobs that have completed, the metric is what they left."""
        found = outcomes_of(machine)
        if self._pattern is None and self._search.result_file is None:
            return found
        for job in machine.run.jobs.values():
            place = place_of(job.spec.name)
            if job.state is not JobState.COMPLETED or place is None or place[1:] not in self._budgets:
                continue
            key = job.id, job.attempt
            if key not in self._read:
                self._read[key] = self._value(job, *place)
            value = self._read[key]
            metrics = {} if value is None else {self._search.metric: value}
            found[job.spec.name] = TrialOutcome("completed", metrics)
        return found

    def missing(self, name: str) -> str:
        return self._missing.get(name, "")

    def folder(self, trial: int) -> Path:
        """The folder of a trial; it need not be there."""
        return self._rundir.root / files.TRIALS / f"t{trial:04d}"

    def make_folder(self, trial: int) -> Path:
        """The same, which is there from now on. Raises StoreError."""
        folder = self.folder(trial)
        try:
            patiently(partial(folder.mkdir, parents=True, exist_ok=True))
        except OSError as error:
            raise StoreError(f"cannot make {folder}: {error.strerror}") from error
        return folder

    def any_read(self) -> bool:
        """Whether a metric has been read in this run, now or earlier."""
        jobs, name = self._rundir.root / files.JOBS, files.metric("*")

        def any_there() -> bool:  # not by `glob`: that may take any error for an empty folder
            folders = [job for job in jobs.iterdir() if job.name.isdecimal()]
            return any(fnmatch(path.name, name) for folder in folders for path in folder.iterdir())

        return kind_of(jobs) is not None and patiently(any_there)

    def _value(self, job: Job, trial: int, bracket: int, rung: int) -> float | None:
        """The metric of a job; nan where it is not finite, None where there is none."""
        kept = self._rundir.job(job.id) / files.metric(job.attempt)
        with contextlib.suppress(OSError, BadInput):
            return _number(kept, self._search.metric)
        try:
            if self._pattern is not None:
                value = self._printed(job)
            else:
                folder, args = str(self.folder(trial)), job.spec.args
                budget = self._budgets[bracket, rung]
                values = values_of(trial=trial, args=args, budget=budget, folder=folder)
                value = _number(result_file(self._search, values, job.spec.workdir), self._search.metric)
        except BadInput as error:
            self._missing[job.spec.name] = str(error)
            return None
        # Where it cannot be written the journal will tell; and until then what was read is there.
        with contextlib.suppress(StoreError):
            value_or_null = value if math.isfinite(value) else None
            write_atomically(kept, json.dumps({self._search.metric: value_or_null}).encode())
        return value

    def _printed(self, job: Job) -> float:
        """The last number in the output of a job that the pattern finds. Raises BadInput."""
        assert self._pattern is not None
        path = self._rundir.job(job.id) / output_of(job.id)
        try:
            lines = patiently(lambda: last_lines(path, MOST_OUTPUT))
        except OSError as error:
            raise BadInput(f"{path}: {error.strerror}") from error
        lines = [line for line in lines if line.strip() and not line.startswith(files.ATTEMPT_MARK)]
        for line in reversed(lines):
            if (value := self._pattern.last(line.rstrip())) is not None:
                return value
        last = f"its last line is {printable(lines[-1])[:_MOST_SHOWN]!r}" if lines else "nothing is in it"
        raise BadInput(f"nothing like {self._search.result!r} in {path} ({last})")


def _number(path: Path, metric: str) -> float:
    """The number of this name in a file with a JSON object; nan where it is null. Raises BadInput."""
    try:
        table = decode_object(patiently(lambda: read_file(path, most_bytes=codec.SMALL_BYTES)))
        if metric not in table:
            raise BadInput(f"no {metric!r} among {', '.join(map(repr, table)) or 'nothing'}"[:200])
        value = table[metric]
        return math.nan if value is None else codec.finite(value, metric)
    except (OSError, BadInput) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise BadInput(f"{path}: {why}") from error
