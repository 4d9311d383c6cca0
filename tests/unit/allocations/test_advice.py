"""The front, what is recommended, what is tried, and a batch job for each training."""

from __future__ import annotations

import json

import msgspec
import pytest

from hpcsched.allocations import advice, separate, tried
from hpcsched.allocations.candidates import limits_in, shapes_in, useful_gpus, whole_limit_s
from hpcsched.allocations.outcomes import Outcome, Work
from hpcsched.allocations.tried import Asked, Trials
from hpcsched.allocations.waits import Wait
from hpcsched.batch.queue import Partition, Shape
from hpcsched.errors import ConfigError
from hpcsched.testing.builders import a_job, a_profile

MODEL = a_profile("m", [1.0, 1.8, 2.4, 2.3], suspend_s=5.0)
JOBS = (a_job("a", "m", 3600), a_job("b", "m", 1800, after=("a",)))


def row(gpus: int, *held_s: float, wait_s: float | None = 0.0, partition: str = "p", **more) -> advice.Row:
    shape = Shape(partition=partition, nodes=1, gpus=gpus, limit_s=3600.0)
    return advice.row_of(shape, Outcome(held_s=held_s), Wait(seconds=wait_s), 120.0, **more)


def test_each_further_allocation_waits_again_and_is_held_back_before():
    shape = Shape(partition="p", nodes=2, gpus=3, limit_s=3600.0)
    wait = Wait(seconds=30.0, low_s=10.0, high_s=50.0, source="history", of=4)
    made = advice.row_of(shape, Outcome(held_s=(3000.0, 3000.0, 600.0)), wait, 120.0)
    assert (made.wait_s, made.wait_low_s, made.wait_high_s) == (330.0, 270.0, 390.0)
    assert (made.end_s, made.least_s) == (6600.0 + 330.0, 6600.0 + 240.0)
    assert made.gpu_hours == pytest.approx(6600 * 6 / 3600)


def test_nothing_on_the_front_is_beaten_and_the_rest_is():
    rows = [
        row(1, 4000.0),
        row(2, 2500.0),
        row(2, 2600.0),
        row(4, 2000.0),
        row(3, 2700.0),
        row(4, 100.0, wait_s=None),
    ]
    made = advice.in_order(rows, waiting=True)
    assert [one.number for one in made] == [1, 2, 3, 4, 5, 6]
    assert [(one.gpus_per_node, one.running_s) for one in made if one.front] == [
        (4, 2000.0),
        (2, 2500.0),
        (1, 4000.0),
    ]


def test_of_equal_ones_that_in_which_nobody_is_preempted():
    rows = [row(2, 900.0, partition="back", preempted=True), row(2, 900.0, partition="main")]
    assert [one.partition for one in advice.in_order(rows, waiting=True) if one.front] == ["main"]


def test_the_cheapest_of_those_that_end_nearly_first_or_the_other_way_round():
    made = advice.in_order([row(8, 1000.0), row(4, 1040.0), row(1, 3000.0), row(1, 2990.0)], waiting=True)
    assert advice.recommended(made, prefer="time", waiting=True).gpus_per_node == 4
    assert advice.recommended(made, prefer="gpu-hours", waiting=True).running_s == 2990.0


def test_unknown_waits_are_compared_without_waiting():
    made = advice.in_order([row(4, 1000.0, wait_s=None), row(1, 2000.0, wait_s=None)], waiting=False)
    assert [one.front for one in made] == [True, True]
    assert all(one.end_s is None for one in made)


def test_no_more_gpus_than_are_useful_and_whole_nodes_beyond_one():
    assert useful_gpus(JOBS, (MODEL,)) == 6
    partition = Partition(name="p", hosts={4: 5})
    assert shapes_in(partition, useful=6) == [(1, 1), (1, 2), (1, 3), (1, 4), (2, 4)]
    assert shapes_in(partition, useful=6, gpus=(2, 9), nodes=(1, 3)) == [(1, 2), (3, 2)]
    assert shapes_in(partition, useful=6, least=3, least_nodes=2) == [(2, 3)]


def test_limits_are_round_and_never_beyond_the_partitions():
    short = Partition(name="p", hosts={4: 5}, limit_s=5400.0)
    assert limits_in(short, 4000.0) == [1800.0, 3600.0, 4000.0]
    assert limits_in(short, 9000.0) == [1800.0, 3600.0, 5400.0]
    assert limits_in(short, 9000.0, (600.0, 7200.0)) == [600.0]
    assert whole_limit_s(1000.0, 60.0, 10.0) == 1200.0
    assert whole_limit_s(1000.0, 60.0, 10.0, doubt=0.2) == 1500.0


