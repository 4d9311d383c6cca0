"""What all pictures share: colours, style, and files that are whole and the same every time."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcsched.errors import HpcschedError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PALETTE = ("#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#0072B2", "#D55E00", "#F0E442", "#999999")
"""Okabe and Ito's colours, which colour-blind readers can tell apart; grey in place of black."""

INK = "#222222"

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

    The same picture gives the same bytes.

    Raises MissingExtra without matplotlib, OSError if the file cannot be written.
    """
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as scratch:
        whole = Path(scratch) / path.name
        render(draw, whole, format="svg", metadata={"Date": None, "Creator": "hpcsched"})
        whole.replace(path)


def render(draw: Callable[[Figure], None], path: Path, **options: Any) -> None:
    """The same in any format matplotlib can write; `options` are its savefig's."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra("pictures need matplotlib: install hpcsched[report]") from error
    # The style is matplotlib's global state and counts when text is made and when it is written. It
    # begins with the defaults, not with the user's matplotlibrc; setting "backend" would load pyplot.
    style: Any = {key: value for key, value in mpl.rcParamsDefault.items() if key != "backend"}
    with mpl.rc_context(style | _STYLE):
        figure = Figure()
        draw(figure)
        figure.savefig(path, **options)
