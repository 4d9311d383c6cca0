"""Tables of metrics, as wide as the terminal: there may be more of them than it has room for."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence

from hpcsched.cli.common import say
from hpcsched.printing import printables

MOST_NAMED = 3
"""Metrics without room that are named; of more it is said how many they are."""

_TEXTS = ("NAME", "ST")
"""Columns of words, which begin at the left."""


def show(first: Sequence[list[str]], metrics: Sequence[list[str]]) -> None:
    """Print columns, each with its header: `first`, and of the metrics as many as fit, one at least."""
    columns = [printables(column) for column in (*first, *metrics)]
    widths = [max(map(len, column)) for column in columns]
    room = shutil.get_terminal_size().columns if sys.stdout.isatty() else sum(widths) + 2 * len(widths)
    shown = len(columns)
    while shown > len(first) + 1 and sum(widths[:shown]) + 2 * (shown - 1) > room:
        shown -= 1
    padded = [
        [cell.ljust(width) if column[0] in _TEXTS else cell.rjust(width) for cell in column]
        for column, width in zip(columns[:shown], widths, strict=False)
    ]
    for cells in zip(*padded, strict=True):
        say("  ".join(cells).rstrip())
    if left := [column[0] for column in columns[shown:]]:
        more = f" and {len(left) - MOST_NAMED} more" if len(left) > MOST_NAMED else ""
        named = ", ".join(left[:MOST_NAMED]) + more
        say(f"no room for {named}: --metric NAME, --csv or --json has them", err=True)


def said_value(values: Mapping[str, float | None], name: str) -> str:
    """A metric with five digits; nan where it was not finite, "" where there is none."""
    if name not in values:
        return ""
    value = values[name]
    return "nan" if value is None else f"{value:.5g}"
