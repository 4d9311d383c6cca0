"""`hpcsched clean`: what runs that are over have left on disk, and its removal."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpcsched.cli.common import json_option, plural, say, say_json, seconds
from hpcsched.cli.jobs.columns import aligned
from hpcsched.errors import HpcschedError
from hpcsched.printing import bounded, said_bytes
from hpcsched.store import registry, run_folders
from hpcsched.store.rundir import RunDir

if TYPE_CHECKING:
    from hpcsched.store.leftovers import LeftRun, What

NAMED = 3
"""Files of the user's that are named for each run; the others are counted."""


@click.command()
@click.argument("dirs", nargs=-1, metavar="[DIR...]", type=click.Path(path_type=Path))
@click.option("--all", "-a", "all_runs", is_flag=True, help="All your runs, wherever they are: shows only.")
@click.option("--older-than", metavar="T", type=seconds, help="Runs that ended so long ago: 30d, 12h.")
@click.option("--only-checkpoints", is_flag=True, help="Remove checkpoints only.")
@click.option(
    "--keep-checkpoints", is_flag=True, help="Remove all but checkpoints, results and the run's record."
)
@click.option("--with-work-left", is_flag=True, help="Runs with jobs left too, or whose end is not known.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@json_option
@click.pass_context
def clean(
    ctx: click.Context,
    dirs: tuple[Path, ...],
    all_runs: bool,
    older_than: float | None,
    only_checkpoints: bool,
    keep_checkpoints: bool,
    with_work_left: bool,
    yes: bool,
    as_json: bool,
) -> int:
    """What runs that are over have left on disk; with DIR or --older-than, remove it.

    On its own it only shows: the runs of this directory, with --all those of any. Removed is, after a
    question or with --yes, what is named by DIR, and with --older-than runs of this directory. A run whose
    agent works is never touched, one with jobs left only with --with-work-left, and of a run directory only
    what hpcsched has made: other files stay, and are named. --only-checkpoints and --keep-checkpoints leave
    results too: what functions returned, metrics, adapters, the best models. The history stays.
    """
    from hpcsched.store.cleaning import remove
    from hpcsched.store.leftovers import What

    if only_checkpoints and keep_checkpoints:
        raise click.UsageError("--only-checkpoints and --keep-checkpoints: give one")
    if all_runs and (dirs or yes):
        raise click.UsageError("--all only shows: name what is to be removed by DIR")
    chosen = bool(dirs) or (older_than is not None and not all_runs)
    if yes and not chosen:
        raise click.UsageError("--yes: say which runs, by DIR or --older-than")
    what = What.CHECKPOINTS if only_checkpoints else What.OTHERS if keep_checkpoints else What.ALL
    found, left_alone = _found(ctx, dirs, all_runs=all_runs, with_work_left=with_work_left)
    runs = [run for run in found if run.age_s >= (older_than or 0.0)]
    failed = [line for line in left_alone if dirs]
    freed = 0
    if not as_json:
        _show(runs, left_alone, what)
    agreed = chosen and bool(runs) and (yes or (not as_json and _agreed(runs, what)))
    if agreed:
        for run in runs:
            try:
                freed += remove(run, what)
            except HpcschedError as error:
                failed.append(str(error))
                say(f"hpcsched: {error}", err=True)
        if not as_json:
            say(f"{said_bytes(freed)} removed")
    elif chosen and not as_json and not runs and not left_alone:
        say("hpcsched: no run that is over is that old", err=True)
    if as_json:
        say_json(_page(runs, left_alone, freed))
    return int(bool(failed) or (chosen and bool(runs) and not agreed))


def _found(
    ctx: click.Context, dirs: Sequence[Path], *, all_runs: bool, with_work_left: bool
) -> tuple[list[LeftRun], list[str]]:
    """The runs that may be cleaned, oldest first, and why others may not."""
    from hpcsched.store.leftovers import NotCleaned, left_by

    # A link to a folder elsewhere is no folder of this directory: such a run has to be named.
    known = [folder for folder in run_folders.all_of(Path.cwd()) if not folder.is_symlink()]
    if all_runs:
        known += [Path(entry.dir) for entry in registry.runs()]
    runs, left_alone = list[Any](), list[str]()
    for folder in dict.fromkeys(path.resolve() for path in (dirs or known)):
        try:
            run = left_by(RunDir(folder), checkpoints=_place(ctx), with_work_left=with_work_left)
            _refuse_living_jobs(run)
            runs.append(run)
        except NotCleaned as error:
            left_alone.append(str(error))
        except HpcschedError as error:
            left_alone.append(f"{folder}: {error}")
    return sorted(runs, key=lambda run: -run.age_s), left_alone


def _refuse_living_jobs(run: LeftRun) -> None:
    """Raise NotCleaned where the agent ended without a word on this host, and its jobs still run."""
    from hpcsched.launch.orphans import find_orphans
    from hpcsched.store.leftovers import NotCleaned

    if run.state == "STALE" and run.host == socket.gethostname():
        pids = ", ".join(str(pid) for pid, _ in find_orphans(run.run_id, ())[:NAMED])
        if pids:
            raise NotCleaned(f"{run.rundir.root}: processes of its jobs still run here: {pids}")


def _place(ctx: click.Context) -> Path | None:
    """The directory for checkpoints that the settings name."""
    given = os.environ.get("HPCSCHED_CHECKPOINTS") or ctx.obj.values.get("checkpoints")
    return Path(given).absolute() if given else None


def _agreed(runs: Sequence[LeftRun], what: What) -> bool:
    from hpcsched.store.leftovers import Kind

    freed = said_bytes(sum(item.bytes for run in runs for item in run.removed_by(what)))
    results = any(item.kind is Kind.RESULT for run in runs for item in run.removed_by(what))
    words = {
        "all": f"all{' (with results of jobs)' * results} of",
        "checkpoints": "the checkpoints of",
        "others": "all but checkpoints and results of",
    }
    said = words[what]
    if not sys.stdin.isatty():
        say(
            f"hpcsched: nothing is removed: --yes removes {said} {plural(len(runs), 'run')}, {freed}",
            err=True,
        )
        return False
    return click.confirm(f"Remove {said} {plural(len(runs), 'run')}, {freed}?", err=True)


def _show(runs: Sequence[LeftRun], left_alone: Sequence[str], what: What) -> None:
    from hpcsched.store.leftovers import Kind

    rows = [("ENDED", "STATE", "JOBS", "SIZE", "CHECKPOINTS", "DIR")]
    for run in runs:
        ended = time.strftime("%Y-%m-%d", time.localtime(time.time() - run.age_s))
        state = "HALF" if run.half else run.state
        sizes = said_bytes(run.bytes()), said_bytes(run.bytes(Kind.CHECKPOINT))
        rows.append((ended, state, str(run.jobs or "-"), *sizes, _short(run.rundir.root)))
    if runs:
        columns = [list(column) for column in zip(*rows, strict=True)]
        click.echo(aligned(columns, [False, False, True, True, True, False]), nl=False)
        say(f"{plural(len(runs), 'run')}, {said_bytes(sum(run.bytes() for run in runs))}")
    else:
        say("nothing is left of runs that are over")
    for run in runs:
        if run.half:
            where = _short(run.rundir.root)
            say(f"hpcsched: {where}: a removal was interrupted; the next one goes on with it", err=True)
        if run.foreign:
            more = f" and {len(run.foreign) - NAMED} more" if len(run.foreign) > NAMED else ""
            named = ", ".join(_short(path) for path in run.foreign[:NAMED])
            say(f"hpcsched: not made by hpcsched, and stays: {named}{more}", err=True)
    for line in left_alone:
        say(f"hpcsched: left alone: {bounded(line)}", err=True)


def _short(path: Path) -> str:
    """A path, from here if it is below."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) and path != here else str(path)


def _page(runs: Iterable[LeftRun], left_alone: Sequence[str], freed: int) -> dict[str, Any]:
    from hpcsched.store.leftovers import Kind

    return {
        "schema": 1,
        "runs": [
            {
                "dir": str(run.rundir.root),
                "run_id": run.run_id,
                "state": run.state,
                "half": run.half,
                "age_s": round(run.age_s, 3),
                "jobs": run.jobs,
                "left": run.left,
                "bytes": run.bytes(),
                "checkpoint_bytes": run.bytes(Kind.CHECKPOINT),
                "foreign": [str(path) for path in run.foreign],
            }
            for run in runs
        ],
        "left_alone": list(left_alone),
        "freed_bytes": freed,
    }
