"""`hpcsched logs JOB`: what a job has written."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import click

from hpcsched.cli.common import code_of, dir_option, find_run, hint_at_runs, job_names, name_one, select
from hpcsched.client.waiting import read_all
from hpcsched.decoding import opened
from hpcsched.errors import BadInput, HpcschedError, NoSuchRun
from hpcsched.patience import patiently
from hpcsched.printing import OutputText
from hpcsched.store.run_folders import go_on
from hpcsched.store.status import read_status


@click.command()
@click.argument("job", shell_complete=job_names)
@dir_option
@click.option("-f", "--follow", is_flag=True, help="Follow the output until the job has ended.")
@click.option("-n", "--lines", type=click.IntRange(min=0), help="The last N lines only.")
@click.pass_context
def logs(ctx: click.Context, job: str, dir_: str | None, follow: bool, lines: int | None) -> int:
    """Print the output of JOB (id or name); all its attempts append to one file, with a line between them.

    On a terminal it cannot do more than write and colour text: what else a terminal would obey is shown as an
    escape. Into a file or a pipe it goes as it is.

    Exit code 3: the run's agent is gone, and jobs are left.
    """
    rundir = find_run(ctx, dir_)
    with hint_at_runs(ctx, dir_):
        several = select(read_all(rundir, [job]), [job])
    if len(several) > 1:
        raise name_one(job, {one.name: one.state for one in several})
    found = several[0]
    if not found.output:
        if not follow:
            raise HpcschedError(f"job {found.id} ({found.name}) has written nothing: it is {found.state}")
        while not (found := select(read_status(rundir, [job]), [job])[0]).output and not found.state.final:
            time.sleep(0.2)
    try:
        with opened(Path(found.output)) as (file, _), _written() as write:
            text = file.read()
            if lines is not None:
                text = b"".join(text.splitlines(keepends=True)[-lines:]) if lines else b""
            write(text)
            while follow:
                status = read_status(rundir, [job])
                write(patiently(file.read))
                if select(status, [job])[0].state.final:
                    break
                if status.run.stale or status.run.state in ("STOPPED", "FINISHED"):
                    raise NoSuchRun(f"the run's agent is gone; go on with `{go_on(rundir.root)}`")
                time.sleep(0.2)
    except BadInput as error:
        raise HpcschedError(f"cannot read {found.output}: {error}") from error
    except OSError as error:
        raise HpcschedError(f"cannot read {found.output}: {error.strerror}") from error
    return code_of(rundir)


@contextlib.contextmanager
def _written() -> Iterator[Callable[[bytes], None]]:
    """Gives what writes output to where it is to go: to a terminal what a terminal may have of it."""
    output, text = sys.stdout.buffer, OutputText() if sys.stdout.isatty() else None

    def write(data: bytes, *, last: bool = False) -> None:
        if text is not None:
            data = text.of(data, last=last).encode(sys.stdout.encoding, "backslashreplace")
        output.write(data)
        output.flush()

    try:
        yield write
    finally:
        write(b"", last=True)
        if text is not None and text.coloured:
            output.write(b"\x1b[0m")
            output.flush()
