"""The threat model: each line names tests that hold it, and these are there."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "threat-model.md"
_TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")

LINES = [
    line
    for line in PAGE.read_text().splitlines()
    if line.startswith("|") and not re.match(r"\|[-|]+$|\| (they|it) tr(y|ies) \|", line)
]


@cache
def named_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    return {part.name for part in tree.body if isinstance(part, ast.FunctionDef)}


def test_there_are_lines_for_everybody() -> None:
    titles = re.findall(r"^## (.*)$", PAGE.read_text(), re.MULTILINE)
    assert len(LINES) > 40 and titles[-1] == "Not held" and len(titles) > 5


@pytest.mark.parametrize("line", LINES, ids=[line.split("|")[1].strip()[:50] for line in LINES])
def test_each_line_names_tests_that_are_there(line: str) -> None:
    _, tries, comes, held, _ = line.split("|")
    named = _TEST.findall(held)
    assert tries.strip() and comes.strip()
    assert named and re.sub(r"[ ,]", "", _TEST.sub("", held)) == "", held
    for file, test in named:
        assert test.startswith("test_") and test in named_in(ROOT / file), f"{file}::{test}"


def test_no_sentence_stands_in_both_pages() -> None:
    def sentences(path: Path) -> set[str]:
        words = " ".join(re.sub(r"[`*|#-]", " ", path.read_text()).split())
        return {part.strip() for part in re.split(r"[.:;](?: |$)", words) if len(part) > 40}

    assert not sentences(ROOT / "SECURITY.md") & sentences(PAGE)
