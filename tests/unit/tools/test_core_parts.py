"""The core is parts that are handed each other: none writes what is another's, none is a tower of classes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import hpcsched
from hpcsched.core.machine import Machine
from hpcsched.core.mechanisms.registry import registered

CORE = Path(hpcsched.__file__).parent / "core"

CHANGES = {"add", "append", "pop", "remove", "discard", "update", "clear", "setdefault", "extend", "insert"}

PARTS = {
    "run",
    "out",
    "ledger",
    "own",
    "estimates",
    "waiting",
    "deadline",
    "attempts",
    "endings",
    "decisions",
}


def written(tree: ast.AST) -> Iterator[ast.expr]:
    """What is assigned to, deleted, or changed by a method of its type."""
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=targets) | ast.Delete(targets=targets):
                for target in targets:
                    yield from target.elts if isinstance(target, ast.Tuple) else [target]
            case ast.AugAssign(target=target) | ast.AnnAssign(target=target):
                yield target
            case ast.Call(func=ast.Attribute(attr=attr, value=value)) if attr in CHANGES:
                yield value


def of_others(tree: ast.AST) -> list[str]:
    """Attributes of another part that are written, and private ones that are read."""
    found = []
    for target in written(tree):
        base = target.value if isinstance(target, ast.Subscript) else target
        match base:
            case ast.Attribute(value=ast.Attribute(value=ast.Name(id="self" | "parts"), attr=attr)):
                if attr.lstrip("_") in PARTS:
                    found.append(ast.unparse(target))
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=attr, value=value) if attr.startswith("_") and attr[1] != "_":
                if not (isinstance(value, ast.Name) and value.id in ("self", "cls")):
                    found.append(ast.unparse(node))
    return found


@pytest.mark.parametrize("path", sorted(CORE.rglob("*.py")), ids=lambda path: str(path.relative_to(CORE)))
def test_a_part_writes_what_is_its_own(path: Path) -> None:
    assert of_others(ast.parse(path.read_text())) == []


@pytest.mark.parametrize(
    "text",
    [
        "self._run.news += 1",
        "self._ledger.free.add(gpu)",
        "self._waiting.late[3], x = 1, 2",
        "del self.deadline.at",
        "x = self._run._secret",
    ],
)
def test_it_is_seen(text: str) -> None:
    assert of_others(ast.parse(text))


def test_nothing_is_a_tower_of_classes() -> None:
    assert Machine.__mro__ == (Machine, object)
    assert all(len(make.__mro__) <= 3 for make in registered() if isinstance(make, type))
