"""Jobs on CPU cores start on a part of their budget and grow into what is free; nobody gets a core twice."""

from __future__ import annotations

import pytest

from hpcsched.core import events as ev
from hpcsched.core.actions import Launch, Resize, Suspend, Terminate
from hpcsched.core.jobs import Target
from hpcsched.core.machine import Machine
from hpcsched.core.mechanisms.cpu.layout import cores_of, counted
from hpcsched.core.mechanisms.cpu.mechanism import Cpu
from hpcsched.core.model import Ended, Role
from hpcsched.core.reasons import Why
from hpcsched.errors import InvalidTransition
from hpcsched.policy import make_policy
from hpcsched.testing.builders import Driver, a_core_job, a_job, a_profile, a_program


def run(*specs, cores=8, **rest) -> Driver:
    return Driver(*specs, gpus=rest.pop("gpus", 0), cores=range(cores), **rest)


def has(driver: Driver, job: str) -> float:
    """The cores that a job runs on."""
    return round(cores_of(driver.job(job).current.seats), 2)


def story(driver: Driver, job: str) -> list[Why]:
    return [note.reason.why for note in driver.job(job).story]


def grow(driver: Driver, job: str, rate: float) -> None:
    """The job is measured to use all it has, and takes what it is given for that."""
    driver.uses(job, rate)
    driver.resized(job, 10)


def test_a_job_starts_with_one_server_two_workers_and_a_part_of_its_budget() -> None:
    driver = run(a_core_job("a", 8), cores=8)
    (launch,) = [action for action in driver.actions if isinstance(action, Launch)]
    assert launch.gpus == () and launch.role is Role.CORES
    assert [seat.server for seat in launch.seats] == [True, False, False]
    assert has(driver, "a") == 1.2  # 15 %, a third for each
    assert {core for seat in launch.seats for core in seat.cores} <= set(range(8))
    assert {seat.host for seat in launch.seats} == {"n1"}


def test_a_profile_of_its_model_on_gpus_says_nothing_of_a_job_on_cores() -> None:
    driver = run(a_core_job("a", 8), profiles=[a_profile("a", [1.0, 1.9])])
    assert driver.machine.estimates.loaded(driver.job("a")) is not None
    assert driver.machine.estimates.profile(driver.job("a")) is None


def test_three_jobs_of_the_whole_host_start_at_once_on_cores_of_their_own() -> None:
    driver = run(*(a_core_job(name, 8) for name in "abc"))
    assert driver.states() == ["STARTING"] * 3
    grants = [driver.machine.mechanism(Cpu).cores.of[i].grant for i in (1, 2, 3)]
    assert all(sum(grant.values()) == 120 for grant in grants)
    taken = driver.machine.mechanism(Cpu).cores.taken("n1")
    assert max(taken.values()) <= 100 and sum(taken.values()) == 360


def test_who_comes_later_waits_until_there_are_cores_and_overtakes_nobody() -> None:
    driver = run(a_core_job("a", 2, start=1.0), a_core_job("b", 2, start=1.0), a_core_job("c", 0.3), cores=2)
    assert driver.states() == ["STARTING", "PENDING", "PENDING"]
    assert driver.machine.waiting_reason(driver.job("b")).why is Why.NO_CORES
    assert driver.machine.waiting_reason(driver.job("c")).why is Why.CORES_PRIORITY
    driver.runs("a")
    driver.exits("a", 0, step=100_000, saved=100_000)
    assert driver.states() == ["COMPLETED", "STARTING", "PENDING"]


def test_a_job_that_uses_all_it_has_gets_half_as_much_again_without_a_restart() -> None:
    driver = run(a_core_job("a", 8))
    driver.runs("a", in_place=True)
    (resize,) = driver.uses("a", rate=2.0)
    assert isinstance(resize, Resize) and resize.keep == (0, 1, 2)
    assert round(cores_of(resize.seats), 2) == 1.8
    assert has(driver, "a") == 1.2 and driver.job("a").resizing
    driver.resized("a", step=10)
    assert has(driver, "a") == 1.8
    first, second = driver.job("a").attempts
    assert first.ended is Ended.RESIZED and second.in_place
    assert second.why is not None and second.why.why is Why.MORE_CORES
    assert "it used 100% of the 1.2 it had" in str(second.why)


