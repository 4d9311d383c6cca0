"""What `hpcsched tune` tells while a search goes on."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from hpcsched.cli.run.live import stamp
from hpcsched.contract.exits import SUSPENDED
from hpcsched.core.actions import Action
from hpcsched.core.events import Event, LaunchFailed, WorkersExited
from hpcsched.core.exits import said_exit
from hpcsched.core.machine import Machine
from hpcsched.printing import printable
from hpcsched.tuning import Search
from hpcsched.tuning.feeding import Trials
from hpcsched.tuning.source import JobSource


class SearchDisplay:
    """Tells how a search goes: a line for each rung that is done and each better result, and on a terminal a
    bar."""

    def __init__(self, machine: Machine, source: JobSource, trials: Trials, *, quiet: bool) -> None:
        self._machine, self._source, self._trials, self._quiet = machine, source, trials, quiet
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
            self.message(f"{job.spec.name} ended with {said_exit(event.code)}{detail}")
        outcomes = self._trials.outcomes(self._machine)
        if outcomes[job.spec.name].state == "completed" and (looked := self._trials.missing(job.spec.name)):
            self.message(f"{job.spec.name} has no metric: {looked}")
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
        progress = self._source.progress(self._trials.outcomes(machine))
        table = Table(box=None, pad_edge=False, show_header=False)
        for _ in range(3):
            table.add_column(no_wrap=True)
        running = len(machine.run.active)
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