def trials(monkeypatch, **limits) -> tuple[Trials, list]:
    """All of the work in three partitions, and the calls of the simulator."""
    calls: list = []
    real = tried.outcome_of
    monkeypatch.setattr(tried, "outcome_of", lambda *a, **k: calls.append(k) or real(*a, **k))
    partitions = [Partition(name=name, hosts={2: 1}, limit_s=6000.0) for name in "pqr"]
    return Trials(Work(jobs=JOBS, profiles=(MODEL,), policy="marble"), partitions, Asked(**limits)), calls


def test_a_shape_is_simulated_once_for_all_partitions(monkeypatch):
    made, calls = trials(monkeypatch)
    # Short ones wait much less, so that they may be worth it.
    found, _ = made.tried(lambda shape: shape.limit_s**2 / 6000, 120.0)
    assert len({repr(call) for call in calls}) == len(calls)
    assert {one.shape.partition for one in found} == set("pqr")
    assert len(found) == len(made.shapes) == 3 * len([one for one in found if one.shape.partition == "p"])


def test_what_comes_back_without_waiting_less_is_not_simulated(monkeypatch):
    made, calls = trials(monkeypatch)
    found, notes = made.tried(lambda shape: 60.0, 120.0)
    assert all(len(one.outcome.held_s) == 1 for one in found)
    assert all("limit_s" not in call for call in calls)
    assert notes == [f"{len(made.shapes) - 6} more with shorter limits left out: they would come back without"
                     " waiting less"]  # fmt: skip
    unknown, _ = made.tried(lambda shape: None if shape.limit_s > 3000 else 60.0, 120.0)
    assert {one.shape.limit_s for one in unknown} > {1800.0, 3600.0}, "what is known is not beaten by it"
    only_short, _ = trials(monkeypatch, limits_s=(1800.0,))[0].tried(lambda shape: 60.0, 120.0)
    assert {len(one.outcome.held_s) for one in only_short} == {2, 4}


def test_a_batch_job_for_each_training():
    fewest = separate.trainings(JOBS, (MODEL,), best=False, most=8)
    best = separate.trainings(JOBS, (MODEL,), best=True, most=2)
    assert [(one.gpus, one.seconds, one.after) for one in fewest] == [(1, 3600.0, ()), (1, 1800.0, (0,))]
    assert [(one.gpus, one.seconds) for one in best] == [(2, 2000.0), (2, 1000.0)]
    assert separate.gpu_hours(fewest) == pytest.approx(1.5)
    assert separate.together_s(fewest, 2) == 5400.0
    apart = separate.trainings([a_job(name, "m", 3600) for name in "abc"], (MODEL,), best=False, most=8)
    assert [separate.together_s(apart, gpus) for gpus in (1, 2, 3)] == [10800.0, 7200.0, 3600.0]


PAGE = advice.Advice(
    file="jobs.toml", system="slurm", jobs=2, counted=2, missing=(), policy="marble", prefer="time",
    waiting=True, doubt=None, recommended=1, command="hpcsched script slurm jobs.toml",
    rows=advice.in_order([row(4, 1000.0), row(1, 2000.0)], waiting=True), separate=(), notes=(),
)  # fmt: skip


def test_what_is_printed_is_read_again(tmp_path):
    path = tmp_path / "advice.json"
    path.write_bytes(msgspec.json.encode(PAGE))
    assert advice.read(path, None) == (PAGE, PAGE.rows[0])
    assert advice.read(path, 2)[1].gpus_per_node == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema": 2}, "schema: 2; accepted: 1"),
        ({"rows": []}, "row 1; accepted: advice with rows"),
        ({"recommended": 7}, "row 7; accepted: a row, 1 to 2"),
        ({"rows": [{"nodes": 0}]}, "accepted: what `hpcsched advise --json` prints"),
    ],
)
def test_what_is_no_advice_is_refused_in_one_line(tmp_path, change, said):
    path = tmp_path / "advice.json"
    path.write_text(json.dumps(msgspec.to_builtins(PAGE) | change))
    with pytest.raises(ConfigError, match=said) as error:
        advice.read(path, None)
    assert "\n" not in str(error.value)
