"""Functions as jobs: what is put into the run directory, and what is taken from there."""

from __future__ import annotations

import os
import pickle
from concurrent.futures import CancelledError
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rundirs import a_home

from hpcsched import Executor, Run
from hpcsched.agent.inbox import Inbox
from hpcsched.client import functions, names
from hpcsched.client.keys import Keys
from hpcsched.contract import files
from hpcsched.errors import ConfigError, NoSuchRun, StoreError, UnknownJob
from hpcsched.jobfile.keys import Job as JobKeys
from hpcsched.store.rundir import RunDir
from hpcsched.worker.call import Call


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run folder in which no agent has begun."""
    a_home(tmp_path, monkeypatch)
    return Run()


def train(lr: float, *, seed: int = 0) -> float:
    """A function of a user."""
    return lr + seed


def test_the_keyword_arguments_are_the_keys_of_a_job_file_and_no_others() -> None:
    assert Keys.__annotations__.keys() == JobKeys.__dataclass_fields__.keys() - {"command", "matrix", "array"}


def test_what_is_submitted_where_no_agent_runs_waits_for_one(run: Run) -> None:
    first = run.submit(train, 1e-3)
    second = run.submit(["python", "net.py"], steps=10, after=first)
    third = run.submit(partial(train, seed=1), 0.5, name="mine", gpus=2, env={"A": "b"})
    assert [job.name for job in run.jobs] == ["train", "net", "mine"]
    assert {job.state for job in run.jobs} == {"PENDING"} and first.record()["reason"] == "NoAgent"
    assert run.job("mine") == third and run.job(2) == second
    with pytest.raises(UnknownJob, match="did you mean 'mine'"):
        run.job("mind")
    specs = {spec.name: spec for spec in _waiting(run)}
    assert specs["net"].after == ("train",) and specs["net"].retries == 2
    assert (specs["mine"].gpus_min, specs["mine"].retries, dict(specs["mine"].env)) == (2, 0, {"A": "b"})
    call = Call._make(pickle.loads(Path(specs["mine"].command[-1]).read_bytes()))
    assert pickle.loads(call.function)() == 1.5
    assert first.cancel()  # and with it what waited for it
    assert [job.state for job in run.jobs] == ["CANCELLED", "CANCELLED", "PENDING"]


def test_a_map_is_one_array(run: Run) -> None:
    jobs = run.map(train, [1, 2, 3], at_once=2)
    assert [job.name for job in jobs] == ["train-1", "train-2", "train-3"]
    arrays = [spec.array for spec in _waiting(run)]
    assert [(one.name, one.index, one.at_once) for one in arrays if one] == [
        ("train", 1, 2),
        ("train", 2, 2),
        ("train", 3, 2),
    ]
    assert {spec.model for spec in _waiting(run)} == {"train"}
    assert [job.name for job in run.map(train, [1])] == ["train-4-1"]
    assert run.submit(train, 1).name == "train-5"
    assert run.map(train, []) == []


@pytest.mark.parametrize(
    ("what", "keys", "message"),
    [
        ("python train.py", {}, "a function, or a list of words"),
        (["python", 3], {}, "a function, or a list of words"),
        ([], {}, "a function, or a list of words"),
        (train, {"gpu": 2}, "unknown key"),
        (train, {"gpus": -1}, "gpus"),
        (train, {"at_once": 2}, "at_once with `map`"),
        (train, {"after": ["nobody"]}, "nobody"),
        (lambda: os.scandir("."), {"name": "a b"}, "name"),
        (partial(train, os.scandir(".")), {}, "that can be pickled"),
    ],
)
def test_what_is_wrong_is_said_in_one_line_and_submits_nothing(
    run: Run, what: Any, keys: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        run.submit(what, **keys)
    assert "\n" not in str(caught.value)
    assert run.jobs == []


def test_arguments_are_for_functions(run: Run) -> None:
    with pytest.raises(ConfigError, match="those of a function"):
        run.submit(["python"], 3)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80",
        pickle.dumps(3),
        pickle.dumps((1, 2, 3, 4)),
        pickle.dumps((1, True, b"no", ""))[:-5],
    ],
)
def test_an_outcome_that_makes_no_sense_is_an_error_of_its_own(tmp_path: Path, content: bytes) -> None:
    rundir = RunDir(tmp_path)
    rundir.job(1).mkdir(parents=True)
    (rundir.job(1) / files.OUTCOME).write_bytes(content)
    with pytest.raises(StoreError, match="cannot be understood"):
        functions.outcome(rundir, 1)


class _Runs:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_an_outcome_of_somebody_else_or_behind_a_link_is_not_unpickled(tmp_path: Path) -> None:
    rundir, ran = RunDir(tmp_path / "run"), tmp_path / "ran"
    rundir.job(1).mkdir(parents=True)
    file, elsewhere = rundir.job(1) / files.OUTCOME, tmp_path / "elsewhere"
    elsewhere.write_bytes(pickle.dumps(_Runs(ran)))
    file.symlink_to(elsewhere)
    with pytest.raises(StoreError):
        functions.outcome(rundir, 1)
    file.unlink()
    elsewhere.rename(file)
    if os.geteuid() == 0:  # else no file can be given to somebody else
        os.chown(file, 54321, -1)
        with pytest.raises(StoreError, match="it comes from user 54321"):
            functions.outcome(rundir, 1)
        assert not ran.exists()
        os.chown(file, 0, -1)
    with pytest.raises(StoreError):
        functions.outcome(rundir, 1)
    assert ran.exists(), "one's own is"


def test_a_result_that_cannot_be_loaded_here_is_told(tmp_path: Path) -> None:
    rundir = RunDir(tmp_path)
    rundir.job(1).mkdir(parents=True)
    pickled = b"cnowhere_at_all\nThing\n."
    (rundir.job(1) / files.OUTCOME).write_bytes(pickle.dumps((1, True, pickled, "")))
    with pytest.raises(StoreError, match="cannot be loaded here: ModuleNotFoundError"):
        functions.outcome(rundir, 1)
    assert functions.outcome(rundir, 2) is None


def test_an_executor_refuses_what_no_job_can_have_before_it_starts_anything(run: Run) -> None:
    with pytest.raises(ConfigError, match="devices"):
        Executor(devices="cpu:2")  # type: ignore[call-arg]
    assert not run.dir.exists()


@pytest.mark.long
def test_a_future_of_a_job_that_was_taken_back_ends(run: Run) -> None:
    future = Executor(run).submit(train, 1.0)
    assert run.cancel(future.job) == 1
    with pytest.raises((CancelledError, NoSuchRun)):
        future.result(timeout=30)


def test_names_are_those_of_functions_and_programs() -> None:
    assert names.fit(names.function(partial(partial(train, 1)))) == "train"
    assert names.fit(names.function(lambda: 0)) == "lambda"
    assert names.fit(names.function(Keyed())) == "Keyed"
    assert names.fit("ü" * 80) == "job" and len(names.fit("x" * 80)) == names.LONGEST


class Keyed:
    """Something to call."""

    def __call__(self) -> None:
        """Nothing."""


def _waiting(run: Run) -> list[Any]:
    return [spec for _, command in Inbox.peek(RunDir(run.dir)) for spec in command.jobs]
