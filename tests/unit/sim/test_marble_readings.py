"""Every reading of Algorithm 1 that the paper leaves open, and what it does not speak of."""

from __future__ import annotations

import pytest

from hpcsched.core import events as ev
from hpcsched.core.actions import Launch, Suspend
from hpcsched.core.model import Role
from hpcsched.errors import ConfigError
from hpcsched.policy import make_policy
from hpcsched.sim.engine import Simulation
from hpcsched.testing.builders import Driver, a_job, a_profile, makespan, simulate

THREE = a_profile("three", [1, 2, 3, 2.5])
FOUR = a_profile("four", [1, 2, 3, 4, 3])
FIVE = a_profile("five", [1, 2, 3, 4, 5, 4.5])
ALL = (THREE, FOUR, FIVE)


def leases(driver):
    return {job.spec.name: job.gpus for job in driver.machine.run.jobs.values() if job.state.active}


def reasons(driver, job):
    return [str(note.reason) for note in driver.job(job).story]


# --- Algorithm 1 -----------------------------------------------------------------------------------


def test_the_optimal_count_is_the_smallest_that_is_fastest():
    flat = a_profile("flat", {1: 1.0, 2: 2.0, 4: 2.0})
    driver = Driver(a_job("x", "flat"), profiles=[flat])
    assert leases(driver) == {"x": (0, 1)}


def test_a_job_gets_its_optimal_count_or_what_is_left():
    driver = Driver(a_job("a", "four"), a_job("b", "four"), a_job("c", "four"), profiles=ALL)
    assert leases(driver) == {"a": (0, 1, 2, 3), "b": (4, 5)}
    assert [driver.job(i).role for i in (1, 2, 3)] == [Role.PRIMARY, Role.SECONDARY, None]
    assert reasons(driver, "a")[-1] == "4 GPUs is the fastest count of four (4 steps/s; measured profile)"
    assert reasons(driver, "b")[-1] == "2 of the 4 GPUs that four is fastest on: no more were free"
    assert driver.machine.waiting_reason(driver.job("c")).why == "Resources"


def test_its_own_gpus_count_as_available():
    driver = Driver(a_job("a", "three"), a_job("b", "four"), profiles=ALL, promote="always")
    driver.runs("a", "b")
    assert leases(driver) == {"a": (0, 1, 2), "b": (3, 4, 5)}
    (suspend,) = driver.exits("a", 0)  # 3 are free: fewer than its optimal 4, but 6 with its own
    assert isinstance(suspend, Suspend)
    (launch,) = driver.leaves("b", 10)
    assert launch.gpus == (0, 3, 4, 5) and launch.role is Role.PRIMARY and launch.resume


def test_promotion_comes_before_the_next_start():
    driver = Driver(
        a_job("a", "three"), a_job("b", "five"), a_job("c", "five"), profiles=ALL, promote="always"
    )
    driver.runs("a", "b")
    first, second = driver.exits("a", 0)
    assert isinstance(first, Suspend) and first.job_id == 2
    assert isinstance(second, Launch) and (second.job_id, len(second.gpus)) == (3, 1)
    assert len(driver.job("b").target.gpus) == 5


def test_the_oldest_secondary_is_promoted_first():
    specs = [a_job("a", "five", gpus=4), a_job("b", "four", gpus=(1, 4)), a_job("c", "three")]
    driver = Driver(*specs, gpus=6, profiles=ALL, promote="always")
    driver.submit(a_job("d", "three", submit_at=1.0))
    driver.runs("a", "b")
    # b waits on 2; c has none yet.
    assert leases(driver) == {"a": (0, 1, 2, 3), "b": (4, 5)}
    driver.exits("a", 0)
    assert driver.job("b").target.role is Role.PRIMARY
    assert leases(driver) == {"b": (0, 1, 4, 5), "c": (2, 3)}
    driver.runs("c")
    driver.leaves("b", 5)
    driver.runs("b")
    driver.submit(a_job("e", "three"))
    driver.now = 2.0
    assert driver.job("c").role is Role.SECONDARY
    driver.exits("b", 0)
    assert driver.job("c").target is not None


def test_two_secondaries_compete_and_the_older_one_wins():
    """Both miss one GPU; one comes free."""
    specs = [
        a_job("x", "three", gpus=1),
        a_job("old", "four", gpus=(1, 4)),
        a_job("young", "four", gpus=(1, 4)),
    ]
    driver = Driver(a_job("y", "four", gpus=1), *specs, gpus=8, profiles=ALL, promote="always")
    assert {k: len(v) for k, v in leases(driver).items()} == {"y": 1, "x": 1, "old": 4, "young": 2}
    driver.runs("x", "y", "young")
    driver.exits("x", 0)
    assert driver.job("young").target is None  # 3 of 4: nothing in parts
    driver.exits("y", 0)
    assert len(driver.job("young").target.gpus) == 4


