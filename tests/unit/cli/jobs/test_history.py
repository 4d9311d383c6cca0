"""What `history` shows of finished jobs."""

from __future__ import annotations

import json
from pathlib import Path

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
