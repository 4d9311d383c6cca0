"""Equal shares on scenes one can follow by hand."""

from __future__ import annotations

import pytest

from hpcsched.core import events as ev
from hpcsched.core.actions import Launch, Suspend
from hpcsched.core.reasons import Why
from hpcsched.policy.baselines.equal import shares
from hpcsched.policy.baselines.targets import coming
from hpcsched.testing.builders import Driver, a_job, a_profile, simulate

LINE = a_profile("line", [1, 2, 3, 4, 5, 6, 7, 8])
THREE = a_profile("three", [1, 2, 3, 2.5, 2, 1.5])
COST = a_profile("cost", [1, 2, 3, 4, 5, 6, 7, 8], start_s=5, suspend_s=10, resume_s=10)
ALL = (LINE, THREE, COST)


def why(machine, name):
    return [note.reason.why for note in machine.run.job_of(name).story]


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
    assert str(machine.run.job_of("a").story[1].reason) == (
        "3 GPUs: an equal share of the 8, at most its fastest count"
    )
    assert "goes from 2 to 4 GPUs: its equal share now" in [
        str(n.reason) for n in machine.run.job_of("c").story
    ]


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


def test_nor_does_anybody_grow_by_a_part_of_what_it_is_to_have():
    driver = Driver(
        a_job("a", "line", 900, gpus=4),
        a_job("b", "line", 900, gpus=2),
        a_job("c", "line", 900),
        gpus=8,
        profiles=ALL,
        policy="equal",
    )
    driver.runs("a", "b", "c")
    driver.suspend("a")  # four GPUs will come free
    assert driver.exits("b", 0) == []  # c could grow by two, but its share is six more
    assert [a.job_id for a in driver.leaves("a", 1)] == [3]
    assert len(driver.job("c").gpus) == 8


def test_what_is_on_its_way_to_a_larger_count_frees_no_gpus():
    """b comes while a grows and keeps its GPU: the two that are free are all that b can have now."""
    driver = Driver(
        a_job("a", "line", 900, gpus=(1, 2)),
        a_job("x", "line", 900, gpus=(3, 3)),
        gpus=4,
        profiles=ALL,
        policy="equal",
    )
    driver.runs("a", "x")
    driver.exits("x", 0)
    assert driver.states() == ["SUSPENDING", "COMPLETED"]
    assert not coming(driver.machine.decisions.view())
    (launch,) = driver.submit(a_job("b", "line", 900, gpus=(1, 3)))
    assert len(launch.gpus) == 2


@pytest.mark.parametrize("command", ["cancel", "suspend"])
def test_who_is_told_to_leave_gives_up_gpus(command):
    driver = Driver(a_job("a", "line"), gpus=4, profiles=ALL, policy="equal")
    driver.runs("a")
    assert not coming(driver.machine.decisions.view())
    getattr(driver, command)("a")
    assert coming(driver.machine.decisions.view())


def test_so_does_who_shrinks():
    """c gets nothing of the free GPU while a saves: its share of two is coming."""
    driver = Driver(a_job("a", "line", 9000, gpus=(1, 5)), gpus=6, profiles=ALL, policy="equal")
    driver.runs("a")
    driver.submit(a_job("b", "line", 9000))
    assert driver.states() == ["SUSPENDING", "PENDING"]
    assert driver.submit(a_job("c", "line", 9000)) == []


def test_but_not_who_has_yet_to_say_that_it_can_leave():
    """It may never say so."""
    driver = Driver(a_job("a", "line", gpus=(1, 3)), gpus=4, profiles=ALL, policy="equal")
    driver.tell(ev.WorkersSpawned, "a", processes=((100, 1),))
    driver.suspend("a")
    assert not coming(driver.machine.decisions.view())
    (launch,) = driver.submit(a_job("b", "line"))
    assert len(launch.gpus) == 1


