"""What makes the planner plan anew, and how often."""

from __future__ import annotations

from dataclasses import replace
from math import isfinite
from random import Random

import pytest

from hpcsched.core import events as ev
from hpcsched.core.actions import Launch, MakePlan
from hpcsched.core.model import Device, JobState
from hpcsched.policy.planner.planner import JITTER_S
from hpcsched.sim.engine import Simulation
from hpcsched.testing.builders import Driver, Planned, a_core_job, a_job, a_profile, makespan

LINE = a_profile("line", [10.0, 20.0, 30.0, 40.0])


class Counted(Planned):
    """A driver that counts the plans made."""

    plans = 0

    def handle(self, event):
        self.plans += isinstance(event, ev.PlanMade)
        return super().handle(event)


def planned(*jobs, gpus=4, profiles=(LINE,), policy="planner", **options):
    return Counted(*jobs, gpus=gpus, profiles=profiles, policy=policy, **options)


def two_at_work():
    """Two jobs on two GPUs each, for 450 s."""
    driver = planned(a_job("a", "line", 9000, gpus=2), a_job("b", "line", 9000, gpus=2))
    driver.runs("a", "b")
    driver.plans = 0
    return driver


@pytest.mark.parametrize(
    ("off_s", "plans"),
    [(0.0, 0), (JITTER_S + 0.05 * 450 - 1, 0), (JITTER_S + 0.05 * 450 + 0.5, 1), (-30.0, 1)],
)
def test_a_job_that_ends_as_planned_is_no_news(off_s, plans):
    driver = two_at_work()
    driver.now = 450.0 + off_s
    driver.exits("a", 0)
    assert driver.plans == plans


def test_arrivals_failures_losses_and_cancellations_are_news():
    driver = two_at_work()
    driver.submit(a_job("c", "line", 9000))
    assert driver.plans == 1
    driver.exits("a", 1)  # tried again
    assert driver.plans == 2
    driver.tell(ev.DeviceLost, gpu=3, why="test")
    assert driver.plans == 3
    driver.cancel("c")
    assert driver.plans == 4


def test_of_a_queue_longer_than_a_plan_the_end_waits_until_half_of_the_plan_has_started(monkeypatch):
    monkeypatch.setattr("hpcsched.policy.planner.planner.WINDOW", 20)
    driver = planned(*(a_job(f"j{i}", "line", 100) for i in range(45)), gpus=1)
    plans = []
    for _ in range(15):
        (job,) = driver.machine.run.active.values()
        driver.runs(job.spec.name)
        driver.now += 10.0
        driver.exits(job.spec.name, 0)
        plans.append(driver.plans)
    assert plans.index(plans[0] + 1) == 10  # 11 of the 20 planned have ended: fewer than half wait
    assert plans[-1] == plans[0] + 1


def test_learning_is_news():
    driver = planned(a_job("a", "line", 90_000), a_job("b", "line", 90_000))
    driver.runs("a", "b") if len(driver.machine.run.active) == 2 else driver.runs("a")
    driver.plans = 0
    driver.trains("a", 3.0)
    assert driver.plans == 1


def test_only_one_plan_is_asked_for_at_a_time():
    driver = Driver(gpus=4, profiles=[LINE], policy="planner")
    assert [type(a) for a in driver.submit(a_job("a", "line"))] == [MakePlan]
    assert driver.submit(a_job("b", "line")) == []
    driver.tell(ev.PlanMade, plan=driver.machine.make_plan())
    assert driver.machine.run.plan.ends.keys() == {1, 2}


def test_a_lost_plan_is_asked_for_again_in_the_next_life():
    driver = Driver(a_job("a", "line"), gpus=4, profiles=[LINE], policy="planner")
    devices = tuple(Device(index=i, host="node", kind="test", handle=str(i)) for i in range(4))
    actions = driver.tell(
        ev.AgentStarted, wall=0.0, devices=devices, policy="planner", policy_options={}, profiles=(LINE,)
    )
    assert MakePlan in map(type, actions)


@pytest.mark.parametrize("also", [(), (a_job("y", "line", 1000, gpus=1),)], ids=["alone", "beside another"])
@pytest.mark.parametrize("nodes", [1, 2])
def test_a_job_for_which_there_are_too_few_gpus_is_planned_without(also, nodes):
    driver = planned(*also, a_job("wide", "line", 1000, gpus=4, nodes=nodes), gpus=4, hosts=nodes)
    driver.plans = 0
    driver.tell(ev.DeviceLost, gpu=0, why="test")
    assert driver.plans <= 2
    if "wide" in driver.counts():
        driver.exits("wide", 143)
    assert driver.plans <= 3 and "wide" not in driver.counts()
    for spec in also:
        assert driver.counts()[spec.name] == 1


def test_when_all_gpus_are_lost_there_is_no_plan():
    driver = planned(a_job("a", "line", 1000), gpus=1)
    driver.runs("a")
    driver.tell(ev.DeviceLost, gpu=0, why="test")
    driver.exits("a", 143)
    assert driver.counts() == {}


