"""Tables of measured numbers, from the files that the benchmarks write."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "benchmarks/results"

_MARK = re.compile(r"^<!-- (results (\S+) rows ([\d,-]+)): ", re.MULTILINE)
_MET = {True: "yes", False: "**no**", None: ""}


def parts() -> dict[tuple[str, str], Callable[[], str]]:
    """The marked parts of the benchmarks' pages: `results FILE rows 1-9,12`, counted from 1."""
    found: dict[tuple[str, str], Callable[[], str]] = {}
    for page in sorted((ROOT / "benchmarks").glob("*.md")):
        for name, file, rows in _MARK.findall(page.read_text()):
            found[str(page.relative_to(ROOT)), name] = partial(table, file, rows)
    return found


def table(file: str, rows: str) -> str:
    """These rows of a file of results."""
    known = json.loads((FOLDER / file).read_text())["rows"]
    chosen = []
    for words in rows.split(","):
        first, _, last = words.partition("-")
        chosen += known[int(first) - 1 : int(last or first)]
    lines = [f"| {row['what']} | {row['goal']} | {row['measured']} | {_MET[row['ok']]} |" for row in chosen]
    return "\n".join(["| what | goal | measured | met |", "|---|---|---|---|", *lines])