def test_nobody_is_asked_to_leave_who_is_not_ready_to():
    driver = Driver(a_job("a", "line", 900), gpus=4, profiles=ALL, policy="equal")
    driver.tell(ev.WorkersSpawned, "a", processes=((100, 1),))
    assert driver.submit(a_job("b", "line", 900)) == []
    assert [type(a) for a in driver.tell(ev.WorkersReady, "a")] == [Suspend]


def test_on_full_hosts_a_job_makes_do_with_what_one_of_them_has():
    jobs = [a_job("a", "line", gpus=2), a_job("b", "line", gpus=2), a_job("c", "line")]
    driver = Driver(*jobs, gpus=3, hosts=2, profiles=ALL, policy="equal")
    assert shares(driver.machine.decisions.view()) == {1: 2, 2: 2, 3: 2}
    assert [len(job.gpus) for job in driver.machine.run.active.values()] == [2, 2, 1]


def test_a_running_job_grows_by_what_a_host_has_and_nobody_else_gets_those_gpus():
    """x leaves two GPUs on the first host; c moves there from the second, and d waits for its old one."""
    jobs = [a_job("a", "line", gpus=2), a_job("b", "line", gpus=3), a_job("c", "line"), a_job("x", gpus=2)]
    driver = Driver(*jobs, a_job("d", "line"), gpus=4, hosts=2, profiles=ALL, policy="equal")
    assert driver.states() == ["STARTING"] * 4 + ["PENDING"]
    driver.runs("a", "b", "c", "x")
    (suspend,) = driver.exits("x", 0)
    assert (type(suspend), suspend.job_id) == (Suspend, 3)
    launches = driver.leaves("c", 1)
    assert [(a.job_id, len(a.gpus)) for a in launches] == [(3, 2), (5, 1)]

    driver = Driver(*jobs, gpus=4, hosts=2, profiles=ALL, policy="equal")
    driver.runs("a", "b", "c", "x")
    assert [type(a) for a in driver.exits("x", 0)] == [Suspend]
    assert shares(driver.machine.decisions.view())[3] == 3  # of which a host has two
    assert [len(a.gpus) for a in driver.leaves("c", 1)] == [2]


def test_jobs_with_several_hosts_count_with_all_their_gpus():
    jobs = [a_job("a", "line", nodes=2), a_job("b", "line"), a_job("c", "line"), a_job("d", "line")]
    driver = Driver(*jobs, gpus=2, hosts=2, profiles=ALL, policy="equal")
    assert shares(driver.machine.decisions.view()) == {1: 1, 2: 1, 3: 1}
    jobs = [a_job("a", "line"), a_job("b", "line", nodes=2), a_job("c", "line")]
    driver = Driver(*jobs, gpus=1, hosts=2, profiles=ALL, policy="equal")
    assert shares(driver.machine.decisions.view()) == {1: 1, 3: 1}
    jobs = [a_job("a", "line", nodes=2, gpus=(1, 2)), a_job("b", "line", gpus=(1, 3))]
    driver = Driver(*jobs, gpus=3, hosts=2, profiles=ALL, policy="equal")
    assert shares(driver.machine.decisions.view()) == {1: 2, 2: 2}  # and not 3: two on each host are four
    driver = Driver(*jobs[:1], gpus=1, hosts=2, profiles=ALL, policy="equal")
    assert shares(driver.machine.decisions.view()) == {1: 1}


def test_of_jobs_nothing_is_known_of_all_get_equal_shares_and_new_ones():
    for b in (a_job("b", "newer", None), a_job("b", "newer", 100), a_job("b", "cost", None)):
        driver = Driver(a_job("a", "new", 100), b, gpus=5, profiles=ALL, policy="equal")
        assert [len(job.gpus) for job in driver.machine.run.active.values()] == [3, 2]
        driver.runs("a", "b")
        assert [a.job_id for a in driver.exits("a", 0) if isinstance(a, Suspend)] == [2]


