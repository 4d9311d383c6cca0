"""The metrics of a training over its steps, from its `jobs/<id>/metrics.jsonl`: a line for each log.

What a later attempt has done again is that attempt's, from its first step on (of that step itself only what
it has logged, too); lines of an attempt that come after those of a later one count for nothing, nor do lines
that cannot be understood, such as a torn last one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from math import inf, nan
from pathlib import Path
from typing import BinaryIO

from hpcsched.contract.codec import LINE_BYTES
from hpcsched.contract.metrics import Point
from hpcsched.decoding import opened
from hpcsched.errors import BadInput, StoreError

MOST_BYTES = 2**28
"""What is read of a file at most (chosen): some two million lines."""

MOST_CURVES = 64
"""Metrics that are drawn of a job (chosen)."""

MOST_POINTS = 4000
"""Points of a curve that are kept of any number, those of its extremes among them (chosen)."""


def read_points(path: Path) -> Sequence[Point]:
    """The points that hold, in the order of their steps; none where there is no such file.

    Raises StoreError if it cannot be read.
    """
    held: list[Point] = []
    for point, again in _points(path):
        if again:
            held = [one for one in held if not _done_again(one, point)]
        held.append(point)
    return sorted(held, key=lambda point: point.step)


def read_curves(path: Path) -> Mapping[str, list[tuple[int, float]]]:
    """By metric its values over the steps, in their order; nan where one was not finite. Nothing where there
    is no such file. A long curve is thinned.

    Raises StoreError if the file cannot be read.
    """
    curves: dict[str, _Curve] = {}
    for point, again in _points(path):
        if again:
            for name, curve in curves.items():
                curve.cut(point.step + (name not in point.values))
        for name, value in point.values.items():
            if name in curves or len(curves) < MOST_CURVES:
                curves.setdefault(name, _Curve()).add(point.step, nan if value is None else value)
    return {name: curve.points for name, curve in curves.items() if curve.points}


def _done_again(one: Point, first: Point) -> bool:
    """Whether a point is of work that has been done again, from the point `first` on."""
    same = one.step == first.step and bool(one.values.keys() & first.values.keys())
    return one.step > first.step or same


def _points(path: Path) -> Iterator[tuple[Point, bool]]:
    """The points in the order they were written, and whether each is the first one of another attempt."""
    newest = None
    try:
        with opened(path) as (file, about):
            for line in _lines(file, min(about.st_size, MOST_BYTES)):
                try:
                    point = Point.decode(line)
                except BadInput:
                    continue
                if newest is None or point.attempt >= newest:
                    yield point, newest not in (None, point.attempt)
                    newest = point.attempt
    except FileNotFoundError:
        return
    except BadInput as error:
        raise StoreError(f"cannot read {path}: {error}") from error
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}") from error


def _lines(file: BinaryIO, most_bytes: int) -> Iterator[bytes]:
    """The whole lines of the first bytes of a file that are not too long."""
    left, whole = most_bytes, True
    while left > 0 and (line := file.readline(min(left, LINE_BYTES))):
        left -= len(line)
        ends = line.endswith(b"\n")
        if whole and ends:
            yield line
        whole = ends


class _Curve:
    """A metric's points, in the order of their steps."""

    def __init__(self) -> None:
        self.points: list[tuple[int, float]] = []

    def add(self, step: int, value: float) -> None:
        if self.points and self.points[-1][0] >= step:
            self.cut(step)
        self.points.append((step, value))
        if len(self.points) >= 2 * MOST_POINTS:
            self._thin()

    def cut(self, step: int) -> None:
        """Forget the points from this step on."""
        del self.points[bisect_left(self.points, step, key=lambda point: point[0]) :]

    def _thin(self) -> None:
        """Keep of each stretch the points of the smallest and the largest value, and the ends."""
        points = self.points
        stretch = -(-len(points) // (MOST_POINTS // 2))
        kept = {0, len(points) - 1}
        for begin in range(0, len(points), stretch):
            numbers = range(begin, min(begin + stretch, len(points)))
            kept |= {choose(numbers, key=self._height) for choose in (min, max)}
        self.points = [points[number] for number in sorted(kept)]

    def _height(self, number: int) -> float:
        value = self.points[number][1]
        return inf if value != value else value
