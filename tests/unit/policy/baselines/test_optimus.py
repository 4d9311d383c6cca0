"""Optimus on scenes one can follow by hand."""

from __future__ import annotations

from hpcsched.core import events as ev
from hpcsched.core.actions import MakePlan, SetTimer, Suspend
from hpcsched.core.reasons import Why
from hpcsched.core.transitions.outcome import LOOK
from hpcsched.sim.engine import Simulation
from hpcsched.testing.builders import Planned, a_job, a_profile, makespan, simulate

LINE = a_profile("line", [1, 2, 3, 4, 5, 6, 7, 8])
THREE = a_profile("three", [1, 2, 3, 2.5, 2, 1.5])
ALL = (LINE, THREE)


def why(machine, name):
    return [note.reason.why for note in machine.run.job_of(name).story]


def test_each_gpu_goes_to_whom_it_saves_most():
    """Seconds saved by the 2nd, 3rd, 4th GPU: a 600, 200, 100; b 150, 50, none (it gets slower)."""
    jobs = [a_job("a", "line", 1200), a_job("b", "three", 300)]
    driver = Planned(*jobs, gpus=6, profiles=ALL, policy="optimus")
    assert driver.machine.run.plan.caps == {1: 4, 2: 2}
    assert driver.counts() == {"a": 4, "b": 2}
    driver = Planned(*jobs, gpus=3, profiles=ALL, policy="optimus")
    assert driver.counts() == {"a": 2, "b": 1}
    driver = Planned(*jobs, gpus=14, profiles=ALL, policy="optimus")
    assert driver.counts() == {"a": 8, "b": 3}  # line is flat beyond 8


def test_a_gpu_on_each_of_two_hosts_has_to_save_twice_as_much():
    """The 2nd GPUs save a 600 s for two of them, b 305 s for one: the last one is b's."""
    pair = a_profile("pair", [1, 2])
    jobs = [a_job("a", "pair", 1200, nodes=2), a_job("b", "pair", 610)]
    driver = Planned(*jobs, gpus=2, hosts=2, profiles=(pair,), policy="optimus")
    assert driver.machine.run.plan.caps == {1: 1, 2: 2}


def test_first_come_first_served_each_gets_its_least_count():
    jobs = [a_job("a", gpus=2), a_job("b", gpus=3), a_job("c", gpus=(2, 4)), a_job("d"), a_job("e")]
    profiles = [a_profile(name, [1, 2, 3, 4]) for name in "abcde"]
    driver = Planned(*jobs, gpus=5, profiles=profiles, policy="optimus")
    assert driver.counts() == {"a": 2, "b": 3}
    driver = Planned(*jobs, gpus=4, profiles=profiles, policy="optimus")
    assert driver.counts() == {"a": 2, "c": 2}


def test_what_runs_changes_at_intervals_only():
    jobs = [a_job("a", "line", 400), a_job("b", "line", 4000)]
    machine, story = simulate(jobs, ALL, gpus=4, policy="optimus", interval=300)
    assert story == [
        "0: start a secondary on 0",
        "0: start b secondary on 1,2,3",
        "400: a is done",
        "600: suspend b",
        "600: b has left",
        "600: resume b primary on 0,1,2,3",
        "1150: b is done",
    ]
    assert why(machine, "b").count(Why.RESIZED) == 1
    assert why(machine, "b")[1] is Why.MARGINAL_GAIN


def test_between_intervals_waiting_jobs_start_on_gpus_that_come_free():
    jobs = [a_job(f"s{i}", "line", 50) for i in range(4)]
    machine, story = simulate(jobs, ALL, gpus=2, policy="optimus")
    assert story[3] == "50: start s2 secondary on 0"
    assert makespan(machine) == 100
    jobs = [
        a_job("a", "line", gpus=1),
        a_job("b", "line", 100, gpus=2),
        a_job("c", "line"),
        a_job("d", "line"),
    ]
    driver = Planned(*jobs[:2], gpus=3, profiles=ALL, policy="optimus")
    driver.submit(*jobs[2:])
    driver.exits("b", 0)
    assert driver.counts() == {"a": 1, "c": 1, "d": 1}
    jobs = [a_job("a", "line", 5000), a_job("b", "line", 100, gpus=2), a_job("c", "line", 900, submit_at=10)]
    _, story = simulate(jobs, ALL, gpus=4, policy="optimus", interval=100)
    assert "50: start c secondary on 2,3" in story  # by the same rule: both, as both save it time


