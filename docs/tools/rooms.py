"""The plan of the house: which room has which modules, and which room imports which."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path

import grimp
from svg import FILL, PALE, Picture

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "hpcsched"
INSIDE = ("core", "worker")
"""Rooms that are also drawn from inside."""
OPEN = ("core.mechanisms", "core.resources")
"""Rooms of these of which each part is a box of its own: others stand between them."""

Arrows = Mapping[str, Mapping[str, int]]
"""Each box to those that it imports, and by how many of its modules."""


# --- table ----------------------------------------------------------------------------------


def table() -> str:
    """A row for each package: what it is, by the first line of its docstring, and its modules."""
    rows = ["| room | | modules |", "|---|---|---|"]
    for folder in [ROOT / PACKAGE, *sorted(path.parent for path in (ROOT / PACKAGE).rglob("*/__init__.py"))]:
        modules = sorted(path.stem for path in folder.glob("*.py") if not path.stem.startswith("__"))
        name = (
            str(folder.relative_to(ROOT / PACKAGE)) + "/"
            if folder != ROOT / PACKAGE
            else "files beside these"
        )
        rows.append(f"| `{name}` | {_first_line(folder / '__init__.py')} | {_listed(modules)} |")
    rows.append(rows.pop(2).replace("`", "", 2))
    return "\n".join(rows)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _first_line(path: Path) -> str:
    words = ast.get_docstring(ast.parse(path.read_text()))
    if not words:
        raise SystemExit(f"{path.relative_to(ROOT)}: has no docstring; its first line says what the room is")
    return words.splitlines()[0]


# --- imports --------------------------------------------------------------------------------


@cache
def _graph() -> grimp.ImportGraph:
    return grimp.build_graph(PACKAGE, cache_dir=None, exclude_type_checking_imports=True)


def arrows(room: str = "") -> Arrows:
    """The imports between the rooms of the house, or between what is in a room."""
    graph, base = _graph(), f"{PACKAGE}.{room}" if room else PACKAGE
    of = {}
    for module in graph.modules:
        if module.startswith(f"{base}."):
            name = _box_of(module, base)
            if room or graph.find_children(f"{base}.{name}"):
                of[module] = name
    found: dict[str, Counter[str]] = {name: Counter() for name in of.values() if not _is_bare(name, room)}
    for module, name in of.items():
        for other in graph.find_modules_directly_imported_by(module):
            if name in found and of.get(other, name) != name and of[other] in found:
                found[name][of[other]] += 1
    return found


def _box_of(module: str, base: str) -> str:
    """In which box of a room's picture a module is."""
    first, _, rest = module.removeprefix(f"{base}.").partition(".")
    opened = f"{base}.{first}".removeprefix(f"{PACKAGE}.") in OPEN
    return f"{first}/{rest.split('.')[0]}" if opened and rest else first


def _is_bare(name: str, room: str) -> bool:
    """Whether nothing is in a box but what only starts a program, or the outside of a room that is open."""
    return name == "__main__" or f"{room}.{name}" in OPEN


