"""The metrics of a training by step, from its `jobs/<id>/metrics.jsonl`: a line for each time it logged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from hpcsched.contract.codec import LINE_BYTES
from hpcsched.contract.metrics import Point
from hpcsched.decoding import opened
from hpcsched.errors import BadInput, StoreError

MOST_POINTS = 2_000_000
"""Lines that are read of one job, at most (chosen): the first ones."""


def read_points(path: Path) -> Sequence[Point]:
    """The points that hold, in order of step; none where there is no such file.

    After a crash a training resumes from an earlier step: its points from there on replace those of the
    lost steps. Lines that cannot be decoded, such as a torn last one, are left out. Raises StoreError if the
    file cannot be read.
    """
    held: list[Point] = []
    for point in _points(path):
        while held and held[-1].step >= point.step and held[-1].attempt != point.attempt:
            held.pop()
        held.append(point)
    return held


def read_curves(path: Path) -> dict[str, list[tuple[int, float]]]:
    """By metric its points (step, value) that hold and are finite. Raises StoreError."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for point in read_points(path):
        for name, value in point.values.items():
            if value is not None:
                curves.setdefault(name, []).append((point.step, value))
    return curves


def _points(path: Path) -> Iterator[Point]:
    try:
        with opened(path) as (file, _):
            for _ in range(MOST_POINTS):
                line = file.readline(LINE_BYTES + 1)
                if not line:
                    return
                if not line.endswith(b"\n"):
                    while line and not line.endswith(b"\n"):  # the rest of one that is too long
                        line = file.readline(LINE_BYTES + 1)
                    continue
                try:
                    yield Point.decode(line)
                except BadInput:
                    continue
    except FileNotFoundError:
        return
    except BadInput as error:
        raise StoreError(f"{path} cannot be read: {error}") from error
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}") from error
