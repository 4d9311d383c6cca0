"""The age of samples: a driver that hangs is noticed, and a pause of the whole agent is not taken for one."""

from __future__ import annotations

import threading

import pytest

from hpcsched.agent.monitor import STALL_S, Monitor
from hpcsched.devices import Sample


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_samples_age_while_the_driver_hangs_but_not_while_all_of_us_are_stopped() -> None:
    clock, hangs, asked = Clock(), threading.Event(), threading.Semaphore(0)

    def sample() -> list[Sample]:
        asked.release()
        hangs.wait(60)
        return [Sample(gpu=0)]

    monitor = Monitor(sample, interval_s=0.001, clock=clock)
    assert asked.acquire(timeout=60)
    for _ in range(4):
        clock.now += 3.0
        assert monitor.take() is None
    assert monitor.age_s == pytest.approx(12.0)
    clock.now += 3600.0
    monitor.take()
    assert monitor.age_s == pytest.approx(12.0 + STALL_S)
    hangs.set()
    assert asked.acquire(timeout=60), "it has put the samples of the round before there"
    assert monitor.take() and monitor.age_s == 0.0
    assert monitor.close()
