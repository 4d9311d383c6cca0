"""`hpcsched tune`: a search for hyperparameters as a run of jobs."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from hpcsched.accounts import user_name
from hpcsched.cli.common import Renamed, check_chart, find_run, goes_on, say
from hpcsched.cli.run import notifying, staying
from hpcsched.cli.run.environments import OPTIONS, environment_options
from hpcsched.cli.run.live import stamp
from hpcsched.cli.run.notifying import notify_options
from hpcsched.cli.run.run import KEPT_SEARCH, conduct, run
from hpcsched.contract import files
from hpcsched.contract.exits import SUSPENDED
from hpcsched.core.actions import Action
from hpcsched.core.events import Event, LaunchFailed, WorkersExited
from hpcsched.core.machine import Machine
from hpcsched.durations import clock
from hpcsched.errors import ConfigError, StoreError
from hpcsched.printing import printable
from hpcsched.store.files import write_atomically
from hpcsched.store.rundir import RunDir
from hpcsched.tuning import Search, parse_search, read_search, source_of
from hpcsched.tuning.feeding import Feeder, check_results, outcomes_of
from hpcsched.tuning.search import PACKINGS, check_packing, environment_of
from hpcsched.tuning.source import JobSource

SHOWN = 10
"""Trials in the table at the end, the best ones first."""


@dataclass
class SearchResult:
    """The result of a search, as JSON and as text."""

    page: dict[str, Any]
    text: str

    def compare(self, other: SearchResult) -> None:
        """Add what packing has gained: the same search with another packing took so long."""
        mine, theirs = self.page, other.page
        same = mine["best"]["job"] == theirs["best"]["job"]
        self.page["against"] = {"packing": theirs["packing"], "wall_s": theirs["wall_s"], "same_best": same}
        ratio = theirs["wall_s"] / mine["wall_s"]
        self.text += (
            f"\npacking {mine['packing']}: {mine['wall_s']:.1f} s; packing {theirs['packing']}: "
            f"{theirs['wall_s']:.1f} s, {ratio:.2f} times as long, with "
            + ("the same best training" if same else f"another best training ({theirs['best']['job']})")
        )


@click.command()
@click.argument("search", type=click.Path(path_type=Path))
@click.option("--packing", type=click.Choice(PACKINGS), help="Packing, instead of what the file says.")
@click.option(
    "--compare",
    cls=Renamed,
    older="--against",
    type=click.Choice(PACKINGS),
    help="At the end, search once more with this packing.",
)
@click.option(
    "--learning-curves",
    cls=Renamed,
    older="--svg",
    type=click.Path(path_type=Path),
    metavar="F.svg",
    help="Draw the trials' learning curves at the end.",
)
@click.pass_context
@environment_options
@notify_options
def tune(
    ctx: click.Context,
    /,
    search: Path,
    packing: str | None,
    compare: str | None,
    learning_curves: Path | None,
    **options: Any,
) -> int:
    """Search the space in SEARCH.toml: Hyperband or ASHA; trials train as one where there are more than GPUs.

    Each trial of a rung is a job of the run (status, logs and explain know it); a search that was stopped or
    killed goes on with --resume. See docs/tuning.md.
    """
    if learning_curves is not None:
        check_chart(learning_curves, "--learning-curves")
    asked = read_search(search)
    asked = replace(asked, packing=packing or asked.packing)
    check_packing(asked, packing, where="--packing")
    check_packing(asked, compare, where="--compare")
    compare = compare or asked.against
    resume = goes_on(options)
    root = find_run(ctx, options["dir_"], begins=not resume).root
    options["dir_"] = str(root)
    once_more = {**options, "dir_": f"{root}-{compare}"}
    if compare == asked.packing:
        accepted = f"another packing than {asked.packing}, which it is to be compared with"
        raise ConfigError(where="--compare", got=compare, accepted=accepted)
    if compare and not resume and RunDir(Path(once_more["dir_"])).journal.exists():
        got, accepted = f"{once_more['dir_']} holds a run already", "--resume, or another --dir"
        raise ConfigError(where="--compare", got=got, accepted=accepted)
    words = [f"--packing {packing}"] * bool(packing) + [f"--compare {compare}"] * (compare != asked.against)
    command = " ".join((f"tune {search}", *words))
    code, found = _search(ctx, asked, search, options, curves=learning_curves, command=command, root=root)
    if compare and found and code == 0:
        if not options["quiet"]:
            say(f"hpcsched: the same search once more, with packing {compare}, to compare", err=True)
        asked = replace(asked, packing=compare)
        code, other = _search(ctx, asked, search, once_more, curves=None, command=command, root=root)
        if other and code == 0:
            found.compare(other)
    if found:
        say(json.dumps(found.page) if options["as_json"] else found.text, lines=True)
    return code


_NOT_OF_A_SEARCH = (
    "words",
    "name",
    "each",
    "array",
    "at_once",
    "compare",
    "gantt",
    *OPTIONS,
    *staying.OPTIONS,
    *notifying.OPTIONS,
)
tune.params += [parameter for parameter in run.params if parameter.name not in _NOT_OF_A_SEARCH]


def _search(
    ctx: click.Context,
    asked: Search,
    file: Path,
    options: dict[str, Any],
    *,
    curves: Path | None,
    command: str,
    root: Path,
) -> tuple[int, SearchResult | None]:
    """One search as a run; its exit code, and what has come of it, if it came to its end."""
    kept = find_run(ctx, options["dir_"]).root / KEPT_SEARCH
    if options["resume"] and kept.exists():
        _check_same(asked, kept, file)
    if (short := asked.shortage()) and not options["quiet"]:
        say(f"hpcsched: {short}", err=True)
    source, text = source_of(asked), file.read_text(encoding="utf-8")
    results: list[SearchResult] = []

    def display(machine: Machine) -> SearchDisplay:
        if not kept.exists():
            with contextlib.suppress(StoreError):  # whatever is wrong there, the journal will tell
                write_atomically(kept, text.encode())
        return SearchDisplay(machine, source, quiet=options["quiet"])

    def report(life: Any) -> int:
        found = _result(life, source, curves=curves)
        if found is None:
            say("hpcsched: no trial has completed", err=True)
            return 1
        results.append(found)
        return 0

    code = conduct(
        ctx,
        jobs=None,
        source=Feeder(source, workdir=Path.cwd(), user=user_name()),
        display=display,
        check=lambda machine: check_results(source, machine),
        report=report,
        keep=lambda life, store: _keep(life, source, store),
        command=command,
        root=root,
        compare=(),
        gantt=None,
        **{**options, "environment": environment_of(asked) or options["environment"]},
    )
    return code, results[0] if results else None


def _check_same(asked: Search, kept: Path, file: Path) -> None:
    """Refuse to go on with a search that has become another one: its trials would not be the same."""
    before = parse_search(kept.read_text(encoding="utf-8"), where=str(kept))
    for key in (
        "trainer",
        "metric",
        "mode",
        "method",
        "R",
        "eta",
        "unit",
        "seed",
        "trials",
        "budget",
        "args",
        "space",
    ):
        if getattr(asked, key) != getattr(before, key):
            raise ConfigError(
                where=str(file),
                key=key,
                got="not what it was when this search began",
                accepted=f"what {kept} says, or another --dir for a new search",
            )


class SearchDisplay:
    """Tells how a search goes: a line for each rung that is done and each better result, and on a terminal a
    bar."""

    def __init__(self, machine: Machine, source: JobSource, *, quiet: bool) -> None:
        self._machine, self._source, self._quiet = machine, source, quiet
        self._now = 0.0
        self._rungs = 0
        self._best: float | None = None
        self._bar: Any = None
        if sys.stderr.isatty() and not quiet:
            from rich.console import Console
            from rich.live import Live

            self._console = Console(stderr=True)
            self._bar = Live(
                console=self._console, auto_refresh=False, transient=True, get_renderable=self._render
            )
            self._bar.start()

    def event(self, event: Event, actions: Sequence[Action]) -> None:
        if self._quiet or not isinstance(event, (WorkersExited, LaunchFailed)):
            return
        job = self._machine.run.jobs[event.job_id]
        if isinstance(event, WorkersExited) and event.code not in (0, SUSPENDED):
            detail = f": {event.detail}" if event.detail else ""
            self.message(f"{job.spec.name} ended with exit code {event.code}{detail}")
        outcomes = outcomes_of(self._machine)
        if not any(outcome.state for outcome in outcomes.values()):
            return
        progress, best = self._source.progress(outcomes), self._source.best(outcomes)
        if best is not None and best.metric != self._best:
            self._best = best.metric
            search = self._source.search
            metric = f"{search.metric} {best.metric:.4g}"
            self.message(f"best so far: {metric} ({best.job.name}: {said(chosen(best.job.args, search))})")
        if progress.rungs_done > self._rungs:
            self._rungs = progress.rungs_done
            self.message(
                f"{progress.rungs_done} of {progress.rungs} rungs done, "
                f"{progress.jobs_done} of {progress.jobs} trainings"
            )

    def tick(self, now: float) -> None:
        self._now = now
        if self._bar is not None:
            self._bar.refresh()

    def message(self, text: str, *, about: str = "") -> None:
        when = stamp(self._machine, self._now)
        if self._bar is None:
            sys.stderr.write(f"{when}{printable(text)}\n")
            sys.stderr.flush()
            return
        from rich.text import Text

        self._console.print(Text(when, style="dim") + Text(printable(text)), soft_wrap=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _render(self) -> Any:
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        machine = self._machine
        progress = self._source.progress(outcomes_of(machine))
        table = Table(box=None, pad_edge=False, show_header=False)
        for _ in range(3):
            table.add_column(no_wrap=True)
        running = sum(job.state.active for job in machine.run.jobs.values())
        table.add_row(
            f"{progress.jobs_done}/{progress.jobs} trainings",
            ProgressBar(total=progress.budget, completed=progress.budget_done, width=30),
            f"{running} running",
        )
        return table


def chosen(args: Mapping[str, Any], search: Search) -> dict[str, Any]:
    """The arguments that were chosen for a configuration; the rest is the same in all."""
    return {name: value for name, value in args.items() if name not in search.args}


def said(args: Any) -> str:
    """A configuration in a few words."""
    return ", ".join(f"{k}={v:.3g}" if isinstance(v, float) else f"{k}={v}" for k, v in args.items())


def _result(life: Any, source: JobSource, *, curves: Path | None) -> SearchResult | None:
    """The result of a search; None if no trial has one. Draws it, and drops the other trials' checkpoints."""
    machine: Machine = life.machine
    search, outcomes = source.search, outcomes_of(machine)
    best = source.best(outcomes)
    if best is None:
        return None
    if search.checkpoints == "best" and source.finished(outcomes):
        _drop_others(life, source, best.job.name)
    checkpoint, adapter = _checkpoint(life, best.job.name), _adapter(life, best.job.name)
    rows, progress = source.trials(outcomes), source.progress(outcomes)
    if curves is not None:
        from hpcsched.report.trials import trials_svg

        trials_svg(source, outcomes, curves)
    page = {
        "schema": 1,
        "best": {
            "args": dict(best.job.args),
            "metric": best.metric,
            "checkpoint": checkpoint and str(checkpoint),
            "adapter": adapter and str(adapter),
            "job": best.job.name,
            "budget": best.job.budget,
        },
        "trials": [
            {
                "trial": row.trial,
                "bracket": row.bracket,
                "args": dict(row.args),
                "budget": row.budget,
                "metric": row.metric,
                "state": row.state,
                "job": row.job,
            }
            for row in rows
        ],
        "wall_s": machine.run.now,
        "packing": search.packing,
    }
    lines = [
        trial_table(rows, search),
        f"{len(rows)} trials, {progress.jobs_done} trainings, {progress.budget_done:g} {search.unit} in "
        f"{clock(machine.run.now)}",
        f"best: {search.metric} {best.metric:.4g} with {said(chosen(best.job.args, search))}",
        f"checkpoint: {checkpoint}",
        *([f"adapter: {adapter}"] if adapter else []),
    ]
    return SearchResult(page, "\n".join(lines))


