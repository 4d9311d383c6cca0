"""Slurm's queue for what is given to it: `sbatch`, `squeue --name`, `sacct`, `scancel`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from hpcsched.batch.command import RunCommand, command_output, run_command
from hpcsched.batch.numbers import whole
from hpcsched.batch.slurm_submit import submit_environ
from hpcsched.batch.slurm_text import queue_environ, state_of, utc_time
from hpcsched.batch.submissions import Submitted
from hpcsched.errors import BatchError

_FIELDS = 6


class SlurmSubmissions:
    """A user's own jobs on a Slurm cluster; see `Submissions`.

    Args:
        environ: the environment of this process; a user's SBATCH_ variables count, as for `sbatch`.
        run: runs a command.
    """

    kind = "slurm"

    def __init__(self, environ: Mapping[str, str], *, run: RunCommand = run_command) -> None:
        self._environ, self._run = submit_environ(environ), run

    def submit(self, script: str) -> str:
        said = command_output(self._run, ("sbatch", "--parsable"), environ=self._environ, stdin=script)
        # The last line: a site's submit plugin may have printed greetings. "12;cluster" in a federation.
        submitted = (said.split() or [""])[-1].partition(";")[0]
        if whole(submitted) is None:
            raise BatchError(f"sbatch did not answer with a job id but {said.strip()[:60]!r}")
        return submitted

    def found(self, names: Sequence[str]) -> tuple[Submitted, ...]:
        argv = ("squeue", "--noheader", "--me", "--states=all", f"--name={','.join(names)}")
        answer = self._asked(*argv, "--format=%A|%j|%T|%S|%e|%r")
        return tuple(one for one in rows_in(answer) if one.name in names)

    def accounted(self, job_id: str, name: str) -> Submitted | None:
        argv = ("sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={job_id}")
        try:
            answer = self._asked(*argv, "--format=JobIDRaw,JobName,State,Start,End,Reason")
        except BatchError:
            return None  # most test clusters, and some real ones, keep no accounts
        return next((one for one in rows_in(answer) if (one.job_id, one.name) == (job_id, name)), None)

    def cancel(self, job_ids: Sequence[str]) -> None:
        if job_ids:
            self._asked("scancel", *job_ids)

    def _asked(self, *argv: str) -> str:
        return command_output(self._run, argv, environ=queue_environ(self._environ))


def rows_in(text: str) -> Iterator[Submitted]:
    """From lines of six fields with `|` between them; others are left out."""
    for line in text.splitlines():
        fields = [field.strip() for field in line.split("|")]
        if len(fields) != _FIELDS or whole(fields[0]) is None or not fields[2]:
            continue
        start, end = utc_time(fields[3]), utc_time(fields[4])
        word = fields[2].split()[0]  # sacct: "CANCELLED by 1000"
        yield Submitted(
            job_id=fields[0],
            name=fields[1],
            state=state_of(word),
            word=word,
            start=start if isinstance(start, float) else None,
            end=end if isinstance(end, float) else None,
            reason="" if fields[5] in ("None", "(null)") else fields[5],
        )
