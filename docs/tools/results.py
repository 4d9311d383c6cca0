"""Tables of measured numbers, from the files that the benchmarks write."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "benchmarks/results"

PAGES = ("benchmarks/*.md", "docs/when-this-pays.md")

_MARK = re.compile(r"^<!-- (results (\S+) rows ([\d,-]+)): ", re.MULTILINE)
_TABLE = re.compile(r"^<!-- (results (\S+) table (.+?)): written", re.MULTILINE)
_MET = {True: "yes", False: "**no**", None: ""}


def parts() -> dict[tuple[str, str], Callable[[], str]]:
    """The marked parts of pages: `results FILE rows 1-9,12`, counted from 1; `results FILE table NAME`."""
    found: dict[tuple[str, str], Callable[[], str]] = {}
    for page in sorted(path for pattern in PAGES for path in ROOT.glob(pattern)):
        text, where = page.read_text(), str(page.relative_to(ROOT))
        for name, file, rows in _MARK.findall(text):
            found[where, name] = partial(table, file, rows)
        for name, file, which in _TABLE.findall(text):
            found[where, name] = partial(named_table, file, which)
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


def named_table(file: str, name: str) -> str:
    """A table that stands in a file of results under its name, as `head` and `rows`."""
    known = json.loads((FOLDER / file).read_text())["tables"][name]
    lines = [known["head"], ["---"] * len(known["head"]), *known["rows"]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
