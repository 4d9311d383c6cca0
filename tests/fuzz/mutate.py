"""One mutator for all forms of inputs: of trees, where the form can be read, and of bytes.

What comes out depends on the seeds alone. An input is named by its *line*, the seeds that led to it: the
first takes a document of the corpus and changes it, each later one changes what the one before has made.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from .forms import Again, Form, Raw

MOST_BYTES = 2**20
"""No input is longer (chosen): what is wrong with long ones shows at this length."""

SCALARS: tuple[Any, ...] = (
    *(0, -1, 1, 2, 3, 255, 65536, 2**31, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63), 10**18, 10**30),
    *(
        0.0,
        -0.0,
        0.5,
        -0.5,
        1e-300,
        1e-9,
        1e9,
        1e18,
        1e300,
        5e-324,
        float("nan"),
        float("inf"),
        float("-inf"),
    ),
    *(True, False, None, [], {}, [[]], {"": ""}, [0], ["a"], {"a": 1}),
    *(
        "",
        " ",
        "a",
        "0",
        "1",
        "-1",
        "1.5",
        "1e9",
        "nan",
        "auto",
        "none",
        "all",
        "*",
        "a,b",
        "a b",
        "1-3",
        "5-1",
    ),
    *(
        "1-99999999999",
        "\u0661",
        "\u00b2",
        "1_0",
        "+1",
        "0x10",
        "٣",
        "%j",
        "%d",
        "{}",
        "{x}",
        "{0}",
        "~",
        "$HOME",
    ),
    *(
        "../../x",
        "/",
        ".",
        "..",
        "/dev/null",
        "a/b",
        "a\0b",
        "a\nb",
        "a\tb",
        "\x1b]0;x\x07",
        "\u202e",
        "\x85",
    ),
    *(
        "\udcff",
        "\ud800",
        "\ufeff",
        "\U0001f600",
        "é",
        "A" * 300,
        "A" * 70000,
        "(" * 200,
        "(a+)+$",
        "[",
        "\\",
    ),
    *(
        "2026-01-01T00:00:00Z",
        "9999-12-31T23:59:59+00:00",
        "0001-01-01T00:00:00-23:59",
        "1:00:00",
        "99999999d",
    ),
)

_ALIKE = {kind: [each for each in SCALARS if type(each) is kind] for kind in (int, float, str)}

Path = tuple[Any, ...]


class Mutator:
    """Changes documents of one form, with words from its corpus."""

    def __init__(self, form: Form, corpus: Sequence[bytes]) -> None:
        assert corpus
        self._form, self._corpus = form, list(corpus)
        trees = [tree for tree in map(form.load, corpus) if tree is not None]
        self._trees = trees
        words: dict[str, None] = {}
        for tree in trees:
            for path in _paths(tree):
                words.update((key, None) for key in path if isinstance(key, str))
                if isinstance(value := _at(tree, path), str) and len(value) < 200:
                    words[value] = None
        self._words = list(words)

    def made(self, line: Sequence[int]) -> bytes:
        """The input of this name."""
        first, *others = line
        random = Random(first)
        data = self._changed(random.choice(self._corpus), random)
        for seed in others:
            data = self._changed(data, Random(seed))
        return data

    def _changed(self, data: bytes, random: Random) -> bytes:
        any_bytes = self._form.any_bytes
        tree = self._form.load(data) if not any_bytes or random.random() < 0.85 else None
        if tree is not None:
            tree = copy.deepcopy(tree)
            for _ in range(random.choice((1, 1, 1, 2, 2, 3, 5))):
                tree = self._tree(tree, random)
            data = self._form.dump(tree)
        if any_bytes and (tree is None or random.random() < 0.05):
            for _ in range(random.choice((1, 1, 2, 4))):
                data = random.choice(_OF_BYTES)(data, random)
            if random.random() < 0.1:
                other = random.choice(self._corpus)
                data = data[: random.randint(0, len(data))] + other[random.randint(0, len(other)) :]
        return data[:MOST_BYTES] if any_bytes or len(data) <= MOST_BYTES else self._corpus[0]

    def _tree(self, tree: Any, random: Random) -> Any:
        paths = _paths(tree)
        path = random.choice(paths)
        if len(paths) > 50 and random.random() < 0.3:
            path = min((path, *random.choices(paths, k=3)), key=len)  # many leaves are alike
        value = _at(tree, path)
        if isinstance(value, (dict, list)) and random.random() < 0.7:
            changed = self._table(value, random) if isinstance(value, dict) else self._list(value, random)
        else:
            changed = self._scalar(value, random)
        return _put(tree, path, changed)

    def _scalar(self, value: Any, random: Random) -> Any:
        kind = random.random()
        if random.random() < 0.4 and (alike := _ALIKE.get(type(value))):
            return random.choice(alike)  # what is of another type is refused before much is reached
        if kind < 0.3:
            return copy.deepcopy(random.choice(SCALARS))
        if kind < 0.4 and self._form.raw:
            return Raw(random.choice(self._form.raw))
        if kind < 0.5 and self._trees:
            other = random.choice(self._trees)
            return copy.deepcopy(_at(other, random.choice(_paths(other))))
        if kind < 0.6 and self._words:
            return random.choice(self._words)
        if isinstance(value, bool):
            return random.choice((not value, int(value), str(value).lower()))
        if isinstance(value, (int, float)):
            return _number(value, random)
        if isinstance(value, str):
            return _text(value, random)
        return random.choice(
            ([value], {"a": value}, [value] * 50, _deep(value, random.choice((5, 70, 1500))))
        )

    def _table(self, table: dict[Any, Any], random: Random) -> Any:
        keys = list(table)
        kind = random.randrange(8)
        if keys and kind <= 1:
            table.pop(random.choice(keys))
        elif keys and kind == 2:
            key = random.choice(keys)
            table[Again(key)] = self._scalar(table[key], random)
        elif keys and kind == 3:
            key = random.choice(keys)
            table[_text(str(key), random)] = table.pop(key)
        elif kind == 4:
            table.update((f"k{i}", i) for i in range(random.choice((10, 3000))))
        elif kind == 5 and self._words:
            known = random.choice(self._words)
            table[known] = copy.deepcopy(random.choice(SCALARS))
        elif self._trees:
            others = [t for t in self._tables() if t]
            if others:
                other = random.choice(others)
                key = random.choice(list(other))
                table[key] = copy.deepcopy(other[key])
        return table

    def _tables(self) -> list[dict[Any, Any]]:
        if not hasattr(self, "_known_tables"):
            found = [_at(tree, path) for tree in self._trees for path in _paths(tree)]
            self._known_tables = [each for each in found if isinstance(each, dict)]
        return self._known_tables

    def _list(self, items: list[Any], random: Random) -> Any:
        kind = random.randrange(7)
        if items and kind == 0:
            items.pop(random.randrange(len(items)))
        elif items and kind == 1:
            items.insert(random.randint(0, len(items)), copy.deepcopy(random.choice(items)))
        elif items and kind == 2:
            random.shuffle(items)
        elif items and kind == 3:
            times = random.choice((2, 10, 300))
            size = len(self._form.dump(items))
            items = items * max(2, min(times, MOST_BYTES // max(size, 1)))
        elif items and kind == 4:
            items = items[: random.randrange(len(items))]
        else:
            items.insert(random.randint(0, len(items)), self._scalar(items[0] if items else None, random))
        return items


def _paths(tree: Any) -> list[Path]:
    """The places in a tree, itself first; of long ones not all."""
    found: list[Path] = []
    todo: list[tuple[Path, Any]] = [((), tree)]
    while todo and len(found) < 5000:
        path, value = todo.pop()
        found.append(path)
        if len(path) > 60:
            continue
        if isinstance(value, dict):
            todo += [((*path, key), inner) for key, inner in reversed(value.items())]
        elif isinstance(value, list):
            todo += [((*path, i), value[i]) for i in reversed(range(min(len(value), 500)))]
    return found


def _at(tree: Any, path: Path) -> Any:
    for step in path:
        tree = tree[step]
    return tree


def _put(tree: Any, path: Path, value: Any) -> Any:
    if not path:
        return value
    _at(tree, path[:-1])[path[-1]] = value
    return tree


def _deep(value: Any, depth: int) -> Any:
    return Raw("[" * depth + "]" * depth) if depth > 100 else [_deep(value, depth - 1)] if depth else value


def _number(value: float, random: Random) -> Any:
    changes: tuple[Callable[[Any], Any], ...] = (
        *(
            lambda x: -x,
            lambda x: x + 1,
            lambda x: x - 1,
            lambda x: x * 2,
            lambda x: x * 1000,
            lambda x: x * 10**9,
        ),
        *(
            lambda x: x / 2,
            lambda x: x / 1e6,
            lambda x: float(x),
            lambda x: str(x),
            lambda x: 0,
            lambda x: [x],
        ),
    )
    try:
        return random.choice(changes)(value)
    except (OverflowError, ArithmeticError):
        return 0


def _text(value: str, random: Random) -> str:
    at = random.randint(0, len(value))
    kind = random.randrange(8)
    if kind == 7:
        return re.sub("[0-9]+", lambda found: _digits(found[0], random), value, count=random.choice((0, 1)))
    if kind == 0:
        return value[:at] + str(random.choice(SCALARS))[:400] + value[at:]
    if kind == 1:
        return value[:at]
    if kind == 2:
        return value[:at] + value[at + 1 :]
    if kind == 3:
        return (
            value[:at]
            + random.choice("-+.,:;=/%{}[]()*^$\\'\"#@!&|<>~ \n\t\x00\x1b\x7f\u202e\udcff0123456789eE")
            + value[at:]
        )
    if kind == 4:
        return value * random.choice((2, 3, 1000))
    if kind == 5:
        return value.swapcase()
    return value[at:] + value[:at]


def _digits(text: str, random: Random) -> str:
    """Another number in the place of one that stands in a text."""
    return random.choice(
        ("0", "-1", str(int(text[:18]) + 1), "999999999", "9" * 19, "9" * 4500, "1.5", "", "\u0661")
    )


def _flip(data: bytes, random: Random) -> bytes:
    if not data:
        return b"\xff"
    at = random.randrange(len(data))
    return data[:at] + bytes([data[at] ^ (1 << random.randrange(8))]) + data[at + 1 :]


def _insert(data: bytes, random: Random) -> bytes:
    at = random.randint(0, len(data))
    more = random.choice(
        (b"\xff", b"\x00", b"\n", b"\xef\xbb\xbf", b'"', b"{", b"}", b"[", b"]", b"=", b",", b"9" * 4400)
    )
    return data[:at] + more + data[at:]


def _cut(data: bytes, random: Random) -> bytes:
    return data[: random.randint(0, len(data))]


def _take_out(data: bytes, random: Random) -> bytes:
    at = random.randint(0, len(data))
    return data[:at] + data[at + random.choice((1, 1, 4, 30, 200)) :]


def _twice(data: bytes, random: Random) -> bytes:
    at = random.randint(0, len(data))
    part = data[at : at + random.choice((1, 8, 60, 400))]
    return data[:at] + part * random.choice((2, 2, 3, 500)) + data[at + len(part) :]


def _line_twice(data: bytes, random: Random) -> bytes:
    lines = data.splitlines(keepends=True)
    if not lines:
        return b"\n"
    lines.insert(random.randint(0, len(lines)), random.choice(lines))
    return b"".join(lines)


_OF_BYTES: tuple[Callable[[bytes, Random], bytes], ...] = (
    _flip,
    _flip,
    _insert,
    _cut,
    _take_out,
    _twice,
    _line_twice,
)
