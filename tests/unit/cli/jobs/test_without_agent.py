"""Jobs submitted where no agent runs are seen, explained, and taken back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from rundirs import a_home, a_run

from hpcsched.agent.inbox import Command, Inbox, send
from hpcsched.cli.main import cli
from hpcsched.client.run import Run
from hpcsched.core.model import JobState
from hpcsched.errors import ConfigError, NoSuchRun
from hpcsched.store.run_folders import waits
from hpcsched.store.rundir import RunDir


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return a_home(tmp_path, monkeypatch)


def hpcsched(*words: str) -> Result:
    return CliRunner().invoke(cli, words, standalone_mode=False)


def submit(name: str, *options: str) -> None:
    done = hpcsched("submit", "--name", name, *options, "--", "true")
    assert done.exit_code == 0, done.stderr


def names(folder: Path) -> list[str]:
    return [job.name for _, command in Inbox.peek(RunDir(folder)) for job in command.wanted]


def test_they_are_seen_with_their_reason_and_what_takes_them(home: Path) -> None:
    submit("a")
    submit("b", "--steps", "50")
    shown = hpcsched("status")
    assert shown.exit_code == 0
    assert shown.stdout.count("PD") == 2 and shown.stdout.count("(NoAgent)") == 2 and "-/50" in shown.stdout
    assert "no agent runs: `hpcsched run` takes the 2 jobs that wait" in shown.stderr
    page = json.loads(hpcsched("status", "--json").stdout)
    assert (page["run"]["state"], page["run"]["agent"]) == ("PENDING", None)
    assert [(job["id"], job["name"], job["state"]) for job in page["jobs"]] == [
        (1, "a", "PENDING"),
        (2, "b", "PENDING"),
    ]


def test_explain_says_what_they_wait_for(home: Path) -> None:
    submit("a")
    told = hpcsched("explain", "a")
    assert "because: waits for an agent" in told.stdout and "next: `hpcsched run` takes it" in told.stdout
    assert json.loads(hpcsched("explain", "1", "--json").stdout)["reason"]["code"] == "NoAgent"


def test_they_can_be_cancelled_and_with_them_what_waits_for_them(home: Path) -> None:
    for name, after in (("a", ()), ("b", ("--after", "a")), ("c", ("--after", "b")), ("d", ())):
        submit(name, *after)
    done = hpcsched("cancel", "b")
    assert done.return_value == 0 and "job 2 (b): cancelled" in done.stderr
    assert "job c: cancelled: it waited for one of these" in done.stderr
    assert names(home / "hpcsched-run") == ["a", "d"]
    assert hpcsched("cancel", "a,d").return_value == 0 and names(home / "hpcsched-run") == []


def test_a_cancelled_one_is_still_seen_and_leaves_its_name_to_another(home: Path) -> None:
    submit("a")
    assert hpcsched("cancel", "a").return_value == 0
    shown = hpcsched("status", "--states", "all")
    assert "CA" in shown.stdout and "(Cancelled)" in shown.stdout and "no agent runs" not in shown.stderr
    assert "because: cancelled by the user" in hpcsched("explain", "a").stdout
    submit("a")
    (line,) = (line for line in hpcsched("status", "--states", "all").stdout.splitlines() if " a " in line)
    assert "(NoAgent)" in line


def test_a_cancelled_one_keeps_no_folder(home: Path) -> None:
    folder = a_run(home / "hpcsched-run", state="FINISHED", age_s=1e5, jobs=(JobState.COMPLETED,))
    (folder / "journal.jsonl").write_text("{}\n")
    submit("a")
    assert waits(RunDir(home / "hpcsched-run-2"))
    assert hpcsched("cancel", "a").return_value == 0 and not waits(RunDir(home / "hpcsched-run-2"))
    assert "CA" in hpcsched("status", "--states", "all").stdout


def test_ids_are_no_names_as_they_are_given_later(home: Path) -> None:
    for name in ("a", "b"):
        submit(name)
    for key in ("1", "1-9", "a,2"):
        refused = hpcsched("cancel", key)
        assert isinstance(refused.exception, ConfigError) and "a, b" in str(refused.exception)
    assert names(home / "hpcsched-run") == ["a", "b"]


def test_a_name_that_waits_is_not_given_to_another(home: Path) -> None:
    submit("a")
    refused = hpcsched("run", "--devices", "cpu:1", "--name", "a", "--", "true")
    assert isinstance(refused.exception, ConfigError) and names(home / "hpcsched-run") == ["a"]


def test_what_else_waits_is_said_and_keeps_the_folder(home: Path) -> None:
    folder = a_run(home / "hpcsched-run", state="FINISHED", age_s=1e5, jobs=(JobState.FAILED,))
    (folder / "journal.jsonl").write_text("{}\n")
    send(RunDir(folder), Command(command="retry", targets=[1]))
    assert "a retry of job-1 waits: `hpcsched run --resume` does it" in hpcsched("status").stderr
    submit("a")
    assert names(folder) == ["a"] and not (home / "hpcsched-run-2").exists()
    done = hpcsched("cancel", "job-1", "a")
    assert done.return_value == 0 and "stays as it is: what waited for it is taken back" in done.stderr
    assert not waits(RunDir(folder))
    submit("b")
    assert names(home / "hpcsched-run-2") == ["b"]


def test_names_may_be_numbers(home: Path) -> None:
    for name in ("2024-05", "7"):
        submit(name)
    assert hpcsched("cancel", "2024-05,7").return_value == 0 and names(home / "hpcsched-run") == []


def test_other_files_in_the_inbox_keep_no_folder(home: Path) -> None:
    folder = a_run(home / "hpcsched-run", state="FINISHED", age_s=1e5, jobs=(JobState.COMPLETED,))
    (folder / "journal.jsonl").write_text("{}\n")
    (folder / "inbox" / "new" / ".nfs1").write_text("x")
    send(RunDir(folder), Command(command="drain"))
    submit("a")
    assert names(home / "hpcsched-run-2") == ["a"]


def test_the_name_of_an_array_stands_for_its_jobs(home: Path) -> None:
    submit("other")
    submit("a", "--array", "1-3")
    done = hpcsched("cancel", "a")
    assert done.return_value == 0 and done.stderr.count("cancelled") == 3
    assert names(home / "hpcsched-run") == ["other"]


def test_one_of_a_file_of_several_is_taken_back_alone(home: Path) -> None:
    (home / "jobs.toml").write_text(
        'schema = 1\n[[job]]\nname = "a"\ncommand = ["true"]\n[[job]]\nname = "b"\ncommand = ["true"]\n'
    )
    assert hpcsched("submit", "jobs.toml").exit_code == 0
    assert hpcsched("cancel", "a").exit_code == 0 and names(home / "hpcsched-run") == ["b"]


def test_commands_on_jobs_of_a_stopped_run_are_left_to_the_next_agent(home: Path) -> None:
    jobs = (JobState.SUSPENDED, JobState.PENDING, JobState.HELD, JobState.COMPLETED)
    folder = a_run(home / "mine", state="STOPPED", age_s=1e5, kind="none", jobs=jobs)

    def told(command: str, *words: str, code: int = 0) -> str:
        done = hpcsched(command, "--dir", str(folder), *words)
        assert done.return_value == code, done.stderr
        return done.stderr

    assert hpcsched("submit", "--dir", str(folder), "--name", "new", "--", "true").exit_code == 0
    said = told("cancel", "job-1,job-4,new")
    assert "(job-1): is to be cancelled" in said and "(new): cancelled" in said
    assert "(job-4): is COMPLETED already: nothing to cancel" in said
    assert f"the next `hpcsched run --resume --dir {folder}` does it" in said
    assert "is to be cancelled already" in told("cancel", "1", code=1)
    assert "is to be cancelled already" in told("hold", "1", code=1)
    assert "neither held" in told("release", "2", code=1)
    assert "is to be held" in told("hold", "2") and "is held already" in told("hold", "2-3", code=1)
    assert "is to go on" in told("release", "2-3")
    left = [(c.command, c.targets) for _, c in Inbox.peek(RunDir(folder)) if c.command != "submit"]
    assert left == [("cancel", [1]), ("hold", [2]), ("release", [2, 3])]
    shown = hpcsched("status", "--dir", str(folder))
    assert "a cancel of job-1 waits" in shown.stderr and "a release of job-2, job-3 waits" in shown.stderr


def test_python_leaves_them_by_the_same_rules(home: Path) -> None:
    jobs = (JobState.PENDING, JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED)
    folder = a_run(home / "mine", state="STOPPED", age_s=1e5, kind="none", jobs=jobs)
    waits, over, failed, with_it = Run(folder).jobs
    for job in (waits, over, with_it):
        assert not job.resume()
    assert waits.cancel() and not waits.cancel() and not over.cancel() and not with_it.cancel()
    with pytest.raises(NoSuchRun):
        waits.suspend()
    assert failed.retry() and with_it.cancel(), "a retry of one brings back those cancelled with it"
    left = [(c.command, c.targets) for _, c in Inbox.peek(RunDir(folder))]
    assert left == [("cancel", [1]), ("retry", [3]), ("cancel", [4])]
    assert failed.cancel() and Run(folder).cancel() == 0, "what waited for it is taken back"
    assert [c.command for _, c in Inbox.peek(RunDir(folder))] == ["cancel", "cancel"]


def test_a_cancel_follows_the_retry_that_brings_a_job_back(home: Path) -> None:
    folder = a_run(home / "mine", state="STOPPED", age_s=1e5, jobs=(JobState.FAILED, JobState.CANCELLED))
    send(RunDir(folder), Command(command="retry", targets=[1]))
    said = hpcsched("cancel", "--dir", str(folder), "job-2")
    assert said.return_value == 0 and "follows the retry that waits" in said.stderr
    assert "follows the retry" in hpcsched("hold", "--dir", str(folder), "job-1").stderr


def test_waiting_for_them_would_be_for_ever(home: Path) -> None:
    submit("a")
    done = hpcsched("wait")
    assert isinstance(done.exception, NoSuchRun) and "`hpcsched run` takes the job that waits" in str(
        done.exception
    )


def test_other_commands_say_that_no_agent_runs(home: Path) -> None:
    submit("a")
    done = hpcsched("suspend", "a")
    assert isinstance(done.exception, NoSuchRun)
    assert str(done.exception).count("no agent runs") == 1 and "none has begun" not in str(done.exception)
    for command in ("hold", "release"):
        done = hpcsched(command, "a")
        assert done.return_value == 1 and "waits for an agent: it can be cancelled" in done.stderr


def test_a_submit_after_a_finished_run_waits_for_the_next_one(home: Path) -> None:
    folder = a_run(home / "hpcsched-run", state="FINISHED", age_s=1e5, jobs=(JobState.COMPLETED,))
    (folder / "journal.jsonl").write_text("{}\n")
    submit("a")
    assert names(home / "hpcsched-run-2") == ["a"] and names(folder) == []
    assert "(NoAgent)" in hpcsched("status").stdout
