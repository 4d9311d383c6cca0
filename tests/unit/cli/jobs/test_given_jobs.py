"""Jobs from a command line: names, values, arrays, variables, lines in scripts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from rundirs import a_home

from hpcsched.agent.inbox import Answer, Inbox
from hpcsched.cli.jobs import control
from hpcsched.cli.jobs.given_jobs import check_programs, exported, is_job_file, of_command
from hpcsched.cli.main import cli
from hpcsched.core.model import Container, JobSpec
from hpcsched.core.needs import Needs
from hpcsched.dialects.command import program_name
from hpcsched.errors import ConfigError
from hpcsched.store.rundir import RunDir


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return a_home(tmp_path, monkeypatch)


def made(*words: str, **rest: Any) -> tuple[JobSpec, ...]:
    return of_command(words, {}, where="submit", **rest)


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["python", "train.py", "--lr", "1"], "train"),
        (["/usr/bin/python3.11", "-u", "a/b/train.py"], "train"),
        (["python", "-m", "pkg.train", "x"], "train"),
        (["python", "-c", "print()"], "python"),
        (["bash", "run.sh"], "run"),
        (["./train.sh"], "train.sh"),
        (["torchrun", "train.py"], "torchrun"),
    ],
)
def test_a_job_is_named_after_its_program_name(words: list[str], name: str) -> None:
    assert program_name(words) == name and made(*words)[0].name == name


def test_a_name_that_is_taken_gets_a_number_for_all_of_its_array() -> None:
    assert made("x", taken=["x", "x-2"], numbered=True)[0].name == "x-3"
    jobs = made("x", "{a}", each=["a=1,2"], taken=["x-2", "x-2-1"], numbered=True)
    assert [job.name for job in jobs] == ["x-3-1", "x-3-2"]
    with pytest.raises(ConfigError, match="x"):
        made("x", name="x", taken=["x"], numbered=True)


def test_values_are_texts_as_they_are_written() -> None:
    jobs = made("x", "{lr}", "{s}", each=["lr=1e-3,0.10", "s=8..9"], at_once=2)
    assert [job.command[1:] for job in jobs] == [("1e-3", "8"), ("1e-3", "9"), ("0.10", "8"), ("0.10", "9")]
    assert {job.array.at_once for job in jobs if job.array} == {2}


@pytest.mark.parametrize(
    ("array", "numbers", "at_once"),
    [
        ("1-3", [1, 2, 3], None),
        ("0-15:5%2", [0, 5, 10, 15], 2),
        ("7,1-2,7", [7, 1, 2], None),
        ("4", [4], None),
    ],
)
def test_arrays_are_sbatchs(array: str, numbers: list[int], at_once: int | None) -> None:
    jobs = made("x", "{index}", array=array)
    assert [job.command[1] for job in jobs] == [str(n) for n in numbers]
    assert [job.array.index for job in jobs if job.array] == numbers
    assert {job.array.at_once for job in jobs if job.array} == {at_once}
    assert [job.name for job in jobs] == [f"x-{n}" for n in numbers]


@pytest.mark.parametrize(
    "array", ["", "3-1", "a", "1-2%", "1-2%0", "1-2%x", "1-", "-1", "1-5:0", "0-99999", "1-9999,10000-19999"]
)
def test_wrong_arrays_are_refused(array: str) -> None:
    with pytest.raises(ConfigError, match="--array"):
        made("x", array=array)


def test_ranges_stand_in_lists_and_paths_are_none() -> None:
    jobs = made("x", "{a}", each=["a=1..3,7,08..10,../data"])
    assert [job.command[1] for job in jobs] == ["1", "2", "3", "7", "08", "09", "10", "../data"]


def test_what_a_run_has_is_not_merged_with() -> None:
    assert made("x", "{a}", each=["a=1"], arrays=["x"], numbered=True)[0].name == "x-2"
    assert made("x", taken=["y"], arrays=["x"], numbered=True)[0].name == "x-2"
    with pytest.raises(ConfigError, match="array of this name"):
        made("x", name="x", arrays=["x"])


@pytest.mark.parametrize(
    "each",
    [
        ["a=5..1"],
        ["a=1..200000"],
        ["a=1..3,5..2"],
        ["a=1,"],
        ["a"],
        ["a="],
        ["=1"],
        ["a=1", "a=2"],
        ["index=1"],
        ["b=1"],
    ],
)
def test_wrong_values_are_refused(each: list[str]) -> None:
    with pytest.raises(ConfigError):
        made("x", "{a}", each=each)


@pytest.mark.parametrize(
    "rest", [{"at_once": 1}, {"each": ["a=1"], "array": "1"}, {"array": "1%2", "at_once": 2}]
)
def test_what_does_not_go_together_is_refused(rest: dict[str, Any]) -> None:
    with pytest.raises(click.UsageError):
        made("x", "{a}", **rest)


def test_job_files_and_commands_are_told_apart(home: Path) -> None:
    (home / "jobs").write_text("schema = 1")
    (home / "test").write_text("schema = 1")
    (home / "x").write_text("#!/bin/sh")
    (home / "x").chmod(0o700)
    for words in (["jobs.toml"], ["some/jobs.toml"], ["jobs"], ["test"]):
        assert is_job_file(words), words
    (home / "train.py").write_text("")
    for word, says in (("nothing", "no file, and no command"), ("./train.py", "`python ./train.py`")):
        with pytest.raises(ConfigError, match=says):
            is_job_file([word])
    assert not is_job_file(["nothing"], elsewhere=True)
    for words in ([], ["true"], ["./x"], ["jobs", "a"], ["echo", "a.toml"]):
        assert not is_job_file(words), words
    with pytest.raises(click.UsageError, match="one job file"):
        is_job_file(["a.toml", "b.toml"])


def test_variables_by_name_and_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOO", "bar")
    assert exported(["FOO,A=1", "B=x=y,"]) == {"FOO": "bar", "A": "1", "B": "x=y"}
    with pytest.raises(ConfigError, match="NONE: not set here"):
        exported(["NONE"])


SCRIPT = """#!/bin/sh
#SBATCH --gpus=8
#HPCSCHED --name fine --each lr=1,2   # and more

