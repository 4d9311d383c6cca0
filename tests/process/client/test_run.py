"""A run from Python: functions as jobs of a real agent, and the executor on top."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from pathlib import Path

import pytest

from hpcsched import Executor, Job, JobFailed, Run
from hpcsched.errors import HpcschedError, NoSuchRun


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """A run with an agent on two slots, which is ended."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    started = Run.start(devices="cpu:2", idle_timeout="60s")
    yield started
    started.stop()


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


class Counting:
    """Counts to `to`, and can be stopped anywhere; `speed`: numbers a second."""

    def __init__(self, to: int) -> None:
        self.at, self.to = 0, to

    def __call__(self, speed: float) -> tuple[int, int]:
        while self.at < self.to:
            time.sleep(1 / speed)
            self.at += 1
        return self.at, int(os.environ["HPCSCHED_ATTEMPT"])

    def checkpoint(self, speed: float) -> Callable[[], tuple[int, int]]:
        """What goes on."""
        return functools.partial(self, 10 * speed)


def test_functions_return_and_raise_as_if_they_were_called_here(run: Run) -> None:
    def divide(a: float, b: float) -> dict[str, float]:
        return {"quotient": a / b}

    fine, bad = run.map(divide, [6.0, 1.0], [3.0, 0.0])
    assert fine.result(timeout=30) == {"quotient": 2.0}
    assert fine.record()["metrics"] == {"quotient": 2.0}
    with pytest.raises(ZeroDivisionError) as caught:
        bad.result(timeout=30)
    assert "a / b" in caught.value.__notes__[0] or "in divide" in caught.value.__notes__[0]
    assert bad.state == "FAILED" and bad.record()["attempt"] == 1
    assert "ZeroDivisionError" in bad.log()
    assert not run.wait(timeout=30) and run.wait([fine])

    command = run.submit(["sh", "-c", "echo so long; exit 3"], retries=0)
    with pytest.raises(JobFailed, match="so long") as failed:
        command.result(timeout=30)
    assert failed.value.exit == 3

    odd = run.submit(lambda: (number for number in range(3)))
    with pytest.raises(JobFailed, match="cannot be pickled"):
        odd.result(timeout=30)
    assert "quotient" in repr(run.table()) and "FAILED" in run._repr_html_()


def test_an_object_with_checkpoint_goes_on_where_it_was(run: Run) -> None:
    job = run.submit(Counting(200), 20.0)
    until(lambda: bool(job.record().get("ready")))
    time.sleep(0.5)
    assert job.suspend()
    until(lambda: job.state == "SUSPENDED")
    saved = job.checkpoint()
    assert saved is not None and saved.is_file()
    assert job.resume()
    assert job.result(timeout=30) == (200, 2)


def test_an_executor_gives_results_in_order_and_cancels(run: Run) -> None:
    with Executor(run, gpus=1) as executor:
        assert list(executor.map(divmod, [7, 8], [3, 3], timeout=30)) == [(2, 1), (2, 2)]
        future = executor.submit(time.sleep, 100)
        until(future.running)
        assert future.cancel() and future.cancelled() and not future.running()
        with pytest.raises(CancelledError):
            future.result()
        assert future.job.wait(timeout=30) == "CANCELLED"
        raising = executor.submit(int, "x")
        assert isinstance(raising.exception(timeout=30), ValueError)
    with pytest.raises(RuntimeError, match="after shutdown"):
        executor.submit(int, "1")


def test_a_run_that_ends_is_not_waited_for_for_ever(run: Run) -> None:
    executor = Executor(run)
    future = executor.submit(time.sleep, 100)
    until(future.running)
    run.stop()
    with pytest.raises((NoSuchRun, CancelledError, JobFailed)):
        future.result(timeout=30)
    with pytest.raises(HpcschedError):
        Job(run, future.job.name).result(timeout=30)
    assert not run.alive


def test_an_agent_that_cannot_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(HpcschedError, match="--devices"):
        Run.start(devices="tpu:2")
    with pytest.raises(HpcschedError, match="No such option"):
        Run.start(device="cpu:2")
