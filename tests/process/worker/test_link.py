"""`hpcsched.Link`: what code that owns its training says to the agent, and hears."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hiccups import Hiccups

import hpcsched
from hpcsched import patience
from hpcsched.errors import ConfigError
from hpcsched.worker.link import Link, Wish
from hpcsched.worker.process.contract import JobEnv
from hpcsched.worker.session import stopping
from hpcsched.worker.session.stopping import StopFlag


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This process is rank 0 of attempt 2; the job's folder."""
    told = {
        "JOB_ID": "3",
        "ATTEMPT": "2",
        "RUN_DIR": str(tmp_path),
        "JOB_DIR": str(tmp_path / "job"),
        "NOTIFY_PID": str(os.getppid()),
        "RESUME": "1",
        "KEEP": "2",
    }
    for name, value in told.items():
        monkeypatch.setenv(f"HPCSCHED_{name}", value)
    monkeypatch.setattr(JobEnv, "wake_agent", lambda self: None)  # our parent is no agent
    (tmp_path / "job").mkdir()
    return tmp_path / "job"


@pytest.fixture(autouse=True)
def handlers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Flags that other tests have left open are not ours."""
    monkeypatch.setattr(stopping, "_handlers", stopping._Handlers())
    numbers = (signal.SIGTSTP, signal.SIGTERM, signal.SIGCHLD)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def again(monkeypatch: pytest.MonkeyPatch, attempt: int = 3) -> Link:
    """A link of the next attempt, as another process would make it."""
    monkeypatch.setenv("HPCSCHED_ATTEMPT", str(attempt))
    return Link()


def save(link: Link, step: int) -> Path:
    place = link.place(step)
    place.mkdir()
    (place / "model").write_text(str(step))
    link.saved(step, place, samples=step * 8)
    return place


def test_it_needs_neither_torch_nor_numpy() -> None:
    code = (
        "import hpcsched, sys; hpcsched.Link(); print(sorted({'torch', 'numpy', 'msgspec'} & {*sys.modules}))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ran.stdout == "[]\n", ran.stderr
    assert hpcsched.Link is Link


def test_without_hpcsched_it_has_no_effect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HPCSCHED_JOB_ID", raising=False)
    monkeypatch.chdir(tmp_path)
    before = signal.getsignal(signal.SIGTERM)
    link = Link()
    link.ready()
    link.report(1, 0.5)
    link.saved(1, tmp_path)
    link.finish({"accuracy": 1.0})
    assert not link.active and link.checkpoint is None and link.wishes() is Wish.NOTHING
    assert (link.rank, link.world_size, link.local_rank, link.steps) == (0, 1, 0, None)
    assert signal.getsignal(signal.SIGTERM) is before and not list(tmp_path.iterdir())
    with pytest.raises(RuntimeError, match="without hpcsched"):
        link.place(1)


def test_without_hpcsched_the_rank_is_torchruns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HPCSCHED_JOB_ID", raising=False)
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    assert (Link().rank, Link().world_size, Link().local_rank) == (3, 4, 1)


def test_a_training_begins_saves_and_leaves(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = Link()
    assert (link.checkpoint, link.step, link.wishes()) == (None, 0, Wish.NOTHING)
    link.ready()
    assert json.loads((job / "ready.2").read_text()) == {"parallel": True}
    os.kill(os.getpid(), signal.SIGTSTP)
    assert link.wishes() is Wish.STOP
    place = save(link, 7)
    assert (link.checkpoint, link.step) == (place, 7)
    with pytest.raises(SystemExit) as left:
        link.leave()
    assert left.value.code == 75
    assert (job / "left.2").exists(), "whatever a framework's teardown ends with"
    state = json.loads((job / "STATE.json").read_text())
    assert {key: state[key] for key in ("step", "samples", "checkpoint", "attempt")} == {
        "step": 7,
        "samples": 56,
        "checkpoint": str(place),
        "attempt": 2,
    }
    after = again(monkeypatch)
    assert (after.checkpoint, after.step) == (place, 7)


def test_the_stop_file_is_enough(job: Path) -> None:
    (job / "stop.2").touch()
    assert Link().wishes() is Wish.STOP


def test_a_file_system_that_answers_nothing_for_a_moment_ends_no_training(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither where it looks for the stop file, nor where it goes on, or saves."""
    hiccups = Hiccups(job, monkeypatch)
    link, now = Link(), time.monotonic()
    hiccups.fails(1)
    monkeypatch.setattr(time, "monotonic", lambda: now + 10.0)
    assert link.wishes() is Wish.NOTHING and hiccups.left == 0
    for calls in range(3):
        hiccups.fails(1, errno.ESTALE, after=calls)
        save(link, 7 + calls)
        assert hiccups.left == 0
    for calls in range(4):
        hiccups.fails(1, after=calls)
        assert again(monkeypatch, attempt=3 + calls).step == 9
        hiccups.fails(0)


