"""Launches that wait: told to end, they are given up at once; the time that they wait does not count."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hpcsched.agent.waiting_launches import WaitingLaunches
from hpcsched.core import events as ev
from hpcsched.core.actions import Launch, Suspend
from hpcsched.core.needs import Needs
from hpcsched.testing.builders import Driver, a_job
from hpcsched.testing.launch import FakeLauncher


class Scene:
    """A job that has been launched, and waits for its modules since its first second."""

    def __init__(self, time_s=60.0):
        self.driver = Driver(gpus=1)
        needs = Needs(time_s=time_s, modules=("gcc",))
        (self.launch,) = (a for a in self.driver.submit(a_job("j", needs=needs)) if isinstance(a, Launch))
        self.launcher, self.clock = FakeLauncher(), SimpleNamespace(now=lambda: self.driver.now)
        self.ready, self.told = False, []
        machine = self.driver.machine
        self.waiting = WaitingLaunches(self.carry_out, self.launcher, machine, self.clock)
        self.carry_out(self.launch)

    def carry_out(self, action):
        if isinstance(action, Launch) and not self.ready:
            self.waiting.put_off(action)
            return []
        return self.waiting.over(1, 1)

    def take(self, actions):
        """Have actions on it be taken, and what comes of them be handled."""
        for action in actions:
            if hasattr(action, "attempt"):
                for event in self.waiting.takes(action) or ():
                    self.told.append(type(event).__name__)
                    self.driver.handle(event)


@pytest.mark.parametrize(
    ("asked", "state"), [("cancel", "CANCELLED"), ("drain", "PENDING"), ("lose", "PENDING")]
)
def test_one_that_is_told_to_end_ends_at_once(asked, state):
    scene = Scene()
    assert scene.driver.machine.waiting_reason(scene.driver.job("j")).why == "Modules"
    scene.driver.now = 7.0
    argument = {"cancel": ["j"], "drain": [], "lose": [0]}[asked]
    scene.take(getattr(scene.driver, asked)(*argument))
    assert scene.told == ["StartWaited", "LaunchFailed"]
    assert scene.driver.states() == [state]
    assert scene.launcher.given_up == [(1, 1)]
    assert not scene.waiting
    assert scene.driver.job("j").time_left_s(scene.driver.now) == 60.0


def test_other_orders_wait_with_it():
    scene = Scene()
    assert scene.waiting.takes(Suspend(at=0.0, job_id=1, attempt=1, cause="")) == []
    assert scene.waiting.takes(Suspend(at=0.0, job_id=2, attempt=1, cause="")) is None
    assert not scene.launcher.given_up


def test_its_time_limit_begins_when_it_starts():
    scene = Scene()
    assert not scene.waiting.counts(("time", 1, 1))
    assert scene.waiting.counts(("term", 1, 1))
    scene.driver.now, scene.ready = 25.0, True
    ((waited,),) = scene.waiting.again()
    assert waited == ev.StartWaited(at=25.0, job_id=1, attempt=1, seconds=25.0)
    assert scene.waiting.counts(("time", 1, 1))
    scene.driver.handle(waited)
    assert scene.driver.due("time", "j") == 85.0


def test_without_a_limit_there_is_nothing_to_tell():
    scene = Scene(time_s=None)
    scene.driver.now, scene.ready = 25.0, True
    assert list(scene.waiting.again()) == [[]]


def test_it_follows_the_machine_that_another_state_was_put_into():
    """As after an event that could not be handled; a job is submitted later."""
    scene = Scene()
    other = Driver(gpus=1)
    for name in ("j", "later"):
        other.submit(a_job(name))
    scene.driver.machine.become(other.machine)
    assert scene.waiting.over(2, 1) == []
