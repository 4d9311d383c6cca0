"""The learning curves of a search's trials as a figure: the metric by the budget, and which went on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hpcsched.report.drawing import INK, PALETTE, save_svg
from hpcsched.tuning.source import JobSource, Outcomes

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def trials_svg(source: JobSource, outcomes: Outcomes, path: Path) -> None:
    """Draw the metric of every training by its budget, the rungs of one trial joined, the best one marked.

    Raises MissingExtra without matplotlib, OSError when the file cannot be written.
    """
    save_svg(lambda figure: draw(figure, source, outcomes), path)


def draw(figure: Figure, source: JobSource, outcomes: Outcomes) -> None:
    """Draw the trials on a figure."""
    search = source.search
    trials: dict[int, list[tuple[float, float, int]]] = {}
    for job in source.existing(outcomes):
        outcome = outcomes.get(job.name)
        value = outcome.metrics.get(search.metric) if outcome and outcome.state == "completed" else None
        if value is not None:
            trials.setdefault(job.trial, []).append((job.budget, value, job.bracket))
    brackets = sorted({points[0][2] for points in trials.values()}, reverse=True)
    colours = {bracket: PALETTE[index % len(PALETTE)] for index, bracket in enumerate(brackets)}
    figure.set_size_inches(8.0, 4.5)
    axes = figure.add_subplot()
    named: set[int] = set()
    for points in trials.values():
        bracket = points[0][2]
        axes.plot(
            [budget for budget, _, _ in points],
            [value for _, value, _ in points],
            "-o",
            color=colours[bracket],
            markersize=3,
            linewidth=0.8,
            label=None if bracket in named else f"bracket {bracket}",
        )
        named.add(bracket)
    best = source.best(outcomes)
    if best is not None:
        label = f"best: {best.metric:.4g} ({best.job.name})"
        axes.plot([best.job.budget], [best.metric], "*", color=INK, markersize=12, label=label)
    axes.set_xscale("log")
    budgets = sorted({budget for points in trials.values() for budget, _, _ in points})
    axes.set_xticks(budgets, [f"{budget:g}" for budget in budgets])
    axes.minorticks_off()
    axes.set_xlabel(f"{search.unit} trained")
    axes.set_ylabel(search.metric)
    axes.legend(fontsize="small", loc="best")
