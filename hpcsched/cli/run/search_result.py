"""What has come of a search: the result of `hpcsched tune`, and what is kept and removed at its end."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcsched.cli.run.search_display import chosen, said
from hpcsched.contract import files
from hpcsched.core.machine import Machine
from hpcsched.durations import clock
from hpcsched.store.trials import ProgramTrials
from hpcsched.tuning import Search
from hpcsched.tuning.feeding import Trials
from hpcsched.tuning.source import JobSource, RungJob, TrialRow

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


def search_result(
    life: Any, source: JobSource, trials: Trials, *, curves: Path | None
) -> SearchResult | None:
    """The result of a search; None if no trial has one. Draws it, and drops the other trials' checkpoints."""
    machine: Machine = life.machine
    search, outcomes = source.search, trials.outcomes(machine)
    best = source.best(outcomes)
    if best is None:
        return None
    if search.checkpoints == "best" and source.finished(outcomes):
        _drop_others(life, source, trials, best.job)
    checkpoint, adapter = _checkpoint(life, best.job.name), _adapter(life, best.job.name)
    folder = _trial_folder(trials, best.job.trial)
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
            "dir": folder and str(folder),
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
        *([f"checkpoint: {checkpoint}"] if checkpoint or not search.command else []),
        *([f"folder: {folder}"] if folder else []),
        *([f"adapter: {adapter}"] if adapter else []),
    ]
    return SearchResult(page, "\n".join(lines))


def keep_trials(life: Any, source: JobSource, trials: Trials, store: Path) -> None:
    """Put the trials into the database, where `history --trials` finds them."""
    from hpcsched.store.database import Database, TrialEntry

    search, run_id = source.search, life.run.id
    entries = [
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
            checkpoint=str(path) if (path := _saved(life, trials, row)) else None,
        )
        for row in source.trials(trials.outcomes(life.machine))
    ]
    with Database(store) as opened:
        opened.record_trials(run_id, entries)


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


def _trial_folder(trials: Trials, trial: int) -> Path | None:
    """The folder of a trial whose program was told one."""
    folder = trials.folder(trial) if isinstance(trials, ProgramTrials) else None
    return folder if folder and folder.is_dir() else None


def _saved(life: Any, trials: Trials, row: TrialRow) -> Path | None:
    """The checkpoint of a trial, or the folder that has what its program saved."""
    return _checkpoint(life, row.job) or _trial_folder(trials, row.trial)


def _adapter(life: Any, name: str) -> Path | None:
    """Where a job has written its adapter as PEFT reads it; None: nowhere."""
    job = life.machine.run.job_of(name)
    folder: Path | None = life.folders[job.id] / files.ADAPTER if job else None
    return folder if folder and folder.is_dir() else None


def _folder(life: Any, job_id: int) -> Path:
    """The folder of a job's checkpoints."""
    folder: Path = life.checkpoints[job_id]
    return folder


def _drop_others(life: Any, source: JobSource, trials: Trials, best: RungJob) -> None:
    """Remove the checkpoints of all other jobs of a search that is over, and other trials' folders."""
    for job in source.existing(trials.outcomes(life.machine)):
        if job.name != best.name and (known := life.machine.run.job_of(job.name)):
            shutil.rmtree(_folder(life, known.id), ignore_errors=True)
        if job.trial != best.trial and (folder := _trial_folder(trials, job.trial)):
            shutil.rmtree(folder, ignore_errors=True)
