"""Curves from a file that programs wrote: what an attempt did again is its own, and nothing is trusted."""

from __future__ import annotations

import json
import os
from math import inf, isnan, nan
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcsched.contract.codec import LINE_BYTES
from hpcsched.contract.metrics import MOST_METRICS, Point
from hpcsched.errors import BadInput, StoreError
from hpcsched.store.metrics import MOST_CURVES, MOST_POINTS, read_curves, read_points


def written(folder: Path, *lines: Any) -> Path:
    path = folder / "metrics.jsonl"
    path.write_bytes(
        b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines)
    )
    return path


def a_line(step: int, attempt: int = 1, **values: Any) -> dict[str, Any]:
    return {"step": step, "t": 1.7e9 + step, "attempt": attempt, **values}


def test_metrics_are_curves_over_steps_by_name(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        a_line(10, loss=2.0, lr=1),
        a_line(20, loss=None, lr=0.5),
        a_line(20, val_loss=1.5),
        a_line(30, loss=1.0),
    )
    curves = read_curves(path)
    assert list(curves) == ["loss", "lr", "val_loss"]
    assert curves["lr"] == [(10, 1.0), (20, 0.5)] and curves["val_loss"] == [(20, 1.5)]
    (first, broken, last) = curves["loss"]
    assert (first, last) == ((10, 2.0), (30, 1.0)) and broken[0] == 20 and isnan(broken[1])


def test_what_a_later_attempt_did_again_is_that_attempts(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        a_line(10, loss=4.0, accuracy=0.1),
        a_line(20, loss=3.0),
        a_line(30, loss=2.0, accuracy=0.3),
        a_line(20, 2, loss=2.5),
        a_line(40, 1, loss=9.0),  # of a process that was not gone yet
        a_line(30, 2, loss=1.5),
    )
    assert read_curves(path) == {
        "loss": [(10, 4.0), (20, 2.5), (30, 1.5)],
        "accuracy": [(10, 0.1)],
    }


@pytest.mark.parametrize(
    "line",
    [
        b'{"step": 5, "t": 1, "attempt": 1, "loss": "low"}',
        b'{"step": 5, "t": 1, "attempt": 1, "loss": [1]}',
        b'{"step": 5, "t": 1, "attempt": 1, "loss": true}',
        b'{"step": 5, "t": 1, "attempt": 1, "loss": NaN}',
        b'{"step": 5.5, "t": 1, "attempt": 1, "loss": 7}',
        b'{"step": -5, "t": 1, "attempt": 1, "loss": 7}',
        b'{"step": null, "t": 1, "attempt": 1, "loss": 7}',
        b'{"t": 1, "attempt": 1, "loss": 7}',
        b'{"step": 5, "attempt": 1, "loss": 7}',
        b'{"step": 5, "t": 1, "attempt": 1, "loss": 1e999}',
        b'{"step": 5, "t": 1, "attempt": 1, "loss": 7, "a\\nb": 1}',
        b'{"step": 5, "t": 1, "attempt": 1, "loss": 7, "": 1}',
        b'{"step": 99999999999999999999, "t": 1, "attempt": 1, "loss": 7}',
        b'{"step": 5, "t": 1, "attempt": 1, "loss": 7',
        b"[1, 2]",
        b"{" * 10_000,
        b"\xff\xfe",
        b'{"step": 5, "t": 1, "attempt": 1, "loss": 7, "x": "' + b"y" * LINE_BYTES + b'"}',
    ],
)
def test_a_line_that_is_none_is_left_out(line: bytes, tmp_path: Path) -> None:
    path = written(tmp_path, a_line(1, loss=1.0), line, a_line(10, loss=0.5))
    assert read_curves(path) == {"loss": [(1, 1.0), (10, 0.5)]}


def test_a_torn_last_line_does_no_harm(tmp_path: Path) -> None:
    path = written(tmp_path, a_line(1, loss=1.0))
    with path.open("ab") as file:
        file.write(b'{"step": 2, "t": 1, "attempt": 1, "loss": 7}')
    assert read_curves(path) == {"loss": [(1, 1.0)]}
    assert [point.step for point in read_points(path)] == [1]


def test_points_are_whole_lines_that_hold(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        *(a_line(step, loss=1.0 * step) for step in (10, 20, 30)),
        a_line(20, 2, loss=-20.0),
        a_line(20, 2, val_loss=None),
        a_line(40, 1, loss=9.0),
    )
    with path.open("ab") as file:
        file.write(json.dumps(a_line(20, 3, eval_loss=1.0)).encode() + b"\n")
    assert read_curves(path)["eval_loss"] == [(20, 1.0)] and read_curves(path)["loss"][-1] == (20, -20.0)
    held = [(point.step, point.attempt, dict(point.values)) for point in read_points(path)]
    assert held == [
        (10, 1, {"loss": 10.0}),
        (20, 2, {"loss": -20.0}),
        (20, 2, {"val_loss": None}),
        (20, 3, {"eval_loss": 1.0}),
    ]


@pytest.mark.parametrize("name", ["", "step", "a\nb", "x" * 200])
def test_names_that_nobody_could_read_are_refused_when_written(name: str) -> None:
    with pytest.raises(BadInput, match="no name of a metric"):
        Point(1, 0.0, 1, {name: 1.0}).encode()


def test_what_is_not_finite_is_written_as_none(tmp_path: Path) -> None:
    line = Point(1, 0.5, 1, {"loss": nan, "other": inf, "fine": 1.0}).encode()
    assert Point.decode(line).values == {"loss": None, "other": None, "fine": 1.0}
    with pytest.raises(BadInput, match="in one line"):
        Point(1, 0.0, 1, {f"m{i}": 1.0 for i in range(MOST_METRICS + 1)}).encode()


@pytest.mark.long
def test_many_points_and_metrics_are_bounded_and_extremes_are_kept(tmp_path: Path) -> None:
    lines = (
        b'{"step":%d,"t":1,"attempt":1,"loss":%d}' % (k, 9 if k == 12_345 else k % 3) for k in range(50_000)
    )
    curves = read_curves(written(tmp_path, *lines, a_line(50_000, **{f"m{i}": 1.0 for i in range(200)})))
    assert len(curves) == MOST_CURVES and len(curves["loss"]) < 2 * MOST_POINTS
    assert (12_345, 9.0) in curves["loss"] and curves["loss"][0][0] == 0


def test_there_is_none_or_it_cannot_be_read(tmp_path: Path) -> None:
    assert read_curves(tmp_path / "none") == {}
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StoreError, match="it is no file"):
        read_curves(tmp_path / "pipe")


@given(
    st.lists(
        st.one_of(
            st.binary(max_size=40),
            st.dictionaries(
                st.sampled_from(["step", "t", "attempt", "loss", "val_loss"]),
                st.one_of(st.none(), st.integers(-5, 50), st.floats(allow_nan=False), st.text(max_size=3)),
            ),
        ),
        max_size=30,
    )
)
def test_whatever_is_there_curves_are_in_order(lines: list[Any]) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        for points in read_curves(written(Path(folder), *lines)).values():
            steps = [step for step, _ in points]
            assert steps == sorted(set(steps)) and steps[0] >= 0
