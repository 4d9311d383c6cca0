"""A run from Python: functions as jobs of a real agent, and the executor on top."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from pathlib import Path

import pytest

from hpcsched import Executor, Job, JobFailed, Link, Run
from hpcsched.errors import HpcschedError, NoSuchRun
from hpcsched.worker.link import Wish


@contextlib.contextmanager
def started(folder: Path) -> Iterator[Run]:
    """A run with an agent on two slots, which is ended; the user's own click.py is none of its business."""
    (folder / "click.py").write_text("raise SystemExit(__file__)")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("XDG_STATE_HOME", str(folder / "state"))
        run = Run.start(devices="cpu:2", idle_timeout="600s")
        yield run
        run.stop()


@pytest.fixture(scope="module")
def common(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    with started(tmp_path_factory.mktemp("run")) as run:
        yield run


@pytest.fixture
def run(common: Run) -> Iterator[Run]:
    """The same one for all tests, none of which leaves jobs to the next."""
    yield common
    common.cancel()


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


class OnlyHere(Exception):
    """Is not made of its text, as unpickling would make it."""

    def __init__(self, *, one: int) -> None:
        super().__init__(f"{one} of 2")


def raise_what_cannot_be_loaded() -> None:
    raise OnlyHere(one=1)


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
    failed_oddly = run.submit(raise_what_cannot_be_loaded)
    with pytest.raises(JobFailed, match="OnlyHere: 1 of 2"):
        failed_oddly.result(timeout=30)
    assert "quotient" in repr(run.table()) and "FAILED" in run._repr_html_()


def test_jobs_that_are_submitted_at_the_same_time_are_not_each_other(run: Run) -> None:
    """Names that were given a moment ago are in no status yet."""
    here, there = [run, Run(run.dir)], [run.submit(pow, 2, 0)]
    there += [here[i % 2].submit(pow, 2, i) for i in range(1, 6)]
    assert len({job.name for job in there}) == 6
    assert [job.result(timeout=30) for job in there] == [1, 2, 4, 8, 16, 32]


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


class Linked:
    """Counts to 100 with a link of its own: it saves the count, as a training saves its state."""

    def __call__(self) -> tuple[int, int]:
        link = Link()
        first = int(link.checkpoint.read_text()) if link.checkpoint else 0
        link.ready(parallel=False)
        for step in range(first, 100):
            time.sleep(0.001 if first else 0.05)
            link.report(step + 1)
            if link.wishes() & Wish.STOP:
                path = link.place(step + 1)
                path.write_text(str(step + 1))
                link.saved(step + 1, path)
                link.leave()
        return 100, first


def test_a_function_with_a_link_goes_on_from_what_that_has_saved(run: Run) -> None:
    job = run.submit(Linked(), steps=100)
    until(lambda: (job.step or 0) > 3)
    assert job.suspend()
    until(lambda: job.state == "SUSPENDED")
    assert job.resume()
    steps, first = job.result(timeout=30)
    assert steps == 100 and first > 3


def test_jobs_of_one_array_have_labels_and_are_cancelled_at_once(run: Run) -> None:
    jobs = run.map(time.sleep, [100] * 4, labels=["a=1", "a=2", "b/ü", "b" * 99], name="nap")
    assert [job.name for job in jobs[:3]] == ["nap-a=1", "nap-a=2", "nap-b--"]
    assert len(jobs[3].name) == 64
    with pytest.raises(TimeoutError):
        run.wait(jobs, timeout=0.1)
    until(lambda: jobs[0].state == "RUNNING")
    assert run.cancel(jobs[:3]) == 3 and not run.wait(jobs[:3], timeout=30)
    states = [row["state"] for row in run.table() if str(row["name"]).startswith("nap-")]
    assert states == ["CANCELLED"] * 3 + [jobs[3].state]
    assert run.cancel() == 1
    again = run.map(abs, [1, 2], labels=["1", "2"])
    more = run.map(abs, [1, 2], labels=["x", "1"])
    assert [job.name for job in again + more] == ["abs-1", "abs-2", "abs-3-x", "abs-3-1"]
    with pytest.raises(HpcschedError, match="labels"):
        run.map(abs, [1, 2], labels=["1"])


def test_of_several_ranks_the_first_one_gives_the_result(run: Run) -> None:
    def last() -> str:
        time.sleep(float(os.environ["RANK"]))
        return os.environ["RANK"]

    assert run.submit(last, gpus=2, processes="per-gpu").result(timeout=30) == "0"


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


def test_what_a_function_may_do_to_its_process(run: Run) -> None:
    def saves(_: int) -> float:
        from hpcsched import Link

        link = Link()
        place = link.place(7)
        place.write_text("state")
        link.report(7, total=7)
        link.saved(7, place)
        return 0.5

    def leaves(code: int) -> None:
        os._exit(code)

    saved = run.submit(saves, 1)
    gone = [run.submit(leaves, code, name=f"leaves-{code}") for code in (0, 3)]
    large = run.submit(lambda: 10**400)
    assert saved.result(timeout=30) == 0.5 and saved.record()["metrics"] == {"result": 0.5}
    checkpoint = saved.checkpoint()
    assert checkpoint is not None and checkpoint.read_text() == "state" and saved.step == 7
    for job, state in zip(gone, ("COMPLETED", "FAILED"), strict=True):
        with pytest.raises(JobFailed):
            job.result(timeout=30)
        assert job.state == state
    assert large.result(timeout=30) == 10**400


def test_modules_are_found_as_in_the_script_that_has_submitted(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder, text in ((run.dir.parent, "here"), (run.dir.parent / "scripts", "script")):
        folder.mkdir(exist_ok=True)
        (folder / "whose.py").write_text(f"TEXT = {text!r}")
    monkeypatch.syspath_prepend(run.dir.parent / "scripts")

    def found() -> str:
        import whose  # type: ignore[import-not-found]

        return str(whose.TEXT)

    assert run.submit(found).result(timeout=30) == "script"


def test_a_run_that_ends_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    with started(tmp_path) as run:
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
