"""Pieces that pages are made of: tables, sections on jobs, and figures as elements of a page."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hpcsched.report.drawing import BAD, FRAME, GRID, INK, PAPER, MissingExtra

if TYPE_CHECKING:
    from jinja2 import Template

_NARROWEST = 0.85
"""The part of its width to which a figure shrinks: below that one scrolls, as its text could not be read."""

_PIXELS = 96 / 72
"""Of a point."""

_COLOURS = {BAD: "--fail", INK: "--ink", FRAME: "--frame", GRID: "--grid", PAPER: "--paper"}
"""Colours of figures that the page's style has by these names: they are others in the dark."""


class Cell(NamedTuple):
    """A cell of a table; `kind` are its classes in the page's style, `link` is the id of what it leads to."""

    text: str
    kind: str = ""
    link: str = ""


class Table(NamedTuple):
    head: Sequence[Cell]
    rows: Sequence[Sequence[Cell]]


class Section(NamedTuple):
    """A section on one job: facts as (name, value), its figure, and a table below."""

    title: str
    facts: Sequence[tuple[str, str]]
    figure: str
    table: Table | None = None


def template(name: str) -> Template:
    """A template of this folder; it escapes all texts. Raises MissingExtra without jinja2."""
    try:
        import jinja2
    except ImportError as error:
        raise MissingExtra("a page needs jinja2: install hpcsched[report]") from error
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(name)


def row(cells: Sequence[str], kinds: Mapping[int, str]) -> Sequence[Cell]:
    return [Cell(text, kinds.get(column, "")) for column, text in enumerate(cells)]


def anchor(job_id: int) -> str:
    """The id of a job's section on a page."""
    return f"job-{job_id}"


def inline(svg: str, number: int) -> str:
    """An SVG document as an element of a page that has others: its ids are those of figure `number`, its ink
    and paper those of the page. Links to the sections of jobs stay, and open no other page."""
    element = svg[svg.index("<svg") :].replace(' target="_blank"', "")
    element = re.sub(r'(<[^<>]*?\bid="|url\(#|href="#(?!job-\d))', rf"\1f{number}-", element)
    for colour, name in _COLOURS.items():
        element = re.sub(rf"\b(fill|stroke): {colour}", rf"\1: var({name})", element)
    if width := re.match(r'<svg[^>]*? width="([\d.]+)pt"', element):
        least = _NARROWEST * _PIXELS * float(width[1])
        element = element.replace("<svg", f'<svg style="min-width: {least:.0f}px"', 1)
    return element


def or_dash(text: str | None) -> str:
    return "-" if text is None else text
