"""Equal shares and Optimus on scenes one can follow by hand, and the random job sets they are compared on."""

from __future__ import annotations

from statistics import stdev

import pytest

from hpcsched.core import events as ev
from hpcsched.core.actions import Launch, MakePlan, SetTimer, Suspend
from hpcsched.core.moves import LOOK
from hpcsched.core.reasons import Why
from hpcsched.policy.equal import shares
from hpcsched.sim.engine import Simulation
from hpcsched.testing.builders import Driver, a_job, a_profile, makespan, simulate
from hpcsched.testing.families import FAMILIES, GPUS, JOB_S, JOBS, random_set, wrong

LINE = a_profile("line", [1, 2, 3, 4, 5, 6, 7, 8])
THREE = a_profile("three", [1, 2, 3, 2.5, 2, 1.5])
COST = a_profile("cost", [1, 2, 3, 4, 5, 6, 7, 8], start_s=5, suspend_s=10, resume_s=10)
ALL = (LINE, THREE, COST)


class Planned(Driver):
    """A driver that has plans made as soon as they are asked for."""

    def handle(self, event):
        actions = super().handle(event)
        for action in [a for a in actions if isinstance(a, MakePlan)]:
            actions += self.handle(ev.PlanMade(at=action.at, plan=self.machine.make_plan()))
        return actions

    def look_again(self):
        self.now = [a.due for a in self.actions if isinstance(a, SetTimer) and a.key == LOOK][-1]
        return self.tell(ev.TimerFired, key=LOOK)

    def counts(self):
        return {job.spec.name: len(job.gpus) for job in self.machine.active.values()}


def why(machine, name):
    return [note.reason.why for note in machine.job_of(name).story]


# --- equal shares ---------------------------------------------------------------------------


def test_gpus_are_shared_equally_and_again_at_each_end():
    jobs = [a_job("a", "line", 300), a_job("b", "line", 600), a_job("c", "line", 900)]
    machine, story = simulate(jobs, ALL, gpus=8, policy="equal")
    assert story == [
        "0: start a secondary on 0,1,2",
        "0: start b secondary on 3,4,5",
        "0: start c secondary on 6,7",
        "100: a is done",
        "100: suspend b",
        "100: suspend c",
        "100: b has left",
        "100: resume b secondary on 0,3,4,5",
        "100: c has left",
        "100: resume c secondary on 1,2,6,7",
        "175: b is done",
        "175: suspend c",
        "175: c has left",
        "175: resume c primary on 0,1,2,3,4,5,6,7",
        "225: c is done",
    ]
    assert str(machine.job_of("a").story[1].reason) == (
        "3 GPUs: an equal share of the 8, at most its fastest count"
    )
    assert "goes from 2 to 4 GPUs: its equal share now" in [str(n.reason) for n in machine.job_of("c").story]


def test_nobody_gets_more_than_its_fastest_count_and_the_others_get_the_rest():
    _, story = simulate([a_job("a", "three"), a_job("b", "line")], ALL, gpus=8, policy="equal")
    assert story[:2] == ["0: start a primary on 0,1,2", "0: start b secondary on 3,4,5,6,7"]


@pytest.mark.parametrize(
    ("steps", "grows"),
    [
        (60, False),  # at 25 s 20 steps are left: 10 s here, 20 + 5 s there
        (120, False),  # 80: 40 s here, 20 + 20 s there
        (124, True),  # 84: 42 s here, 20 + 21 s there
    ],
)
def test_a_job_grows_if_that_pays(steps, grows):
    jobs = [a_job("a", "cost", 40), a_job("b", "cost", steps)]
    _, story = simulate(jobs, ALL, gpus=4, policy="equal")
    assert ("25: suspend b" in story) is grows
    _, story = simulate(jobs, ALL, gpus=4, policy="equal", resize="always")
    assert "25: suspend b" in story


def test_what_is_left_of_a_start_counts_as_time_on_the_old_count():
    """5 + 30.5 s on two, 20 + 15.25 s on four: but for the start it would be 30.5 s on two."""
    driver = Driver(a_job("a", "cost"), a_job("b", "cost", 61), gpus=4, profiles=ALL, policy="equal")
    driver.runs("a", "b")
    driver.cancel("a")
    assert [a.job_id for a in driver.exits("a", 143) if isinstance(a, Suspend)] == [2]


def test_an_arrival_gets_its_share_once_the_others_have_given_it_up():
    jobs = [a_job("a", "cost", 400), a_job("b", "cost", 100, submit_at=20)]
    _, story = simulate(jobs, ALL, gpus=4, policy="equal")
    assert story[:5] == [
        "0: start a primary on 0,1,2,3",
        "20: suspend a",
        "30: a has left",
        "30: resume a secondary on 0,1",
        "30: start b secondary on 2,3",
    ]


