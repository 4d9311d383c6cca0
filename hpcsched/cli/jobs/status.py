"""`hpcsched status`: the run's jobs, read from the snapshot alone."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from functools import lru_cache, partial

import click
import msgspec

from hpcsched.cli.common import code_of, dir_option, find_run, hint_at_runs, json_option, option, select
from hpcsched.cli.jobs import about_arrays, about_batches, about_cpu, about_idle, without_agent
from hpcsched.cli.jobs.about_arrays import Row
from hpcsched.cli.jobs.about_leftover import in_a_line
from hpcsched.core.model import JobState
from hpcsched.errors import ConfigError
from hpcsched.printing import gpus as named
from hpcsched.store.status import (
    JobStatus,
    RunStatus,
    Status,
    age_s,
    is_old,
    left_s,
    my_runs,
    read_page,
)


@lru_cache(maxsize=64)  # most jobs of a long queue have run for 0 s
def clock(seconds: float) -> str:
    """Slurm's way: MM:SS, H:MM:SS, D-HH:MM:SS."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    if days:
        return f"{days}-{h:02}:{m:02}:{s:02}"
    return f"{h}:{m:02}:{s:02}" if h else f"{m}:{s:02}"


FIELDS: dict[str, tuple[str, Callable[[JobStatus], str]]] = {
    "%i": ("JOBID", lambda j: str(j.id)),
    "%j": ("NAME", lambda j: j.name),
    "%u": ("USER", lambda j: j.user),
    "%t": ("ST", lambda j: j.state.code),
    "%T": ("STATE", lambda j: str(j.state)),
    "%M": ("TIME", lambda j: clock(j.elapsed_s)),
    "%L": ("LEFT", lambda j: "-" if j.eta_s is None else clock(j.eta_s)),
    "%b": ("GPUS", lambda j: gpus(j)),
    "%C": ("CPUS", lambda j: about_cpu.of_budget(j)),
    "%m": ("MODEL", lambda j: j.model),
    "%p": ("ROLE", lambda j: j.role or "-"),
    "%s": ("STEP", lambda j: steps(j)),
    "%S": ("SUSP", lambda j: str(j.suspensions)),
    "%z": ("RESIZED", lambda j: str(j.resizes)),
    "%a": ("ATTEMPT", lambda j: str(j.attempt)),
    "%e": ("EXIT", lambda j: "-" if j.exit is None else str(j.exit)),
    "%B": ("BATCH", lambda j: about_batches.batch(j)),
    "%W": ("WORKERS", lambda j: about_cpu.counts(j) or about_batches.workers(j)),
    "%K": ("INDEX", lambda j: "-" if j.array_index is None else str(j.array_index)),
    "%y": ("SIMILARITY", lambda j: about_batches.similarity(j)),
    "%k": ("SAVES", lambda j: j.saves or "-"),
    "%n": ("NOISE", lambda j: about_batches.noise_scale(j)),
    "%R": ("NODELIST(REASON)", lambda j: where(j)),
}
DEFAULT_FORMAT = "%i %j %u %t %M %L %b %s %R"
_RIGHT = {"%i", "%M", "%L", "%s", "%S", "%z", "%a", "%e", "%B", "%y", "%n"}


def gpus(job: JobStatus, shared: Container[int] = ()) -> str:
    """Its GPUs, with a + where others have one of them (`shared`) too."""
    named = about_cpu.held(job) or ",".join(map(str, job.gpus)) or "-"
    return f"{named}+" if any(gpu in shared for gpu in job.gpus) else named


def shared_gpus(jobs: Iterable[JobStatus]) -> set[int]:
    """The GPUs that several of a run's jobs have."""
    return {gpu for gpu, holders in Counter(gpu for job in jobs for gpu in job.gpus).items() if holders > 1}


def steps(job: JobStatus) -> str:
    done = "-" if job.step is None else str(job.step)
    return done if job.steps is None else f"{done}/{job.steps}"


def where(job: JobStatus) -> str:
    reason = f"({job.reason})" if job.reason else ""
    return " ".join(filter(None, [",".join(job.hosts), reason]))


@click.command()
@click.argument("jobs", nargs=-1)
@dir_option
@click.option("-j", "--jobs", "more", metavar="IDS", multiple=True, help="These jobs only (ids, names, 3-7).")
@click.option("--states", "-t", metavar="S", help="These states only: names or codes with commas, or all.")
@option("--format", "-o", "format_", metavar="FORMAT", help="Columns, like squeue's: " + DEFAULT_FORMAT)
@click.option("-r", "--array", is_flag=True, help="A line for each job of an array.")
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
    array: bool,
    noheader: bool,
    all_runs: bool,
    as_json: bool,
) -> int:
    """The run's jobs, like squeue: unfinished ones, and a line that counts the finished.

    Works on any host that sees the run directory: no port, no lock. Where the agent shows no sign of life,
    the batch system is asked for its batch job. Exit code 3: the agent is gone, and jobs are left.
    """
    gc.disable()  # ten thousand jobs and a short life: nothing is worth collecting
    rundir, wanted = find_run(ctx, dir_), [*jobs, *more]
    if all_runs:
        if wanted or states is not None:
            raise click.UsageError("--all lists runs: it takes no jobs and no --states")
        _all_runs(header=not noheader, as_json=as_json)
        return 0
    if as_json and not wanted and not without_agent.anything_waits(rundir):
        with hint_at_runs(ctx, dir_):
            page = read_page(rundir)
        asked(page.run)
        sys.stdout.buffer.write(msgspec.json.encode(page) + b"\n")
        return code_of(rundir)
    with hint_at_runs(ctx, dir_):
        found = without_agent.read_all(rundir)
    if as_json:
        asked(found.run)
        found.jobs = select(found, wanted) if wanted else found.jobs
        sys.stdout.buffer.write(msgspec.json.encode(found) + b"\n")
        return code_of(rundir)
    chosen = select(found, wanted) if wanted else found.jobs
    names = _states(states)
    if names is not None:
        chosen = [job for job in chosen if job.state in names]
    elif not wanted:
        chosen = [job for job in chosen if not job.state.final]
    by_job = bool(wanted) or array or not any(job.array for job in chosen)
    rows = None if by_job else about_arrays.rows(chosen, found.jobs)
    crowded = shared_gpus(found.jobs)
    sys.stdout.write(table(chosen, format_ or DEFAULT_FORMAT, header=not noheader, shared=crowded, rows=rows))
    if not wanted and not noheader:
        sys.stdout.write(_finished(found) + _edited(found))
    note(found)
    return code_of(rundir)


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


