"""How long a foreground stands still for a guest, and what a guest does whose own process has gone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextvars import copy_context
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from hpcsched.worker.background import build_gate  # noqa: E402
from hpcsched.worker.background.build_gate import BuildGate, GuestBuild  # noqa: E402
from hpcsched.worker.background.rng_isolation import NotHostable  # noqa: E402
from hpcsched.worker.checkpoint.saving import Saves  # noqa: E402
from hpcsched.worker.process.contract import JobEnv  # noqa: E402
from hpcsched.worker.process.guest import GuestGone, HostedGuest, be_hosted  # noqa: E402
from hpcsched.worker.session.stopping import StopFlag  # noqa: E402

DEADLINE_S = 10.0


def never() -> bool:
    return False


@pytest.fixture
def meanwhile() -> Iterator[Callable[[Callable[[], object]], threading.Thread]]:
    """Does something in another thread, which has ended when the test has."""
    started: list[threading.Thread] = []

    def begin(what: Callable[[], object]) -> threading.Thread:
        started.append(threading.Thread(target=what, daemon=True))
        started[-1].start()
        return started[-1]

    yield begin
    for thread in started:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()


def test_a_guest_that_takes_too_long_is_sent_away_and_holds_no_later_step_up(
    monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[Callable[[], object]], threading.Thread]
) -> None:
    monkeypatch.setattr(build_gate, "BUILT_WITHIN_S", 0.1)
    place, visit, came = BuildGate(), GuestBuild(never), []
    guest = meanwhile(lambda: came.append(place.wait(visit)))
    deadline = time.monotonic() + DEADLINE_S
    while not visit.sent_away:
        place.stand_still()
        assert time.monotonic() < deadline
    guest.join(DEADLINE_S)
    assert came == [True]
    began = time.monotonic()
    for _ in range(100):
        place.stand_still()
    assert time.monotonic() - began < 0.1  # one more stand would have been as long
    with pytest.raises(NotHostable, match="longer than its foreground can stand still"), visit.tracing():
        pytest.fail("nothing is traced while the foreground computes")


def test_the_foreground_does_not_go_on_while_a_model_is_traced(
    monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[Callable[[], object]], threading.Thread]
) -> None:
    monkeypatch.setattr(build_gate, "BUILT_WITHIN_S", 0.0)
    place, visit = BuildGate(), GuestBuild(never)
    stands = meanwhile(lambda: place.wait(visit))
    with pytest.raises(NotHostable), visit.tracing():
        while stands.is_alive() and not visit.stands.is_set():
            front = meanwhile(place.stand_still)
            front.join(0.1)
        while not visit.sent_away:
            front.join(0.01)
        front.join(0.1)
        assert front.is_alive()


def test_a_foreground_goes_on_at_once_when_the_guest_is_wanted_no_more(
    meanwhile: Callable[[Callable[[], object]], threading.Thread],
) -> None:
    place, unwanted = BuildGate(), threading.Event()
    visit = GuestBuild(unwanted.is_set)
    meanwhile(lambda: place.wait(visit))

    def change_of_mind() -> None:
        visit.stands.wait(DEADLINE_S)
        unwanted.set()

    meanwhile(change_of_mind)
    deadline = time.monotonic() + DEADLINE_S
    while not visit.sent_away:
        place.stand_still()
        assert time.monotonic() < deadline


def test_a_guest_does_not_wait_for_ever_for_a_foreground_that_makes_no_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(build_gate, "STANDS_WITHIN_S", 0.0)
    place = BuildGate()
    with pytest.raises(NotHostable, match="in no state to take it in"):
        place.wait(GuestBuild(never))
    place.stand_still()  # and is not waited for
    assert not place.wait(GuestBuild(lambda: True))


def test_a_guest_whose_own_process_has_gone_writes_nothing_more(tmp_path: Path) -> None:
    environ = {"HPCSCHED_JOB_ID": "7", "HPCSCHED_JOB_DIR": str(tmp_path / "7")}
    state = {"step": 3, "samples": 30}

    def inside() -> None:
        with Path("/dev/null").open("w") as nowhere:
            guest = HostedGuest(environ, nowhere, nowhere)
        be_hosted(guest)
        saves, flag = Saves(JobEnv.from_environ(environ), None), StopFlag(None)
        assert flag.install()
        saves.save(state, loss=None)
        assert flag.wanted is None
        written = (tmp_path / "7" / "STATE.json").read_bytes()
        guest.gone = True
        with pytest.raises(GuestGone):
            saves.save({**state, "step": 4}, loss=None)
        with pytest.raises(GuestGone):
            saves.record(4, 40, loss=None)
        with pytest.raises(GuestGone):
            _ = flag.wanted
        assert (tmp_path / "7" / "STATE.json").read_bytes() == written
        assert saves.store is not None and saves.store.newest_step() == 3

    copy_context().run(inside)