def test_a_job_about_to_end_does_not_shrink_and_the_arrival_waits_for_its_end():
    """At 40 s a has 20 s left: as long as saving and resuming would take."""
    jobs = [a_job("a", "cost", 220), a_job("b", "cost", 100, submit_at=40)]
    _, story = simulate(jobs, ALL, gpus=4, policy="equal")
    assert story[1:3] == ["60: a is done", "60: start b primary on 0,1,2,3"]
    _, story = simulate(jobs, ALL, gpus=4, policy="equal", resize="always")
    assert story[1] == "40: suspend a"


def test_while_gpus_are_about_to_come_free_nobody_starts_on_fewer():
    """c could start on the free GPU at once; its share of two comes when a has saved."""
    driver = Driver(a_job("a", "cost", 9000, gpus=(1, 5)), gpus=6, profiles=ALL, policy="equal")
    driver.runs("a")
    (suspend,) = driver.submit(a_job("c", "cost", 9000))
    assert isinstance(suspend, Suspend)
    launches = driver.leaves("a", 1)
    assert [(a.job_id, len(a.gpus)) for a in launches if isinstance(a, Launch)] == [(1, 3), (2, 3)]


def test_of_jobs_nothing_is_known_of_all_get_equal_shares_and_new_ones():
    jobs = [a_job("a", "new", 100), a_job("b", "newer", None)]
    driver = Driver(*jobs, gpus=5, profiles=ALL, policy="equal")
    assert [len(job.gpus) for job in driver.machine.active.values()] == [3, 2]
    driver.runs("a", "b")
    driver.reports("b", 10, rate=2.0)  # what it does on two says nothing of five
    assert [a.job_id for a in driver.exits("a", 0) if isinstance(a, Suspend)] == [2]


@pytest.mark.parametrize(("deadline", "grows"), [(89.0, False), (91.0, True)])
def test_a_job_that_could_not_go_on_before_the_allocation_ends_is_left_as_it_is(deadline, grows):
    """Saving begins 60 s before the deadline, and 10 s earlier for a's own save; the switch takes 20 s."""
    jobs = [a_job("a", "cost", 9000), a_job("b", "cost", 9000)]
    for policy in ({"policy": "equal", "resize": "always"}, {"policy": "equal"}):
        driver = Driver(*jobs, gpus=4, profiles=ALL, deadline=deadline, **policy)
        driver.runs("a", "b")
        assert [type(a) for a in driver.exits("b", 0)] == [Suspend] * grows


def test_who_is_sent_away_by_the_user_has_no_share():
    jobs = [a_job("a", "line", 9000), a_job("b", "line", 9000)]
    driver = Driver(*jobs, gpus=4, profiles=ALL, policy="equal")
    driver.runs("a", "b")
    driver.suspend("a")
    assert shares(driver.machine.view()) == {1: 0, 2: 4}
    assert [a.job_id for a in driver.leaves("a", 1) if isinstance(a, Suspend)] == [2]


def test_a_later_job_makes_way_for_an_earlier_one_that_needs_its_gpus():
    jobs = [a_job("a", "line", gpus=4), a_job("b", "line", 9000)]
    driver = Driver(gpus=4, profiles=ALL, policy="equal")
    driver.submit(*jobs)
    driver.runs("a")
    driver.suspend("a")
    driver.leaves("a", 1)
    driver.runs("b")
    driver.resume("a")
    assert why(driver.machine, "b")[-1] is Why.PREEMPTED
    (launch,) = [a for a in driver.leaves("b", 5) if isinstance(a, Launch)]
    assert launch.job_id == 1
    assert driver.states() == ["STARTING", "SUSPENDED"]


def test_shares_on_several_hosts():
    """Two GPUs for a is one on each host; what its hosts cannot give is done without."""
    jobs = [a_job("a", "line", 600, nodes=2), a_job("b", "line", 300), a_job("c", "line", 300)]
    _, story = simulate(jobs, ALL, gpus=3, nodes=2, policy="equal")
    assert story[:3] == [
        "0: start a secondary on 0,1,3,4",
        "0: start b secondary on 2",
        "0: start c secondary on 5",
    ]


# --- Optimus --------------------------------------------------------------------------------


def test_each_gpu_goes_to_whom_it_saves_most():
    """Seconds saved by the 2nd, 3rd, 4th GPU: a 600, 200, 100; b 150, 50, none (it gets slower)."""
    jobs = [a_job("a", "line", 1200), a_job("b", "three", 300)]
    driver = Planned(*jobs, gpus=6, profiles=ALL, policy="optimus")
    assert driver.machine.plan.caps == {1: 4, 2: 2}
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
    assert driver.machine.plan.caps == {1: 1, 2: 2}


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
    assert "gives up its 3 GPUs: earlier jobs need them" in [str(n.reason) for n in machine.job_of("b").story]


