"""`status` without a sign of life asks the batch system once; `status --all` lists the user's runs."""

from __future__ import annotations

import json
import os
import re
import stat
import threading
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from click.testing import CliRunner, Result
from rundirs import a_home, a_run

from hpcsched import batch
from hpcsched.batch.base import BatchJobState
from hpcsched.cli.jobs import batch_job_status
from hpcsched.cli.jobs.columns import FIELDS, LONG_FORMAT
from hpcsched.cli.main import cli
from hpcsched.core.model import JobState
from hpcsched.errors import NoSuchRun, UnknownJob
from hpcsched.store import registry
from hpcsched.store.rundir import RunDir

HERE = os.uname().nodename


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """A batch system of which every job waits in the queue; what it was asked."""
    questions: list[tuple[str, str]] = []
    answer_as(monkeypatch, BatchJobState.PENDING, questions)
    return questions


def answer_as(
    monkeypatch: pytest.MonkeyPatch,
    life: BatchJobState,
    questions: list[tuple[str, str]] | None = None,
    why: str = "",
) -> None:
    def batch_of(kind: str, *, cluster: str | None) -> SimpleNamespace:
        def ask(job_id: str) -> BatchJobState:
            if questions is not None:
                questions.append((kind, job_id))
            return life

        return SimpleNamespace(job_state=ask, why_waiting=lambda job_id: why)

    monkeypatch.setattr(batch, "batch_of", batch_of)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return a_home(tmp_path, monkeypatch)


def status(*words: str) -> Result:
    return CliRunner().invoke(cli, ["status", *words])


def test_a_living_run_is_never_asked_after(home: Path, asked: list[tuple[str, str]]) -> None:
    a_run(home / "hpcsched-run", age_s=9, left_s=3600)
    done = status()
    assert done.exit_code == 0 and asked == []
    assert re.search(r"this is 0:(09|1\d) old", done.stderr)
    assert re.search(r"slurm job 123 ends in (1:00:00|59:[45]\d)", done.stderr)


def test_a_stale_run_outside_a_batch_system_is_not_asked_after(
    home: Path, asked: list[tuple[str, str]]
) -> None:
    a_run(home / "hpcsched-run", age_s=60, kind="none")
    assert re.search(r"is gone; last seen 1:\d\d ago\. Go on with `hpcsched run --resume`", status().stderr)
    assert asked == []


@pytest.mark.parametrize(
    ("life", "says"),
    [
        (
            BatchJobState.RUNNING,
            "its job 123 still runs on slurm: the agent may hang or the shared filesystem lag",
        ),
        (BatchJobState.PENDING, "job 123 waits in the queue of slurm: it goes on by itself"),
        (BatchJobState.SUSPENDED, "its job 123 is suspended on slurm"),
        (BatchJobState.ENDED, "job 123 has ended: go on with `hpcsched run --resume`"),
        (BatchJobState.UNKNOWN, "slurm does not answer"),
    ],
)
def test_a_stale_run_is_asked_after_once(
    home: Path, monkeypatch: pytest.MonkeyPatch, life: BatchJobState, says: str
) -> None:
    questions: list[tuple[str, str]] = []
    answer_as(monkeypatch, life, questions)
    a_run(home / "hpcsched-run", age_s=60)
    done = status()
    assert says in done.stderr and questions == [("slurm", "123")]
    assert "no sign of the agent on elsewhere" in done.stderr and re.search(r"\b1:[0-5]\d", done.stderr)
    assert json.loads(status("--json").stdout)["run"]["allocation"]["life"] == life.value


def test_a_stopped_run_whose_job_was_requeued_says_so(home: Path, asked: list[tuple[str, str]]) -> None:
    a_run(home / "hpcsched-run", state="STOPPED")
    assert (
        "stopped with work left; job 123 waits in the queue of slurm: it goes on by itself" in status().stderr
    )


