"""`hpcsched status`: the run's jobs, read from the snapshot alone."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import click
from click.core import ParameterSource

from hpcsched.cli.common import (
    code_of,
    dir_option,
    find_run,
    hint_at_runs,
    job_names,
    json_option,
    option,
    say,
    say_json,
    select,
)
from hpcsched.cli.jobs import about_arrays, about_idle
from hpcsched.cli.jobs.about_leftover import in_a_line
from hpcsched.cli.jobs.columns import (
    DEFAULT_FORMAT,
    FIELDS,
    LONG_FORMAT,
    aligned,
    columns_of,
    in_order,
    samples_of,
    shared_gpus,
    table,
)
from hpcsched.client import waiting
from hpcsched.core.states import JobState
from hpcsched.durations import clock
from hpcsched.errors import ConfigError, NoSuchRun
from hpcsched.printing import fitting, printable, printables, room
from hpcsched.printing import gpus as named
from hpcsched.store.run_folders import has_commands
from hpcsched.store.status import (
    RunStatus,
    Status,
    age_s,
    is_old,
    is_silent,
    left_s,
    read_page,
)


@click.command()
@click.argument("jobs", nargs=-1, shell_complete=job_names)
@dir_option
@click.option("-j", "--jobs", "more", metavar="IDS", multiple=True, help="These jobs only (ids, names, 3-7).")
@click.option("--states", "-t", metavar="S", help="These states only: names or codes with commas, or all.")
@option(
    "--format",
    "-o",
    "format_",
    metavar="FORMAT",
    help=f"Columns, like squeue's (help: all): {DEFAULT_FORMAT}",
)
@click.option("--long", "-l", "long_", is_flag=True, help="More columns: time limit, busy GPUs, attempts.")
@click.option("--stats-only", is_flag=True, help="One line that counts the jobs by state.")
@click.option("-r", "--array", is_flag=True, help="A line for each job of an array.")
@click.option("--sort", "-S", metavar="KEYS", help="Order by columns, as squeue: -M,i (- turns it round).")
@click.option("--parsable", "-P", is_flag=True, help="Columns with a vertical bar between them.")
@click.option("--noheader", is_flag=True, help="No header line.")
@click.option("--all", "-a", "all_runs", is_flag=True, help="All your runs instead, newest first.")
@json_option
@click.pass_context
def status(
    ctx: click.Context,
    jobs: tuple[str, ...],
    dir_: str | None,
    more: tuple[str, ...],
    states: str | None,
    format_: str | None,
    long_: bool,
    stats_only: bool,
    array: bool,
    sort: str | None,
    parsable: bool,
    noheader: bool,
    all_runs: bool,
    as_json: bool,
) -> int:
    """The run's jobs, like squeue: unfinished ones, and a line that counts the finished.

    Works on any host that sees the run directory: no port, no lock. Where the agent shows no sign of life,
    the batch system is asked for its batch job. Exit code 3: the agent is gone, and jobs are left.
    """
    gc.disable()  # ten thousand jobs and a short life: nothing is worth collecting
    if format_ == "help":
        sys.stdout.writelines(f"{key}  {name}\n" for key, (name, _) in FIELDS.items())
        return 0
    said = ctx.get_parameter_source("format_") is ParameterSource.COMMANDLINE
    if long_ + said + stats_only + as_json > 1 or (all_runs and (long_ or stats_only)):
        raise click.UsageError("one of --long, --format, --stats-only and --json; with --all only --json")
    rundir, wanted = find_run(ctx, dir_), [*jobs, *more]
    if all_runs:
        if wanted or states is not None:
            raise click.UsageError("--all lists runs: it takes no jobs and no --states")
        _all_runs(header=not noheader, as_json=as_json)
        return 0
    if as_json and not wanted and not has_commands(rundir):
        with hint_at_runs(ctx, dir_):
            page = read_page(rundir)
        asked(page.run)
        say_json(page)
        return code_of(rundir) if page.run.stale else 0
    names = _states(states)
    lists_ended = as_json or (not stats_only and any(state.final for state in names or ()))
    with hint_at_runs(ctx, dir_):
        found = waiting.read_all(rundir, None if lists_ended and not wanted else wanted)
        if found.ended and not wanted and not (array or parsable) and any(job.array for job in found.jobs):
            found = waiting.read_all(rundir)  # its lines count all jobs of an array
        chosen = select(found, wanted) if wanted else found.jobs
    left = found.run.stale and not all(job.state.final for job in found.jobs)
    code = NoSuchRun.exit_code if left else 0
    if as_json:
        asked(found.run)
        found.jobs = chosen
        say_json(found)
        return code
    if names is not None:
        chosen = [job for job in chosen if job.state in names]
    elif not wanted:
        chosen = [job for job in chosen if not job.state.final]
    if stats_only:
        counts = Counter(job.state for job in chosen) if wanted else found.counts
        say(counted({s: n for s, n in counts.items() if names is None or s in names}) or "no jobs")
        note(found)
        return code
    columns = columns_of(LONG_FORMAT if long_ else format_ or DEFAULT_FORMAT)
    if sort:
        chosen = in_order(chosen, sort)
    by_job = bool(wanted) or array or parsable or not any(job.array for job in chosen)
    rows = None if by_job else about_arrays.rows(chosen, found.jobs)
    crowded, samples = shared_gpus(found.jobs), samples_of(found.gpus)
    text = table(
        chosen,
        columns,
        header=not noheader,
        shared=crowded,
        samples=samples,
        rows=rows,
        parsable=parsable,
        room=None if said else room(),
    )
    sys.stdout.write(text)
    if not (wanted or noheader or parsable):
        sys.stdout.write(printable(_finished(found) + _edited(found), lines=True))
    note(found)
    for line in waiting.what_else_waits(rundir, found):
        say(f"hpcsched: {line}", err=True)
    return code


def _states(text: str | None) -> set[JobState] | None:
    if text is None:
        return None
    words = {word.strip().upper() for word in text.split(",")}
    if words == {"ALL"}:
        return set(JobState)
    chosen = {state for state in JobState if {state.value, state.code} & words}
    if unknown := words - {word for state in chosen for word in (state.value, state.code)}:
        accepted = ", ".join([*(f"{state} ({state.code})" for state in JobState), "all"])
        raise ConfigError(where="--states", got=repr(min(unknown)), accepted=accepted)
    return chosen


def _all_runs(*, header: bool, as_json: bool) -> None:
    from hpcsched.store.summaries import my_runs

    found = my_runs()
    if as_json:
        say_json({"schema": 1, "runs": found})
        return
    rows = [("STATE", "ALLOCATION", "AGE", "DONE", "LEFT", "DIR")] if header else []
    for run in found:
        kind, job_id = run.allocation.get("kind") or "none", run.allocation.get("id")
        rows.append(
            (
                "-" if run.state is None else "STALE" if run.stale else run.state,
                "-" if kind == "none" else f"{kind} {job_id}",
                "-" if run.age_s is None else clock(run.age_s),
                str(run.done),
                str(run.left),
                run.dir,
            )
        )
    columns, right = [list(column) for column in zip(*rows, strict=True)], [False, False, *[True] * 3, False]
    if (width := room()) is not None and rows:
        columns, right = _narrowed(columns, right, width)
    sys.stdout.write(aligned(columns, right) if rows else "")
    if not found:
        say("hpcsched: no runs of yours are known here", err=True)
    elif any(run.stale and run.state for run in found):
        say("hpcsched: STALE: no sign of life; `hpcsched status --dir DIR` asks why", err=True)


def _narrowed(columns: list[list[str]], right: list[bool], width: int) -> tuple[list[list[str]], list[bool]]:
    """The columns of runs for a terminal of this width.

    Where it is too narrow, folders are named from here or from the home directory, as `--dir` takes them too,
    and those columns are left out that matter least; no folder is cut.
    """

    def kept() -> list[int]:
        return fitting([max(map(len, printables(column))) for column in columns], _RANKS_OF_RUNS, width)

    if len(kept()) < len(columns):
        columns = [*columns[:-1], [_from_here(folder) for folder in columns[-1]]]
    at = kept()
    return [columns[i] for i in at], [right[i] for i in at]


def _from_here(folder: str) -> str:
    """A folder's shortest name for a shell in this directory."""
    for base, begins in ((Path.cwd(), ""), (Path.home(), "~/")):
        with contextlib.suppress(ValueError):
            return begins + str(Path(folder).relative_to(base))
    return folder


