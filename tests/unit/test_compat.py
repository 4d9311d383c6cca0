"""What stands in for the standard library of later Pythons does the same."""

from __future__ import annotations

import sys
from dataclasses import field, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpcsched import compat


@pytest.fixture(params=[(3, 9), sys.version_info[:2]], ids=["as under 3.9", "as here"])
def lib(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module as it is in that Python."""
    monkeypatch.setattr(sys, "version_info", request.param)
    found: dict[str, Any] = {}
    exec(compile(Path(compat.__file__).read_text(), compat.__file__, "exec"), found)
    return SimpleNamespace(**found)


def test_text_that_is_an_enumeration(lib: Any) -> None:
    class Mode(lib.StrEnum):  # type: ignore[misc, name-defined]
        LOUD = "loud"

    assert Mode.LOUD == "loud" == str(Mode.LOUD) == f"{Mode.LOUD}"
    assert f"{Mode.LOUD:>6}" == "  loud" and Mode("loud") is Mode.LOUD
    with pytest.raises(ValueError, match="quiet"):
        Mode("quiet")


def test_dataclasses_whose_arguments_have_names(lib: Any) -> None:
    @lib.dataclass(frozen=True, slots=True, kw_only=True)
    class Point:
        x: int = 1
        y: int
        name: list[str] = field(default_factory=list)
        whole: bool = field(init=False, default=True)

    point = Point(y=2)
    assert (point.x, point.y, point.name, point.whole) == (1, 2, [], True)
    assert point == Point(x=1, y=2) and replace(point, x=5) == Point(x=5, y=2)
    assert hash(Point(y=1, name=())) and [each.name for each in fields(point)] == ["x", "y", "name", "whole"]
    for wrong in ({}, {"y": 1, "z": 2}, {"y": 1, "whole": False}):
        with pytest.raises(TypeError):
            Point(**wrong)
    with pytest.raises(TypeError):
        Point(1, 2)
    with pytest.raises(AttributeError):
        point.x = 3


def test_other_dataclasses_are_as_they_were(lib: Any) -> None:
    @lib.dataclass
    class Plain:
        x: int
        y: int = 0

        def __post_init__(self) -> None:
            self.y += 1

    @lib.dataclass(slots=True)
    class Slotted(Plain):
        z: int = 3

    @lib.dataclass(kw_only=True)
    class Named:
        x: int

        def __post_init__(self) -> None:
            self.x += 1

    assert (Plain(1).y, Slotted(1, 2).z, Slotted(1, 2).y, Named(x=1).x) == (1, 3, 3, 2)


def test_zip_that_is_strict(lib: Any) -> None:
    assert list(lib.zip([1, 2], "ab", strict=True)) == [(1, "a"), (2, "b")]
    assert list(lib.zip([1, 2], "a", strict=False)) == list(lib.zip([1, 2], "a")) == [(1, "a")]
    assert list(lib.zip(strict=True)) == []
    for unequal in (([1, 2], [1]), ([1], [1, 2]), ([None], [])):
        with pytest.raises(ValueError, match="zip"):
            list(lib.zip(*unequal, strict=True))


def test_pairs_and_bits(lib: Any) -> None:
    assert list(lib.pairwise("abc")) == [("a", "b"), ("b", "c")]
    assert list(lib.pairwise(iter("a"))) == []
    assert [lib.bit_count(number) for number in (0, 5, -3, 2**100)] == [0, 2, 2, 1]