@pytest.mark.parametrize("seed", [*range(30), 61, 63, 192, 218])
def test_jobs_that_end_together_go_as_planned(seed):
    """Sweeps are jobs of the same length: many events of one moment."""
    random = Random(seed)
    gpus = random.choice([3, 4, 6])
    profiles = [
        a_profile(f"m{k}", [x, 1.7 * x, 2.2 * x, 2.5 * x, 2.6 * x, 2.6 * x], start_s=c, suspend_s=c / 2)
        for k, (x, c) in enumerate([(1.0, 5.0), (2.0, 9.0)])
    ]
    jobs = []
    for i in range(random.randint(4, 14)):
        least = random.choice([1, 1, 1, 2, gpus])
        most = random.choice([None, None, max(least, 2)])
        steps = random.choice([1, 600, 600, 3000])
        jobs.append(a_job(f"j{i}", f"m{random.randrange(2)}", steps, gpus=(least, most)))
    ran = {}
    for policy in ("marble", "planner"):
        simulation = Simulation(jobs, profiles, gpus=gpus, policy=policy)
        ran[policy] = simulation.run()
    plan = ran["planner"].run.plan
    assert plan.facts["marble_s"] == pytest.approx(makespan(ran["marble"]), abs=1e-6)
    assert makespan(ran["planner"]) <= makespan(ran["marble"]) + 1e-6
    for job in ran["planner"].run.jobs.values():
        assert job.ended_s == pytest.approx(plan.ends[job.id], abs=1e-6)


def goes_by(driver, **changed):
    """From now on the plan is a list plan, with this changed."""
    plan = replace(driver.machine.make_plan(), rule="list", **changed)
    return driver.handle(ev.PlanMade(at=driver.now, plan=plan))


def test_one_that_starts_is_not_resized_in_the_same_breath():
    """Its launch costs nothing: by the plan's own rule it would start on its cap and grow at once."""
    driver = Driver(a_job("a", "line", 9000), gpus=4, profiles=(LINE,), policy="planner")
    (launch,) = goes_by(driver, caps={1: 2})
    assert isinstance(launch, Launch) and len(launch.gpus) == 2


@pytest.mark.parametrize(("left_s", "grows"), [(40.0, True), (12.0, False)])
def test_one_that_ends_after_the_allocation_grows_only_if_that_gets_it_farther(left_s, grows):
    """A restart takes 10 s, and 4 GPUs are twice as fast as 2: worth it with more than 20 s left."""
    slow = a_profile("slow", [10.0, 20.0, 30.0, 40.0], start_s=5.0, suspend_s=5.0, resume_s=5.0)
    jobs = a_job("a", "slow", 10**6), a_job("b", "slow", 10**6, gpus=2)
    driver = Driver(*jobs, gpus=4, profiles=(slow,), policy="planner", deadline=10_000.0, reserve_s=60.0)
    goes_by(driver, caps={1: 2, 2: 2}, order=(1, 2))
    driver.runs("a", "b")
    driver.now = 10_000.0 - 60.0 - 5.0 - left_s
    driver.tell(ev.ProgressObserved, progress=())
    driver.exits("b", 0)
    goes_by(driver, caps={1: 2})
    assert (driver.job("a").target is not None) == grows


@pytest.mark.parametrize("goal", ["both", "makespan", "jct"])
@pytest.mark.parametrize("waiting", [a_job("a", "line", 1000, gpus=1), a_job("a", "line", 1000)])
def test_slots_whose_cores_are_on_loan_are_planned_to_come_back(waiting, goal):
    driver = planned(a_core_job("c", 2, start=1.0), waiting, gpus=2, kind="cpu", goal=goal)
    plan = driver.machine.run.plan
    assert driver.machine.run.active.keys() == {1} and not driver.machine.ledger.free
    assert plan.order == (2,) and isfinite(plan.ends[2])
    assert plan.facts["makespan_s"] > 100
    driver.exits("c", 0)
    assert driver.machine.run.active.keys() == {2}


@pytest.mark.parametrize("policy", ["planner", "optimus"])
def test_where_no_plan_can_be_made_jobs_go_on_and_start_and_none_is_asked_for_until_there_is_news(policy):
    driver = planned(a_job("a", "line", gpus=2), gpus=4, policy=policy)
    driver.runs("a")
    driver.submit(a_job("b", "line", gpus=3))
    driver.plans = 0
    driver.tell(ev.PlanMade, plan=driver.machine.make_plan(fallback=True))
    assert driver.plans == 1 and not driver.machine.decisions.plan_asked
    assert driver.job("a").state is JobState.RUNNING and driver.job("a").width == 2
    driver.exits("a", 0)
    assert driver.job("b").state.active
    driver.plans = 0
    driver.submit(a_job("c", "line"))
    assert driver.plans == (policy == "planner")  # the other looks again after a time