def table(
    jobs: list[JobStatus],
    format_: str,
    *,
    header: bool,
    shared: Container[int] = (),
    rows: Sequence[Row] | None = None,
) -> str:
    """Aligned columns for these jobs, of which some have `shared` GPUs; `rows`: the lines of arrays."""
    keys = format_.replace(",", " ").split()
    for key in keys:
        if key not in FIELDS:
            accepted = ", ".join(f"{k} {name}" for k, (name, _) in FIELDS.items())
            raise ConfigError(where="--format", got=repr(key), accepted=accepted)
    texts = [partial(gpus, shared=shared) if key == "%b" else FIELDS[key][1] for key in keys]
    if rows is None:
        columns = [[text(job) for job in jobs] for text in texts]
    else:
        columns = [
            [about_arrays.text(row, key, text) for row in rows] for key, text in zip(keys, texts, strict=True)
        ]
    if header:
        columns = [[FIELDS[key][0], *column] for key, column in zip(keys, columns, strict=True)]
    return _aligned(columns, [key in _RIGHT for key in keys])


def _aligned(columns: list[list[str]], right: list[bool]) -> str:
    widths = [max(map(len, column), default=0) for column in columns]
    aligned = [f"%{'' if r else '-'}{width}s" for r, width in zip(right, widths, strict=True)]
    if not right[-1]:
        aligned[-1] = "%s"  # no blanks at the end of a line
    line = "  ".join(aligned) + "\n"
    return "".join([line % row for row in zip(*columns, strict=True)])


def _all_runs(*, header: bool, as_json: bool) -> None:
    found = my_runs()
    if as_json:
        sys.stdout.buffer.write(msgspec.json.encode({"schema": 1, "runs": found}) + b"\n")
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
    columns = [list(column) for column in zip(*rows, strict=True)]
    sys.stdout.write(_aligned(columns, [False, False, True, True, True, False]) if rows else "")
    if not found:
        click.echo("hpcsched: no runs of yours are known here", err=True)
    elif any(run.stale and run.state for run in found):
        click.echo("hpcsched: STALE: no sign of life; `hpcsched status --dir DIR` asks why", err=True)


def _finished(found: Status) -> str:
    counts = Counter(job.state for job in found.jobs if job.state.final)
    parts = [f"{n} {state.lower()}" for state, n in sorted(counts.items())]
    return f"finished: {', '.join(parts)}\n" if parts else ""


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
    if run.stale or run.state == "STOPPED":
        from hpcsched.cli.jobs import batch_job_status

        batch_job_status.ask(run)


def note(found: Status) -> None:
    """On stderr: how old this is, and whether anybody still writes it."""
    run = found.run
    if run.stale or run.state == "STOPPED":
        from hpcsched.cli.jobs import batch_job_status

        asked(run)
        click.echo(f"hpcsched: {batch_job_status.sentence(run, clock(age_s(run)))}", err=True)
    elif is_old(run):
        click.echo(f"hpcsched: this is {clock(age_s(run))} old", err=True)
    if waiting := without_agent.what_takes_them(found):
        click.echo(f"hpcsched: {waiting}", err=True)
    if idle := about_idle.in_a_line(run, clock):
        click.echo(f"hpcsched: {idle}", err=True)
    left = left_s(run)
    if left is not None and left > 0 and run.state in ("RUNNING", "DRAINING") and not run.stale:
        job = f"{run.allocation.get('kind')} job {run.allocation.get('id')}"
        click.echo(f"hpcsched: {job} ends in {clock(left)}", err=True)
    by_reason: dict[str, list[str]] = {}
    for gpu, why in run.lost_gpus.items():
        by_reason.setdefault(why, []).append(gpu)
    for why, gpus_ in by_reason.items():
        lost = f"GPU {gpus_[0]} was" if len(gpus_) == 1 else f"GPUs {','.join(gpus_)} were"
        click.echo(f"hpcsched: {lost} lost: {why}", err=True)
    for line in in_a_line(run, clock):
        click.echo(f"hpcsched: {line}", err=True)
    for line in silent_gpus(found):
        click.echo(f"hpcsched: {line}", err=True)


def silent_gpus(found: Status) -> list[str]:
    """Lines about GPUs whose samples are too old, as the driver does not answer: one by health."""
    ages: dict[str, dict[int, float]] = {}
    for gpu in found.gpus:
        if gpu.sample_age_s is not None:
            ages.setdefault(gpu.health, {})[gpu.index] = gpu.sample_age_s
    return [
        f"no sample of {named(of)} for {clock(max(of.values()))}: the driver does not answer"
        + (f"; {'its' if len(of) == 1 else 'their'} health is unknown" if health == "unknown" else "")
        for health, of in ages.items()
    ]
