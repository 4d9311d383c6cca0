"""Slurm's queue simulated: each test is one rule. `benchmarks/queue_check.py` tries them on a real one."""

from __future__ import annotations

from random import Random

import pytest

from hpcsched.allocations.backfill import Queue, Settings
from hpcsched.allocations.cluster import BatchJob, Cluster, neighbours
from hpcsched.errors import ConfigError

M = 60.0
ONE = Cluster(nodes=1, gpus=4)


def a_batch_job(name: str, runs_min: float, limit_min: float, gpus: int = 1, **more) -> BatchJob:
    defaults = {"submit_s": 0.0, "limit_s": limit_min * M, "runs_s": runs_min * M}
    return BatchJob(name=name, gpus=gpus, **{**defaults, **more})


def starts(jobs, cluster=ONE, **settings) -> dict[str, float]:
    """When each job starts, in minutes."""
    queue = Queue(cluster, Settings(**settings))
    queue.submit(*jobs)
    queue.run()
    assert not queue.waiting
    assert queue.gpus_in_use == 0
    return {name: ran.start_s / M for name, ran in queue.ran.items()}


def test_a_short_job_fills_a_hole_and_a_long_one_does_not():
    jobs = [a_batch_job("now", 10, 10, 3), a_batch_job("big", 5, 5, 4)]
    found = starts([*jobs, a_batch_job("long", 3, 11), a_batch_job("short", 3, 9)])
    assert found == {"now": 0, "short": 0, "big": 10, "long": 15}


def test_by_its_limit_and_not_by_how_long_it_really_runs():
    jobs = [a_batch_job("now", 1, 10, 3), a_batch_job("big", 5, 5, 4)]
    # It would have been over in time; nobody can know that.
    assert starts([*jobs, a_batch_job("careful", 0.5, 60)])["careful"] == 6


def test_an_early_end_lets_the_next_start_at_once():
    assert starts([a_batch_job("now", 2, 60, 3), a_batch_job("big", 5, 5, 4)])["big"] == 2


def test_a_job_is_ended_at_its_limit():
    assert starts([a_batch_job("now", 90, 10, 4), a_batch_job("next", 1, 1)])["next"] == 10


def test_a_job_that_waits_for_one_gpu_reserves_the_whole_node():
    two = Cluster(nodes=2, gpus=4)
    jobs = [a_batch_job("a", 10, 10, 3), a_batch_job("b", 20, 20, 4), a_batch_job("waits", 10, 10, 2)]
    # node 1 has one GPU free, and from minute 10 on there would be two beside those of `waits`.
    found = starts([*jobs, a_batch_job("small", 12, 12)], two)
    assert found["waits"] == 10
    assert found["small"] == 10


def test_two_nodes_are_waited_for_together():
    two = Cluster(nodes=2, gpus=4)
    jobs = [a_batch_job("a", 10, 10, 4), a_batch_job("b", 20, 20, 1), a_batch_job("both", 5, 5, 4, nodes=2)]
    found = starts([*jobs, a_batch_job("fits", 19, 19, 3), a_batch_job("late", 21, 21, 2)], two)
    assert found == {"a": 0, "b": 0, "fits": 0, "both": 20, "late": 25}


def test_tasks_of_an_array_go_as_their_percent_sign_says_and_block_nobody():
    tasks = [a_batch_job(f"t{n}", 10, 10, array="t", at_once=2) for n in range(4)]
    found = starts([*tasks, a_batch_job("other", 10, 10, 2)])
    assert found == {"t0": 0, "t1": 0, "other": 0, "t2": 10, "t3": 10}


def test_an_array_reserves_no_more_than_it_may():
    # Eight tasks of which one is given a reservation: node 2 stays free for what ends later.
    two = Cluster(nodes=2, gpus=1)
    jobs = [a_batch_job("a", 10, 10), a_batch_job("b", 10, 10)]
    tasks = [a_batch_job(f"t{n}", 10, 10, array="t") for n in range(4)]
    jobs += [*tasks, a_batch_job("c", 5, 5, submit_s=1.0)]
    assert starts(jobs, two, array_reservations=1)["c"] == 30
    assert starts(jobs, two)["c"] == 30


