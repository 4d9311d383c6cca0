"""Parts that all figures share: colours, style, and files that are whole and the same every time."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcsched.errors import HpcschedError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    Panel = Callable[[Axes], None]

PALETTE = ("#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#0072B2", "#D55E00", "#F0E442", "#999999")
"""Okabe and Ito's colours, which colour-blind readers can tell apart; grey in place of black."""

INK = "#222222"
FRAME = "#aaaaaa"
GRID = "#dddddd"
PAPER = "#ffffff"
BAD = "#c00000"
SMALL = 8.0
"""The size of what is written beside a chart."""

WIDE_RANGE = 20.0
"""Largest over smallest value of a loss from which on its axis is logarithmic."""

MOST_VALUE = 1e100
"""The largest value that an axis can show."""

# Inches, of panels one below the other.
PANELS = (8.0, 0.9, 0.95)
"""The width of a figure, and what is left of its panels and right of them."""
TIMELINE = (11.0, 0.65, 0.15)
"""The same of figures over the time of a run, so that what was at one time is below each other."""
_PANEL, _SPACE, _TOP, _BOTTOM = 1.25, 0.16, 0.32, 0.48
_LABEL, _MARGIN = 0.58, 0.2  # from an axis to its label, and from there to the edge

_STYLE: Any = {
    "svg.hashsalt": "hpcsched",
    "svg.fonttype": "none",  # text stays text: smaller, searchable
    "text.parse_math": False,
    "font.size": 9.0,
    "hatch.linewidth": 0.8,
}


class MissingExtra(HpcschedError):
    """Something was asked for that needs an extra which is not installed."""

    exit_code = 2


def save_svg(draw: Callable[[Figure], None], path: Path) -> None:
    """Write what `draw` puts on a figure into the SVG file `path`, which appears whole or not at all.

    The same figure gives the same bytes.

    Raises MissingExtra without matplotlib, OSError if the file cannot be written.
    """
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as scratch:
        whole = Path(scratch) / path.name
        render(draw, whole, format="svg", metadata={"Date": None, "Creator": "hpcsched"})
        whole.replace(path)


def render(draw: Callable[[Figure], None], path: Path, **options: Any) -> None:
    """Write a figure in any format of matplotlib; `options` are its savefig's."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra("a figure needs matplotlib: install hpcsched[report]") from error
    # The style is matplotlib's global state and counts when text is made and when it is written. It
    # begins with the defaults, not with the user's matplotlibrc; setting "backend" would load pyplot.
    style: Any = {key: value for key, value in mpl.rcParamsDefault.items() if key != "backend"}
    with mpl.rc_context(style | _STYLE):
        figure = Figure()
        draw(figure)
        figure.savefig(path, **options)


def draw_panels(
    figure: Figure,
    panels: Sequence[Panel],
    *,
    title: str,
    span: tuple[float, float],
    label: str,
    sides: tuple[float, float, float] = PANELS,
) -> None:
    """Draw panels one below the other, on one axis that goes from `span[0]` to `span[1]`."""
    whole, left, right = sides
    height = _TOP + _BOTTOM + len(panels) * _PANEL + (len(panels) - 1) * _SPACE
    width = whole - left - right
    figure.set_size_inches(whole, height)
    bottom = height - _TOP
    for number, panel in enumerate(panels):
        bottom -= _PANEL + (_SPACE if number else 0.0)
        axes = figure.add_axes((left / whole, bottom / height, width / whole, _PANEL / height))
        dress(axes)
        panel(axes)
        axes.yaxis.set_label_coords(-min(_LABEL, left - _MARGIN) / width, 0.5)
        axes.set_xlim(*span)
        last = number == len(panels) - 1
        axes.tick_params(labelbottom=last)
        if number == 0:
            axes.set_title(title, loc="left", fontsize=9.5, fontweight="bold", color=INK)
        if last:
            axes.set_xlabel(label, color=INK)


def beside(axes: Axes, y: float, text: str) -> None:
    """A line's name, to its right."""
    axes.annotate(
        text, (1.0, y), (4, 0), xycoords=("axes fraction", "data"), textcoords="offset points",
        va="center", fontsize=SMALL, color=INK, annotation_clip=False,
    )  # fmt: skip


def legend_beside(axes: Axes, colours: Sequence[tuple[str, str]]) -> None:
    """A legend to the right of a chart, as (name, colour) from above."""
    from matplotlib.patches import Patch

    axes.legend(
        handles=[Patch(facecolor=colour, label=name) for name, colour in colours],
        loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=SMALL,
        labelcolor=INK, handlelength=1.0, handleheight=0.8, labelspacing=0.25, borderpad=0.1,
    )  # fmt: skip


def logarithmic(axes: Axes, values: Sequence[float]) -> None:
    """An axis with a few plain numbers on it."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    low, high = min(values), max(values)
    axes.set_yscale("log")
    axes.set_ylim(low / 1.5, high * 1.5)
    # Within two decades the powers of ten alone would be too few.
    subs = (1.0,) if high > 100 * low else (1.0, 3.0)
    axes.yaxis.set_major_locator(LogLocator(subs=subs, numticks=6))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.minorticks_off()


def time_unit(span_s: float) -> tuple[str, float]:
    """The unit of a time axis that is `span_s` seconds long, and the unit in seconds."""
    if span_s <= 1200:
        return "s", 1.0
    return ("min", 60.0) if span_s <= 2 * 3600 else ("h", 3600.0)


def dress(axes: Axes) -> None:
    """Give a chart the grid and the frame that all charts have."""
    axes.tick_params(labelcolor=INK, color=FRAME)
    axes.grid(color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(FRAME)
