"""What samples say of GPUs: lost, found again, not known as the driver hangs. Time is the test's."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from hpcsched.agent.gpu_watch import (
    MOST_LOSSES,
    OLD_AFTER_S,
    UNKNOWN_AFTER_S,
    WELL_FOR_S,
    GpuWatch,
    keep_samples,
)
from hpcsched.core import events as ev
from hpcsched.devices import Sample
from hpcsched.store.status import MeasuredGpu
from hpcsched.testing.builders import Driver

PERIOD_S = 5.0
GOOD = Sample(gpu=0, utilisation=0.5, memory_mib=1024.0)
BAD = Sample(gpu=0, healthy=False, why="Xid 79")


class Played:
    """A monitor that has samples when the test says so, over one GPU of a run."""

    interval_s = PERIOD_S

    def __init__(self, *, gpus: int = 1) -> None:
        self.now = self.age_s = 0.0
        self.said: list[str] = []
        self.shown: dict[int, MeasuredGpu] = {}
        self.kept: dict[float, dict[int, Any]] = {}
        self._next: list[Sample] | None = None
        self.machine = Driver(gpus=gpus).machine
        self.health = GpuWatch(
            self,  # type: ignore[arg-type]
            self.machine,
            publish=lambda samples: setattr(self, "shown", samples),
            keep=partial(keep_samples, self),  # type: ignore[arg-type]
            tell=self.said.append,
            clock=lambda: self.now,
        )

    def add(self, at: float, gpus: dict[int, Any]) -> None:
        self.kept[at] = gpus

    def take(self) -> list[Sample] | None:
        return self._next

    def goes_on(self, seconds: float, *samples: Sample, told: Any = ()) -> list[ev.Event]:
        """So much later these samples come, or none; what follows is handled."""
        self.now += seconds
        self.age_s = 0.0 if samples else self.age_s + seconds
        self._next = list(samples) or None
        events = self.health.look(self.now, told)
        for event in [*told, *events]:
            self.machine.handle(event)
        return events

    def well(self, seconds: float) -> list[ev.Event]:
        """All samples of so many seconds are good."""
        rounds = range(round(seconds / PERIOD_S) + 1)
        return [event for i in rounds for event in self.goes_on(PERIOD_S if i else 0.0, GOOD)]


@pytest.fixture
def gpu() -> Played:
    return Played()


def test_a_gpu_that_was_condemned_and_is_well_for_a_while_is_used_again(gpu: Played) -> None:
    assert gpu.goes_on(PERIOD_S, BAD) == [ev.DeviceLost(at=PERIOD_S, gpu=0, why="Xid 79")]
    assert gpu.goes_on(PERIOD_S, BAD) == [], "once"
    assert gpu.well(WELL_FOR_S - PERIOD_S) == []
    assert gpu.goes_on(1.0, BAD) == [], "not yet: it begins anew"
    gpu.now += 60.0
    (found,) = gpu.well(WELL_FOR_S)
    assert isinstance(found, ev.DeviceFound) and found.why == "well for 30 s"
    assert gpu.well(WELL_FOR_S) == [] and gpu.machine.ledger.lost == {}


def test_one_that_comes_and_goes_stays_out(gpu: Played) -> None:
    whys = []
    for _ in range(MOST_LOSSES):
        (lost,) = gpu.goes_on(PERIOD_S, BAD)
        whys.append(lost.why)  # type: ignore[attr-defined]
        gpu.well(WELL_FOR_S)
    assert whys == ["Xid 79", "Xid 79 (lost 2 times: it stays out)"]
    assert gpu.well(10 * WELL_FOR_S) == []
    assert gpu.machine.ledger.lost.keys() == {0}


@pytest.mark.parametrize("before", [False, True], ids=["alone", "after its samples"])
def test_what_a_worker_could_not_use_does_not_come_back_by_samples(gpu: Played, before: bool) -> None:
    if before:
        gpu.goes_on(PERIOD_S, BAD)
    gpu.goes_on(PERIOD_S, GOOD, told=[ev.DeviceLost(at=gpu.now, gpu=0, why="torch: no kernel image")])
    assert gpu.well(10 * WELL_FOR_S) == []


def test_a_driver_that_hangs_is_said_once_and_old_samples_are_not_shown(gpu: Played) -> None:
    gpu.goes_on(PERIOD_S, GOOD)
    assert gpu.shown == {0: MeasuredGpu(utilisation=0.5, memory_mib=1024.0)}
    gpu.goes_on(PERIOD_S + OLD_AFTER_S)
    assert gpu.shown == {0: MeasuredGpu(utilisation=0.5, memory_mib=1024.0)} and not gpu.said
    assert gpu.health.used_mib(0) == 1024.0
    gpu.goes_on(1.0)
    assert gpu.shown == {0: MeasuredGpu(sample_age_s=36.0)}
    assert gpu.health.used_mib(0) is None
    gpu.goes_on(UNKNOWN_AFTER_S)
    assert gpu.shown == {0: MeasuredGpu(sample_age_s=156.0, health="unknown")}
    assert gpu.said == [
        "no sample of GPU 0 for 36 s: the driver does not answer; jobs go on, and its health is unknown if "
        "it still does not"
    ]
    assert list(gpu.machine.ledger.devices) == [0], "that is no proof of a dead GPU"


def test_one_that_answers_again_is_well_again(gpu: Played) -> None:
    gpu.goes_on(PERIOD_S + UNKNOWN_AFTER_S + 1.0)
    assert gpu.shown[0].health == "unknown"
    assert gpu.goes_on(1.0, GOOD) == []
    assert gpu.shown == {0: MeasuredGpu(utilisation=0.5, memory_mib=1024.0)}
    assert gpu.said[1:] == ["samples of GPU 0 come again"]


def test_silence_does_not_make_a_lost_gpu_well(gpu: Played) -> None:
    gpu.goes_on(PERIOD_S, BAD)
    gpu.goes_on(PERIOD_S, GOOD)
    gpu.goes_on(PERIOD_S + OLD_AFTER_S + 1.0)
    assert gpu.machine.ledger.lost.keys() == {0}


def test_nor_does_a_sample_before_a_silence_and_one_after_it(gpu: Played) -> None:
    gpu.goes_on(PERIOD_S, BAD)
    gpu.goes_on(PERIOD_S, GOOD)
    gpu.goes_on(PERIOD_S + OLD_AFTER_S + 1.0)
    assert gpu.goes_on(1.0, GOOD) == []
    assert gpu.well(WELL_FOR_S)[0].why == "well for 30 s"  # type: ignore[attr-defined]


def test_nor_do_old_samples_of_a_node_agent_whose_driver_hangs(gpu: Played) -> None:
    gpu.goes_on(PERIOD_S, BAD)
    for age_s in range(0, 300, 5):
        assert gpu.goes_on(PERIOD_S, Sample(gpu=0, age_s=float(age_s))) == []


def test_one_host_of_two_is_silent() -> None:
    """Its node agent still talks: what it sends on has an age."""
    two = Played(gpus=2)
    two.goes_on(PERIOD_S, GOOD, Sample(gpu=1, utilisation=0.1, age_s=40.0))
    assert two.shown == {
        0: MeasuredGpu(utilisation=0.5, memory_mib=1024.0),
        1: MeasuredGpu(sample_age_s=40.0),
    }
    assert two.said[0].startswith("no sample of GPU 1 for 40 s")


def test_what_was_measured_is_kept_and_what_is_old_or_unknown_is_not() -> None:
    gpu = Played(gpus=2)
    gpu.goes_on(PERIOD_S, GOOD, Sample(gpu=1))
    gpu.goes_on(PERIOD_S)
    gpu.goes_on(PERIOD_S, Sample(gpu=0, utilisation=1.0, age_s=OLD_AFTER_S + 2 * PERIOD_S), Sample(gpu=1))
    assert gpu.kept == {PERIOD_S: {0: (0.5, 1024.0)}, 3 * PERIOD_S: {}}


def test_it_follows_the_machine_that_another_state_was_put_into() -> None:
    played = Played(gpus=1)
    played.machine.become(Driver(gpus=2).machine)
    (lost,) = played.goes_on(1.0, GOOD, Sample(gpu=1, healthy=False, why="Xid 79"))
    assert isinstance(lost, ev.DeviceLost) and lost.gpu == 1