def test_a_cap_holds_a_users_jobs_back_and_lets_others_pass():
    mine = [a_batch_job(f"m{n}", 10, 10, user="me") for n in range(4)]
    found = starts([*mine, a_batch_job("other", 10, 10, 2)], gpus_per_user=2, capped=frozenset({"me"}))
    assert found == {"m0": 0, "m1": 0, "other": 0, "m2": 10, "m3": 10}


def test_shards_share_a_gpu_that_nobody_gets_whole():
    cluster = Cluster(nodes=1, gpus=2, shards=2)
    jobs = [a_batch_job(f"s{n}", 10, 10, shards=1) for n in range(2)]
    jobs += [a_batch_job("whole", 10, 10), a_batch_job("next", 5, 5), a_batch_job("s2", 5, 5, shards=1)]
    assert starts(jobs, cluster) == {"s0": 0, "s1": 0, "whole": 0, "next": 10, "s2": 10}


def test_a_follow_up_comes_when_the_first_has_ended_and_waits_anew():
    second = a_batch_job("second", 5, 10, 4)
    found = starts([a_batch_job("first", 10, 10, 4, follow=second), a_batch_job("other", 7, 10, 4)])
    assert found == {"first": 0, "other": 10, "second": 17}


def test_backfill_comes_at_its_interval_and_the_main_scheduler_at_once():
    jobs = [a_batch_job("now", 10, 10, 3), a_batch_job("big", 5, 5, 4, submit_s=1.0)]
    found = starts([*jobs, a_batch_job("short", 1, 1, submit_s=6.0)], interval_s=30.0)
    assert found["short"] == pytest.approx(31 / 60)


def test_a_copy_goes_on_by_itself():
    queue = Queue(ONE)
    queue.submit(a_batch_job("a", 10, 10, 4), a_batch_job("b", 10, 10, 4))
    queue.run(until=5 * M)
    other = queue.copy()
    other.submit(a_batch_job("c", 1, 1, 4))
    other.run(done=["c"])
    assert other.ran["c"].start_s == 20 * M
    assert queue.now == 5 * M
    queue.run()
    assert "c" not in queue.ran


def test_what_can_never_run_is_refused():
    with pytest.raises(ConfigError, match="5 GPUs"):
        Queue(ONE).submit(a_batch_job("a", 1, 1, 5))


def test_nodes_come_from_the_shortest_row_that_is_long_enough():
    assert neighbours([0, 1, 2, 4, 5, 7], 2) == [4, 5]
    assert neighbours([0, 1, 2, 4, 5, 7], 5) == [0, 1, 2, 4, 5]
    assert neighbours([0], 2) is None


def test_no_gpu_is_held_twice_and_nobody_starts_before_coming():
    draw = Random(7)
    jobs = [
        a_batch_job(
            f"j{n}", draw.uniform(1, 200), draw.choice((30, 60, 240)), draw.choice((1, 1, 2, 4)),
            nodes=draw.choice((1, 1, 2)), submit_s=draw.uniform(0, 40_000), user=draw.choice("ab"),
        )
        for n in range(300)
    ]  # fmt: skip
    queue = Queue(Cluster(nodes=5, gpus=4), Settings(gpus_per_user=14))
    queue.submit(*jobs)
    queue.run()
    assert len(queue.ran) == len(jobs)
    assert any(ran.by_backfill for ran in queue.ran.values())
    for ran in queue.ran.values():
        assert ran.start_s >= ran.job.submit_s
        there = [other for other in queue.ran.values() if other.start_s <= ran.start_s < other.end_s]
        for node in ran.nodes:
            assert sum(other.job.gpus for other in there if node in other.nodes) <= 4
        assert (
            sum(other.job.gpus * other.job.nodes for other in there if other.job.user == ran.job.user) <= 14
        )