def test_it_grows_until_its_budget_is_reached_and_then_rests() -> None:
    driver = run(a_core_job("a", 4), cores=8)
    driver.runs("a", in_place=True)
    rate = 1.0
    while has(driver, "a") < 3.9:
        grow(driver, "a", rate)
        rate *= 1.4
    for _ in range(9):  # other counts of servers and workers are slower
        driver.uses("a", rate if counted(driver.job("a").current.seats) == (1, 2) else 0.8 * rate)
        if driver.job("a").resizing:
            driver.resized("a", 10)
    assert has(driver, "a") == pytest.approx(4, abs=0.03)
    assert story(driver, "a")[-1] is Why.SETTLED
    assert not driver.uses("a", rate * 1.01)


def test_who_wants_more_waits_for_cores_and_gets_them_when_another_ends() -> None:
    driver = run(a_core_job("a", 4, start=0.5), a_core_job("b", 2, start=1.0), cores=4)
    driver.runs("a", "b", in_place=True)
    assert driver.uses("a", 1.0) == []
    assert story(driver, "a")[-1] is Why.WANTS_CORES
    driver.exits("b", 0, step=100_000, saved=100_000)
    assert driver.job("a").resizing
    driver.resized("a", 20)
    assert has(driver, "a") == pytest.approx(3, abs=0.05)


def test_nobody_grows_while_a_job_waits_for_cores() -> None:
    driver = run(a_core_job("a", 4, start=0.25), a_core_job("b", 4, start=1.0), cores=4)
    driver.runs("a", in_place=True)
    assert driver.uses("a", 1.0) == []
    assert not driver.job("a").resizing
    assert driver.states() == ["RUNNING", "PENDING"]


def test_what_a_job_is_about_to_give_back_is_nobodys_until_it_has() -> None:
    driver = run(a_core_job("a", 2, start=1.0), a_core_job("b", 0.9, start=1.0), cores=2)
    driver.runs("a", in_place=True)
    driver.uses("a", 5.0, [0.2, 0.5, 0.5])  # idle cores: more workers first, then fewer cores
    while driver.job("a").current.why is None or driver.job("a").current.why.why is not Why.TRIMMED:
        assert driver.states() == ["RUNNING", "PENDING"]
        driver.resized("a", 10)
        driver.uses("a", 5.0 if len(driver.job("a").current.seats) == 3 else 4.0, 0.4)
    assert driver.states() == ["RUNNING", "STARTING"]


def test_a_full_link_asks_for_a_server_and_says_so() -> None:
    driver = run(a_core_job("a", 8))
    driver.runs("a", in_place=True)
    (resize,) = driver.uses("a", 2.0, 0.6, full=0.4)
    assert counted(resize.seats) == (2, 2) and resize.keep == (0, 1, 2)
    assert "link of server 0 was over 90 % full for 40% of the time" in str(driver.job("a").story[-1].reason)


def test_processes_that_cannot_use_their_cores_get_company() -> None:
    driver = run(a_core_job("a", 8))
    driver.runs("a", in_place=True)
    (resize,) = driver.uses("a", 2.0, 0.6, full=0.05)
    assert counted(resize.seats) == (1, 3)
    assert cores_of(resize.seats) <= has(driver, "a")
    assert driver.job("a").story[-1].reason.why is Why.UTILISATION_BOTTLENECK


def test_the_first_ranks_of_each_kind_stay_when_some_leave() -> None:
    driver = run(a_core_job("a", 8))
    driver.runs("a", in_place=True)
    driver.uses("a", 2.0, 0.6, full=0.4)
    driver.resized("a", 10)
    driver.uses("a", 1.0, 0.6)  # slower: other things are tried, and in the end all is as it was
    while driver.job("a").resizing:
        driver.resized("a", 20)
        driver.uses("a", 2.0 if counted(driver.job("a").current.seats) == (1, 2) else 1.0, 0.97)
    seats = driver.job("a").current.seats
    assert seats[0].server


def test_a_change_that_is_refused_is_not_asked_for_again() -> None:
    driver = run(a_core_job("a", 8))
    driver.runs("a", in_place=True)
    (more,) = driver.uses("a", 2.0, 0.6)
    assert counted(more.seats) == (1, 3)
    assert driver.stays("a", refused=True) == []  # it may be about to end: until it is measured again
    (other,) = driver.uses("a", 2.001, 0.6)
    assert isinstance(other, Resize) and counted(other.seats) != (1, 3)
    assert has(driver, "a") == 1.2


def test_a_job_that_was_suspended_comes_back_as_it_was_fastest() -> None:
    driver = run(a_core_job("a", 8))
    driver.runs("a", in_place=True)
    for rate in (1.0, 1.5, 2.2):
        grow(driver, "a", rate)
    before = driver.job("a").current.seats
    driver.uses("a", 3.0, [0.9, 0.9, 0.9])
    driver.resized("a", 10)
    driver.suspend("a")
    driver.leaves("a", 50)
    assert driver.machine.mechanism(Cpu).cores.taken("n1") == {}
    driver.resume("a")
    assert driver.job("a").current.seats == before
    assert "as when it was fastest" in str(driver.job("a").story[-1].reason)