def test_where_the_record_cannot_be_read_it_does_not_begin_anew(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(Link(), 7)
    hiccups = Hiccups(job, monkeypatch)
    monkeypatch.setattr(patience, "PATIENCE_S", 0.0)
    for calls in range(3):
        hiccups.fails(100, after=calls)
        with pytest.raises(OSError, match="Input/output"):
            again(monkeypatch, attempt=3 + calls)
    hiccups.fails(0)
    assert again(monkeypatch, attempt=9).step == 7


def test_one_that_begins_anew_deletes_nothing_of_which_it_does_not_know(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPCSCHED_KEEP", "1")
    good = save(Link(), 500)
    (job / "STATE.json").write_text("{")
    assert save(again(monkeypatch), 10).is_dir() and good.is_dir()
    link = again(monkeypatch, attempt=4)
    assert link.step == 10
    save(link, 20)
    assert not good.exists(), "what is newer than the record was being written when an attempt died"


def test_a_lost_agent_is_a_reason_to_save_and_leave(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = Link()
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert link.wishes() is Wish.STOP


def test_a_periodic_checkpoint_is_due_on_rank_0(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCSCHED_CHECKPOINT_EVERY_S", "0")
    link = Link()
    assert link.wishes() is Wish.SAVE
    monkeypatch.setenv("HPCSCHED_CHECKPOINT_EVERY_S", "1000")
    other = Link()
    assert other.wishes() is Wish.NOTHING
    monkeypatch.setenv("HPCSCHED_CHECKPOINT_EVERY_S", "0")
    monkeypatch.setenv("HPCSCHED_RANK", "1")
    monkeypatch.setenv("HPCSCHED_WORLD_SIZE", "2")
    assert Link().wishes() is Wish.NOTHING


def test_one_that_failed_is_due_again_in_its_time(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCSCHED_CHECKPOINT_EVERY_S", "10")
    link = Link()
    now = time.monotonic()
    for later, wish in [(11, Wish.SAVE), (12, Wish.SAVE), (21, Wish.NOTHING), (23, Wish.SAVE)]:
        monkeypatch.setattr(time, "monotonic", lambda later=later: now + later)
        assert link.wishes() is wish
        if later == 12:
            link.not_saved()
    assert not (job / "STATE.json").exists()


def test_two_links_hear_the_same_and_one_may_close(job: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    callback, own = Link(), Link()
    os.kill(os.getpid(), signal.SIGTSTP)
    assert callback.wishes() is own.wishes() is Wish.STOP
    own.saved(3, _file(job / "mine"))
    assert callback.step == 3, "what one has said, the other knows"
    callback.finish()
    late = Link()
    os.kill(os.getpid(), signal.SIGTERM)
    assert late.wishes() is Wish.STOP and callback.wishes() is Wish.NOTHING
    own.close()
    late.close()
    assert signal.getsignal(signal.SIGTERM) is before


def test_ready_is_said_once_for_all_links(job: Path) -> None:
    Link().ready(parallel=False)
    Link().ready()
    assert (job / "ready.2").read_text() == "{}"


def test_signals_are_taken_again_from_a_framework(job: Path) -> None:
    """A framework takes signals in its `fit`, and gives them back at its end: to a link that is closed."""
    before = signal.getsignal(signal.SIGTERM)
    link = Link()
    ours = signal.signal(signal.SIGTERM, lambda *_: None)
    link.take_signals()
    os.kill(os.getpid(), signal.SIGTERM)
    assert link.wishes() is Wish.STOP
    link.close()
    assert signal.getsignal(signal.SIGTERM) is before

    told = []
    signal.signal(signal.SIGTERM, lambda *_: told.append(1))
    link = Link()
    ours = signal.signal(signal.SIGTERM, lambda *_: None)
    link.close()
    signal.signal(signal.SIGTERM, ours)
    os.kill(os.getpid(), signal.SIGTERM)
    assert told == [1], "then it does what it did before"


def test_a_forked_child_ends_at_sigterm(job: Path) -> None:
    """As `Process.terminate` of multiprocessing expects; it inherits the handlers."""
    flag = StopFlag(None)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    flag.install()
    pid = os.fork()
    if pid == 0:
        os.kill(os.getpid(), signal.SIGTSTP)  # not for it
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGTERM
    assert flag.wanted is None
    flag.close()


def test_in_another_thread_the_stop_file_tells(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[object] = []

    def training() -> None:
        link = Link()
        link.ready()
        (job / "stop.2").touch()
        seen.append(link.wishes())
        try:
            link.leave()
        except SystemExit as end:  # ends the thread, not the process
            seen.append(end.code)

    thread = threading.Thread(target=training)
    thread.start()
    thread.join(30)
    assert seen == [Wish.STOP, 75]
    assert (job / "ready.2").exists() and (job / "left.2").exists()
    assert capsys.readouterr().err.count("not in the main thread") == 1


def test_behind_a_launcher_it_leaves_with_0(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    link = Link()
    link.ready()
    assert (job / "ready.2").read_text() == "{}", "the launcher is not one of several ranks"
    with pytest.raises(SystemExit) as left:
        link.leave()
    assert left.value.code == 0 and (job / "left.2").exists()
    monkeypatch.setenv("RANK", "1")
    (job / "left.2").unlink()
    with pytest.raises(SystemExit):
        Link().leave()
    assert not (job / "left.2").exists()


@pytest.mark.parametrize("lost", ["deleted", "empty", "garbage"])
def test_a_checkpoint_that_is_not_whole_is_not_gone_on_from(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], lost: str
) -> None:
    place = save(Link(), 5)
    (place / "model").unlink()
    if lost == "deleted":
        place.rmdir()
    elif lost == "garbage":
        (job / "STATE.json").write_bytes(b"{" * 2_000_000)
    link = again(monkeypatch)
    assert link.checkpoint is None and link.step == 0
    said = capsys.readouterr().err
    assert said.count("this begins anew") == 1 and len(said) < 500


def test_one_with_somebody_elses_file_is_refused(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What frameworks put into checkpoints is run when it is read: by Keras, Lightning and others."""
    if os.geteuid() != 0:
        pytest.skip("only root can give a file to somebody else")
    place = save(Link(), 4)
    os.chown(place / "model", 54321, -1)
    with pytest.raises(ConfigError, match=r"checkpoint of step 4: .*/model belongs to user 54321") as refused:
        again(monkeypatch)
    assert "\n" not in str(refused.value)
    os.chown(place / "model", os.geteuid(), -1)
    assert again(monkeypatch).checkpoint == place


def test_what_was_being_written_is_passed_over(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Link()
    good = save(first, 5)
    first.place(9).mkdir()  # and then it died
    second = again(monkeypatch)
    assert second.checkpoint == good
    assert second.place(9) != first.place(9)


def test_as_many_places_stay_as_the_job_says(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = Link()
    places = [save(link, step) for step in (1, 2, 10)]
    (job / "checkpoint" / "mine").mkdir()
    (job / "checkpoint" / "step-3").touch()
    link.place(99).mkdir()
    assert [place.exists() for place in places] == [False, True, True]
    link = again(monkeypatch)
    last = save(link, 11)
    left = {path.name for path in (job / "checkpoint").iterdir()}
    assert left == {"mine", "step-3", places[2].name, last.name}, "what was half written goes, yours stays"


def test_results_are_put_on_record_at_the_end(job: Path) -> None:
    link = Link()
    link.report(4)
    link.finish({"loss": 0.5})
    state = json.loads((job / "STATE.json").read_text())
    assert (state["step"], state["checkpoint"], state["metrics"]) == (4, None, {"loss": 0.5})
    link = Link()
    place = save(link, 6)
    link.finish({"loss": float("nan")})
    state = json.loads((job / "STATE.json").read_text())
    assert (state["step"], state["checkpoint"], state["metrics"]) == (6, str(place), {"loss": None})


def test_what_cannot_be_saved_has_a_code_of_its_own(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    link = Link()
    link.report(4)
    with pytest.raises(SystemExit) as left:
        link.cannot_save(OSError("no room"))
    assert left.value.code == 74 and "step 4 could not be saved: no room" in capsys.readouterr().err


def test_progress_asks_for_the_loss_when_a_line_is_due(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Loss:
        asked = 0

        def __float__(self) -> float:
            self.asked += 1
            return float("nan")

    read, write = os.pipe()
    monkeypatch.setenv("HPCSCHED_PROGRESS_FD", str(write))
    link, loss = Link(), Loss()
    for step in range(1, 200):
        link.report(step, loss)
    assert 1 <= loss.asked < 20
    assert json.loads(os.read(read, 4096).splitlines()[0]).keys() == {"step", "t"}
    os.close(read)
    os.close(write)


def _file(path: Path) -> Path:
    path.write_text("x")
    return path
