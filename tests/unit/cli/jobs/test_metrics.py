"""`hpcsched metrics`: what a job has logged, as a table, CSV and JSON."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import msgspec
import pytest
from click import UsageError
from click.testing import CliRunner, Result
from rundirs import a_home, a_run

from hpcsched.cli.jobs import metrics
from hpcsched.cli.main import cli
from hpcsched.contract import files
from hpcsched.contract.metrics import Point
from hpcsched.errors import ConfigError, HpcschedError
from hpcsched.store.rundir import RunDir
from hpcsched.store.status import read_status

LOGGED = (
    Point(10, 1.5, 1, {"loss": 2.0, "lr": 0.1}),
    Point(20, 2.5, 1, {"loss": 1.0, "lr": 0.1}),
    Point(20, 3.5, 2, {"loss": 0.9, "lr": 0.05}),  # once more, after a crash
    Point(20, 4.5, 2, {"val, loss": 1.25}),
    Point(30, 5.5, 2, {"loss": float("nan"), "lr": 0.05}),
)


@pytest.fixture(autouse=True)
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = a_run(a_home(tmp_path, monkeypatch) / "hpcsched-run")
    path = RunDir(folder).job(1) / files.METRICS
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(point.encode() for point in LOGGED))


def hpcsched(*words: str) -> Result:
    return CliRunner().invoke(cli, ["metrics", *words], standalone_mode=False)


def test_a_table_has_a_row_for_each_step() -> None:
    assert [line.split() for line in hpcsched("job-1").stdout.splitlines()] == [
        ["STEP", "loss", "lr", "val,", "loss"],
        ["10", "2", "0.1"],
        ["20", "0.9", "0.05", "1.25"],
        ["30", "nan", "0.05"],
    ]
    assert hpcsched("job-1", "-n", "2").stdout.split()[-7:-3] == ["20", "0.9", "0.05", "1.25"]
    shown = hpcsched("1", "-m", "val, loss").stdout
    assert [line.split() for line in shown.splitlines()] == [["STEP", "val,", "loss"], ["20", "1.25"]]


def test_a_narrow_terminal_shows_what_fits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    metrics._show([Point(1, 0.0, 1, {"a" * 12: 1.0, "b": 2.0, "c": 3.0})], ["a" * 12, "b", "c"])
    said = capsys.readouterr()
    assert said.out.splitlines()[0] == "STEP  aaaaaaaaaaaa"
    assert said.err == "no room for b, c: --metric NAME, --csv or --json has them\n"


def test_csv_has_a_row_for_each_point_and_json_the_same() -> None:
    rows = list(csv.DictReader(hpcsched("job-1", "--csv").stdout.splitlines()))
    assert [row["step"] for row in rows] == ["10", "20", "20", "30"]
    assert rows[1] == {"step": "20", "t": "3.5", "attempt": "2", "loss": "0.9", "lr": "0.05", "val, loss": ""}
    page = json.loads(hpcsched("job-1", "--json", "-n", "2").stdout)
    assert (page["schema"], page["id"], page["name"]) == (1, 1, "job-1")
    assert page["points"] == [
        {"step": 20, "t": 4.5, "attempt": 2, "val, loss": 1.25},
        {"step": 30, "t": 5.5, "attempt": 2, "loss": None, "lr": 0.05},
    ]


def test_of_several_jobs_each_has_a_line_with_what_it_has_told_last(tmp_path: Path) -> None:
    rundir = RunDir(Path("hpcsched-run").absolute())
    page = read_status(rundir)
    page.jobs[1].metrics = {"loss": 0.5}
    rundir.status.write_bytes(msgspec.json.encode(page))
    path = rundir.job(3) / files.METRICS
    path.parent.mkdir(parents=True)
    path.write_bytes(b"".join(Point(n, 1.0, 1, {"loss": 3.0 / n, "acc": 0.5}).encode() for n in (1, 2)))
    header, *rows = [line.split() for line in hpcsched("--sort", "loss").stdout.splitlines()]
    assert header == ["JOBID", "NAME", "ST", "STEP", "loss", "lr", "val,", "loss", "acc"]
    assert [(row[0], row[4]) for row in rows] == [("2", "0.5"), ("3", "1.5"), ("1", "nan")]
    assert [line.split()[0] for line in hpcsched("--sort", "-loss").stdout.splitlines()[1:]] == [
        "3",
        "2",
        "1",
    ]
    table = csv.DictReader(hpcsched("2-3", "--csv").stdout.splitlines())
    assert [(row["name"], row["loss"], row["acc"]) for row in table] == [
        ("job-2", "0.5", ""),
        ("job-3", "1.5", "0.5"),
    ]
    page = json.loads(hpcsched("1,3", "-m", "loss", "--json").stdout)
    assert [(job["id"], job["metrics"]) for job in page["jobs"]] == [(1, {"loss": None}), (3, {"loss": 1.5})]
    assert "--sort: 'x'; accepted: loss" in str(hpcsched("--sort", "x").exception)
    for wrong in (["1", "--sort", "loss"], ["-n", "2"]):
        assert isinstance(hpcsched(*wrong).exception, UsageError)


def test_what_is_not_there_is_said() -> None:
    assert "job 2 (job-2) has logged no metrics: it is RUNNING" in str(hpcsched("2").exception)
    wrong = hpcsched("1", "-m", "accuracy").exception
    assert isinstance(wrong, ConfigError) and "accepted: loss, lr, val, loss" in str(wrong)
    assert isinstance(hpcsched("9").exception, HpcschedError)
    assert "none of these jobs" in str(hpcsched("2-3").exception)
