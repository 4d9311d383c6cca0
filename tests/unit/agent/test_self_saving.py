"""What is told of a program that saves by itself, how it is asked to, and what its end means."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpcsched.agent import self_saving
from hpcsched.agent.own_checkpoints import OwnCheckpoints, Saved
from hpcsched.agent.self_saving import SAVING_SEEN_S, SETTLES_WITHIN_S, STARTS_WITHIN_S, Seen, SelfSaving
from hpcsched.core.events import CheckpointSaved, Event, RestartSeen, SavingSeen
from hpcsched.core.model import Restart
from hpcsched.testing.launch import FIRST_PID, FakeWorkers, Script

TERM = Restart(checkpoints=("c-*",))
USR1 = replace(TERM, signal="SIGUSR1", saved_codes=(144,))
GOES = replace(TERM, signal="")
OUTSIDE = replace(TERM, suspend_command=("dump", "{pid}"))


class Program:
    """An attempt whose thread never looks: what is seen of it the test says, and the time too."""

    def __init__(self, folder: Path, restart: Restart, patch: pytest.MonkeyPatch, **more: Any) -> None:
        patch.setattr(self_saving, "time", self)
        patch.setattr(self_saving.threading.Thread, "start", self._refuse)
        self.now = 1000.0
        self.workers = FakeWorkers([FIRST_PID], Script(on_signal={}))
        checkpoints = OwnCheckpoints(restart, folder=folder, workdir=folder)
        self.saving = SelfSaving(restart, checkpoints, self.workers, **more)

    @staticmethod
    def _refuse(*_: object) -> None:
        raise RuntimeError

    def monotonic(self) -> float:
        return self.now

    def sees(self, *, handles: bool = False, step: int | None = None, changed: bool = False) -> None:
        saved = None if step is None else Saved(Path(f"c-{step}"), step, float(step), (step, 1, 1))
        changed_at = self.now if changed else self.saving.seen.changed_at
        self.saving.seen = Seen(handles, saved, changed_at)
        if handles:
            self.workers.caught = {signal.SIGTERM, signal.SIGUSR1}

    def news(self, after_s: float = 1.0, **more: Any) -> list[Event]:
        self.now += after_s
        return list(self.saving.news(500.0, 500.0, job_id=1, attempt=2, speed=1.0, **more))

    def code(self, code: int, *, unasked: bool = False, done: bool = False) -> int:
        return self.saving.code(code, unasked=unasked, done=done)


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    made: list[Program] = []

    def make(restart: Restart = TERM, **more: Any) -> Program:
        made.append(Program(tmp_path, restart, monkeypatch, **more))
        return made[-1]

    yield make
    for one in made:
        one.workers.close()


def seen(*, handles: bool, step: int | None = None) -> RestartSeen:
    saved_at = None if step is None else float(step)
    return RestartSeen(at=500.0, job_id=1, attempt=2, handles=handles, step=step, saved_at=saved_at)


def test_it_is_told_when_its_handler_is_there_and_whenever_that_changes(program: Any) -> None:
    one = program()
    assert one.news() == []
    one.sees(handles=True)
    assert one.news() == [seen(handles=True)]
    assert one.news() == []
    one.sees(handles=True, step=10)
    assert one.news() == [seen(handles=True, step=10)]
    one.sees(handles=True)  # its only one is being written over
    assert one.news() == []
    one.sees(handles=False, step=10)
    assert one.news() == [seen(handles=False, step=10)]


def test_without_a_handler_it_is_told_once_it_has_had_time_to_start(program: Any) -> None:
    one = program()
    assert one.news(STARTS_WITHIN_S - 1) == []
    assert one.news(2.0) == [seen(handles=False)]


def test_one_that_has_told_a_step_has_started(program: Any) -> None:
    one = program()
    assert one.news() == []
    assert one.news(trains=True) == [], "its handlers may have come after that look"
    one.saving.seen = replace(one.saving.seen, at=one.now + 0.5)
    assert one.news(trains=True) == [seen(handles=False)]
    one.sees(handles=True)
    assert one.news(trains=True) == [seen(handles=True)], "late, and all the same"


def test_one_that_has_saved_has_started(program: Any) -> None:
    one = program()
    one.sees(step=10)
    assert one.news() == [seen(handles=False, step=10)]


def test_that_it_still_saves_is_told_only_when_it_is_asked_to_leave_and_not_too_often(program: Any) -> None:
    one = program()
    one.sees(handles=True, changed=True)
    one.news()
    one.saving.ask(30.0)
    assert one.news() == [], "what it wrote before"
    told = []
    for _ in range(9):
        one.now += 0.5
        one.sees(handles=True, changed=True)
        told += one.news(0.0)
    assert told == [SavingSeen(at=500.0, job_id=1, attempt=2)] * 3
    assert one.news(10 * SAVING_SEEN_S) == [], "nothing has changed since"


def test_one_whose_training_is_done_is_left_to_end(program: Any) -> None:
    one = program(TERM)
    one.sees(handles=True, step=60)
    one.saving.seen = replace(one.saving.seen, newest=replace(one.saving.seen.newest, done=True))
    one.saving.ask(30.0)
    assert one.workers.signals == [] and one.saving.asked_at is not None
    assert one.saving.done(0)


@pytest.mark.parametrize(
    ("restart", "handles", "sent"),
    [
        (TERM, True, signal.SIGTERM),
        (USR1, True, signal.SIGUSR1),
        (USR1, False, signal.SIGTERM),
        (GOES, True, signal.SIGTERM),
    ],
)
def test_how_it_is_asked(program: Any, restart: Restart, handles: bool, sent: signal.Signals) -> None:
    one = program(restart)
    one.sees(handles=handles)
    one.saving.ask(30.0)
    assert one.workers.signals == [sent]


@pytest.mark.parametrize(
    ("restart", "code", "newer", "means"),
    [
        (TERM, 0, True, 75),
        (TERM, 1, True, 75),
        (TERM, 143, True, 75),
        (TERM, 0, False, 0),
        (TERM, 143, False, 143),
        (TERM, 75, False, 75),
        (USR1, 144, False, 75),
    ],
)
def test_what_its_end_means_when_it_was_asked(
    program: Any, restart: Restart, code: int, newer: bool, means: int
) -> None:
    one = program(restart)
    one.sees(handles=True, step=10)
    one.saving.ask(30.0)
    one.sees(handles=True, step=20 if newer else 10)
    assert one.code(code) == means
    if code == 0:
        assert one.code(0, unasked=True) == one.code(0, done=True) == 0


def test_without_a_handler_it_goes_on_until_what_it_has_just_saved_is_whole(program: Any) -> None:
    one = program()
    one.saving._done.clear()  # somebody looks
    one.sees(step=10, changed=True)
    one.saving.ask(30.0)
    assert one.workers.signals == [] and one.saving.settles, (
        "what it has saved since the last look is not known"
    )
    one.saving.seen = replace(one.saving.seen, settling=True, at=one.now)
    one.news()
    assert one.workers.signals == []
    one.saving.seen = replace(one.saving.seen, settling=False, at=one.now)
    one.news()
    assert one.workers.signals == [signal.SIGTERM] and not one.saving.settles
    assert not one.saving.done(0)
    one.news()
    assert one.workers.signals == [signal.SIGTERM]


def test_what_ends_meanwhile_has_ended_by_itself(program: Any) -> None:
    one = program()
    one.saving._done.clear()
    one.saving.ask(30.0)
    one.saving.seen = replace(one.saving.seen, at=one.now)
    one.saving.looked(0)
    assert one.saving._ended is True and one.workers.signals == []
    assert one.saving.done(0), "nobody has told it to"
    assert not one.saving.done(1)
    one.news(2 * SETTLES_WITHIN_S)
    assert one.saving.done(0), "nor after its end"


def test_a_handler_that_comes_meanwhile_is_asked(program: Any) -> None:
    one = program()
    one.saving._done.clear()
    one.sees(step=10)
    one.saving.ask(30.0)
    one.sees(handles=True, step=20)
    one.news(SETTLES_WITHIN_S)
    assert not one.saving.done(0)
    assert one.workers.signals == [signal.SIGTERM] and one.code(0) == 75


@pytest.mark.parametrize(("grace_s", "waits_s"), [(4.0, 2.0), (300.0, SETTLES_WITHIN_S)])
def test_it_does_not_go_on_for_long(program: Any, grace_s: float, waits_s: float) -> None:
    one = program()
    one.saving._done.clear()
    one.saving.ask(grace_s)
    one.saving.seen = replace(one.saving.seen, settling=True, at=one.now)
    one.news(waits_s - 0.1)
    assert one.workers.signals == []
    assert not one.saving.looked(1) and one.saving._ended is False
    one.news(0.2)
    assert one.workers.signals == [signal.SIGTERM]


def test_a_look_that_fails_does_not_end_the_watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_saving, "LOOK_S", 0.01)
    checkpoints, looks = OwnCheckpoints(TERM, folder=tmp_path, workdir=tmp_path), list[float]()

    def look(now: float) -> None:
        looks.append(now)
        if len(looks) == 1:
            raise RuntimeError("odd name")

    monkeypatch.setattr(checkpoints, "look", look)
    saving = SelfSaving(TERM, checkpoints, FakeWorkers([FIRST_PID], Script(on_signal={})))
    deadline = time.monotonic() + 20.0
    while len(looks) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    while not saving.looked(1):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert saving.detail == "its checkpoints could not be looked at: odd name"


def test_one_that_could_not_have_heard_has_not_saved_for_that(program: Any) -> None:
    one = program()
    one.sees(step=10)
    one.saving.ask(30.0)
    one.sees(step=20)
    assert one.code(143) == 143
    assert one.saving.saved_step(25, record=None) == 20


def test_unasked_its_end_is_its_own(program: Any) -> None:
    one = program(USR1)
    one.sees(handles=True, step=10)
    assert [one.code(code) for code in (0, 1, 144)] == [0, 1, 75]


@pytest.mark.parametrize(
    ("code", "handles", "launcher", "by_itself"),
    [
        (0, True, False, True),
        (0, False, False, False),
        (75, False, False, True),
        (143, True, False, True),
        (143, False, False, False),
        (1, True, False, False),
        (1, True, True, True),
        (137, True, True, False),
    ],
)
def test_whether_it_may_have_been_in_the_middle_of_a_save(
    program: Any, monkeypatch: pytest.MonkeyPatch, code: int, handles: bool, launcher: bool, by_itself: bool
) -> None:
    one = program(launcher=launcher)
    one.sees(handles=handles)
    one.saving.ask(30.0)
    one.saving.looked(code)
    assert one.saving._ended is by_itself


@pytest.mark.parametrize(("result", "sent", "means"), [((0, ""), "KILL", 75), ((3, "no room"), "TERM", 74)])
def test_a_command_saves_it(program: Any, result: tuple[int, str], sent: str, means: int) -> None:
    one = program(OUTSIDE)
    one.saving.ask(30.0)
    assert one.workers.save_command == ("dump", "{pid}")
    assert one.workers.signals == []
    assert not one.saving.looked(137), "it has ended the program, and is not over yet"
    one.workers.saved_by = result
    assert one.saving.looked(137)
    assert one.workers.signals[0] is signal.Signals[f"SIG{sent}"]
    assert one.code(137) == means
    if result[0]:
        assert one.saving.detail == "suspend_command ended with exit code 3: no room"
    else:
        assert one.saving.saved_step(40, record=None) == 40


def test_a_command_that_never_ends_holds_nothing_up(program: Any) -> None:
    one = program(OUTSIDE)
    one.saving.ask(30.0)
    one.now += 60.0
    assert one.saving.looked(137)
    assert one.code(137) == 137


def test_a_checkpoint_that_is_not_there_any_more_is_told(program: Any) -> None:
    one = program(gone=True)
    assert one.news() == [CheckpointSaved(at=500.0, job_id=1, attempt=2, step=0)]
    assert one.news() == []