_RANKS_OF_RUNS = (0, 1, 4, 3, 2, 0)
"""Columns of runs that a narrow terminal does without: those of a higher rank first, of rank 0 never."""


def _finished(found: Status) -> str:
    counts = counted({state: number for state, number in found.counts.items() if state.final})
    return f"finished: {counts}\n" if counts else ""


def counted(counts: Mapping[JobState, int]) -> str:
    """How many are in each state, such as "5 pending, 2 running"; empty for none."""
    return ", ".join(f"{n} {state.lower()}" for state, n in sorted(counts.items()))


def _edited(found: Status) -> str:
    """Lines on jobs that differ in a job file, where the run does not go by it."""
    lines = []
    for job in found.jobs:
        if job.kept:
            what = "differs" if len(job.kept) == 1 else "differ"
            lines.append(
                f"{', '.join(job.kept)} {what} in the job file (kept; run --resume --update takes it)"
            )
        elif job.updated:
            lines.append(
                f"{', '.join(job.updated)} taken since it ended; `hpcsched retry {job.name}` runs it"
            )
        else:
            continue
        lines[-1] = f"job {job.name}: {lines[-1]}\n"
    return "".join(lines)


def asked(run: RunStatus) -> None:
    """Ask the batch system about the run's job where the snapshot alone cannot tell what is to come."""
    if run.stale or run.state == "STOPPED" or is_silent(run):
        from hpcsched.cli.jobs import batch_job_status

        batch_job_status.ask(run)