def test_when_an_older_one_has_taken_the_last_gpu_nothing_is_said_to_the_next():
    line = a_profile("line", [1.0, 2.0, 3.0])
    driver = Driver(gpus=5, profiles=[*ALL, line], promote="always")
    driver.submit(a_job("fixed", "three", gpus=2), a_job("one", "three", gpus=1))
    driver.submit(a_job("x", "line"), a_job("y", "line"))
    assert leases(driver) == {"fixed": (0, 1), "one": (2,), "x": (3, 4)}
    driver.exits("fixed", 0)
    assert driver.job("y").gpus == (0, 1)
    driver.runs("x", "y")
    told = len(driver.job("y").story)
    (suspend,) = driver.exits("one", 0)
    assert suspend.job_id == driver.job("x").id
    assert len(driver.job("y").story) == told


def test_older_means_submitted_earlier_not_started_earlier():
    specs = [a_job("a", "three"), a_job("old", "five", gpus=(2, None)), a_job("young", "five")]
    driver = Driver(*specs, gpus=6, profiles=ALL, promote="always")
    driver.hold("young")
    driver.runs("a", "old")
    assert {k: len(v) for k, v in leases(driver).items()} == {"a": 3, "old": 3}
    driver.suspend("old")
    driver.leaves("old", 1)
    driver.release("young")
    driver.runs("young")
    assert len(leases(driver)["young"]) == 3
    driver.exits("a", 0)  # young is promoted; old resumed on the one that is left
    driver.resume("old")
    assert {job.id: len(job.gpus) for job in driver.machine.run.active.values()} == {3: 5}


def test_no_promotion_in_parts():
    driver = Driver(
        a_job("a", "three", gpus=1),
        a_job("b", "three", gpus=2),
        a_job("c", "five"),
        profiles=ALL,
        promote="always",
    )
    driver.runs("a", "b", "c")
    assert driver.exits("a", 0) == []
    assert leases(driver)["c"] == (3, 4, 5)
    assert reasons(driver, "c")[-1] == "not promoted: 5 GPUs would be its best, 4 could be had"
    assert driver.exits("b", 0) != []


def test_no_promotion_that_gains_no_gpu():
    """A secondary that has its best count already, by a newer profile, or more than it."""
    for best in (3, 2):
        driver = Driver(a_job("a", "three"), a_job("b", "four"), profiles=ALL, promote="always")
        driver.runs("a", "b")
        newer = a_profile("four", [1, 2, 3, 2] if best == 3 else [1, 3, 2])
        driver.tell(ev.ProfilesLoaded, profiles=(newer,))
        assert driver.job("b").role is Role.SECONDARY
        assert driver.exits("a", 0) == []
        assert leases(driver) == {"b": (3, 4, 5)}


def test_a_job_that_is_not_ready_is_not_promoted_until_it_is():
    driver = Driver(a_job("a", "three"), a_job("b", "four"), profiles=ALL, promote="always")
    driver.runs("a")
    driver.tell(ev.WorkersSpawned, "b", processes=())
    assert driver.exits("a", 0) == []
    assert "has not said that it can be suspended" in reasons(driver, "b")[-1]
    assert [type(a) for a in driver.tell(ev.WorkersReady, "b")] == [Suspend]


def test_never_means_never():
    driver = Driver(a_job("a", "three"), a_job("b", "four"), profiles=ALL, promote="never")
    driver.runs("a", "b")
    assert driver.exits("a", 0) == []
    assert reasons(driver, "b")[-1] == "not promoted: the policy option promote is never"


def costly(cost_s):
    return a_profile("four", [1, 2, 3, 4, 3], suspend_s=cost_s / 2, resume_s=cost_s / 2)


@pytest.mark.parametrize(("cost_s", "promoted"), [(24.9, True), (25.0, False)])
def test_promotion_where_it_pays(cost_s, promoted):
    """300 steps left: 100 s on 3 GPUs, 75 s on 4. Equal is not better."""
    driver = Driver(a_job("a", "three"), a_job("b", "four", 400), profiles=[THREE, costly(cost_s)])
    driver.runs("a", "b")
    driver.reports("b", 100)
    assert bool(driver.exits("a", 0)) is promoted
    word = "promoted from 3 to 4 GPUs" if promoted else "exceed the 25 s it would save"
    assert word in reasons(driver, "b")[-1]