#HPCSCHED --export X=1
echo
#HPCSCHED --name late
"""


def test_lines_of_a_script_are_options_and_the_command_line_goes_first(home: Path) -> None:
    (home / "job.sh").write_text(SCRIPT)
    (home / "job.sh").chmod(0o700)
    for words in (["./job.sh", "{lr}"], ["--name", "mine", "--", "./job.sh", "{lr}"]):
        assert CliRunner().invoke(cli, ["submit", *words], standalone_mode=False).return_value == 0
    jobs = [job for _, command in Inbox.peek(RunDir(home / "hpcsched-run")) for job in command.jobs]
    assert [job.name for job in jobs] == ["fine-1", "fine-2", "mine-1", "mine-2"]
    assert all(job.env == {"X": "1"} for job in jobs)


def test_a_wrong_line_is_refused_with_its_number(home: Path) -> None:
    (home / "job.sh").write_text("#!/bin/sh\n#HPCSCHED --name 'x\n")
    done = CliRunner().invoke(cli, ["submit", "./job.sh"], standalone_mode=False)
    assert isinstance(done.exception, ConfigError) and "./job.sh:2" in str(done.exception)


def test_an_option_on_the_command_line_replaces_that_of_a_line(home: Path) -> None:
    (home / "job.sh").write_text("#!/bin/sh\n#HPCSCHED --each a=1,2 --at-once 1\n#HPCSCHED --export NONE\n")
    (home / "job.sh").chmod(0o700)
    for sweep in (["--each", "a=3,4"], ["--array", "5-6"]):
        words = [*sweep, "--export", "B=1", "--", "./job.sh", "{a}"]
        assert CliRunner().invoke(cli, ["submit", *words], standalone_mode=False).return_value == 0
    jobs = [job for _, command in Inbox.peek(RunDir(home / "hpcsched-run")) for job in command.jobs]
    assert [job.array.at_once for job in jobs if job.array] == [None] * 4
    assert all(job.env == {"B": "1"} for job in jobs)


def test_a_limit_on_the_command_line_goes_before_that_of_a_line(home: Path) -> None:
    for lines in ("--array 1-4%2", "--each a=1,2 --at-once 2"):
        (home / "job.sh").write_text(f"#!/bin/sh\n#HPCSCHED {lines}\n")
        (home / "job.sh").chmod(0o700)
        words = ["--at-once", "1", "--", "./job.sh", "{a}"]
        assert CliRunner().invoke(cli, ["submit", *words], standalone_mode=False).return_value == 0
    jobs = [job for _, command in Inbox.peek(RunDir(home / "hpcsched-run")) for job in command.jobs]
    assert [job.array.at_once for job in jobs if job.array] == [1] * 6


def test_an_environment_in_a_line_is_the_jobs(home: Path) -> None:
    (home / "job.sh").write_text("#!/bin/sh\n#HPCSCHED --conda mine\n")
    assert CliRunner().invoke(cli, ["submit", "./job.sh"], standalone_mode=False).return_value == 0
    ((_, command),) = Inbox.peek(RunDir(home / "hpcsched-run"))
    assert command.jobs[0].environment and command.jobs[0].environment.name == "mine"


@pytest.mark.parametrize("command", ["submit", "run"])
def test_a_program_that_is_not_there_is_refused_and_said_where_only_the_path_may_differ(
    command: str, home: Path
) -> None:
    (home / "x").write_text("#!/bin/sh")
    for word, says in (("nosuch", "no such"), ("./x", "chmod"), ("x", "./x"), ("./" + "x" * 300, "no such")):
        done = CliRunner().invoke(cli, [command, "--", word, "y"], standalone_mode=False)
        if command == "submit" and "/" not in word:  # the run may have another PATH
            assert done.return_value == 0 and says in done.output, word
        else:
            assert isinstance(done.exception, ConfigError) and says in str(done.exception), word


def test_a_program_that_is_elsewhere_or_made_by_others_is_not_looked_for(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for words in (["--name", "a", "true"], ["--after", "a", "--", "no"], ["--conda", "c", "--", "no"]):
        assert CliRunner().invoke(cli, ["submit", *words], standalone_mode=False).return_value == 0
    monkeypatch.setenv("HPCSCHED_PYTHON", "/env/bin/python")  # jobs that name no environment have this one
    assert CliRunner().invoke(cli, ["submit", "--", "no"], standalone_mode=False).return_value == 0
    (job,) = made("nosuch")
    check_programs([replace(job, container=Container(image="i", runtime="auto"))])


def test_an_agent_on_another_host_may_find_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "names_in", lambda rundir: (True, [], {}))
    monkeypatch.setattr(control, "ask", lambda rundir, command: Answer(ids=[1], outcomes=[""]))
    done = CliRunner().invoke(cli, ["submit", "--", "nosuch"], standalone_mode=False)
    assert done.return_value == 0 and "submitted all the same: 'nosuch': no such program" in done.output


def submitted(home: Path, *words: str) -> JobSpec:
    done = CliRunner().invoke(cli, ["submit", *words], standalone_mode=False)
    assert done.return_value == 0, done.exception
    return Inbox.peek(RunDir(home / "hpcsched-run"))[-1][1].jobs[-1]


def test_options_are_keys_by_sbatchs_names_also_in_a_script(home: Path) -> None:
    (home / "sub").mkdir()
    (home / "job.sh").write_text("#!/bin/sh\n#HPCSCHED -D sub -t 2h --mem 16G -c 4 -C A100\n")
    (home / "job.sh").chmod(0o700)
    job = submitted(home, "-t", "30m", "./job.sh")
    assert (job.workdir, job.command) == (str(home / "sub"), (str(home / "job.sh"),))
    assert job.needs == Needs(time_s=1800, memory_mib=16 * 1024, cpus_per_gpu=4, gpu_type="A100")
    assert submitted(home, "--chdir", "sub", "true").workdir == job.workdir


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["-t", "30"], "--time: 30: without a unit; accepted: 30m"),
        (["-t", "+30"], "--time: +30: without a unit; accepted: 30m"),
        (["-t", "x"], "--time: 'x'"),
        (["--mem", "16"], "--mem: '16'"),
        (["-c", "0"], "--cpus-per-gpu: 0"),
        (["-D", "nosuch"], "nosuch': no such folder"),
        (["--retries", "-1"], "--retries: -1"),
    ],
)
def test_wrong_options_are_refused_by_the_checks_of_keys(words: list[str], says: str, home: Path) -> None:
    (home / "job.sh").write_text(f"#!/bin/sh\n#HPCSCHED {' '.join(words)}\n")
    (home / "job.sh").chmod(0o700)
    for given in ([*words, "true"], ["./job.sh"]):
        done = CliRunner().invoke(cli, ["submit", *given], standalone_mode=False)
        assert isinstance(done.exception, ConfigError) and says in str(done.exception)


def test_a_trainer_is_submitted_with_its_arguments_numbers_as_such(home: Path) -> None:
    words = ["--trainer", "mine:Net", "--args", "lr={lr},deep=true", "--args", '{"width": 8}', "--each"]
    job = submitted(home, *words, "lr=1e-3,1e-2")
    assert (job.name, job.trainer, job.command) == ("Net-0.01", "mine:Net", ())
    assert job.args == {"lr": 0.01, "deep": True, "width": 8}
    for wrong in (["--args", "a=1", "true"], ["--trainer", "a:B", "true"]):
        done = CliRunner().invoke(cli, ["submit", *wrong], standalone_mode=False)
        assert isinstance(done.exception, click.UsageError)


def test_a_job_file_may_wait_for_an_array_of_the_run(home: Path) -> None:
    (home / "k.toml").write_text('schema = 1\n[[job]]\nname = "k"\ncommand = ["x"]\nafter = ["sw"]\n')
    for words in (["--name", "sw", "--array", "1-2", "--", "true"], ["k.toml"]):
        assert CliRunner().invoke(cli, ["submit", *words], standalone_mode=False).return_value == 0
    last = Inbox.peek(RunDir(home / "hpcsched-run"))[-1][1]
    assert last.jobs[0].after == ("sw-1", "sw-2")


@pytest.mark.parametrize("line", ["extra", "--help", "--name a -- b", "--nme a"])
def test_a_line_has_options_and_nothing_else(line: str, home: Path) -> None:
    (home / "job.sh").write_text(f"#!/bin/sh\n#HPCSCHED {line}\n")
    done = CliRunner().invoke(cli, ["submit", "./job.sh"], standalone_mode=False)
    assert isinstance(done.exception, ConfigError) and "./job.sh:2" in str(done.exception)


@pytest.mark.parametrize("words", [["--name", "x"], ["--gpus", "2"], ["--each", "a=1"], ["--export", "A=1"]])
def test_a_job_file_takes_no_options_of_commands(words: list[str], home: Path) -> None:
    (home / "jobs.toml").write_text('schema = 1\n[[job]]\nname = "a"\ncommand = ["x"]\n')
    done = CliRunner().invoke(cli, ["submit", *words, "jobs.toml"], standalone_mode=False)
    assert isinstance(done.exception, click.UsageError) and words[0] in str(done.exception)