def _reachable(arrows: Mapping[str, Iterable[str]]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for name in arrows:
        wanted, seen = list(arrows[name]), set()
        while wanted:
            if (other := wanted.pop()) not in seen:
                seen.add(other)
                wanted.extend(arrows[other])
        found[name] = seen
    return found


def downward(arrows: Arrows) -> tuple[dict[str, set[str]], list[tuple[str, str]]]:
    """The arrows without those that others imply, and those that run back up (of a circle the thinnest)."""
    left, up = {name: dict(ends) for name, ends in arrows.items()}, []
    while True:
        below = _reachable(left)
        circle = [(n, name, to) for name in left for to, n in left[name].items() if name in below[to]]
        if not circle:
            break
        _, name, to = min(circle)
        del left[name][to]
        up.append((name, to))
    few = {
        name: {to for to in ends if not any(to in below[other] for other in ends)}
        for name, ends in left.items()
    }
    return few, up


# --- picture --------------------------------------------------------------------------------

_HIGH, _FLOOR, _SPACE = 28, 66, 14
_Place = tuple[str, str, int]
"""A box (its name twice), or where an arrow from one box to another passes a floor."""


def picture() -> str:
    """The house, and below it some rooms from inside."""
    plans = [("hpcsched", arrows())] + [(f"hpcsched/{name}", arrows(name)) for name in INSIDE]
    drawn = [(title, _floors(downward(of)[0]), *downward(of)) for title, of in plans]
    width = max(_width(floors) for _, floors, *_ in drawn) + 40
    height = 30 + sum(len(floors) * _FLOOR + 44 for _, floors, *_ in drawn)
    picture, y = Picture("The rooms of hpcsched, and which imports which", width, height), 30.0
    for title, floors, few, up in drawn:
        picture.text(20, y, title, size=14, bold=True, anchor="start")
        _draw(picture, floors, few, up, y + 16, width)
        y += len(floors) * _FLOOR + 44
    words = "An arrow: imports. Left out: arrows that others imply. Dashed: one of a circle."
    picture.text(20, height - 10, words, size=11, anchor="start")
    return str(picture)


def _floors(few: Mapping[str, set[str]]) -> list[list[_Place]]:
    """The highest floor first; a box lies right above the highest that it imports."""
    level: dict[str, int] = {}

    def at(name: str) -> int:
        if name not in level:
            level[name] = 1 + max((at(to) for to in few[name]), default=-1)
        return level[name]

    floors: list[list[_Place]] = [[] for _ in range(1 + max(map(at, few)))]
    for name in sorted(few):
        floors[level[name]].append((name, name, level[name]))
        for to in sorted(few[name]):
            for between in range(level[to] + 1, level[name]):
                floors[between].append((name, to, between))
    for _ in range(8):
        for others, floor in [*pairwise(floors), *pairwise(floors[::-1])]:
            _sort(floor, others, few)
    return floors[::-1]


def _sort(floor: list[_Place], others: list[_Place], few: Mapping[str, set[str]]) -> None:
    """By the middle of what they are joined to on the floor beside, from left to right."""

    def middle(place: _Place) -> float:
        joined = [
            i for i, other in enumerate(others) if _joined(place, other, few) or _joined(other, place, few)
        ]
        return sum(joined) / len(joined) / len(others) if joined else floor.index(place) / len(floor)

    floor[:] = sorted(floor, key={place: middle(place) for place in floor}.__getitem__)


def _joined(upper: _Place, lower: _Place, few: Mapping[str, set[str]]) -> bool:
    """Whether an arrow goes from the one straight to the other."""
    if upper[2] != lower[2] + 1:
        return False
    if _is_box(upper) and _is_box(lower):
        return lower[0] in few[upper[0]]
    start = upper[0] == lower[0] and not _is_box(lower)
    end = upper[1] == lower[1] and not _is_box(upper)
    return (start and (_is_box(upper) or upper[1] == lower[1])) or (end and _is_box(lower))


def _is_box(place: _Place) -> bool:
    return place[0] == place[1]


def _wide(place: _Place) -> float:
    return 7.4 * len(place[0]) + 20 if _is_box(place) else 6


def _width(floors: list[list[_Place]]) -> int:
    return max(int(sum(_wide(place) + _SPACE for place in floor)) for floor in floors)


def _draw(
    picture: Picture,
    floors: list[list[_Place]],
    few: Mapping[str, set[str]],
    up: Iterable[tuple[str, str]],
    top: float,
    width: int,
) -> None:
    at: dict[_Place, tuple[float, float]] = {}
    for row, floor in enumerate(floors):
        space = (width - 40 - sum(map(_wide, floor))) / len(floor)
        x = 20 + space / 2
        for place in floor:
            at[place] = x + _wide(place) / 2, top + row * _FLOOR
            x += _wide(place) + space
    for upper, (x, y) in at.items():
        for lower, (to_x, to_y) in at.items():
            if _joined(upper, lower, few):
                start = y + _HIGH if _is_box(upper) else y + _HIGH / 2
                picture.curve(
                    (x, start), (to_x, to_y if _is_box(lower) else to_y + _HIGH / 2), tip=_is_box(lower)
                )
    boxes = {place[0]: spot for place, spot in at.items() if _is_box(place)}
    for name, to in up:
        (x, y), (to_x, to_y) = boxes[name], boxes[to]
        picture.curve((x + 12, y), (to_x + 12, to_y + _HIGH), dash="4 3")
    for name, (x, y) in boxes.items():
        wide = _wide((name, name, 0))
        picture.box(x - wide / 2, y, wide, _HIGH, FILL if few[name] else PALE)
        picture.text(x, y + 18, name)