def note(found: Status) -> None:
    """On stderr: how old this is, and whether anybody still writes it."""
    run = found.run
    if run.stale or run.state == "STOPPED":
        from hpcsched.cli.jobs import batch_job_status

        asked(run)
        say(f"hpcsched: {batch_job_status.sentence(run, clock(age_s(run)))}", err=True)
    elif is_old(run):
        from hpcsched.cli.jobs import batch_job_status

        asked(run)
        why = batch_job_status.sentence(run, clock(age_s(run)))
        say(f"hpcsched: {why or f'this is {clock(age_s(run))} old'}", err=True)
    if line := waiting.what_takes_them(found):
        say(f"hpcsched: {line}", err=True)
    if idle := about_idle.in_a_line(run, clock):
        say(f"hpcsched: {idle}", err=True)
    for disk in run.short_disks if run.alive else ():
        say(f"hpcsched: {disk.words}", err=True)
    left = left_s(run)
    frozen = run.allocation.get("life") == "SUSPENDED"  # so is the time to its end
    if left is not None and left > 0 and run.state in ("RUNNING", "DRAINING") and not (run.stale or frozen):
        job = f"{run.allocation.get('kind')} job {run.allocation.get('id')}"
        say(f"hpcsched: {job} ends in {clock(left)}", err=True)
    by_reason: dict[str, list[str]] = {}
    for gpu, why in run.lost_gpus.items():
        by_reason.setdefault(why, []).append(gpu)
    for why, gpus_ in by_reason.items():
        lost = "s" * (len(gpus_) > 1) + f" {','.join(gpus_)} {'was' if len(gpus_) == 1 else 'were'} lost"
        say(f"hpcsched: {found.noun}{lost}: {why}", err=True)
    for line in in_a_line(found, clock):
        say(f"hpcsched: {line}", err=True)
    for line in silent_gpus(found):
        say(f"hpcsched: {line}", err=True)


def silent_gpus(found: Status) -> list[str]:
    """Lines about GPUs whose samples are too old, as the driver does not answer: one by health."""
    ages: dict[str, dict[int, float]] = {}
    for gpu in found.gpus:
        if gpu.sample_age_s is not None:
            ages.setdefault(gpu.health, {})[gpu.index] = gpu.sample_age_s
    return [
        f"no sample of {named(of, found.noun)} for {clock(max(of.values()))}: the driver does not answer"
        + (f"; {'its' if len(of) == 1 else 'their'} health is unknown" if health == "unknown" else "")
        for health, of in ages.items()
    ]