@pytest.mark.parametrize(
    ("life", "why", "says"),
    [
        (BatchJobState.PENDING, "BeginTime", "waits in the queue of slurm (BeginTime): it goes on by itself"),
        (BatchJobState.PENDING, "DependencyNeverSatisfied", "never starts: go on with"),
        (
            BatchJobState.HELD,
            "JobHeldUser",
            "is held in the queue of slurm (JobHeldUser): `scontrol release 123`",
        ),
        (
            BatchJobState.HELD,
            "launch failed requeued held",
            "an operator may have to: `scontrol release 123`",
        ),
    ],
)
def test_why_a_job_that_came_back_does_not_run(
    home: Path, monkeypatch: pytest.MonkeyPatch, life: BatchJobState, why: str, says: str
) -> None:
    answer_as(monkeypatch, life, why=why)
    a_run(home / "hpcsched-run", state="STOPPED")
    assert says in status().stderr


def test_a_living_agent_that_is_silent_may_be_suspended(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer_as(monkeypatch, BatchJobState.SUSPENDED)
    a_run(home / "hpcsched-run", age_s=60, host=HERE)
    assert "slurm job 123 is suspended for 1:0" in status().stderr


@pytest.mark.parametrize(
    ("age_s", "joinable", "says"),
    [
        (60, True, "joined takes the run over; if none does within a minute, go on with"),
        (100, True, "waits in the queue"),
        (60, False, "waits in the queue"),
    ],
)
def test_of_hosts_that_joined_another_agent_takes_over_for_a_while(
    home: Path, asked: list[tuple[str, str]], age_s: float, joinable: bool, says: str
) -> None:
    rundir = RunDir(a_run(home / "hpcsched-run", age_s=age_s))
    record = rundir.read_record()
    assert record
    rundir.write_record(msgspec.structs.replace(record, joinable=joinable))
    assert says in status().stderr


def test_a_batch_system_that_hangs_costs_a_moment_only(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    never = threading.Event()
    monkeypatch.setattr(
        batch, "batch_of", lambda *_, **__: SimpleNamespace(job_state=lambda job: never.wait(30))
    )
    monkeypatch.setattr(batch_job_status, "ANSWER_WITHIN_S", 0.05)
    a_run(home / "hpcsched-run", age_s=60)
    assert "slurm does not answer" in status().stderr
    never.set()


def test_all_lists_the_runs_newest_first(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter((1.0, 2.0, 3.0))
    monkeypatch.setattr(registry.time, "time", lambda: next(times))
    for name, more in (("one", {"age_s": 60.0}), ("two", {"state": "FINISHED"}), ("three", {"host": HERE})):
        a_run(home / name, run_id=name, **more)  # type: ignore[arg-type]
        assert registry.register(name, home / name) is None
    monkeypatch.undo()
    monkeypatch.setenv("XDG_STATE_HOME", str(home / "XDG_STATE_HOME"))
    monkeypatch.chdir(home)
    lines = [line.split() for line in status("--all").stdout.splitlines()]
    assert lines[0] == ["STATE", "ALLOCATION", "AGE", "DONE", "LEFT", "DIR"]
    assert [(line[0], line[-3:]) for line in lines[1:]] == [
        ("RUNNING", ["1", "2", str(home / "three")]),
        ("FINISHED", ["1", "2", str(home / "two")]),
        ("STALE", ["1", "2", str(home / "one")]),
    ]
    page = json.loads(status("--all", "--json").stdout)
    assert [(run["id"], run["stale"], run["done"]) for run in page["runs"]] == [
        ("three", False, 1),
        ("two", False, 1),
        ("one", True, 1),
    ]


def test_runs_fit_a_narrow_terminal_and_no_folder_is_cut(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    away = home.parent / f"{home.name}-away"
    for n, folder in enumerate((home / "inside", away)):
        a_run(folder, run_id=f"r{n}", jobs=(JobState.COMPLETED,))
        registry.register(f"r{n}", folder)

    def lines(width: int | None) -> list[str]:
        monkeypatch.setattr("hpcsched.cli.jobs.status.room", lambda: width)
        return status("--all").stdout.splitlines()[:3]

    everything = lines(None)
    assert {line.split()[-1] for line in everything} == {"DIR", str(away), str(home / "inside")}
    widest = max(map(len, everything))
    assert lines(widest) == everything
    heads = dict.fromkeys(tuple(lines(width)[0].split()) for width in range(widest, 0, -1))
    gone = [{*before} - {*after} for before, after in pairwise(heads)]
    assert gone == [{"AGE"}, {"DONE"}, {"LEFT"}, {"ALLOCATION"}]
    assert "inside" in {line.split()[-1] for line in lines(1)}


def test_all_takes_no_jobs(home: Path) -> None:
    assert status("--all", "1").exit_code == 2
    assert status("--all").exit_code == 0


def test_counts_alone_and_more_columns(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_run(home / "hpcsched-run", jobs=(JobState.RUNNING, JobState.PENDING, JobState.PENDING, JobState.FAILED))

    def shown(*words: str) -> list[str]:
        done = CliRunner().invoke(cli, ["status", *words], standalone_mode=False)
        return done.stdout.splitlines()

    assert shown("--stats-only")[0] == "1 failed, 2 pending, 1 running"
    assert shown("--stats-only", "--states", "PD")[0] == "2 pending"
    assert {"STATE", "ROLE", "ATTEMPT"} <= set(shown("--long")[0].split())
    assert [line.split()[0] for line in shown("-o", "help")] == list(FIELDS)
    everything = shown("--long")
    monkeypatch.setattr("hpcsched.cli.jobs.status.room", lambda: 80)
    assert max(map(len, everything)) > 80 >= max(map(len, shown("--long")))
    assert shown("-o", LONG_FORMAT) == everything


def test_without_a_run_here_the_living_ones_are_named(home: Path) -> None:
    a_run(home / "alive")
    registry.register("r1", home / "alive")
    done = status()
    assert isinstance(done.exception, NoSuchRun)
    assert f"your live run is in {home / 'alive'}" in str(done.exception)
    assert "hpcsched status --all" in str(done.exception) and "\n" not in str(done.exception)
    assert "live run" not in str(status("--dir", "nowhere").exception)


def test_where_a_job_is_of_an_earlier_run_that_is_named(home: Path) -> None:
    def said(*words: str) -> str:
        done = CliRunner().invoke(cli, list(words), standalone_mode=False)
        assert isinstance(done.exception, (UnknownJob, NoSuchRun))
        return str(done.exception)

    first = a_run(home / "hpcsched-run", state="FINISHED", jobs=(JobState.COMPLETED,) * 3)
    RunDir(first).journal.write_text("\n")
    submitted = CliRunner().invoke(cli, ["submit", "--name", "later", "true"], standalone_mode=False)
    assert submitted.return_value == 0 and (home / "hpcsched-run-2").is_dir()
    for command in ("logs", "metrics", "status", "explain"):
        assert said(command, "job-3").endswith("an earlier run has one: --dir hpcsched-run"), command
    for command in ("history", "efficiency", "report"):
        assert said(command).endswith("has begun here is that of --dir hpcsched-run"), command
    assert "earlier" not in said("logs", "nosuch") + said("--dir", "hpcsched-run-2", "logs", "job-3")


def test_the_registry_is_private_and_forgets_what_is_gone(home: Path) -> None:
    folder = registry.folder()
    for name in ("a", "b"):
        a_run(home / name, run_id=name)
        registry.register(name, home / name)
    assert stat.S_IMODE((folder / "a.json").stat().st_mode) == 0o600
    (home / "a").rename(home / "moved")
    a_run(home / "b", run_id="another")  # the directory was emptied and used again
    (folder / "odd.json").write_text("{")
    assert registry.runs() == []
    assert sorted(path.name for path in folder.iterdir()) == ["odd.json"]


def test_a_run_on_a_filesystem_that_is_not_mounted_here_is_not_forgotten(home: Path) -> None:
    registry.register("r", home / "scratch" / "me" / "run")
    assert registry.runs() == []
    a_run(home / "scratch" / "me" / "run", run_id="r")
    assert [run.id for run in registry.runs()] == ["r"]


def test_a_registry_that_cannot_be_written_is_one_line(home: Path) -> None:
    (home / "XDG_STATE_HOME").write_text("a file")
    said = registry.register("r", home)
    assert said and "status --all" in said and "\n" not in said
    assert registry.runs() == []


def test_a_snapshot_that_is_nested_too_deep_is_refused(home: Path) -> None:
    folder = a_run(home / "hpcsched-run")
    for odd in (b'{"x":' + b"[" * 200_000 + b"]" * 200_000 + b"}", b'{"jobs":[' + b'{"a":' * 200_000 + b"1"):
        (folder / "status.json").write_bytes(odd)
        for words in ((), ("--json",)):
            told = CliRunner().invoke(cli, ["status", *words], standalone_mode=False).exception
            assert "cannot be understood" in str(told)
