"""Paragraphs and titles on a terminal, as wide as they read well."""

from __future__ import annotations

import shutil
import textwrap
from typing import Any

import click

WIDEST = 100
"""Characters of a line of prose at most (chosen)."""


def columns() -> int:
    return shutil.get_terminal_size().columns


def say(text: str, *, indent: str = "", **style: Any) -> None:
    """Print a paragraph."""
    width = min(columns(), WIDEST) - 1
    lines = textwrap.wrap(
        text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )
    click.secho("\n".join(lines), **style)


def title(text: str) -> None:
    """Print a title, apart from what is above it."""
    click.echo()
    say(text, bold=True)
