"""`explain JOB`: what is next for a job, which is what its policy will do and no more."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hpcsched.cli.jobs.explain import what_is_next
from hpcsched.core import events as ev
from hpcsched.core.jobs import Job
from hpcsched.core.machine import Machine
from hpcsched.core.model import JobState, Role
from hpcsched.core.plan import Plan, Stage
from hpcsched.core.transitions.outcome import LOOK
from hpcsched.durations import clock
from hpcsched.policy import POLICIES
from hpcsched.sim.engine import Simulation
from hpcsched.testing.builders import Driver, a_job, a_profile

LINE = a_profile("line", [10.0, 20.0, 30.0, 40.0])
KNEE = a_profile("knee", [10.0, 18.0, 18.5, 18.6], start_s=2.0, suspend_s=2.0)
"""Two GPUs do almost what four do: MARBLE gives a job all four, a plan does not."""


def following(driver: Driver, job: str) -> list[str]:
    return what_is_next(driver.machine, driver.job(job))


def promised(lines: list[str]) -> list[str]:
    return [line for line in lines if "promoted" in line]


def beside(policy: str, **options: Any) -> Driver:
    """Job b runs on the two GPUs that a has left of four; c waits."""
    driver = Driver(a_job("a", "line", 900, gpus=2), gpus=4, profiles=[LINE], policy=policy, **options)
    driver.submit(a_job("b", "line", 9000), a_job("c", "line", 900))
    driver.runs(*(job.id for job in driver.machine.run.jobs.values() if job.state is JobState.STARTING))
    return driver


def test_a_change_in_place_is_what_comes_next() -> None:
    driver = Driver(a_job("a", "line", 900, gpus=2), a_job("b", "line", 9000), gpus=4, profiles=[LINE])
    driver.runs("a", "b", in_place=True)
    driver.reports("b", 1, rate=20.0)
    driver.exits("a", 0)
    assert following(driver, "b") == ["it goes on on 4 GPUs without a restart, as soon as that is prepared"]
    driver.resized("b", 10)
    assert following(driver, "b")[0].startswith("8990 of 9000 steps left at 40 steps/s")


# --- running jobs -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("promote", "lines"),
    [
        ("pays", ["promoted to 4 GPUs when they can be had and it pays"]),
        ("always", ["promoted to 4 GPUs when they can be had"]),
        ("never", []),
    ],
)
def test_marble_promotes_as_its_option_says(promote: str, lines: list[str]) -> None:
    driver = beside("marble", promote=promote)
    assert promised(following(driver, "b")) == lines
    assert promised(following(driver, "a")) == []  # it has the count that it asks for
    driver.drain()
    assert promised(following(driver, "a")) == promised(following(driver, "b")) == []


def test_a_count_is_one_on_each_of_a_jobs_hosts() -> None:
    driver = Driver(a_job("wide", "line", 8000, nodes=2), gpus=4, hosts=2, profiles=[LINE])
    driver.runs("wide")
    assert len(driver.job("wide").gpus) == 8
    assert following(driver, "wide") == ["8000 of 8000 steps left at 40 steps/s: about 3:20"]
    driver = Driver(
        *(a_job(f"small{i}", "line", 900, gpus=2) for i in range(3)),
        gpus=4,
        hosts=2,
        profiles=[LINE],
    )
    driver.submit(a_job("wide", "line", 8000, nodes=2), a_job("tall", "line", 8000, gpus=3, nodes=2))
    driver.exits("small0", 0)
    assert driver.job("wide").width == 2
    driver.runs("wide")
    assert "promoted to 4 GPUs on each of 2 hosts when they can be had and it pays" in following(
        driver, "wide"
    )
    assert following(driver, "tall")[0].endswith("it wants 3 GPUs on each of 2 hosts")


@pytest.mark.parametrize("policy", sorted(set(POLICIES) - {"marble"}))
def test_only_marble_promises_promotions(policy: str) -> None:
    """At any time of a run: where the planner follows MARBLE's rules, it is MARBLE that promises."""
    jobs = [a_job(f"j{i}", "knee", 2000 + 700 * i, submit_at=20.0 * i) for i in range(5)]
    said: list[str] = []

    def watch(event: object, actions: object, machine: Machine) -> None:
        if not (machine.run.plan and machine.run.plan.rule == "marble"):
            said.extend(line for job in machine.run.jobs.values() for line in what_is_next(machine, job))

    Simulation(jobs, [KNEE], gpus=4, policy=policy, watch=watch).run()
    assert said and promised(said) == []
    assert policy == "planner" or not any("planned" in line for line in said)
    assert not any("fastest count" in line for line in said)


def test_a_planner_that_found_nothing_better_does_as_marble_does() -> None:
    driver = Driver(*(a_job(name, "line", 9000) for name in "ab"), gpus=4, policy="planner", profiles=[LINE])
    follow(driver, rule="marble")
    driver.runs("a")
    assert (
        following(driver, "b")[0] == "0 jobs before it; 0 of 4 GPUs free; it wants 4 GPUs (its fastest count)"
    )
    driver.job("a").role = Role.SECONDARY
    driver.job("a").current.gpus = (0, 1)
    assert promised(following(driver, "a")) == ["promoted to 4 GPUs when they can be had and it pays"]


def follow(driver: Driver, **changes: Any) -> Plan:
    """Let the planner have its plan, changed so."""
    plan = replace(driver.machine.make_plan(), **changes)
    driver.tell(ev.PlanMade, plan=plan)
    return plan


# --- plans --------------------------------------------------------------------------------------------


