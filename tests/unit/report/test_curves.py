"""The figure of losses and metrics over steps."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Mapping
from math import nan
from pathlib import Path
from typing import Any

import pytest

from hpcsched.report.curves import MOST_PANELS, MOST_POINTS, Curve, curves_svg, draw


def drawn(curves: Mapping[str, Curve]) -> dict[str, Any]:
    """The panels by name."""
    from matplotlib.figure import Figure

    figure = Figure()
    draw(figure, curves, title="job")
    figure.canvas.draw()
    return {axes.get_title(loc="left"): axes for axes in figure.axes}


def points(line: Any) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in line.get_xydata()]


def test_a_metric_and_its_validation_share_a_panel_and_losses_come_first() -> None:
    panels = drawn(
        {
            "accuracy": [(10, 0.5)],
            "val_loss": [(10, 3.0), (20, 2.5)],
            "loss": [(5, 3.0), (20, 2.0)],
            "val_f1": [(20, 0.3)],
            "empty": [],
        }
    )
    assert list(panels) == ["loss", "accuracy", "f1"]
    loss = panels["loss"]
    assert [points(line) for line in loss.lines] == [[(5, 3.0), (20, 2.0)], [(10, 3.0), (20, 2.5)]]
    assert [text.get_text() for text in loss.get_legend().get_texts()] == ["training", "validation"]
    assert {axes.get_xlim() for axes in panels.values()} == {(0.0, 20.4)}
    assert panels["f1"].get_legend() is None


def test_a_loss_that_falls_far_is_logarithmic_and_one_that_diverged_says_where() -> None:
    panels = drawn({"loss": [(1, 100.0), (2, 0.1), (3, nan), (4, 1e200)], "lr": [(1, 0.1), (2, 0.09)]})
    assert panels["loss"].get_yscale() == "log" and panels["lr"].get_yscale() == "linear"
    curve, mark = panels["loss"].lines
    assert points(curve) == [(1, 100.0), (2, 0.1)] and set(mark.get_xdata()) == {3}


def test_points_and_panels_are_bounded_and_extremes_kept() -> None:
    long = [(k, 50.0 if k == 77_777 else 1.0 + k % 5) for k in range(100_000)]
    panels = drawn({"loss": long, **{f"m{k:02}": [(1, 1.0)] for k in range(30)}})
    assert len(panels) == MOST_PANELS
    kept = points(panels["loss"].lines[0])
    assert len(kept) <= MOST_POINTS and (77_777, 50.0) in kept


@pytest.mark.parametrize(
    "curves",
    [
        pytest.param({"loss": [(0, nan)]}, id="nothing finite"),
        pytest.param({"loss": [(0, 0.0)]}, id="at step 0"),
        pytest.param({"loss": [(2**53, 5e-324), (2**53 + 1, 1e99)]}, id="beyond all bounds"),
        pytest.param({"val_": [(1, -1.0)], "<&>$x$": [(1, 2.0)]}, id="odd names"),
        pytest.param({}, id="none"),
    ],
)
def test_odd_curves_can_be_drawn(curves: Mapping[str, Curve], tmp_path: Path) -> None:
    curves_svg(curves, tmp_path / "c.svg", title="<&>$x$")
    found = [e.text for e in ET.parse(tmp_path / "c.svg").iter("{http://www.w3.org/2000/svg}text")]
    assert "<&>$x$" in found
