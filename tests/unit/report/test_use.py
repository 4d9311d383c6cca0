"""The figure of how busy devices were."""

from __future__ import annotations

from typing import Any

import pytest

from hpcsched.report.use import Point, draw


def drawn(hosts: dict[str, list[Point]], span_s: float = 100.0) -> list[Any]:
    from matplotlib.figure import Figure

    figure = Figure()
    draw(figure, hosts, span_s=span_s)
    figure.canvas.draw()
    return figure.axes


@pytest.mark.long
def test_a_host_has_a_panel_for_what_was_measured_on_the_axis_of_the_run() -> None:
    points = [Point(10.0 * k, [0.25, 0.75], [1024.0, 3072.0]) for k in range(1, 5)]
    busy, memory, other = drawn({"n1": points, "n2": [Point(5.0, [1.0], [])]})
    assert [axes.get_xlim() for axes in (busy, memory, other)] == [(0.0, 100.0)] * 3
    assert [(float(x), float(y)) for x, y in busy.lines[0].get_xydata()][:2] == [(10.0, 50.0), (20.0, 50.0)]
    assert {float(y) for _, y in memory.lines[0].get_xydata()} == {2.0}
    assert [axes.get_ylabel() for axes in (busy, memory, other)] == ["busy (%)", "memory (GiB)", "busy (%)"]
    assert other.texts[0].get_text() == "n2"


def test_a_line_is_broken_where_nobody_sampled_and_a_long_one_is_thinned() -> None:
    times = [*range(50), *range(500, 550)]
    (busy,) = drawn({"n1": [Point(float(at), [0.5], []) for at in times]}, 600.0)
    assert [len(line.get_xdata()) for line in busy.lines] == [50, 50]
    (busy,) = drawn({"n1": [Point(float(at), [at % 7 / 7], []) for at in range(50_000)]}, 50_000.0)
    assert sum(len(line.get_xdata()) for line in busy.lines) <= 600
