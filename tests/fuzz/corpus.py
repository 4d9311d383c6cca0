"""Documents to begin with: the project's own files, and the blocks of its pages."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from .forms import FORMS

ROOT = Path(__file__).resolve().parents[2]

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)

MOST_BYTES = 20_000
"""Longer documents are left out where there are shorter ones (chosen): most of their parts are alike."""


@cache
def blocks(language: str) -> tuple[bytes, ...]:
    """The blocks of all pages in a language."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    found = (match for page in pages for match in _BLOCK.findall(page.read_text(encoding="utf-8")))
    return tuple(text.encode() for word, text in found if word == language)


@cache
def tables(kind: str) -> tuple[bytes, ...]:
    """The TOML documents of a kind: jobs, search, pool or settings."""
    files = [
        path
        for folder in ("jobscripts", "site-config", "tests/data/runs/0.5.0")
        for path in (ROOT / folder).rglob("*.toml")
    ]
    found = [*blocks("toml"), *(path.read_bytes() for path in sorted(files))]
    return tuple(data for data in found if len(data) < MOST_BYTES and _kind(FORMS["toml"].load(data)) == kind)


def _kind(table: Any) -> str:
    if not isinstance(table, dict):
        return ""
    for key, kind in (("job", "jobs"), ("template", "pool"), ("space", "search"), ("node", "node")):
        if key in table:
            return kind
    return "settings"


def documents(*patterns: str, having: str = "", most: int = MOST_BYTES) -> tuple[bytes, ...]:
    """Files of the project, and JSON blocks of its pages that have the key `having`."""
    paths = [path for pattern in patterns for path in sorted(ROOT.glob(pattern))]
    found = [path.read_bytes() for path in paths]
    found += [data for data in blocks("json") if having and having in (FORMS["json"].load(data) or ())]
    return tuple(data for data in found if len(data) <= most) or tuple(found[:1])


def a_piece(data: bytes, key: str, most: int = 4) -> bytes:
    """A JSON document of which the list `key` keeps its first members only."""
    table = json.loads(data)
    return json.dumps({**table, key: table[key][:most]}).encode()


def run_folders() -> Iterator[Path]:
    """The run directories that earlier versions have left."""
    yield from sorted(path.parent for path in (ROOT / "tests/data/runs").glob("*/runs/*/status.json"))


@cache
def recorded_journals() -> tuple[bytes, ...]:
    """Journals of tests and real runs, of which the short ones."""
    found = []
    for path in sorted((ROOT / "tests/data/runs").glob("*/runs/*/journal.jsonl")):
        data = path.read_bytes().rstrip(b"\0")
        if len(data) < MOST_BYTES:
            found.append(data)
    return tuple(found)


JOBS = """schema = 1
[[job]]
name = "a"
model = "ResNet-50"
command = ["python", "a.py"]
steps = 3600
[[job]]
name = "b"
model = "Inception-v3"
trainer = "m:N"
steps = 140
after = ["a"]
"""


def with_jobs(folder: Path) -> None:
    """A job file."""
    (folder / "jobs.toml").write_text(JOBS)


def with_run(folder: Path) -> None:
    """A run's directory as an agent has left it; which one, does not matter for what is put over it."""
    run = folder / "run"
    shutil.copytree(ROOT / "tests/data/runs/0.5.0/runs/commands", run, copy_function=shutil.copyfile)
    run.chmod(0o700)
    (folder / "hpcsched-run").symlink_to("run")
    state = folder / "xdg-state/hpcsched/runs"
    state.mkdir(parents=True)
    (state / "0.json").write_text(json.dumps({"id": "0", "dir": str(run), "at": 0.0}))