@pytest.mark.parametrize(("deadline", "grows"), [(89.0, False), (91.0, True)])
def test_a_job_that_could_not_go_on_before_the_allocation_ends_is_left_as_it_is(deadline, grows):
    """Saving begins 60 s before the deadline, and 10 s earlier for a's own save; the switch takes 20 s."""
    jobs = [a_job("a", "cost", 9000), a_job("b", "cost", 9000)]
    for policy in ({"policy": "equal", "resize": "always"}, {"policy": "equal"}):
        driver = Driver(*jobs, gpus=4, profiles=ALL, deadline=deadline, **policy)
        driver.runs("a", "b")
        assert [type(a) for a in driver.exits("b", 0)] == [Suspend] * grows


@pytest.mark.parametrize(("deadline", "changes"), [(89.0, False), (91.0, True)])
def test_nor_does_it_shrink_or_make_way(deadline, changes):
    driver = Driver(a_job("a", "cost", 9000), gpus=4, profiles=ALL, deadline=deadline, policy="equal")
    driver.runs("a")
    assert [type(a) for a in driver.submit(a_job("b", "cost", 9000))] == [Suspend] * changes

    driver = Driver(a_job("a", "cost", 9000, gpus=4), gpus=4, profiles=ALL, policy="equal")
    driver.runs("a")
    driver.suspend("a")
    driver.submit(a_job("b", "cost", 9000))
    driver.leaves("a", 1)
    driver.runs("b")
    driver.tell(ev.DeadlineMoved, deadline=deadline)
    assert [type(a) for a in driver.resume("a")] == [Suspend] * changes


def test_who_is_sent_away_by_the_user_has_no_share():
    jobs = [a_job("a", "line", 9000), a_job("b", "line", 9000)]
    driver = Driver(*jobs, gpus=4, profiles=ALL, policy="equal")
    driver.runs("a", "b")
    driver.suspend("a")
    assert shares(driver.machine.decisions.view()) == {1: 0, 2: 4}
    assert [a.job_id for a in driver.leaves("a", 1) if isinstance(a, Suspend)] == [2]
    driver.suspend("b")  # while it is on its way to four GPUs
    assert shares(driver.machine.decisions.view()) == {2: 0}
    driver = Driver(*jobs, gpus=4, profiles=ALL, policy="equal")
    driver.runs("a", "b")
    driver.cancel("a")
    assert shares(driver.machine.decisions.view()) == {1: 0, 2: 4}


def test_a_later_job_makes_way_for_an_earlier_one_that_needs_its_gpus():
    """Also if some GPUs would be left for it, but too few."""
    for least in (4, 2):
        driver = Driver(gpus=4, profiles=ALL, policy="equal")
        driver.submit(a_job("a", "line", 9000, gpus=(least, 4)), a_job("b", "line", 9000, gpus=(3, 4)))
        driver.runs("a")
        driver.suspend("a")
        driver.leaves("a", 1)
        driver.runs("b")
        driver.resume("a")
        assert why(driver.machine, "b")[-1] is Why.PREEMPTED
        (launch,) = [a for a in driver.leaves("b", 5) if isinstance(a, Launch)]
        assert (launch.job_id, len(launch.gpus)) == (1, 4)
        assert driver.states() == ["STARTING", "SUSPENDED"]


def test_earlier_is_who_came_earlier():
    """Whatever its id: for a, which needs all of them, b does not make way."""
    jobs = [a_job("a", "line", 800, gpus=4, submit_at=50), a_job("b", "line", 800)]
    _, story = simulate(jobs, ALL, gpus=4, policy="equal")
    assert story[1:3] == ["200: b is done", "200: start a primary on 0,1,2,3"]


def test_shares_on_several_hosts():
    """Two GPUs for a is one on each host; what its hosts cannot give is done without."""
    jobs = [a_job("a", "line", 600, nodes=2), a_job("b", "line", 300), a_job("c", "line", 300)]
    _, story = simulate(jobs, ALL, gpus=3, nodes=2, policy="equal")
    assert story[:3] == [
        "0: start a secondary on 0,1,3,4",
        "0: start b secondary on 2",
        "0: start c secondary on 5",
    ]