def test_a_killed_worker_costs_an_attempt_and_the_cores_are_free_meanwhile() -> None:
    driver = run(a_core_job("a", 8), a_core_job("b", 8, start=1.0))
    driver.runs("a", in_place=True)
    assert driver.states()[1] == "PENDING"
    driver.exits("a", 137, step=30, saved=30)
    job = driver.job("a")
    assert job.attempts[-2].ended is Ended.FAILED
    assert job.state.active and job.current.from_step == 30
    assert job.failures == 1


def test_a_drain_saves_and_frees_all_cores() -> None:
    driver = run(a_core_job("a", 8))
    driver.runs("a", in_place=True)
    driver.uses("a", 1.0)
    actions = driver.drain()
    assert any(isinstance(action, Suspend) for action in actions)
    driver.leaves("a", 10)
    assert driver.machine.stopped and driver.machine.mechanism(Cpu).cores.taken("n1") == {}


def test_the_next_agent_goes_on_with_what_was_found() -> None:
    driver = run(a_core_job("a", 8))
    driver.runs("a", in_place=True)
    grow(driver, "a", 1.0)
    driver.uses("a", 2.0)
    driver.start_agent(0, saved={1: 40})
    assert driver.job("a").state.active and driver.job("a").current.from_step == 40
    assert has(driver, "a") == 1.8


def test_cores_that_are_lost_take_the_jobs_on_them_along() -> None:
    driver = run(a_core_job("a", 8), hosts=2, gpus=1)
    host = driver.machine.mechanism(Cpu).cores.of[1].host
    driver.runs("a", in_place=True)
    actions = driver.tell(ev.CoresLost, host=host, why="no word")
    assert any(isinstance(action, Terminate) for action in actions)
    driver.exits("a", 143, step=10, saved=5)
    job = driver.job("a")
    assert job.attempts[-2].ended is Ended.LOST and job.failures == 0
    assert driver.machine.mechanism(Cpu).cores.of[1].host != host


def test_a_measurement_of_another_attempt_counts_for_nothing() -> None:
    driver = run(a_core_job("a", 8))
    driver.runs("a", in_place=True)
    grow(driver, "a", 1.0)
    driver.uses("a", 9.0, attempt=1)
    assert driver.machine.run.stale == 1
    driver.tell(ev.UsageMeasured, "a", rate=1.0, cpu=(1.0,), net=(0.0,), samples=5, stable=True)
    assert driver.machine.run.stale == 2 and not driver.job("a").resizing


def test_gpu_jobs_lose_nothing_to_jobs_on_cores() -> None:
    profile = a_profile("m", [1.0, 1.9])
    driver = run(a_core_job("a", 8), a_job("g", "m", gpus=2), gpus=2, profiles=[profile])
    assert driver.job("g").gpus == (0, 1)
    assert driver.job("a").gpus == () and driver.machine.ledger.free == set()


# --- CPU slots lend their cores


def slots(*specs, count=4, **rest) -> Driver:
    return Driver(*specs, gpus=count, kind="cpu", **rest)


def test_slots_are_lent_from_the_last_one_on_as_many_as_are_needed() -> None:
    driver = slots(a_core_job("a", 4, start=0.3))
    assert driver.machine.mechanism(Cpu).cores.loans.keys() == {2, 3}  # 1.2 cores
    assert driver.machine.ledger.free == {0, 1}
    driver.runs("a", in_place=True)
    driver.exits("a", 0, step=100_000, saved=100_000)
    assert driver.machine.ledger.free == {0, 1, 2, 3}


def test_a_job_for_slots_waits_for_those_on_loan_and_nobody_grows_onto_slots_meanwhile() -> None:
    driver = slots(a_core_job("a", 4, start=0.3))
    driver.runs("a", in_place=True)
    driver.submit(a_job("g", gpus=3))
    assert driver.states()[1] == "PENDING"
    (within,) = driver.uses("a", 1.0)  # into what is left of the two slots that it has on loan
    assert round(cores_of(within.seats), 2) == pytest.approx(1.8, abs=0.03)
    driver.resized("a", 10)
    (within,) = driver.uses("a", 1.4)
    driver.resized("a", 20)
    assert driver.uses("a", 1.6) == []
    assert driver.machine.mechanism(Cpu).cores.loans.keys() == {2, 3}
    driver.exits("a", 0, step=100_000, saved=100_000)
    assert driver.job("g").gpus == (0, 1, 2)


