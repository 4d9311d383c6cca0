"""A GPU is given on when its memory is free, or when time is up."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from hpcsched.agent.clock import RunClock
from hpcsched.agent.gpu_memory import FREE_WITHIN_S, GpuMemory, time_to_wait_s
from hpcsched.core.model import Device

NOBODY = 10.0
"""Seconds in which what must happen has to: many times what it takes."""


def gpu(index: int) -> Device:
    return Device(index=index, host="here", kind="fake", handle=str(index), memory_mib=81920.0)


SLOT = Device(index=0, host="here", kind="cpu", handle="0-3")


class Played:
    """A driver that says what the test wants, killed processes, and the test's clock."""

    def __init__(self) -> None:
        self.answers: dict[int, bool | None] = {}
        self.asked = 0
        self.killed = 0
        self.now = 100.0
        self.said: list[str] = []
        self.memory = GpuMemory(
            self._free, tell=self.said.append, used_mib=lambda gpu: 1234.4, clock=lambda: self.now
        )

    def _free(self, device: Device) -> bool | None:
        self.asked += 1
        return self.answers.get(device.index, True)

    def free(self, who: Any, *devices: Device, within_s: float = FREE_WITHIN_S) -> bool:
        return self.memory.free(who, devices, lambda: self.killed, within_s=within_s)

    def wakes(self) -> bool:
        """Whether it wakes the agent up, at once."""
        woken = bool(select.select([self.memory], [], [], NOBODY)[0])
        self.memory.heard()
        return woken

    def await_asked(self, times: int) -> None:
        """Wait until the driver has been asked so often."""
        deadline = time.monotonic() + NOBODY
        while self.asked < times:
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def idle(self) -> None:
        """Wait until nobody is asked any more."""
        for thread in threading.enumerate():
            if thread.name == "gpu-memory":
                thread.join(NOBODY)


@pytest.fixture
def driver() -> Iterator[Played]:
    played = Played()
    yield played
    played.memory.close()
    played.idle()


@pytest.mark.parametrize("devices", [(), (SLOT,)], ids=["none", "a CPU slot"])
def test_what_has_no_memory_of_its_own_is_given_on_at_once(driver: Played, devices: tuple[Device]) -> None:
    assert driver.free("a", *devices)
    assert driver.asked == 0


@pytest.mark.parametrize("answer", [True, None], ids=["free", "nobody can say"])
def test_one_that_is_free_is_given_on_as_soon_as_the_driver_has_said_so(
    driver: Played, answer: bool | None
) -> None:
    driver.answers[0] = answer
    assert not driver.free("a", gpu(0)), "the driver is asked elsewhere: it may take its time"
    assert driver.wakes()
    assert driver.free("a", gpu(0)) and not driver.said


def test_it_waits_for_memory_and_for_what_was_killed(driver: Played) -> None:
    driver.killed, driver.answers[1] = 1, False
    assert not driver.free("a", gpu(0), gpu(1))
    driver.answers[1] = True
    assert not driver.free("a", gpu(0), gpu(1))
    driver.answers[1] = False
    driver.killed = 0
    assert not driver.free("a", gpu(0), gpu(1))
    driver.answers[1] = True
    assert driver.wakes() and driver.free("a", gpu(0), gpu(1))


def test_after_the_deadline_it_is_given_on_and_said(driver: Played) -> None:
    driver.answers[0] = False
    assert not driver.free("a", gpu(0), gpu(3))
    driver.await_asked(3)  # the answers of a round count when it is done
    driver.now += FREE_WITHIN_S - 0.1
    assert not driver.free("a", gpu(0), gpu(3))
    driver.now += 0.1
    driver.killed = 2
    assert driver.free("a", gpu(0), gpu(3))
    assert driver.said == [
        "GPU 0 (1234 MiB in use), GPU 3 given on after 10 s; killed processes that have not ended: 2"
    ]


def test_the_deadline_may_come_nearer_and_in_a_drain_there_is_none(driver: Played) -> None:
    driver.answers[0] = False
    assert not driver.free("a", gpu(0))
    driver.now += 2.0
    assert not driver.free("a", gpu(0), within_s=3.0)
    assert driver.free("a", gpu(0), within_s=0.0)
    assert driver.free("b", gpu(0), within_s=0.0)
    assert not driver.said, "nobody gets them"


def test_one_that_others_use_too_makes_nobody_wait_twice(driver: Played) -> None:
    driver.answers[0] = False
    driver.free("a", gpu(0))
    driver.now += FREE_WITHIN_S
    assert driver.free("a", gpu(0)) and len(driver.said) == 1
    assert not driver.free("b", gpu(0))
    assert driver.wakes() and driver.free("b", gpu(0)), "as it was before"
    driver.answers[0] = True
    driver.free("c", gpu(0))
    assert driver.wakes() and driver.free("c", gpu(0))
    driver.answers[0] = False
    driver.free("d", gpu(0))
    driver.now += FREE_WITHIN_S - 1.0
    assert not driver.free("d", gpu(0)), "it has been free since"


def test_who_comes_to_a_gpu_meanwhile_ends_the_wait(driver: Played) -> None:
    """A background job on its lane: the memory will not be free now."""
    driver.answers[0] = False
    assert not driver.free("a", gpu(0))
    assert driver.free("a") or (driver.wakes() and driver.free("a"))
    assert not driver.said


def test_nothing_is_asked_while_nobody_waits(driver: Played) -> None:
    driver.free("a", gpu(0))
    assert driver.wakes()
    driver.idle()
    asked = driver.asked
    assert driver.free("a", gpu(0)) and driver.asked == asked
    driver.free("b", gpu(0))
    assert driver.wakes(), "and it begins anew"


@pytest.mark.parametrize(
    ("saves_at", "draining", "within_s"),
    [(float("inf"), False, FREE_WITHIN_S), (140.0, False, 4.0), (140.0, True, 0.0)],
)
def test_how_long_it_may_take(saves_at: float, draining: bool, within_s: float) -> None:
    clock = RunClock(at=100.0, speed=10.0)
    deadline = SimpleNamespace(saving_begins=lambda: saves_at, draining=draining)
    assert time_to_wait_s(deadline, clock) == pytest.approx(within_s, abs=0.1)  # type: ignore[arg-type]
