"""The report of what was played: it passes only where enough was, and nothing is violated."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from . import report
from .planted import FAULTS, Fault
from .real.planted import BUGS


def _planted(bugs: Sequence[Fault], found_s: float | None = 2.0) -> dict[str, Any]:
    faults = [{"fault": bug.name, "file": bug.file, "found_s": found_s, "violated": "x"} for bug in bugs]
    return {"seconds_each": 300.0, "faults": faults}


PLANTED, PLANTED_REAL = _planted(FAULTS), _planted(BUGS)
VIRTUAL = {"schedules": 10_000, "first": 0, "seconds": 900.0, "violations": {}}


def _schedule(seed: int, **other: Any) -> dict[str, Any]:
    row = {"seed": seed, "flavour": "hosts", "commit": "c0ffee", "skipped": "", "violations": []}
    return {
        **row,
        "torch": True,
        "hosts": 2,
        "faults": {"kill agent": 1},
        "lives": 2,
        "walltimes": [1, 1],
        **other,
    }


REAL = [_schedule(seed) for seed in range(1000)]


def _reported(folder: Path, **pages: Any) -> tuple[int, dict[str, Any]]:
    words = ["--output", str(folder / "report.json")]
    for part, page in pages.items():
        (folder / part).write_text(json.dumps(page))
        words += [f"--{part.replace('_', '-')}", str(folder / part)]
    code = report.main(words)
    return code, json.loads((folder / "report.json").read_text())


def test_schedules_may_come_in_several_files_and_count_once(tmp_path: Path) -> None:
    files = [str(tmp_path / name) for name in ("first", "second")]
    for file, rows in zip(files, (REAL[:600], REAL[600:]), strict=True):
        Path(file).write_text(json.dumps({"schema": 1, "schedules": rows}))
    assert report.main(["--output", str(tmp_path / "all"), "--real", *files]) == 0
    assert len(json.loads((tmp_path / "all").read_text())["real"]["schedules"]) == 1000
    with pytest.raises(SystemExit):
        report.main(["--output", str(tmp_path / "all"), "--real", *files[:1], *files[:1]])


def test_parts_come_one_after_the_other(tmp_path: Path) -> None:
    code, page = _reported(tmp_path, virtual=VIRTUAL, planted=PLANTED, planted_real=PLANTED_REAL)
    assert code == 0
    code, page = _reported(tmp_path, real={"schema": 1, "schedules": REAL})
    assert code == 0
    assert [row["measured"] for row in page["rows"]] == [
        "10,000 in 15 minutes, 0 violated",
        "1,000 at c0ffee with 1,000 faults and doings of users, 0 violated",
        "1000",
        "1000",
        "1000 of 1000",
        f"{len(FAULTS)} of {len(FAULTS)}, the last after 2 s",
        f"{len(BUGS)} of {len(BUGS)}, the last after 2 s",
    ]
    assert page["tables"]["kinds"]["rows"] == [["hosts", "1000", "2000", "1000", "0"]]
    assert [row["seed"] for row in page["real"]["schedules"]] == list(range(1000))


@pytest.mark.parametrize(
    ("part", "page"),
    [
        ("virtual", {**VIRTUAL, "schedules": 9_999}),
        ("virtual", {**VIRTUAL, "violations": {"7": ["a job is lost"]}}),
        ("planted", _planted(FAULTS, None)),
        ("planted", _planted(FAULTS[:1])),
        ("planted_real", _planted(())),
        ("planted_real", _planted((*BUGS[1:], FAULTS[0]))),
        ("real", {"schedules": REAL[1:]}),
        ("real", {"schedules": [*REAL[1:], _schedule(0, commit="beef")]}),
        ("real", {"schedules": [*REAL[1:], _schedule(0, violations=["a job is lost"])]}),
        ("real", {"schedules": [*REAL[1:], _schedule(0, skipped="no namespaces")]}),
        ("real", {"schedules": [*REAL[1:], _schedule(0, walltimes=[1, 0])]}),
        ("real", {"schedules": [_schedule(seed, torch=False) for seed in range(1000)]}),
        ("real", {"schedules": [_schedule(seed, hosts=1) for seed in range(1000)]}),
    ],
)
def test_less_than_that_does_not_pass(tmp_path: Path, part: str, page: dict[str, Any]) -> None:
    assert _reported(tmp_path, **{part: page})[0] == 1