def test_unknown_jobs_get_an_equal_share_and_no_more():
    jobs = [a_job("a", "new", 100), a_job("b", "line", None), a_job("c", "line", 10)]
    driver = Planned(*jobs, gpus=8, profiles=ALL, policy="optimus")
    assert driver.counts() == {"a": 2, "b": 2, "c": 4}
    driver.runs("a")
    driver.reports("a", 10, rate=3.0)  # known on two GPUs is not known
    driver.look_again()
    assert driver.machine.plan.caps[1] == 2


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
    assert driver.machine.plan.at == 50.0
    assert driver.counts() == {"a": 2}


# --- random job sets ------------------------------------------------------------------------


def test_a_seed_says_all():
    assert random_set(7) == random_set(7)
    assert random_set(7) != random_set(8)
    assert random_set(7, arrivals=0.5) == random_set(7, arrivals=0.5)
    assert wrong(random_set(7).profiles, 1) == wrong(random_set(7).profiles, 1)
    assert wrong(random_set(7).profiles, 1) != wrong(random_set(7).profiles, 2)


@pytest.mark.parametrize("family", FAMILIES)
def test_sets_are_what_they_are_said_to_be(family):
    sizes = set()
    for seed in range(30):
        made = random_set(seed, family)
        models = {p.model: p for p in made.profiles}
        assert made.name == f"{family}-{seed}"
        assert made.gpus in GPUS
        assert JOBS[0] <= len(made.jobs) <= JOBS[1]
        assert {job.model for job in made.jobs} == models.keys()
        for job in made.jobs:
            step_s = 1 / models[job.model].rate(1)
            assert JOB_S[0] - step_s <= job.steps * step_s <= JOB_S[1] + step_s
            assert job.submit_at == 0
        for p in made.profiles:
            assert 0 <= p.suspend_s + p.resume_s <= made.switch_s <= 65
            assert p.suspend_s < 30
            assert 0 <= p.start_s <= 1.2 * p.resume_s
        sizes.add(len(made.jobs))
    assert len(sizes) > 15
    assert min(sizes) < 10 < 50 < max(sizes)
    assert {random_set(seed).family for seed in range(40)} == set(FAMILIES)
    assert all(len(random_set(seed, family, most_jobs=5).jobs) <= 5 for seed in range(20))


def test_jobs_arrive_over_about_that_share_of_their_work():
    shares_seen = []
    for seed in range(60):
        made = random_set(seed, arrivals=0.5)
        models = {p.model: p for p in made.profiles}
        work_s = sum(job.steps / models[job.model].rate(1) for job in made.jobs) / made.gpus
        times = [job.submit_at for job in made.jobs]
        assert times == sorted(times)
        assert times[0] == 0 < times[-1]
        shares_seen.append(times[-1] / work_s * len(times) / (len(times) - 1))
    assert sum(shares_seen) / len(shares_seen) == pytest.approx(0.5, abs=0.1)


def test_extrapolated_curves_neither_fall_nor_beat_linear_growth():
    seen = {}
    for seed in range(10):
        for p in random_set(seed, "pollux").profiles:
            seen[p.model] = p
    cifar = seen["cifar10 (global batch 128)"]  # slower on 4 than on 3: flat
    assert cifar.rate(8) == cifar.rate(4)
    imagenet = seen["imagenet (global batch 200)"]  # t(g) = a + b / g through (3, 2.6893) and (4, 3.2749)
    b = (1 / 2.6893 - 1 / 3.2749) * 12
    assert imagenet.rate(6) == pytest.approx(1 / (1 / 3.2749 - b / 4 + b / 6))
    assert imagenet.rate(6) == pytest.approx(4.187, abs=0.001)
    large = seen["cifar10 (global batch 1024)"]  # grew faster than linear: linear from there
    assert large.rate(8) == pytest.approx(2 * large.rate(4))
    for p in seen.values():
        last = min(4, max(g for g in p.throughput if g <= 4))
        for g in range(last, 8):
            assert p.rate(g) <= p.rate(g + 1) * (1 + 1e-9)
            assert p.rate(g + 1) <= p.rate(g) * (g + 1) / g * (1 + 1e-9)


def test_wrong_profiles_are_wrong_by_that_much():
    exact = [p for seed in range(30) for p in random_set(seed, "synthetic").profiles]
    found = wrong(exact, 5, by=0.15)
    assert [(p.model, p.start_s, p.suspend_s) for p in found] == [
        (p.model, p.start_s, p.suspend_s) for p in exact
    ]
    errors = [
        f.throughput[g] / p.throughput[g] - 1 for f, p in zip(found, exact, strict=True) for g in p.throughput
    ]
    assert stdev(errors) == pytest.approx(0.15, abs=0.015)
    assert sum(errors) / len(errors) == pytest.approx(0.0, abs=0.03)
    assert wrong(exact, 5, by=0.0) == tuple(exact)
