"""What `history` shows of finished jobs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from hpcsched.cli.main import cli
from hpcsched.store.database import Database, FinishedJob, RunEntry

AT = "2026-01-01T00:00:00.000Z"


def a_job(job_id: int, max_rss_bytes: int | None) -> FinishedJob:
    return FinishedJob(
        run_id="r",
        job_id=job_id,
        name=f"j{job_id}",
        model="m",
        state="FAILED",
        exit=137,
        submit_s=0.0,
        start_s=0.0,
        end_s=60.0,
        submit_at=AT,
        start_at=AT,
        end_at=AT,
        gpu_hours=0.05,
        steps=None,
        steps_repeated=None,
        suspensions=0,
        gpus_max=1,
        max_rss_bytes=max_rss_bytes,
    )


def test_memory_is_spelt_as_sacct_does_and_counted_in_bytes_for_programs(tmp_path: Path) -> None:
    sizes = [None, 700, 123 * 2**20, 5 * 2**28, 3 * 2**40]
    path = tmp_path / "h.db"
    with Database(path) as db:
        db.record_run(RunEntry(run_id="r", directory="/d", host="n", policy="marble", gpus=1, started_at=AT))
        db.record_jobs(a_job(number, size) for number, size in enumerate(sizes, 1))
    asked = ["history", "--all", "--database", str(path)]
    shown = CliRunner().invoke(cli, [*asked, "--parsable"], standalone_mode=False).stdout
    rows = [line.split("|") for line in shown.splitlines() if "|" in line]  # older click has stderr here too
    at = rows[0].index("MAXRSS")
    assert sorted(row[at] for row in rows[1:]) == sorted(["-", "700", "123M", "1.2G", "3T"])
    assert {row[rows[0].index("EXIT")] for row in rows[1:]} == {"0:9"}
    told = json.loads(CliRunner().invoke(cli, [*asked, "--json"], standalone_mode=False).stdout)
    assert {job["job_id"]: job["max_rss_bytes"] for job in told["jobs"]} == dict(enumerate(sizes, 1))
    chosen = CliRunner().invoke(cli, [*asked, "--parsable", "-o", "maxrss,jobid", "--noheader"]).stdout
    assert {line for line in chosen.splitlines() if "|" in line} >= {"123M|3", "-|1"}
    wrong = CliRunner().invoke(cli, [*asked, "-o", "jobid,color"], standalone_mode=False).exception
    assert "JOBID, NAME, MODEL" in str(wrong)


def test_a_narrow_terminal_does_without_what_matters_least(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "h.db"
    name = "a-name-that-is-never-cut-" * 2
    with Database(path) as db:
        db.record_run(RunEntry(run_id="r", directory="/d", host="n", policy="marble", gpus=1, started_at=AT))
        db.record_jobs([replace(a_job(1, 700), name=name)])
    asked = ["history", "--all", "--database", str(path)]

    def heads(width: int | None, *words: str) -> list[str]:
        monkeypatch.setattr("hpcsched.cli.jobs.history.room", lambda: width)
        shown = CliRunner().invoke(cli, [*asked, *words], standalone_mode=False).stdout.splitlines()[:2]
        assert words or width is None or max(map(len, shown)) <= max(width, len(name) + 24)
        assert name in shown[1]
        return shown[0].split()

    everything = heads(None)
    assert len(everything) == 12 and heads(200) == everything
    assert heads(126) == [head for head in everything if head not in ("SUSP", "MODEL")]
    assert heads(20) == ["JOBID", "NAME", "STATE", "EXIT"]
    assert heads(20, "-o", "jobid,name,model") == ["JOBID", "NAME", "MODEL"]