def planned(*, until: float) -> Machine:
    jobs = [a_job(f"j{i}", "knee", 4000 + 400 * i) for i in range(8)]
    simulation = Simulation(jobs, [KNEE], gpus=4, policy="planner")
    simulation.run(until=until)
    assert simulation.machine.run.plan is not None and simulation.machine.run.plan.rule == "list"
    return simulation.machine


def test_what_the_plan_means_to_do_with_a_job_that_waits() -> None:
    machine = planned(until=10.0)
    plan = machine.run.plan
    assert plan is not None
    waiting = [i for i in plan.order if i in machine.own.queue]
    assert len(waiting) >= 3
    for before, job_id in enumerate(waiting):
        line, end = what_is_next(machine, machine.run.jobs[job_id])
        cap = plan.caps[job_id]
        words = f"{'' if plan.strict else 'at most '}{cap} GPU{'s' * (cap > 1)} (planned)"
        jobs = "1 job" if before == 1 else f"{before} jobs"
        assert line == f"{jobs} before it; {len(machine.ledger.free)} of 4 GPUs free; it wants {words}"
        expected, slack = clock(plan.ends[job_id]), clock(plan.slack_s[job_id])
        assert end == f"planned to end {expected} into the run, give or take {slack}"


def test_a_planned_end_is_told_of_running_jobs_and_comes_true() -> None:
    machine = planned(until=10.0)
    plan = machine.run.plan
    assert plan is not None
    for job in machine.run.active.values():
        assert what_is_next(machine, job)[-1].startswith("planned to end ")
    later = planned(until=plan.ends[machine.run.running[0].id] - 1)
    assert later.run.plan == plan
    done = Simulation([j.spec for j in machine.run.jobs.values()], [KNEE], gpus=4, policy="planner").run()
    first: Job = done.run.jobs[machine.run.running[0].id]
    assert first.ended_s == pytest.approx(plan.ends[first.id], abs=plan.slack_s[first.id])


def test_a_job_that_is_to_shrink_as_soon_as_it_can_be_suspended() -> None:
    driver = Driver(a_job("a", "knee", 9000), gpus=4, policy="planner", profiles=[KNEE])
    follow(driver, rule="list", caps={1: 4})
    driver.tell(ev.WorkersSpawned, "a", processes=((100, 1),))
    assert driver.job("a").width == 4
    driver.now = 10.0
    follow(driver, at=10.0, rule="list", caps={1: 2}, shrink=(1,))
    assert "planned to go down to 2 GPUs" in following(driver, "a")
    driver.tell(ev.WorkersReady, "a")
    assert following(driver, "a") == ["it starts again on 2 GPUs as soon as it has saved"]


def test_the_stages_of_a_plan_say_what_changes_when() -> None:
    driver = Driver(
        a_job("a", "line", 9000), a_job("b", "line", 9000), gpus=4, policy="planner", profiles=[LINE]
    )
    stages = (
        Stage(until=100.0, gpus={1: 4}),
        Stage(until=160.0, gpus={1: 2, 2: 2}),
        Stage(until=300.0, gpus={2: 2}),
    )
    follow(driver, rule="stages", stages=stages, shrink=())
    driver.runs("a")
    assert "planned to go to 2 GPUs at 1:40 into the run" in following(driver, "a")
    waits = "0 jobs before it; 0 of 4 GPUs free; it wants 2 GPUs (planned, from 1:40 into the run on)"
    assert following(driver, "b")[0] == waits
    driver.now = 100.0
    driver.tell(ev.TimerFired, key=LOOK)
    driver.leaves("a", 1)
    driver.runs("a", "b")
    assert "planned to save and wait at 2:40 into the run" in following(driver, "a")
    assert not any("planned to save" in line for line in following(driver, "b"))


def test_a_plan_that_is_out_of_date_or_will_not_be_followed_says_nothing() -> None:
    for change in ("news", "drain"):
        machine = planned(until=10.0)
        if change == "news":
            machine.run.news += 1
        else:
            machine.deadline.draining = True
        said = [line for job in machine.run.jobs.values() for line in what_is_next(machine, job)]
        assert said and not any("planned" in line for line in said), said


def test_nobody_says_when_a_job_ends_of_which_too_little_is_known() -> None:
    specs = (a_job("x", "new", 9000), a_job("y", "knee", None), a_job("z", "knee", 900))
    driver = Driver(*specs, gpus=4, policy="planner", profiles=[KNEE])
    plan = follow(driver)
    assert set(plan.ends) == {1, 2, 3}
    told = {name: [line for line in following(driver, name) if "planned to end" in line] for name in "xyz"}
    assert [len(lines) for lines in told.values()] == [0, 0, 1]


# --- waiting jobs -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "wants"),
    [
        ("marble", "4 GPUs (its fastest count)"),
        ("exclusive", "4 GPUs (all that it may have)"),
        ("equal", "at least 1 GPU"),
        ("optimus", "at least 1 GPU"),
    ],
)
def test_what_a_waiting_job_wants_is_what_its_policy_gives(policy: str, wants: str) -> None:
    jobs = [a_job(f"j{i}", "line", 9000) for i in range(9)]
    simulation = Simulation(jobs, [LINE], gpus=4, policy=policy)
    simulation.run(until=1.0)
    machine = simulation.machine
    (line,) = what_is_next(machine, machine.run.jobs[9])
    before = len(machine.own.queue) - 1
    assert line == f"{before} jobs before it; 0 of 4 GPUs free; it wants {wants}"