def _keep(life: Any, source: JobSource, store: Path) -> None:
    """Put the trials into the database, where `history --trials` finds them."""
    from hpcsched.store.database import Database, TrialEntry

    search, run_id = source.search, life.run.id
    trials = [
        TrialEntry(
            run_id=run_id,
            trial=row.trial,
            bracket=row.bracket,
            args=dict(row.args),
            unit=search.unit,
            budget=row.budget,
            metric=search.metric,
            value=row.metric,
            state=row.state,
            best=row.best,
            job=row.job,
            checkpoint=str(path) if (path := _checkpoint(life, row.job)) else None,
        )
        for row in source.trials(outcomes_of(life.machine))
    ]
    with Database(store) as opened:
        opened.record_trials(run_id, trials)


def trial_table(rows: Sequence[Any], search: Search) -> str:
    """The best trials, one line each."""
    from hpcsched.profiling.draw import aligned

    sign = -1 if search.mode == "max" else 1
    ranked = sorted(rows, key=lambda row: (row.metric is None, sign * (row.metric or 0.0), row.trial))
    lines: list[tuple[str, ...]] = [
        ("TRIAL", "BRACKET", search.unit.upper(), search.metric.upper(), "STATE", "ARGS")
    ]
    width = shutil.get_terminal_size().columns
    for row in ranked[:SHOWN]:
        metric = "" if row.metric is None else f"{row.metric:.4g}"
        words = said(chosen(row.args, search))
        state = "best" if row.best else row.state
        lines.append(
            (
                str(row.trial),
                str(row.bracket),
                f"{row.budget:g}",
                metric,
                state,
                words[: max(20, width)],
            )
        )
    more = [f"... and {len(rows) - SHOWN} more"] if len(rows) > SHOWN else []
    return "\n".join([aligned(lines, left=(4, 5)).rstrip("\n"), *more])


def _checkpoint(life: Any, name: str) -> Path | None:
    job = life.machine.run.job_of(name)
    folder = _folder(life, job.id) if job else Path()
    files = sorted(folder.glob("step-*.pt")) if job and folder.is_dir() else []
    return files[-1] if files else None


def _adapter(life: Any, name: str) -> Path | None:
    """Where a job has written its adapter as PEFT reads it; None: nowhere."""
    job = life.machine.run.job_of(name)
    folder: Path | None = life.folders[job.id] / files.ADAPTER if job else None
    return folder if folder and folder.is_dir() else None


def _folder(life: Any, job_id: int) -> Path:
    """The folder of a job's checkpoints."""
    folder: Path = life.checkpoints[job_id]
    return folder


def _drop_others(life: Any, source: JobSource, best: str) -> None:
    """Remove the checkpoints of all other jobs of a search that is over."""
    for job in source.existing(outcomes_of(life.machine)):
        if job.name != best and (known := life.machine.run.job_of(job.name)):
            shutil.rmtree(_folder(life, known.id), ignore_errors=True)
