"""Resizing in place on the virtual clock: what it changes in a schedule, and what may come between."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from places import ROOT

from hpcsched.cli.run.results import overhead_s, result_of
from hpcsched.core import events as ev
from hpcsched.core.model import Ended, Kind, Role
from hpcsched.core.reasons import Why
from hpcsched.planning.jobs.problem import Problem
from hpcsched.policy.marble import Marble
from hpcsched.policy.planner.rollout import rollout
from hpcsched.report.gantt import gantt_svg
from hpcsched.sim.engine import Simulation
from hpcsched.store.profiles import load_profiles
from hpcsched.testing.builders import a_job, a_profile, makespan, simulate
from hpcsched.testing.families import FAMILIES, random_set

SUMMIT = load_profiles(ROOT / "profiles" / "marble-summit.json")
IN_PLACE = [replace(profile, grow_s=2.0, shrink_s=1.0) for profile in SUMMIT]
FAST = (
    a_profile("two", [1, 2], start_s=10.0, suspend_s=5.0, grow_s=3.0, shrink_s=2.0),
    a_profile("four", [1, 2, 3, 4], start_s=10.0, suspend_s=5.0, grow_s=3.0, shrink_s=2.0),
)


def training(name, *args, **rest):
    """A job that is no stand-in."""
    return a_job(name, *args, kind=Kind.TRAINER, **rest)


def pair(**rest):
    """`b` has two of four GPUs and does 2 steps/s from 10 s on; from 60 s on it can have all."""
    specs = [training("a", "two", 100), training("b", "four", 1000)]
    return simulate(specs, FAST, gpus=4, promote="always", **rest)


def stretches(job):
    return [(a.start_s, a.end_s, len(a.gpus), a.from_step, a.to_step) for a in job.attempts]


# --- as in the paper ----------------------------------------------------------------------------


def test_figure_5_without_a_restart():
    """ResNet-50 ends; Inception-v3, on 3 GPUs, gets its fourth and trains on while the new rank starts."""
    names = {"ResNet-50": 900, "Inception-v3": 4000, "VGG-16": 4000}
    specs = [training(name, name, steps) for name, steps in names.items()]
    machine, story = simulate(specs, IN_PLACE, promote="always")
    assert story[:6] == [
        "0: start ResNet-50 primary on 0,1,2",
        "0: start Inception-v3 secondary on 3,4,5",
        "140: ResNet-50 is done",
        "140: resize Inception-v3 primary to 3,4,5,0",
        "140: start VGG-16 secondary on 1,2",
        "169: Inception-v3 goes on on 3,4,5,0",
    ]
    job = machine.run.job_of("Inception-v3")
    small, large = job.attempts
    assert (small.ended, small.end_s, small.to_step) == (Ended.RESIZED, large.start_s, large.from_step)
    assert (job.suspensions, job.repeated, job.step) == (0, 0, 4000)

    again, _ = simulate([replace(spec, kind=Kind.REPLAY) for spec in specs], IN_PLACE, promote="always")
    assert again.run.job_of("Inception-v3").suspensions == 1
    assert job.ended_s < again.run.job_of("Inception-v3").ended_s


@pytest.mark.parametrize("number", [2, 3])
def test_a_set_of_the_paper_is_done_sooner(number):
    sets = {
        2: [("Inception-v3", 2400), ("ResNet-50", 600), ("ResNet-101", 1000)],
        3: [("ResNet-50", 900), ("Inception-v3", 2000), ("VGG-16", 800)],
    }
    specs = [training(f"{i}-{model}", model, steps) for i, (model, steps) in enumerate(sets[number])]
    by_restart, _ = simulate(specs, SUMMIT, promote="always")
    in_place, story = simulate(specs, IN_PLACE, promote="always")
    assert any(": resize " in line for line in story) and not any(": suspend " in line for line in story)
    assert makespan(in_place) < makespan(by_restart)


def test_jobs_start_in_their_order():
    models = [("two", 200), ("four", 800), ("two", 200), ("four", 200), ("four", 200)]
    specs = [training(f"j{i}", model, steps) for i, (model, steps) in enumerate(models)]
    machine, _ = simulate(specs, FAST, gpus=4, promote="always")
    starts = [job.started_s for job in machine.run.jobs.values()]
    assert starts == sorted(starts)
    assert any(a.ended is Ended.RESIZED for job in machine.run.jobs.values() for a in job.attempts)


# --- the course of one resize -------------------------------------------------------------------


def test_it_trains_on_while_ranks_start_stands_still_and_goes_on():
    machine, story = pair()
    job = machine.run.job_of("b")
    # 60 s: 100 steps. The new ranks take 10 s, in which it does 20; then it stands still for 3 s.
    assert stretches(job) == [(0.0, 73.0, 2, 0, 120), (73.0, 73.0 + 880 / 4, 4, 120, 1000)]
    assert story == [
        "0: start a primary on 0,1",
        "0: start b secondary on 2,3",
        "60: a is done",
        "60: resize b primary to 2,3,0,1",
        "73: b goes on on 2,3,0,1",
        "293: b is done",
    ]


def test_what_it_costs(tmp_path):
    machine, _ = pair()
    job = machine.run.job_of("b")
    assert [overhead_s(machine, job, attempt) for attempt in job.attempts] == [10.0 + 3.0, 0.0]
    result = result_of(machine)
    b = result.jobs[1]
    assert (b.switches, b.suspensions, b.switch_s, b.overhead_s) == (1, 0, 3.0, 13.0)
    assert [(a.ended, a.launch_s, a.suspend_s) for a in b.attempts] == [
        (Ended.RESIZED, 10.0, 3.0),
        (Ended.COMPLETED, 0.0, 0.0),
    ]
    assert result.overhead_share == pytest.approx(23.0 / 293.0)
    assert b.gpu_hours * 3600 == pytest.approx(2 * 73 + 4 * 220)
    assert result.lower_bound_s is not None and result.lower_bound_s <= result.makespan_s
    gantt_svg([result], tmp_path / "g.svg")
    assert "resized" in (tmp_path / "g.svg").read_text()


def test_the_lower_bound_knows_of_it():
    """A start on four GPUs takes so long that nobody who launches there is done as soon."""
    launch_s = {2: 10.0, 4: 500.0}
    slow = replace(FAST[1], start_s=launch_s, resume_s=launch_s)
    specs = [training("a", "two", 100), training("b", "four", 4000)]
    result = result_of(simulate(specs, [FAST[0], slow], gpus=4, promote="always")[0])
    assert result.makespan_s == 563.0 + 2900 / 4 < 500.0 + 4000 / 4
    assert result.lower_bound_s is not None and result.lower_bound_s <= result.makespan_s


def test_one_that_shrinks_waits_for_no_new_ranks():
    specs = [training("b", "four", 1000), training("c", "two", 100, gpus=2, submit_at=20.0)]
    machine, story = simulate(specs, FAST, gpus=4, policy="equal", resize="always")
    assert story[1:4] == [
        "20: resize b secondary to 0,1",
        "22: b goes on on 0,1",
        "22: start c primary on 2,3",
    ]
    assert machine.run.job_of("b").attempts[1].from_step == 40


def test_a_step_is_finished_first():
    slow = a_profile("four", [0.1, 0.1, 0.1, 0.2], start_s=10.0, grow_s=3.0)
    specs = [training("a", "two", 104), training("b", "four", 30)]
    machine, _ = simulate(specs, [FAST[0], slow], gpus=4, promote="always")
    # The new ranks are there at 72 s, its seventh step ends at 80 s.
    assert stretches(machine.run.job_of("b"))[0] == (0.0, 83.0, 2, 0, 7)


def test_one_that_is_done_before_its_new_ranks_are_there():
    specs = [training("a", "two", 100), training("b", "four", 110)]
    machine, story = simulate(specs, FAST, gpus=4, promote="always")
    assert story[-2:] == ["60: resize b primary to 2,3,0,1", "65: b is done"]
    assert len(machine.run.job_of("b").attempts) == 1


def test_one_that_is_still_starting_is_resized_when_it_has_started():
    specs = [training("a", "two", 1), training("b", "four", 1000)]
    slow = replace(FAST[1], start_s=30.0, resume_s=1.0)
    machine, _ = simulate(specs, [FAST[0], slow], gpus=4, promote="always")
    assert stretches(machine.run.job_of("b"))[0] == (0.0, 33.0, 2, 0, 0)


@pytest.mark.parametrize("kind", [Kind.TRAINER, Kind.COMMAND, Kind.REPLAY])
@pytest.mark.parametrize("costs", [{}, {"grow_s": 1.0}, {"shrink_s": 1.0}])
def test_who_is_resized_in_place(kind, costs):
    """Whose profile says what that costs, and who is no stand-in."""
    profiles = [replace(p, **{"grow_s": None, "shrink_s": None, **costs}) for p in FAST]
    specs = [a_job("a", "two", 100, kind=kind), a_job("b", "four", 1000, kind=kind)]
    machine, _ = simulate(specs, profiles, gpus=4, promote="always")
    ends = [attempt.ended for attempt in machine.run.job_of("b").attempts]
    in_place = bool(costs) and kind is not Kind.REPLAY
    assert ends == [Ended.RESIZED if in_place else Ended.SUSPENDED, Ended.COMPLETED]
    if "shrink_s" in costs and in_place:  # a cost that is not known is taken to be small
        assert machine.run.job_of("b").attempts[0].end_s == pytest.approx(70.1)


def test_by_what_really_happens_not_by_what_is_thought():
    specs = [training("a", "two", 100), training("b", "four", 1000)]
    thought = [replace(p, grow_s=None, shrink_s=None) for p in FAST]
    simulation = Simulation(specs, thought, gpus=4, options={"promote": "always"}, truth=FAST)
    assert simulation.run().run.job_of("b").attempts[0].end_s == 73.0


# --- whether it pays ----------------------------------------------------------------------------


@pytest.mark.parametrize(("steps", "pays"), [(1000, True), (129, True), (128, False), (110, False)])
def test_it_pays_only_if_enough_is_left_when_the_new_ranks_are_there(steps, pays):
    """At 70 s 120 steps are done; 2 s of standing still have to be made up for at twice the rate."""
    profiles = [FAST[0], replace(FAST[1], grow_s=2.0)]
    specs = [training("a", "two", 100), training("b", "four", steps)]
    machine, _ = simulate(specs, profiles, gpus=4, promote="pays")
    job = machine.run.job_of("b")
    by_hand = {1000: 72 + 880 / 4, 129: 72 + 9 / 4, 128: 74.0, 110: 65.0}
    assert job.ended_s == by_hand[steps]
    why = [note.reason for note in job.story if note.reason.why in (Why.PROMOTED, Why.DOES_NOT_PAY)]
    assert [reason.why for reason in why] == [Why.PROMOTED if pays else Why.DOES_NOT_PAY]
    assert " 2.00 s of standing still " in str(why[0]) and "suspend" not in str(why[0])


# --- what may come between ----------------------------------------------------------------------


def at(kind, seconds, **rest):
    return kind(at=seconds, **rest)


def test_ranks_that_cannot_join():
    failed = at(ev.ResizeFailed, 65.0, job_id=2, attempt=1, error="no memory")
    machine, story = pair(happenings=[failed])
    assert story[3:] == [
        "60: resize b primary to 2,3,0,1",
        "65: suspend b",
        "70: b has left",
        "70: resume b primary on 0,1,2,3",
        f"{80 + 890 / 4:.0f}: b is done",
    ]
    job = machine.run.job_of("b")
    assert (job.repeated, job.suspensions) == (0, 1)


@pytest.mark.parametrize("seconds", [65.0, 71.0])
def test_cancelled_in_the_middle(seconds):
    cancelled = at(ev.CancelRequested, seconds, job_id=2)
    machine, story = pair(happenings=[cancelled])
    assert machine.run.job_of("b").ended_s == seconds
    assert len(machine.ledger.free) == 4 and not any("goes on" in line for line in story)


@pytest.mark.parametrize(
    ("seconds", "step", "left"), [(65.0, 110, 70.0), (69.7, 120, 75.0), (71.5, 120, 76.5)]
)
def test_suspended_in_the_middle(seconds, step, left):
    """Before it stands still, at its last step before, and while it does: what was done is saved."""
    happenings = [
        at(ev.SuspendRequested, seconds, job_id=2),
        at(ev.ResumeRequested, 100.0, job_id=2),
    ]
    machine, _ = pair(happenings=happenings)
    job = machine.run.job_of("b")
    first, second = job.attempts
    assert (first.ended, first.to_step, first.end_s) == (Ended.SUSPENDED, step, left)
    assert (second.start_s, second.from_step, len(second.gpus)) == (100.0, step, 4)
    assert job.repeated == 0


def test_the_deadline_comes_while_it_is_being_resized():
    """Saving begins at 65 s, five before the new ranks would be there."""
    deadline = 65.0 + 60.0 + 5.0
    machine, story = pair(happenings=[at(ev.DeadlineMoved, 60.0, deadline=deadline)])
    assert story[3:] == ["60: resize b primary to 2,3,0,1", "65: suspend b", "70: b has left"]
    assert machine.run.job_of("b").saved_step == 110


def test_a_gpu_is_lost_on_which_a_rank_starts():
    machine, story = pair(happenings=[at(ev.DeviceLost, 65.0, gpu=1, why="Xid 79")])
    assert story[4:7] == ["65: suspend b", "70: b has left", "70: resume b primary on 0,2,3"]
    assert machine.run.job_of("b").repeated == 0


def test_a_state_with_a_resize_under_way_goes_on():
    """As for the estimates of a run that is not over."""
    specs = [training("a", "two", 100), training("b", "four", 1000)]
    first = Simulation(specs, FAST, gpus=4, options={"promote": "always"})
    machine = first.run(until=65.0)
    assert machine.run.job_of("b").resizing
    machine = Simulation((), FAST, machine=machine).run()
    job = machine.run.job_of("b")
    assert [a.ended for a in job.attempts] == [Ended.RESIZED, Ended.COMPLETED]
    assert job.attempts[0].end_s == pytest.approx(65.0 + 10.0 + 3.0)


def test_a_state_after_a_resize_goes_on_without_a_start():
    specs = [training("a", "two", 100), training("b", "four", 1000)]
    machine = Simulation(specs, FAST, gpus=4, options={"promote": "always"}).run(until=75.0)
    assert Simulation((), FAST, machine=machine).run().run.job_of("b").ended_s == 293.0


# --- planners -----------------------------------------------------------------------------------


def test_a_planner_shrinks_for_an_arrival_in_place():
    """`b` has all four; `c` can run on few, and comes when `b` has long to go."""
    profiles = (
        a_profile("b", [1, 1.9, 2.6, 3.0], start_s=5.0, suspend_s=60.0, grow_s=1.0, shrink_s=1.0),
        a_profile("c", [1, 1.2], start_s=5.0, suspend_s=60.0, grow_s=1.0, shrink_s=1.0),
    )
    specs = [training("b", "b", 3000), training("c", "c", 300, submit_at=100.0)]
    machine, story = simulate(specs, profiles, gpus=4, policy="planner")
    shrinks = [line for line in story if ": resize b" in line]
    assert shrinks and not any("suspend" in line for line in story)
    assert Why.SHRUNK in [note.reason.why for note in machine.run.job_of("b").story]
    grown = [note.reason for note in machine.run.job_of("b").story if note.reason.why is Why.GROWN]
    assert grown and " 1.00 s of standing still save " in str(grown[0])
    by_restart = [replace(p, grow_s=None, shrink_s=None) for p in profiles]
    assert makespan(machine) < makespan(simulate(specs, by_restart, gpus=4, policy="planner")[0])


def test_what_a_plan_expects_of_a_resize_in_place_is_what_happens():
    """The future that a planner sketches counts the time in which new ranks start as the simulator does."""
    specs = [training("a", "two", 100), training("b", "four", 1000)]
    simulation = Simulation(specs, FAST, gpus=4, policy="planner")
    plan = simulation.run(until=30.0).make_plan()
    machine, story = simulate(specs, FAST, gpus=4, policy="planner")
    assert any(": resize b" in line for line in story)
    assert plan.ends[2] == pytest.approx(machine.run.job_of("b").ended_s)


def test_what_marble_would_do_is_what_it_does():
    """A planner's measure: with 50 steps left a restart would not pay, standing still does."""
    specs = [training("a", "two", 100), training("b", "four", 150)]
    before = Simulation(specs, FAST, gpus=4).run(until=30.0)
    machine, _ = simulate(specs, FAST, gpus=4)
    assert machine.run.job_of("b").ended_s == 73.0 + 30 / 4
    assert rollout(Problem(before.decisions.view()), Marble()).ends == [60.0, 80.5]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("policy", ["marble", "planner", "equal", "optimus"])
def test_under_every_policy_all_is_done_and_nothing_twice(policy, family):
    """The invariants are checked after each event; a job's stretches follow each other without a gap."""
    drawn = random_set(3, family, arrivals=0.5, most_jobs=12)
    jobs = [replace(job, kind=Kind.COMMAND) for job in drawn.jobs]
    profiles = [replace(p, grow_s=1.0, shrink_s=0.5) for p in drawn.profiles]
    machine, _ = simulate(jobs, profiles, gpus=drawn.gpus, policy=policy)
    assert machine.run.finished
    for job in machine.run.jobs.values():
        assert (job.repeated, job.step) == (0, job.spec.steps)
    assert math.isfinite(makespan(machine))


def test_roles_and_the_list_of_secondaries_follow():
    machine, _ = pair()
    assert machine.run.secondaries == []
    assert [attempt.role for attempt in machine.run.job_of("b").attempts] == [Role.SECONDARY, Role.PRIMARY]
