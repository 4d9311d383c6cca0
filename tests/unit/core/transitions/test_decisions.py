"""A policy that asks for what cannot be is stopped before anything happens, in one line and with the job's
story."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hpcsched.contract.seats import Seat
from hpcsched.core import events as ev
from hpcsched.core.actions import SetTimer
from hpcsched.core.jobs import Target
from hpcsched.core.mechanisms.background.view import SetPace, Share, Yield
from hpcsched.core.mechanisms.cpu.mechanism import Cpu
from hpcsched.core.mechanisms.cpu.view import Reseat, StartOnCores
from hpcsched.core.mechanisms.packing.mechanism import Packing
from hpcsched.core.mechanisms.packing.view import Part, Ride
from hpcsched.core.model import JobState, Kind, Role
from hpcsched.core.reasons import Reason, Why
from hpcsched.core.view import LookAgain, Preempt, Resize
from hpcsched.errors import InvalidTransition
from hpcsched.testing.builders import Driver, a_core_job, a_job, a_profile

WHY = Reason(Why.FIXED, {"gpus": 1, "hosts": ""})
PROFILES = (a_profile("front", [10.0, 20.0]), a_profile("back", [10.0]))


class Stubborn:
    """Asks for what it was told to, whatever it sees: once."""

    name, work_conserving, acts_when_full = "stubborn", False, True

    def __init__(self, kind: str, *decisions: Any) -> None:
        self._kind, self._decisions = kind, decisions
        self.rules = dict.fromkeys(("background", "packing", "cpu"), self)

    def _ask(self, kind: str) -> list[Any]:
        if kind != self._kind:
            return []
        decisions, self._decisions = self._decisions, ()
        return list(decisions)

    def decide(self, view: object) -> list[Any]:
        return self._ask("decide")

    def share(self, view: object) -> list[Any]:
        return self._ask("share")

    def ride(self, view: object) -> list[Any]:
        return self._ask("ride")

    def allot(self, view: object) -> list[Any]:
        return self._ask("allot")

    def watches(self, job: object) -> bool:
        return False


def decides(driver: Driver, kind: str, *decisions: Any) -> None:
    """The policy says so now."""
    driver.machine.decisions.policy = Stubborn(kind, *decisions)
    driver.tell(ev.ProfilesLoaded, profiles=())


def refused(driver: Driver, kind: str, decision: Any, words: str) -> None:
    """It is refused with these words, and the story of the job with it; nothing is asked of the outside."""
    before = len(driver.actions)
    with pytest.raises(InvalidTransition, match=words) as caught:
        decides(driver, kind, decision)
    assert f"job {decision.job.id} ({decision.job.spec.name}), on ProfilesLoaded: " in str(caught.value)
    assert "submitted" in str(caught.value)
    assert len(driver.actions) == before


# --- GPUs -------------------------------------------------------------------------------------------


def test_who_cannot_save_yet_cannot_be_suspended() -> None:
    driver = Driver(a_job("a", gpus=1), gpus=2)
    refused(driver, "decide", Preempt(job=driver.job("a"), reason=WHY), "cannot be suspended")


@pytest.mark.parametrize("hosts", [("n1",), ("n1", "n1"), ("n1", "n2", "n3")])
def test_a_job_of_two_hosts_goes_to_two_different_ones(hosts: tuple[str, ...]) -> None:
    driver = Driver(a_job("a", nodes=2), gpus=2, hosts=3, policy="exclusive")
    driver.runs("a")
    ask = Resize(job=driver.job("a"), gpus=1, hosts=hosts, role=Role.PRIMARY, reason=WHY)
    refused(driver, "decide", ask, "cannot be resized to 1 GPUs")


def test_a_gpu_that_somebody_has_is_given_to_nobody_else() -> None:
    driver = Driver(a_job("a", gpus=2), a_job("b", gpus=1), gpus=3)
    assert driver.job("a").gpus == (0, 1)
    with pytest.raises(InvalidTransition, match="GPU 1 is not free"):
        driver.machine.ledger.hold(driver.job("b"), Target((1, 2), Role.PRIMARY, 0.0))


def test_a_job_cannot_go_where_its_state_does_not_lead() -> None:
    driver = Driver(a_job("a"), gpus=1)
    driver.runs("a")
    with pytest.raises(InvalidTransition, match=r"RUNNING -> STARTING(.|\n)*submitted"):
        driver.machine._out.set_state(driver.job("a"), JobState.STARTING)
    assert driver.job("a").state is JobState.RUNNING


# --- background lanes -------------------------------------------------------------------------------


def beside() -> Driver:
    """`b` runs in the background of the GPU that `f` has; `c` waits for a lane."""
    driver = Driver(a_job("f", "front", 10**5, gpus=1), gpus=1, profiles=PROFILES)
    driver.runs("f")
    driver.submit(*(a_job(name, "back", 10**5, gpus=1, background=True) for name in "bc"))
    driver.runs("b")
    assert driver.job("c").state is JobState.PENDING
    return driver


@pytest.mark.parametrize(("name", "gpu"), [("c", 0), ("c", 7), ("b", 0), ("f", 0)])
def test_a_lane_that_is_taken_or_not_there_takes_nobody(name: str, gpu: int) -> None:
    driver = beside()
    ask = Share(job=driver.job(name), gpu=gpu, reason=WHY)
    refused(driver, "share", ask, f"cannot start in the background of GPU {gpu}")


@pytest.mark.parametrize(("name", "share"), [("b", 1.5), ("b", -0.1), ("f", 0.5), ("c", 0.5)])
def test_a_pace_is_a_part_of_the_speed_of_one_on_a_lane(name: str, share: float) -> None:
    driver = beside()
    refused(driver, "share", SetPace(job=driver.job(name), share=share), f"cannot go at {share} of its speed")


@pytest.mark.parametrize("name", ["f", "c", "left"])
def test_nobody_leaves_a_lane_that_it_does_not_have_or_is_leaving_already(name: str) -> None:
    driver = beside()
    if name == "left":
        name = "b"
        driver.suspend(name)
        assert driver.job(name).state is JobState.SUSPENDING
    ask = Yield(job=driver.job(name), reason=WHY)
    refused(driver, "share", ask, "cannot leave its background lane")


# --- packs ------------------------------------------------------------------------------------------


def packed() -> Driver:
    """`a` holds the GPU, `b` rides there; `plain` waits, as does `c`, which came last."""
    driver = Driver(gpus=1)
    about: dict[str, Any] = {"gpus": 1, "kind": Kind.TRAINER, "trainer": "m:T"}
    strategy = {"kind": "packed", "most": 2}
    driver.submit(*(a_job(name, "m", strategy=strategy, **about) for name in "ab"))
    driver.runs("a", "b")
    driver.submit(a_job("plain", "m", **about), a_job("c", "m", strategy=strategy, **about))
    assert driver.states() == ["RUNNING", "RUNNING", "PENDING", "PENDING"]
    return driver


@pytest.mark.parametrize(("name", "gpu"), [("plain", 0), ("c", 3), ("b", 0)])
def test_only_packed_jobs_that_wait_ride_and_only_where_somebody_trains(name: str, gpu: int) -> None:
    driver = packed()
    refused(driver, "ride", Ride(job=driver.job(name), gpu=gpu, reason=WHY), f"cannot ride on GPU {gpu}")


@pytest.mark.parametrize("name", ["a", "c", "leaving"])
def test_only_who_rides_leaves_its_pack_and_once(name: str) -> None:
    driver = packed()
    if name == "leaving":
        name = "b"
        driver.suspend(name)
    refused(driver, "ride", Part(job=driver.job(name), reason=WHY), "cannot leave its pack")


def test_the_same_time_to_look_at_packs_again_sets_no_second_timer() -> None:
    driver = packed()

    def timers() -> int:
        return sum(isinstance(action, SetTimer) and action.key == Packing.timer for action in driver.actions)

    before = timers()
    for at, more in ((50.0, 1), (50.0, 1), (60.0, 2)):
        decides(driver, "ride", LookAgain(at=at))
        assert timers() == before + more


# --- CPU cores --------------------------------------------------------------------------------------


def on_cores() -> Driver:
    """`a` runs on 0.6 of 8 cores as a server and two workers; `w` has to wait, as it needs more."""
    driver = Driver(a_core_job("a", 4), a_core_job("w", 8, start=1.0), gpus=0, cores=range(8))
    driver.runs("a", in_place=True)
    assert driver.states() == ["RUNNING", "PENDING"]
    return driver


@pytest.mark.parametrize(("name", "host"), [("a", "n1"), ("w", "n7")])
def test_a_job_starts_on_the_cores_of_a_host_that_is_there_and_once(name: str, host: str) -> None:
    driver = on_cores()
    seats = (Seat(server=True, share=0.1), Seat(server=False, share=0.1))
    ask = StartOnCores(job=driver.job(name), host=host, seats=seats, grant={7: 20}, memory=None, reason=WHY)
    refused(driver, "allot", ask, f"cannot start on the cores of {host}")


@pytest.mark.parametrize(
    "keep", [(), (1, 2), (0, 1, 1), (0, 3), (0, 1, 2, 3)], ids=["none", "no 0", "twice", "unknown", "more"]
)
def test_the_ranks_that_stay_are_some_that_there_are_with_the_first(keep: tuple[int, ...]) -> None:
    driver = on_cores()
    job = driver.job("a")
    ask = Reseat(job=job, seats=job.current.seats, keep=keep, grant={7: 60}, memory=None, reason=WHY)
    refused(driver, "allot", ask, "cannot go on with 3 seats")


def test_a_server_does_not_become_a_worker() -> None:
    driver = on_cores()
    job = driver.job("a")
    server, one, other = job.current.seats
    seats = (server, replace(one, server=True), other)
    ask = Reseat(job=job, seats=seats, keep=(0, 1, 2), grant={7: 60}, memory=None, reason=WHY)
    refused(driver, "allot", ask, "cannot become another kind")


def test_only_the_slots_whose_cores_are_meant_are_lent() -> None:
    driver = Driver(gpus=4, kind="cpu")
    driver.machine.decisions.policy = None
    driver.submit(a_core_job("a", 4))
    seats = tuple(Seat(server=server, share=0.3, host="n1", cores=(1,)) for server in (True, False, False))
    job = driver.job("a")
    start = StartOnCores(job=job, host="n1", seats=seats, grant={1: 90}, memory=None, reason=WHY)
    decides(driver, "allot", start)
    assert driver.machine.mechanism(Cpu).cores.loans.keys() == {1}
    assert driver.machine.ledger.free == {0, 2, 3}