def test_the_start_still_to_be_paid_counts_as_time_on_the_old_gpus():
    slow = a_profile("four", [1, 2, 3, 4, 3], start_s=50.0, suspend_s=10.0, resume_s=40.0)
    driver = Driver(a_job("a", "three"), a_job("b", "four", 300), profiles=[THREE, slow])
    driver.runs("a", "b")
    driver.now = 10.0
    assert driver.exits("a", 0) != []  # 40 + 100 s against 50 + 75 s


def test_whether_it_pays_is_not_known_without_steps():
    driver = Driver(a_job("a", "three"), a_job("b", "four", None), profiles=ALL)
    driver.runs("a", "b")
    driver.exits("a", 0)
    assert "the work left is unknown" in reasons(driver, "b")[-1]


# --- who waits, who passes -------------------------------------------------------------------------


def test_dependents_wait_and_independents_pass():
    specs = [a_job("a", "three"), a_job("b", "three", after=("a",)), a_job("c", "three")]
    driver = Driver(*specs, profiles=ALL)
    assert leases(driver) == {"a": (0, 1, 2), "c": (3, 4, 5)}
    driver.exits("a", 0)
    assert leases(driver) == {"b": (0, 1, 2), "c": (3, 4, 5)}


def test_a_job_that_needs_more_than_is_free_is_passed_and_starts_when_it_fits():
    specs = [a_job("a", "three"), a_job("big", "five", gpus=5), a_job("c", "three")]
    machine, story = simulate(specs, ALL)
    assert story[:3] == [
        "0: start a primary on 0,1,2",
        "0: start c primary on 3,4,5",
        "33: a is done",
    ]
    assert story[-2:] == ["33: start big primary on 0,1,2,3,4", "53: big is done"]
    assert machine.run.finished


def test_fixed_and_ranges_of_gpus():
    specs = [
        a_job("two", "five", gpus=2),
        a_job("few", "five", gpus=(1, 3)),
        a_job("many", "three", gpus=(4, 6)),
    ]
    driver = Driver(*specs, gpus=12, profiles=ALL)
    assert {k: len(v) for k, v in leases(driver).items()} == {"two": 2, "few": 3, "many": 4}
    assert reasons(driver, "two")[-1] == "the job asks for 2 GPUs"
    assert {job.role for job in driver.machine.run.jobs.values()} == {Role.PRIMARY}


# --- models never measured -------------------------------------------------------------------------


def test_an_unknown_model_gets_at_most_half_the_node():
    driver = Driver(a_job("x"), profiles=ALL)
    assert leases(driver) == {"x": (0, 1, 2)}
    assert reasons(driver, "x")[-1] == (
        "the scaling of x has not been measured yet: it gets 3 GPUs now, at most half of the 6; its speed is "
        "learnt as it runs"
    )


@pytest.mark.parametrize(("count", "each"), [(1, [3]), (2, [3, 3]), (3, [2, 2, 2]), (4, [1, 1, 2, 2])])
def test_unknown_models_share_what_is_free_equally(count, each):
    driver = Driver(*(a_job(f"x{i}") for i in range(count)), profiles=ALL)
    assert [len(gpus) for gpus in leases(driver).values()] == each


def test_the_only_gpu_is_not_halved():
    driver = Driver(a_job("x"), gpus=1, profiles=ALL)
    assert leases(driver) == {"x": (0,)}


def test_an_unknown_model_keeps_to_its_own_limits():
    driver = Driver(a_job("x", gpus=(4, 5)), a_job("y", gpus=(1, 1)), profiles=ALL)
    assert [len(gpus) for gpus in leases(driver).values()] == [4, 1]


def test_learnt_throughput_counts_from_the_next_decision_on():
    driver = Driver(a_job("x", "new"), a_job("y", "new", after=("x",)), profiles=ALL)
    driver.runs("x")
    driver.trains("x", rate=2.5)
    profile = driver.machine.estimates.profile(driver.job("y"))
    assert (profile.source, profile.throughput) == ("learned", {3: 2.5})
    driver.exits("x", 0)
    assert leases(driver) == {"y": (0, 1, 2)}
    assert reasons(driver, "y")[-1] == "3 GPUs is the fastest count of new (2.5 steps/s; learned profile)"


