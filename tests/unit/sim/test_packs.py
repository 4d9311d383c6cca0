"""Jobs that are trained as one on a GPU: who rides with whom, who inherits the GPU, what it comes to."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from hpcsched.cli.jobs.explain import what_is_next
from hpcsched.cli.run.results import result_of
from hpcsched.core import events as ev
from hpcsched.core.actions import SetTimer
from hpcsched.core.mechanisms.packing.mechanism import Packing
from hpcsched.core.model import JobState, Kind, Role
from hpcsched.core.reasons import Why
from hpcsched.policy import POLICIES
from hpcsched.report.gantt import _strips
from hpcsched.report.result import summarise
from hpcsched.sim.engine import Simulation
from hpcsched.testing.builders import Driver, a_job, a_profile
from hpcsched.testing.invariants import check

SMALL = replace(a_profile("small", [10.0]), packed_s={1: 0.1, 2: 0.12, 4: 0.16, 8: 0.24})
LARGE = replace(a_profile("large", [10.0]), packed_s={1: 0.1, 2: 0.21, 8: 0.9})
UNKNOWN = a_profile("unknown", [10.0])
PLAIN = a_profile("plain", [10.0, 19.0])
PROFILES = (SMALL, LARGE, UNKNOWN, PLAIN)


def packed(name, model="small", steps=1000, most=8, **rest):
    strategy = {"kind": "packed", "most": most, **rest.pop("strategy", {})}
    return a_job(name, model, steps, gpus=1, strategy=strategy, **rest)


def run(jobs, *, gpus=1, policy="marble", **rest):
    simulation = Simulation(
        jobs, PROFILES, gpus=gpus, policy=policy, watch=lambda event, actions, machine: check(machine), **rest
    )
    return simulation.run()


def ends(machine):
    return [round(job.ended_s, 3) for job in machine.run.jobs.values()]


@pytest.mark.parametrize("policy", POLICIES)
def test_eight_small_jobs_train_as_one_in_the_time_of_their_packed_steps(policy):
    """8 x 100 s one after the other; 1,000 steps of 0.24 s as one."""
    machine = run([packed(f"j{i}") for i in range(8)], policy=policy)
    assert ends(machine) == [240.0] * 8
    assert [job.attempts[0].role for job in machine.run.jobs.values()] == [Role.PRIMARY] + [Role.PACKED] * 7


def test_a_gpu_that_is_free_is_better_than_a_seat():
    machine = run([packed(f"j{i}") for i in range(4)], gpus=4)
    assert ends(machine) == [100.0] * 4
    assert not any(job.current.role is Role.PACKED for job in machine.run.jobs.values())


def test_they_are_spread_over_the_gpus_and_go_where_others_are_like_them():
    jobs = [packed(f"j{i}", args={"width": 32 * (1 + i % 2)}) for i in range(8)]
    machine = run(jobs, gpus=2)
    gpus = [job.current.gpus[0] for job in machine.run.jobs.values()]
    assert gpus == [0, 1] * 4


@pytest.mark.parametrize(("mode", "model"), [("auto", "small"), ("loop", "small"), ("auto", "unknown")])
def test_one_goes_where_its_own_model_trains_if_that_is_known_to_gain(mode, model):
    """Else, and also where models are computed one after the other, it goes where the fewest train."""
    models = (model, "plain", model, model, "plain")
    jobs = [packed(f"j{i}", name, strategy={"mode": mode}) for i, name in enumerate(models)]
    gpus = [job.attempts[0].gpus[0] for job in run(jobs, gpus=2).run.jobs.values()]
    known = (mode, model) == ("auto", "small")
    assert gpus == ([0, 1, 0, 0, 1] if known else [0, 1, 0, 1, 0])


def test_what_is_known_to_gain_nothing_is_not_packed():
    """Two large models take 0.21 s a step together, 0.1 s each one after the other."""
    machine = run([packed(f"j{i}", "large") for i in range(3)])
    assert ends(machine) == [100.0, 200.0, 300.0]


def test_what_was_never_measured_takes_as_long_as_one_after_the_other():
    machine = run([packed(f"j{i}", "unknown") for i in range(3)])
    assert ends(machine) == [300.0] * 3


def test_no_more_than_the_job_says_and_only_those_that_belong_together():
    machine = run([packed(f"j{i}", most=2) for i in range(4)])
    assert ends(machine) == [120.0, 120.0, 240.0, 240.0]
    labels = ["a", "b", "a", "b"]
    machine = run([packed(f"j{i}", strategy={"pack": label}) for i, label in enumerate(labels)])
    assert ends(machine) == [120.0, 240.0, 120.0, 240.0]


def test_nobody_rides_while_another_waits_for_the_gpu():
    """`plain` came before j1: had j1 ridden with j0, it would have had to wait longer."""
    machine = run([packed("j0"), a_job("plain", "plain", 1000, gpus=1), packed("j1")])
    assert ends(machine) == [100.0, 200.0, 300.0]


def test_when_the_holder_leaves_the_next_has_the_gpu():
    machine = run([packed("short", steps=500), packed("long", steps=1000), packed("never", steps=800)])
    short, long, never = machine.run.jobs.values()
    assert (short.attempts[0].role, long.attempts[0].role) == (Role.PRIMARY, Role.PACKED)
    assert machine.mechanism(Packing).packs.inherited_s == {(long.id, 1): short.ended_s}
    assert [machine.ledger.held_from_s(job, job.attempts[0]) for job in (short, never)] == [0.0, None]
    result = result_of(machine)
    assert result.gpu_hours * 3600 == pytest.approx(long.ended_s)
    assert result.utilisation == pytest.approx(1.0)


def test_what_packed_jobs_do_says_nothing_of_what_their_models_can():
    driver = Driver(gpus=1, profiles=[])
    driver.submit(*(packed(name, kind=Kind.TRAINER, trainer="m:T") for name in "ab"))
    assert driver.job("b").state is JobState.STARTING
    driver.runs("a", "b")
    driver.trains("a", rate=1.0, seconds=400.0)
    assert not driver.machine.estimates.observed.beliefs


def test_one_that_leaves_its_pack_gets_a_gpu_of_its_own_and_no_company():
    driver = Driver(gpus=1, profiles=[])
    jobs = [packed(name, kind=Kind.TRAINER, trainer="m:T") for name in "abc"]
    driver.submit(*jobs)
    driver.runs("a")
    for name in "bc":
        driver.runs(name)
    driver.exits("c", 75, 0, None)
    job = driver.job("c")
    assert job.state is JobState.PENDING and not job.failures
    assert any(note.reason.why is Why.LEFT_PACK for note in job.story)
    driver.exits("a", 0, 100, 100)
    assert job.state is JobState.PENDING  # b has the GPU now, and c rides no more
    driver.exits("b", 0, 100, 100)
    assert job.state is JobState.STARTING
    driver.runs("c")
    driver.submit(packed("d", kind=Kind.TRAINER, trainer="m:T"))
    assert driver.job("d").state is JobState.PENDING
    driver.exits("c", 75, 0, None)  # alone there is nobody to make room for
    assert driver.job("c").failures == 1


def test_one_that_makes_room_keeps_its_checkpoint_and_waits_for_a_gpu_of_its_own():
    driver = Driver(gpus=1, profiles=[])
    driver.submit(*(packed(name, kind=Kind.TRAINER, trainer="m:T") for name in "ab"))
    driver.runs("a")
    driver.runs("b")
    driver.exits("b", 75, 40, 40)
    job = driver.job("b")
    assert (job.state, job.saved_step, job.repeated) == (JobState.SUSPENDED, 40, 0)
    assert said(job, Why.LEFT_PACK)
    driver.submit(packed("c", kind=Kind.TRAINER, trainer="m:T"))
    assert driver.job("c").state is JobState.PENDING  # else b would wait for c too
    driver.exits("a", 0, 100, 100)
    assert (job.state, job.role) == (JobState.STARTING, Role.PRIMARY)


def test_one_that_is_stopped_while_it_starts_may_ride_again():
    driver = Driver(gpus=1, profiles=[])
    driver.submit(*(packed(name, kind=Kind.TRAINER, trainer="m:T") for name in "ab"))
    driver.runs("a")
    driver.tell(ev.WorkersSpawned, "b", processes=((100, 1),))
    driver.drain()
    driver.exits("b", 75, None, None)
    driver.exits("a", 75, 10, 10)
    assert not driver.machine.mechanism(Packing).packs.alone
    driver.start_agent(1)
    assert [driver.job(name).role for name in "ab"] == [Role.PRIMARY, Role.PACKED]


def test_what_a_trainer_refuses_is_not_tried_again():
    driver = Driver(gpus=1, profiles=[])
    driver.submit(packed("a", kind=Kind.TRAINER, trainer="m:T"), a_job("b", kind=Kind.COMMAND, gpus=1))
    driver.runs("a")
    driver.exits("a", 2, None, None)
    assert driver.job("a").state is JobState.FAILED
    driver.runs("b")
    driver.exits("b", 2, None, None)
    assert driver.job("b").state is not JobState.FAILED  # what 2 means there is not known


def test_a_lost_gpu_ends_all_that_train_there():
    driver = Driver(gpus=2, profiles=[])
    driver.submit(*(packed(name, kind=Kind.TRAINER, trainer="m:T") for name in "abcd"))
    for name in "abcd":
        driver.runs(name)
    there = [job for job in driver.machine.run.active.values() if job.gpus == (0,)]
    assert len(there) == 2
    driver.lose(0)
    assert all(job.wanted for job in there)
    assert not any(job.wanted for job in driver.machine.run.active.values() if job.gpus == (1,))


def test_explain_tells_with_whom_a_job_trains_and_why_one_that_waits_does_not():
    driver = Driver(gpus=1, profiles=[])
    first, second, third, other = (packed(name, most=2) for name in ("a", "b", "c", "d"))
    trainer = {"kind": Kind.TRAINER, "trainer": "m:T"}
    driver.submit(*(replace(spec, **trainer) for spec in (first, second, third)))
    driver.submit(replace(other, **{**trainer, "trainer": "m:Other"}))
    driver.runs("a", "b")
    told = {name: what_is_next(driver.machine, driver.job(name)) for name in "abcd"}
    assert "it holds GPU 0, where it trains as one with 2 (b)" in told["a"]
    assert "it shares GPU 0, where it trains as one with 1 (a)" in told["b"]
    assert "not on GPU 0: 2 train there, at most 2 may" in told["c"]
    assert "not on GPU 0: job 1 (a) is of another kind" in told["d"]


def test_explain_names_no_gpu_to_one_that_left_its_pack_and_none_whose_job_is_not_packed():
    driver = Driver(gpus=2, profiles=[])
    trainer = {"kind": Kind.TRAINER, "trainer": "m:T"}
    driver.submit(a_job("plain", "plain", gpus=1))
    driver.submit(*(packed(name, most=2, **trainer) for name in "abc"))
    driver.runs("plain", "a", "b")
    assert (driver.job("plain").gpus, driver.job("a").gpus) == ((0,), (1,))
    told = what_is_next(driver.machine, driver.job("c"))
    assert "not on GPU 1: 2 train there, at most 2 may" in told and "GPU 0" not in told
    driver.exits("b", 75, 0, None)
    assert driver.job("b").state is JobState.PENDING
    assert driver.job("b").id in driver.machine.mechanism(Packing).packs.alone
    assert "not on GPU" not in what_is_next(driver.machine, driver.job("b"))


def test_in_a_gantt_chart_packed_jobs_are_one_above_the_other():
    machine = run([packed("short", steps=500), packed("long", steps=1000), packed("last", steps=800)])
    result = summarise(machine.run.jobs.values(), policy="marble", gpus=1)
    bars = [(job, attempt) for job in result.jobs for attempt in job.attempts]
    assert _strips(bars, result.makespan_s) == {(1, 0.0): (0, 3), (2, 0.0): (1, 3), (3, 0.0): (2, 3)}


def test_what_is_known_not_to_fit_into_the_memory_is_not_packed():
    """Two take 6,000 MiB as one, three 8,000: of 8,000 there are 7,200 to plan with."""
    fits = replace(SMALL, packed_mib={1: 4000.0, 2: 6000.0})
    driver = Driver(gpus=1, profiles=[fits])
    small = {"kind": Kind.TRAINER, "trainer": "m:T"}
    driver.machine.ledger.devices[0] = replace(driver.machine.ledger.devices[0], memory_mib=8000.0)
    driver.submit(*(packed(name, **small) for name in "abc"))
    assert [str(job.state) for job in driver.machine.run.jobs.values()] == ["STARTING", "STARTING", "PENDING"]
    assert "not on GPU 0: 3 of them do not fit into its memory" in what_is_next(
        driver.machine, driver.job("c")
    )


def parted(machine):
    return [job.spec.name for job in machine.run.jobs.values() if said(job, Why.PARTED)]


def said(job, why):
    return any(note.reason.why is why for note in job.story)


def wait(driver, seconds):
    """So long nothing happens but what packs are to be looked at for."""
    until = driver.now + seconds
    while True:
        asked = (
            action
            for action in driver.actions
            if isinstance(action, SetTimer) and action.key == Packing.timer
        )
        due = min((action.due for action in asked if driver.now < action.due <= until), default=None)
        if due is None:
            driver.now = until
            return
        driver.now = due
        driver.tell(ev.TimerFired, key=Packing.timer)


SLOW = a_profile("slow", [10.0], start_s=1.0, resume_s=2.0, suspend_s=1.0)


@pytest.mark.parametrize("policy", ["marble", "planner", "equal"])
def test_who_rides_goes_to_a_gpu_that_stays_free_for_as_long_as_going_there_takes(policy):
    """Three of 100 s on two GPUs: at 50 s the one that is alone there is done, and the GPU stays free."""
    jobs = [packed("a", "slow"), packed("b", "slow", steps=490), packed("c", "slow")]
    machine = Simulation(
        jobs, [SLOW], gpus=2, policy=policy, watch=lambda event, actions, machine: check(machine)
    ).run()
    a, b, c = machine.run.jobs.values()
    assert b.ended_s == 50.0
    assert parted(machine) == ["c"]
    (note,) = (note for note in c.story if note.reason.why is Why.PARTED)
    assert note.at == 53.0
    assert [attempt.gpus for attempt in c.attempts] == [(0,), (1,)]
    assert [attempt.role for attempt in c.attempts] == [Role.PACKED, Role.PRIMARY]
    assert c.steps_repeated == 0
    assert max(a.ended_s, c.ended_s) < 140.0  # of 201 had they stayed together


def test_under_a_planner_nobody_rides_who_is_about_to_get_a_gpu():
    jobs = [packed("a", "slow"), packed("b", "slow", steps=400), packed("c", "slow", submit_at=5.0)]
    machine = Simulation(jobs, [SLOW], gpus=3, policy="planner").run()
    assert [job.attempts[0].role for job in machine.run.jobs.values()].count(Role.PACKED) == 0
    machine = Simulation(jobs, [SLOW], gpus=2, policy="planner").run()
    assert parted(machine) == ["c"]
    assert [attempt.gpus for attempt in machine.run.jobs[3].attempts] == [(0,), (1,)]


def test_nobody_parts_for_what_is_not_worth_its_cost_or_while_another_waits():
    short = [packed("a", "slow"), packed("b", "slow", steps=940), packed("c", "slow", steps=500)]
    machine = Simulation(short, [SLOW], gpus=2, policy="marble").run()
    assert not parted(machine)
    driver = Driver(gpus=2, profiles=[SLOW])
    driver.submit(*(packed(name, "slow", kind=Kind.TRAINER, trainer="m:T") for name in "abc"))
    for name in "abc":
        driver.runs(name)
    driver.exits("b", 0, 1000, 1000)
    wait(driver, 2.0)
    driver.submit(a_job("wide", "slow", gpus=2))  # waits for both GPUs: the free one is taken for it
    wait(driver, 60.0)
    assert driver.job("c").state is JobState.RUNNING
    assert not said(driver.job("c"), Why.PARTED)


def test_one_whose_work_is_not_known_parts_when_it_has_trained_long_enough_to_be_worth_it():
    driver = Driver(gpus=2, profiles=[])
    driver.now = 1000.0
    epochs = {"kind": Kind.TRAINER, "trainer": "m:T", "steps": None, "strategy": {"mode": "loop"}}
    driver.submit(*(packed(name, **epochs) for name in "abc"))
    for name in "abc":
        driver.runs(name)
    driver.exits("b", 0, 10, 10)
    c = driver.job("c")
    cost_s = driver.machine.estimates.save_s(c) + driver.machine.estimates.launch_s(c, 1, first=False)
    wait(driver, 2 * cost_s - 0.5)
    assert c.state is JobState.RUNNING
    wait(driver, 1.0)
    assert c.state is JobState.SUSPENDING
    (parted,) = (note.reason for note in c.story if note.reason.why is Why.PARTED)
    assert parted.facts["sooner"] == pytest.approx(cost_s)  # half of what it has trained so far
    driver.exits("c", 75, 20, 20)
    assert (c.state, c.gpus) == (JobState.STARTING, (1,))


def test_a_job_parts_once_and_no_more_leave_than_there_are_gpus():
    driver = Driver(gpus=3, profiles=[])
    loop = {"kind": Kind.TRAINER, "trainer": "m:T", "steps": None, "strategy": {"mode": "loop"}}
    driver.submit(*(packed(f"j{i}", **loop) for i in range(9)))
    for i in range(9):
        driver.runs(f"j{i}")
    for i in (1, 4, 7):  # all that are on GPU 1
        driver.exits(f"j{i}", 0, 10, 10)
    wait(driver, 600.0)
    leaving = [job for job in driver.machine.run.active.values() if job.state is JobState.SUSPENDING]
    assert [job.gpus for job in leaving] == [(0,)]
    driver.tell(ev.TimerFired, key=Packing.timer)  # asked again while one is still on its way
    assert sum(job.state is JobState.SUSPENDING for job in driver.machine.run.active.values()) == 1
    name = leaving[0].spec.name
    driver.exits(name, 75, 20, 20)
    driver.runs(name)
    wait(driver, 600.0)
    assert driver.job(name).state is JobState.RUNNING
    assert len([j for j in driver.machine.run.active.values() if j.state is JobState.SUSPENDING]) == 0


def test_one_whose_gpu_was_taken_on_its_way_rides_again_and_stays():
    driver = Driver(gpus=2, profiles=[])
    loop = {"kind": Kind.TRAINER, "trainer": "m:T", "steps": None, "strategy": {"mode": "loop"}}
    driver.submit(*(packed(name, **loop) for name in "abc"))
    for name in "abc":
        driver.runs(name)
    driver.exits("b", 0, 10, 10)
    wait(driver, 11.0)
    c = driver.job("c")
    assert c.state is JobState.SUSPENDING
    driver.submit(a_job("plain", "plain", gpus=1))
    driver.exits("c", 75, 20, 20)
    assert (c.state, c.role) == (JobState.STARTING, Role.PACKED)
    driver.runs("plain", "c")
    driver.exits("plain", 0, 100, 100)
    wait(driver, 600.0)
    driver.tell(ev.TimerFired, key=Packing.timer)
    assert c.state is JobState.RUNNING


@pytest.mark.parametrize("policy", ["exclusive", "optimus"])
def test_nobody_parts_where_a_free_gpu_is_not_given_away_at_once(policy):
    machine = Simulation(
        [packed(f"j{i}", "slow") for i in range(3)], [SLOW], gpus=2, policy="exclusive"
    ).run()
    assert not parted(machine)


@pytest.mark.parametrize("policy", ["planner", "marble", "equal"])
@pytest.mark.long
def test_sets_of_all_kinds_of_jobs_come_to_their_end(policy):
    """Packed, plain and background jobs that arrive at any time: the invariants hold after every event."""
    for seed in range(15):
        draw = random.Random(seed)
        jobs = []
        for i in range(draw.randint(3, 12)):
            kind = draw.choice(["packed", "packed", "plain", "background"])
            model, steps = draw.choice(["small", "large", "slow"]), draw.randint(10, 3000)
            about = {"submit_at": float(draw.choice([0, 0, draw.randint(1, 100)])), "gpus": 1}
            if i and draw.random() < 0.2:
                about["after"] = (f"j{draw.randrange(i)}",)
            if kind == "packed":
                jobs.append(packed(f"j{i}", model, steps, most=draw.randint(1, 4), **_without_gpus(about)))
            else:
                jobs.append(a_job(f"j{i}", model, steps, background=kind == "background", **about))
        simulation = Simulation(
            jobs,
            [*PROFILES, SLOW],
            gpus=draw.randint(1, 3),
            policy=policy,
            watch=lambda event, actions, machine: check(machine),
        )
        assert simulation.run().run.finished


def _without_gpus(about):
    return {key: value for key, value in about.items() if key != "gpus"}