def test_who_grows_waits_for_who_shrinks_and_nobody_else_takes_the_gpus():
    """At the interval b gives two GPUs to a; they come free when b has saved, and c may not have them."""
    jobs = [a_job("a", "line", 9000, gpus=(1, 3)), a_job("b", "line", 9000)]
    driver = Planned(jobs[1], gpus=4, profiles=ALL, policy="optimus", interval=100)
    driver.submit(jobs[0])
    assert driver.counts() == {"b": 4}
    driver.runs("b")
    driver.reports("b", 100)
    assert [type(a) for a in driver.look_again()] == [MakePlan, Suspend]
    driver.submit(a_job("c", "line", 50))
    assert driver.counts() == {"b": 4}
    driver.leaves("b", 100)
    assert driver.counts() == {"b": 2, "a": 2}


def test_a_later_job_makes_way_at_an_interval_and_starts_again_in_its_place():
    """x, then a on all GPUs: b waits from 400 on, and is not sent away again when it is back at 550."""
    jobs = [
        a_job("x", "line", 300, gpus=1),
        a_job("a", "line", 600, after=("x",), gpus=4),
        a_job("b", "line", 3000),
    ]
    machine, story = simulate(jobs, ALL, gpus=4, policy="optimus", interval=400)
    assert story[2:] == [
        "300: x is done",
        "400: suspend b",
        "400: b has left",
        "400: start a primary on 0,1,2,3",
        "550: a is done",
        "550: resume b primary on 0,1,2,3",
        "1000: b is done",
    ]
    assert "gives up its 3 GPUs: earlier jobs need them" in [
        str(n.reason) for n in machine.run.job_of("b").story
    ]


def test_unknown_jobs_get_an_equal_share_and_no_more():
    jobs = [a_job("a", "new", 9000), a_job("b", "line", None), a_job("c", "line", 10)]
    driver = Planned(*jobs, gpus=8, profiles=ALL, policy="optimus")
    assert driver.counts() == {"a": 2, "b": 2, "c": 4}


def test_what_was_seen_on_one_count_tells_what_more_would_gain():
    driver = Planned(
        a_job("a", "new", 9000), a_job("c", "line", 10, gpus=(1, 7)), gpus=8, profiles=ALL, policy="optimus"
    )
    assert driver.counts() == {"a": 4, "c": 4}
    driver.runs("a")
    driver.trains("a", rate=3.0)
    driver.look_again()
    assert driver.machine.run.plan.caps == {1: 7, 2: 1}  # a has 2960 s to go, c 10 at most


def looks(driver):
    return [a.due for a in driver.actions if isinstance(a, SetTimer) and a.key == LOOK]


def test_nothing_is_to_be_looked_at_again_when_nothing_is_under_way():
    driver = Planned(gpus=2, profiles=ALL, policy="optimus")
    assert looks(driver) == []
    driver.submit(a_job("big", "line", gpus=3))  # fits nowhere
    assert looks(driver) == []
    driver.submit(a_job("a", "line"))
    assert looks(driver) == [600.0]
    driver.runs("a")
    driver.now = 600.0
    driver.tell(ev.TimerFired, key=LOOK)
    assert looks(driver) == [600.0, 1200.0]
    driver.exits("a", 0)
    driver.now = 1200.0
    driver.tell(ev.TimerFired, key=LOOK)
    assert looks(driver) == [600.0, 1200.0]


def test_a_simulation_with_a_gap_between_jobs_ends():
    jobs = [a_job("a", "line", 100), a_job("b", "line", 100, submit_at=5000)]
    seen = []
    Simulation(
        jobs,
        ALL,
        gpus=4,
        policy="optimus",
        options={"interval": "10"},
        watch=lambda event, actions, machine: seen.append(event),
    ).run()
    assert len([e for e in seen if isinstance(e, ev.TimerFired)]) < 12
    assert seen[-1].at < 5100


def test_a_new_life_of_the_run_plans_anew():
    driver = Planned(a_job("a", "line", 9000), gpus=4, profiles=ALL, policy="optimus")
    driver.runs("a")
    driver.saves("a", 5)
    driver.now = 50.0
    driver.start_agent(2, {1: 5})
    assert driver.machine.run.plan.at == 50.0
    assert driver.counts() == {"a": 2}
