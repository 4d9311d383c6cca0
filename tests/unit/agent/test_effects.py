"""What the record of a job says when its attempt ends: nothing that is saved may be forgotten by it."""

from __future__ import annotations

import json
import selectors
from types import SimpleNamespace

import pytest

from hpcsched.agent.attempts import WatchedAttempt
from hpcsched.agent.clock import RunClock
from hpcsched.agent.effects import Effects
from hpcsched.core.actions import Launch, SetTimer
from hpcsched.core.needs import Needs
from hpcsched.testing.builders import Driver, a_job
from hpcsched.testing.launch import FakeLauncher


class Ended:
    """Processes that have failed."""

    record = held = ready = refused = None
    told_after_s = 0.0
    oom = ""
    over_limit = False

    def reap(self):
        return 1

    def failed_early(self):
        return False

    def close(self):
        pass


def saved_step_after(folder, record):
    """A job has saved step 500 and been resumed; its second attempt fails while this is its record."""
    run = Driver(gpus=1)
    run.submit(a_job("j", steps=10_000))
    run.runs("j")
    run.saves("j", 500)
    run.suspend("j")
    run.leaves("j", 500)
    run.resume("j")
    run.runs("j")
    if record:
        (folder / "STATE.json").write_text(json.dumps(record))
    with selectors.DefaultSelector() as selector:
        effects = Effects(
            machine=run.machine,
            launcher=SimpleNamespace(),
            site=SimpleNamespace(),
            clock=RunClock(),
            selector=selector,
        )
        attempt = WatchedAttempt(
            job_id=1,
            attempt=2,
            workers=Ended(),
            gpus=(0,),
            ranks=1,
            folder=folder,
            output=folder / "out",
            measured=False,
        )
        effects._attempts[1] = attempt
        (exited,) = effects._reap(attempt)
    run.handle(exited)
    return run.job("j").saved_step


@pytest.mark.parametrize(
    ("record", "saved"),
    [
        ({"step": 400, "attempt": 1}, 500),
        ({"step": 500, "attempt": 1}, 500),
        ({"step": 600, "attempt": 1}, 600),
        ({"step": 700, "attempt": 2}, 700),
        ({"step": 450, "attempt": 2}, 450),
        ({"step": 450}, 450),
        (None, 500),
    ],
    ids=[
        "an earlier attempt's, not on disk yet",
        "an earlier attempt's, as none was saved since",
        "an earlier attempt's, not told before",
        "its own",
        "its own, after it had to fall back",
        "of a program that tells no attempt",
        "none",
    ],
)
def test_the_record_of_an_earlier_attempt_does_not_take_back_what_is_saved(tmp_path, record, saved):
    assert saved_step_after(tmp_path, record) == saved


def test_a_time_limit_does_not_ring_while_its_job_waits_for_its_modules(monkeypatch):
    run = Driver(gpus=2)
    needs = Needs(time_s=1.0, modules=("gcc",))
    waits, _ = (
        next(action for action in run.submit(a_job(name, needs=needs)) if isinstance(action, Launch))
        for name in ("waits", "runs")
    )
    with selectors.DefaultSelector() as selector:
        effects = Effects(
            machine=run.machine,
            launcher=FakeLauncher(),
            site=SimpleNamespace(),
            clock=SimpleNamespace(now=lambda: 5.0),
            selector=selector,
        )
        effects._waiting.put_off(waits)
        monkeypatch.setattr(effects._waiting, "again", lambda: iter(()))
        for job_id in (1, 2):
            for kind in ("time", "grace"):
                effects.perform(SetTimer(at=0.0, cause=waits.cause, key=(kind, job_id, 1), due=4.0))
        rung = sorted(event.key for event in effects.collect())
    assert rung == [("grace", 1, 1), ("grace", 2, 1), ("time", 2, 1)]


def test_what_is_kept_for_a_jobs_next_attempt_goes_once_there_will_be_none(monkeypatch):
    run = Driver(gpus=2)
    for name in ("ends", "runs"):
        run.submit(a_job(name))
        run.runs(name)
    run.exits("ends", 0)
    launcher, forgotten = FakeLauncher(), []
    monkeypatch.setattr(launcher, "forget", forgotten.append)
    with selectors.DefaultSelector() as selector:
        effects = Effects(
            machine=run.machine,
            launcher=launcher,
            site=SimpleNamespace(),
            clock=SimpleNamespace(now=lambda: 5.0),
            selector=selector,
        )
        effects._launched |= {1, 2}
        for job_id in (1, 2):
            effects.perform(SetTimer(at=0.0, cause=0, key=("time", job_id, 1), due=9.0 + job_id))
        assert effects._timers.first == 10.0
        assert list(effects.collect()) == []
    assert forgotten == [1]
    assert effects._timers.first == 11.0
    assert effects._launched == {2}
