"""`hpcsched report`: how a run went, or goes, as one HTML page."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpcsched.cli.common import Renamed, check_chart, dir_option, find_run, hint_at_runs, needs, plural
from hpcsched.errors import ConfigError, NoSuchRun, StoreError

if TYPE_CHECKING:
    from hpcsched.core.jobs import Job
    from hpcsched.core.machine import Machine
    from hpcsched.report.html import BatchHistory, CoresHistory
    from hpcsched.store.rundir import RunDir

MOST_RUNS = 20
"""Runs on a page side by side (chosen): of more one sees no differences."""

MOST_FIGURES = 100
"""Most jobs with a section of their own, whose batches are drawn, and whose CPU cores are: more take minutes,
and are not read."""


@click.command()
@click.argument("runs", nargs=-1, metavar="[RUN]...")
@dir_option
@click.option(
    "-o",
    "--output",
    metavar="F.html",
    type=click.Path(path_type=Path),
    help="The page (report.html in the run directory; of several runs, in this one).",
)
@click.option(
    "--figures",
    cls=Renamed,
    older="--svg",
    metavar="FOLDER",
    type=click.Path(path_type=Path),
    help="Folder that gets the figures too, as SVG: the Gantt chart, and those of jobs.",
)
@click.option(
    "--serve",
    is_flag=True,
    help="Show the page live until Ctrl-C, at an address of this host for you alone (for ssh -L).",
)
@click.option("--port", metavar="N", type=click.IntRange(0, 65535), help="The port of --serve (a free one).")
@click.option("--kept", type=click.Path(path_type=Path), hidden=True, help="Curves that --serve has drawn.")
@click.pass_context
def report(
    ctx: click.Context,
    runs: tuple[str, ...],
    dir_: str | None,
    output: Path | None,
    figures: Path | None,
    serve: bool,
    port: int | None,
    kept: Path | None,
) -> None:
    """A run as one HTML page: Gantt chart, utilisation, each job with why it ended, its curves and its
    efficiency, changing batches and CPU cores. Several RUN directories: a page that has them side by side.

    Runs are only read, on any host that sees their directories, whether they are over, go on, or have lost
    their agent. Prints the page's path; with --serve its address, and follows the runs.
    """
    if serve and (output or figures):
        raise click.UsageError("--serve writes no files: leave out -o and --figures", ctx)
    if port is not None and not serve:
        raise click.UsageError("--port goes with --serve", ctx)
    if runs and dir_ is not None:
        raise click.UsageError("give run directories or --dir, not both", ctx)
    rundirs = [_plain(find_run(ctx, run)) for run in runs or [dir_]]
    if len(rundirs) > MOST_RUNS:
        accepted = f"at most {MOST_RUNS} on a page"
        raise ConfigError(where="report", got=plural(len(rundirs), "run"), accepted=accepted)
    for rundir in rundirs:
        try:
            with hint_at_runs(ctx, runs[0] if runs else dir_):
                rundir.require()
                if not (rundir.begun or serve):
                    raise NoSuchRun(f"the run in {rundir.root} has not started yet")
        except NoSuchRun as error:
            if not serve or not rundir.root.parent.is_dir():
                raise
            click.echo(f"hpcsched: {error}; the page waits for it", err=True)
    if serve:
        from hpcsched.cli.run.report_serve import serve as show

        _check_extra()
        show(rundirs, port or 0)
    else:
        path = output or (rundirs[0].root if len(rundirs) == 1 else Path.cwd()) / "report.html"
        write_page(rundirs, path, figures, kept)
        click.echo(path)


def write_page(
    rundirs: Sequence[RunDir], path: Path, figures: Path | None = None, kept: Path | None = None
) -> None:
    """Write the page of these runs, and into the folder `figures` its figures too; curves that were drawn
    before are in `kept`.

    Raises ConfigError for a place that cannot be written, MissingExtra without what draws the page, NoSuchRun
    for a run that has not started.
    """
    from hpcsched.cli.run.report_run import replayed
    from hpcsched.store.files import write_atomically

    _check_output(path)
    machines = [replayed(rundir) for rundir in rundirs]
    if figures is not None:
        _make_folder(figures)
    place: AbstractContextManager[str] = (
        nullcontext(str(figures)) if figures else tempfile.TemporaryDirectory(prefix="hpcsched-report.")
    )
    with place as folder:
        try:
            page = _page_of(rundirs, machines, Path(folder), kept)
        except OSError as error:
            where = "--figures" if figures else "report"
            raise ConfigError(where=where, got=str(error), accepted="a folder for the figures") from error
    try:
        write_atomically(path, page.encode())
    except StoreError as error:
        accepted = "a file that can be written"
        raise ConfigError(where="--output", got=str(error), accepted=accepted) from error


def _page_of(rundirs: Sequence[RunDir], machines: Sequence[Machine], folder: Path, kept: Path | None) -> str:
    if len(rundirs) == 1:
        return _page(rundirs[0], machines[0], folder, kept)
    from hpcsched.cli.run.report_runs import page_of

    return page_of(rundirs, machines, folder)


def _plain(rundir: RunDir) -> RunDir:
    """The run by its path without `..`, unless that is another place, as it is behind symbolic links."""
    from hpcsched.store.rundir import RunDir

    normal = Path(os.path.normpath(rundir.root))
    with suppress(OSError):  # one of them is not there
        return RunDir(normal) if normal.samefile(rundir.root) else rundir
    return rundir


def efficiency(machine: Machine, job: Job, gpu_hours: float) -> float | None:
    """Steps per GPU-second over those on one GPU by the model's profile, or as seen in this run.

    None where one GPU has not been measured, or the job tells no steps or held no GPU.
    """
    gpu_type = machine.ledger.type_of(job.current.gpus) if job.attempts else ""
    one_host = (job.spec.model, 1, gpu_type)
    profile = machine.estimates.profiles.get(one_host) or machine.estimates.observed.beliefs.get(one_host)
    if profile is None or 1 not in profile.throughput or not job.reports or gpu_hours <= 0:
        return None
    former = machine.run.by_name.get(job.spec.continues or "")
    steps = job.step - (machine.run.jobs[former].step if former else 0)
    return steps / (gpu_hours * 3600) / profile.rate(1) if steps > 0 else None


def _page(rundir: RunDir, machine: Machine, folder: Path, kept: Path | None) -> str:
    """The page; its figures are left in the folder. `kept`: see `details_of`."""
    from hpcsched.cli.jobs.explain_run import next_lines
    from hpcsched.cli.run.report_jobs import details_of
    from hpcsched.cli.run.report_policies import under_policies
    from hpcsched.cli.run.report_run import began, facts_of, state_of
    from hpcsched.cli.run.report_use import drawn
    from hpcsched.cli.run.results import result_of
    from hpcsched.cli.run.simulate import MOST_DRAWN
    from hpcsched.cli.run.simulation_inputs import MOST_KEPT
    from hpcsched.report.gantt import gantt_svg, span_of
    from hpcsched.report.html import RunPage

    state, notes = state_of(rundir, machine)
    notes += next_lines(machine, rundir.root, rundir.read_record())
    many = len(machine.run.jobs)
    details, without = details_of(rundir, machine, MOST_FIGURES, folder, kept)
    if without:
        notes.append(f"the curves of {plural(without, 'job')} are left out: there is too much of them")
    result = result_of(machine, label="" if machine.run.finished else "so far", keep_jobs=many <= MOST_KEPT)
    gantt = None
    if many > MOST_DRAWN:
        listed = "" if result.jobs else " or listed"
        notes.append(f"{plural(many, 'job')} are too many to be drawn{listed}")
    else:
        gantt_svg([result], folder / "gantt.svg", links={detail.job_id for detail in details})
        gantt = (folder / "gantt.svg").read_text(encoding="utf-8")
    efficiencies = {
        job.id: value
        for job in result.jobs
        if (value := efficiency(machine, machine.run.jobs[job.id], job.gpu_hours)) is not None
    }
    use, left_out = drawn(rundir, machine, folder, span_s=span_of([result]))
    if left_out:
        notes.append(f"the use of the devices of {plural(left_out, 'more host')} is left out")
    histories, left_out = _histories(rundir, machine, folder)
    if left_out:
        notes.append(f"the batches of {plural(left_out, 'more job')} are left out")
    configurations, left_out = _configurations(machine, folder)
    if left_out:
        notes.append(f"the configurations of {plural(left_out, 'more job')} are left out")
    policies, about_policies = under_policies(machine)
    if len(details) < many:
        notes.append(f"{plural(many - len(details), 'more job')} have no section of their own")
    return RunPage(
        title=f"hpcsched: {rundir.root}",
        state=state,
        began=began(machine),
        facts=facts_of(rundir, machine),
        result=result,
        gantt=gantt,
        use=use,
        efficiencies=efficiencies,
        histories=histories,
        configurations=configurations,
        details=details,
        notes=notes,
        policies=policies,
        about_policies=about_policies,
    ).html()


def _histories(rundir: RunDir, machine: Machine, folder: Path) -> tuple[Sequence[BatchHistory], int]:
    """The jobs with stream workers that have begun, drawn into the folder, and how many are left out."""
    from hpcsched.planning.vsw.options import WorkerOptions
    from hpcsched.report.batches import batches_svg
    from hpcsched.report.html import BatchHistory
    from hpcsched.store.batches import BATCHES_FILE, read_batches

    found: list[BatchHistory] = []
    left_out = 0
    for job in machine.run.jobs.values():
        if job.spec.strategy["kind"] != "vsw":
            continue
        try:
            decisions = read_batches(rundir.job(job.id) / BATCHES_FILE)
        except StoreError as error:
            click.echo(f"hpcsched: {error}: left out", err=True)
            continue
        if not decisions:
            continue
        if len(found) == MOST_FIGURES:
            left_out += 1
            continue
        options, path = WorkerOptions.parse(job.spec.strategy), folder / f"{job.spec.name}-batches.svg"
        batches_svg(decisions, options, path, step=job.step, title=job.spec.name)
        svg = path.read_text(encoding="utf-8")
        history = BatchHistory(
            job_id=job.id, name=job.spec.name, decisions=decisions, options=options, svg=svg
        )
        found.append(history)
    return found, left_out


def _configurations(machine: Machine, folder: Path) -> tuple[Sequence[CoresHistory], int]:
    """The trainings on CPU cores that have begun, drawn into the folder, and how many are left out."""
    from hpcsched.report.cores import cores_svg
    from hpcsched.report.html import CoresHistory

    begun = [job for job in machine.run.jobs.values() if job.spec.strategy["kind"] == "ps" and job.attempts]
    found: list[CoresHistory] = []
    for job in begun[:MOST_FIGURES]:
        budget, path = job.spec.cpus or 0.0, folder / f"{job.spec.name}-cores.svg"
        cores_svg(job.attempts, path, budget=budget, now_s=machine.run.now, title=job.spec.name)
        svg = path.read_text(encoding="utf-8")
        history = CoresHistory(
            job_id=job.id, name=job.spec.name, attempts=job.attempts, budget=budget, svg=svg
        )
        found.append(history)
    return found, len(begun) - len(found)


def _check_output(path: Path) -> None:
    """Refuse a page that could not be written at the end."""
    if path.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(where="--output", got=str(path), accepted="a file name that ends in .html")
    check_chart(path, "--output")
    _check_extra()


def _check_extra() -> None:
    needs("matplotlib", "a figure", "report")
    needs("jinja2", "a page", "report")


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise ConfigError(
            where="--figures",
            got=f"{folder}: {error.strerror}",
            accepted="a folder, or a new one's name in one",
        ) from error