def test_several_learnt_counts_tell_which_is_best():
    driver = Driver(a_job("x", "new", gpus=1), a_job("y", "new", gpus=4), profiles=ALL)
    driver.runs("x", "y")
    driver.trains("x", rate=2.0)
    driver.trains("y", rate=1.5)
    driver.exits("y", 0)
    driver.submit(a_job("z", "new"))
    assert len(leases(driver)["z"]) == 1


# --- exclusive, options, going on from a state ---------------------------------------------------------


def test_exclusive_takes_no_more_than_a_job_may_have_and_starts_nothing_beside_it():
    driver = Driver(a_job("a", "three", gpus=(1, 2)), a_job("b", "three"), policy="exclusive", profiles=ALL)
    assert leases(driver) == {"a": (0, 1)}
    driver.submit(a_job("c", "three"))
    assert leases(driver) == {"a": (0, 1)}
    assert reasons(driver, "a")[-1] == "exclusive policy: the 2 GPUs that it may have, one job at a time"
    driver.exits("a", 0)
    assert leases(driver) == {"b": (0, 1, 2, 3, 4, 5)}


def test_on_several_hosts_exclusive_jobs_run_side_by_side_in_order():
    """A batch system gives each job hosts of its own: nobody overtakes the one that needs two."""
    jobs = [a_job("a", "three"), a_job("wide", "three", nodes=2), a_job("c", "three")]
    driver = Driver(*jobs, gpus=2, hosts=2, policy="exclusive", profiles=ALL)
    assert leases(driver) == {"a": (0, 1)}
    driver.exits("a", 0)
    assert leases(driver) == {"wide": (0, 1, 2, 3)}
    driver.submit(a_job("d", "three"), a_job("e", "three"))
    driver.exits("wide", 0)
    assert leases(driver) == {"c": (0, 1), "d": (2, 3)}


def test_exclusive_keeps_the_order():
    driver = Driver(policy="exclusive", profiles=ALL)
    driver.submit(*(a_job(f"j{i}", "three") for i in range(5)))
    order = []
    while driver.machine.run.active:
        (job,) = driver.machine.run.active.values()
        order.append(job.id)
        driver.exits(job.id, 0)
    assert order == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("fifo", {}, "--policy: 'fifo'; accepted: marble, exclusive"),
        ("marble", {"promote": "often"}, "--policy-option: promote: 'often'; accepted: pays, always, never"),
        ("marble", {"eps": 1}, "--policy-option: marble.eps: unknown option; accepted: promote"),
        ("exclusive", {"promote": "pays"}, "accepted: none (exclusive has no options)"),
    ],
)
def test_unknown_policies_and_options_are_refused(name, options, message):
    with pytest.raises(ConfigError) as caught:
        make_policy(name, options)
    assert message in str(caught.value)


def test_a_lost_device_in_a_simulation():
    lost = ev.DeviceLost(at=10.0, gpu=0, why="Xid 79")
    machine, story = simulate([a_job("a", "three", 90)], ALL, gpus=3, happenings=[lost])
    assert story == [
        "0: start a primary on 0,1,2",
        "10: a exits 143",
        "10: start a primary on 1,2",
        "55: a is done",
    ]
    assert machine.run.jobs[1].repeated == 30


@pytest.mark.parametrize("cut", [0.0, 10.0, 25.0, 31.0, 33.0, 60.0])
def test_from_the_present_state_a_simulation_goes_on_as_it_would_have(cut):
    """Stop it anywhere (in starts, in a suspension) and let another one take over."""
    slow = [a_profile(p.model, p.throughput, start_s=5.0, suspend_s=4.0, resume_s=3.0) for p in ALL]
    specs = [
        a_job("a", "three", 75),
        a_job("b", "four", 400),
        a_job("c", "five", 300),
        a_job("d", "three", 99, after=("a",)),
        a_job("e", "three", 60, submit_at=32.0),
    ]
    whole, _ = simulate(specs, slow, promote="always")

    first = Simulation(specs, slow, gpus=6, options={"promote": "always"}).run(until=cut)
    assert first.run.now == cut
    rest = Simulation((), slow, machine=first).run()
    assert rest.run.finished
    assert makespan(rest) == pytest.approx(makespan(whole), rel=0.01)
    assert all(job.repeated == 0 for job in rest.run.jobs.values())


def test_a_simulation_needs_profiles_and_steps():
    for spec in (a_job("x", "nobody"), a_job("x", "three", None)):
        with pytest.raises(ConfigError, match="job x"):
            Simulation([spec], ALL, gpus=6)
