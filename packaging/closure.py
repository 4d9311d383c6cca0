"""The files of the distribution hpcsched-worker: what runs in a training's process, and what that imports.

python packaging/closure.py      prints them, one a line
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "hpcsched"

ENTRIES = ("hpcsched.worker", "hpcsched.contract", "hpcsched.examples", "hpcsched.integrations")
"""Packages that are in it as a whole; of others only the modules that these import."""

DATA = ("hpcsched/py.typed", "hpcsched/examples/plain.sh")


def files(root: Path = ROOT) -> list[Path]:
    """Its modules, relative to `root`, sorted."""
    known = _modules(root)
    wanted = [name for name in known if name.startswith(tuple(f"{entry}." for entry in ENTRIES))]
    found: set[str] = set()
    while wanted:
        name = wanted.pop()
        if name in found:
            continue
        found.add(name)
        wanted.extend(name.rsplit(".", 1)[:-1])  # the package that it is in
        wanted.extend(module for module in imported(known[name], known) if module in known)
    return sorted(known[name].relative_to(root) for name in found)


def imported(path: Path, known: Mapping[str, Path]) -> Iterator[str]:
    """The modules that a file imports, at once or later; not those that only type checkers read."""
    trees: list[ast.AST] = [ast.parse(path.read_text())]
    while trees:
        tree = trees.pop()
        if isinstance(tree, ast.If) and "TYPE_CHECKING" in ast.unparse(tree.test):
            trees.extend(tree.orelse)
            continue
        trees.extend(ast.iter_child_nodes(tree))
        if isinstance(tree, ast.Import):
            yield from (alias.name for alias in tree.names)
        elif isinstance(tree, ast.ImportFrom):
            module = tree.module or ""
            for alias in tree.names:
                name = f"{module}.{alias.name}"
                yield name if name in known else module


def _modules(root: Path) -> dict[str, Path]:
    """All modules of the package by their names."""
    found = {}
    for path in (root / PACKAGE).rglob("*.py"):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


if __name__ == "__main__":
    sys.stdout.write("".join(f"{path}\n" for path in files()))