def test_a_job_on_cores_starts_on_slots_that_are_free_beside_jobs_that_have_some() -> None:
    driver = slots(a_job("g", gpus=3), a_core_job("a", 4, start=0.2))
    assert driver.job("g").gpus == (0, 1, 2)
    assert driver.machine.mechanism(Cpu).cores.loans.keys() == {3}
    assert {core for seat in driver.job("a").current.seats for core in seat.cores} == {3}


def test_a_lost_slot_on_loan_takes_the_job_along() -> None:
    driver = slots(a_core_job("a", 4, start=0.3))
    driver.runs("a", in_place=True)
    driver.lose(3)
    assert driver.job("a").wanted
    driver.exits("a", 143, step=3, saved=2)
    assert driver.job("a").state.active
    assert 3 not in driver.machine.mechanism(Cpu).cores.loans


def test_a_slot_that_is_found_again_has_no_cores_to_give_that_a_job_still_ends_on() -> None:
    driver = slots(a_core_job("a", 4, start=0.3))
    driver.runs("a", in_place=True)
    cpu = driver.machine.mechanism(Cpu)
    on_slot = cpu.cores.taken("n1")[3]
    driver.lose(3)
    driver.find(3)
    assert 3 in driver.machine.ledger.free
    assert driver.job("a").state.active and not cpu.cores.loans.keys() & {3}
    assert cpu.room("n1", lent=True).get(3, 0) == 100 - on_slot
    driver.exits("a", 143, step=3, saved=2)
    assert cpu.room("n1", lent=True).get(3, 0) + cpu.cores.taken("n1").get(3, 0) == 100


def test_slots_that_share_a_core_lend_their_part_of_it() -> None:
    driver = Driver(gpus=4, kind="test")
    from hpcsched.core.mechanisms.cpu.cores import of_slot
    from hpcsched.core.model import Device

    two = [Device(index=i, host="n1", kind="cpu", handle="0") for i in range(2)]
    assert of_slot(two[0], two) == {0: 50}
    assert driver.machine.mechanism(Cpu).room("n1", lent=True) == {}  # GPUs have no cores to lend


# --- replay, and what cannot be


def test_a_replay_of_the_events_gives_the_same_seats() -> None:
    driver = run(a_core_job("a", 8), a_core_job("b", 8))
    driver.runs("a", "b", in_place=True)
    for rate in (1.0, 1.5):
        grow(driver, "a", rate)
    driver.uses("b", 3.0, 0.5)
    again = Machine(make_policy)
    for event in driver.events:
        again.handle(event)
    for i in (1, 2):
        assert again.run.jobs[i].current.seats == driver.machine.run.jobs[i].current.seats
        assert again.mechanism(Cpu).cores.of[i] == driver.machine.mechanism(Cpu).cores.of[i]


def test_a_policy_cannot_give_more_than_the_budget_or_a_core_twice() -> None:
    driver = run(a_core_job("a", 2, start=1.0), cores=4)
    driver.runs("a", in_place=True)
    machine, job = driver.machine, driver.job("a")
    with pytest.raises(InvalidTransition, match="cannot have seats"):
        machine.mechanism(Cpu)._check(job, job.current.seats, {0: 100, 1: 100, 2: 100})
    with pytest.raises(InvalidTransition, match="of the cores of n1"):
        target = Target((), Role.CORES, 0.0, seats=job.current.seats, grant={0: 100, 9: 100})
        machine.ledger.change(job, target)


# --- programs ---------------------------------------------------------------------------------------


def test_a_program_has_its_cores_from_start_to_end() -> None:
    driver = run(a_program("p", 2.5), a_core_job("a", 8, start=0.5), a_program("q", 2), cores=8)
    (seat,) = driver.job("p").current.seats
    assert (seat.server, seat.share) == (False, 2.5) and len(seat.cores) == 3
    assert driver.states() == ["STARTING", "STARTING", "PENDING"]
    driver.runs("p", "a")
    driver.uses("p", 5.0, 0.1)
    assert has(driver, "p") == 2.5 and not driver.job("p").target
    driver.exits("p", 0)
    assert driver.states() == ["COMPLETED", "RUNNING", "STARTING"]


def test_a_program_that_is_suspended_has_as_many_cores_again() -> None:
    driver = run(a_program("p", 2), cores=3)
    driver.runs("p")
    driver.suspend("p")
    driver.exits("p", 75)
    driver.resume("p")
    assert has(driver, "p") == 2 and driver.states() == ["STARTING"]


