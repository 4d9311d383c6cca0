"""metrics.jsonl: what holds after restarts, and what hostile lines can do to it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from hpcsched.contract import files
from hpcsched.contract.metrics import MOST_METRICS, Point
from hpcsched.errors import BadInput, StoreError
from hpcsched.store.metrics import read_curves, read_points


def point(step: int, attempt: int = 1, **values: float | None) -> bytes:
    return Point(step, 0.5 * step, attempt, values).encode()


def test_what_a_later_attempt_does_again_replaces_what_was_lost(tmp_path: Path) -> None:
    path = tmp_path / files.METRICS
    lines = [point(s, loss=float(s)) for s in (10, 20, 30)] + [point(s, 2, loss=-s) for s in (20, 30, 40)]
    path.write_bytes(b"".join(lines))
    assert read_curves(path) == {"loss": [(10, 10.0), (20, -20.0), (30, -30.0), (40, -40.0)]}


def test_two_lines_of_one_step_both_hold(tmp_path: Path) -> None:
    path = tmp_path / files.METRICS
    path.write_bytes(point(10, loss=1.0) + point(10, val_loss=2.0))
    assert read_curves(path) == {"loss": [(10, 1.0)], "val_loss": [(10, 2.0)]}


def test_what_is_not_finite_is_kept_as_none(tmp_path: Path) -> None:
    path = tmp_path / files.METRICS
    path.write_bytes(point(1, loss=math.nan, other=math.inf) + point(2, loss=3.0))
    assert [dict(p.values) for p in read_points(path)] == [{"loss": None, "other": None}, {"loss": 3.0}]
    assert read_curves(path) == {"loss": [(2, 3.0)]}


def test_lines_that_make_no_sense_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / files.METRICS
    bad = [
        b"not json\n",
        b'{"step": -1, "t": 0}\n',
        b'{"step": 1, "t": 0, "loss": "much"}\n',
        b'{"step": 1, "t": 0, "loss": 1e999}\n',
        b'{"step": 1, "t": 0, "a\\nb": 1}\n',
        b'{"step": 1, "t": 0, "long": "' + b"x" * 200_000 + b'"}\n',
        b'{"step": 1, "t": 0' + b"".join(b', "m%d": 1' % i for i in range(300)) + b"}\n",
        b'{"step": 9, "t": 0, "loss": 1',
    ]
    path.write_bytes(point(1, loss=1.0) + b"".join(bad[:-1]) + point(2, loss=2.0) + bad[-1])
    assert read_curves(path) == {"loss": [(1, 1.0), (2, 2.0)]}


def test_no_file_is_no_points_and_another_thing_an_error(tmp_path: Path) -> None:
    assert read_points(tmp_path / files.METRICS) == []
    with pytest.raises(StoreError, match="it is no file"):
        read_points(tmp_path)


@pytest.mark.parametrize("name", ["", "step", "a\nb", "x" * 200])
def test_names_that_nobody_could_read_are_refused_when_written(name: str) -> None:
    with pytest.raises(BadInput, match="no name of a metric"):
        Point(1, 0.0, 1, {name: 1.0}).encode()


def test_too_many_at_once_are_refused() -> None:
    with pytest.raises(BadInput, match="in one line"):
        Point(1, 0.0, 1, {f"m{i}": 1.0 for i in range(MOST_METRICS + 1)}).encode()