def test_a_program_that_could_never_start_keeps_nobody_waiting() -> None:
    """It came when there were more cores."""
    driver = run(a_program("p", 5), a_core_job("a", 2), a_program("q", 3), cores=4)
    assert driver.states() == ["PENDING", "STARTING", "STARTING"]
    driver.exits("a", 0, step=100_000, saved=100_000)
    assert not driver.machine.stuck
    driver.exits("q", 0)
    assert driver.machine.stuck


# --- what is lost, and what is asked meanwhile ------------------------------------------------------


def test_cores_are_lost_once() -> None:
    driver = run(a_core_job("a", 8), hosts=2, gpus=1)
    host = driver.machine.mechanism(Cpu).cores.of[1].host
    driver.runs("a", in_place=True)
    assert driver.tell(ev.CoresLost, host=host, why="no word") != []
    told = len(driver.job("a").story)
    assert driver.tell(ev.CoresLost, host=host, why="no word") == []
    assert len(driver.job("a").story) == told


def test_a_job_that_was_to_get_more_of_lost_cores_starts_elsewhere_on_what_it_had() -> None:
    driver = run(a_core_job("a", 8), hosts=2, gpus=1)
    host = driver.machine.mechanism(Cpu).cores.of[1].host
    driver.runs("a", in_place=True)
    driver.uses("a", rate=2.0)
    assert driver.job("a").resizing
    actions = driver.tell(ev.CoresLost, host=host, why="no word")
    assert [type(action) for action in actions] == [Terminate]
    assert driver.job("a").target is None
    driver.exits("a", 143, step=10, saved=5)
    assert driver.machine.mechanism(Cpu).cores.of[1].host != host and has(driver, "a") == 1.2


def test_a_job_that_is_saving_when_its_cores_are_lost_is_not_told_to_end() -> None:
    """It may still manage to; its grace timer is set."""
    driver = run(a_core_job("a", 8), hosts=2, gpus=1)
    host = driver.machine.mechanism(Cpu).cores.of[1].host
    driver.runs("a", in_place=True)
    driver.suspend("a")
    assert driver.tell(ev.CoresLost, host=host, why="no word") == []
    assert str(driver.job("a").story[-1].reason).count(host)
    driver.leaves("a", 40)
    assert driver.states() == ["SUSPENDED"] and driver.job("a").step == 40
    driver.resume("a")
    assert driver.machine.mechanism(Cpu).cores.of[1].host != host


def test_a_job_that_gets_another_strategy_begins_its_search_anew() -> None:
    driver = run(a_core_job("a", 8))
    driver.runs("a", in_place=True)
    grow(driver, "a", 1.0)
    driver.uses("a", 2.0)
    driver.suspend("a")
    driver.leaves("a", 50)
    driver.define(a_core_job("a", 8, start=0.3))
    driver.resume("a")
    assert has(driver, "a") == 2.4  # 30 % of 8, and not the 1.8 that were its fastest
    assert "as when it was fastest" not in str(driver.job("a").story[-1].reason)


def test_a_job_that_could_not_save_any_more_is_not_started_on_cores() -> None:
    driver = run(a_core_job("a", 2), deadline=100.0, reserve_s=99.0)
    assert driver.states() == ["PENDING"]
    assert driver.machine.waiting_reason(driver.job("a")).why is Why.WALLTIME_TOO_SHORT
    assert driver.machine.mechanism(Cpu).cores.taken("n1") == {}
    driver.tell(ev.DeadlineMoved, deadline=100_000.0)
    assert driver.states() == ["STARTING"]


def test_a_change_that_is_made_after_all_while_the_job_saves_for_it_is_what_it_goes_on_with() -> None:
    driver = run(a_core_job("a", 8))
    driver.runs("a", in_place=True)
    driver.uses("a", 2.0)
    driver.ring("resize", "a")  # not done in time: it is to be suspended and started again for it
    assert driver.states() == ["SUSPENDING"]
    driver.resized("a", 10)
    assert has(driver, "a") == 1.8
    driver.leaves("a", 20)
    assert driver.states() == ["STARTING"] and has(driver, "a") == 1.8
    assert sum(driver.machine.mechanism(Cpu).cores.of[1].held.values()) == 180


def test_what_a_job_on_gpus_uses_of_cores_is_nobodys_news() -> None:
    driver = Driver(a_job("g", gpus=1), gpus=1)
    driver.runs("g")
    driver.tell(ev.UsageMeasured, "g", rate=1.0, cpu=(), net=(), samples=5, stable=True)
    assert driver.machine.run.stale == 1 and driver.machine.mechanism(Cpu).cores.of == {}
