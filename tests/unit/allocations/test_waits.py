"""Waiting: who says how long, in which order, and between which bounds."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcsched.allocations.waits import MOST_SILENT, Past, Waits, ask, in_order, within
from hpcsched.batch.queue import Planned, Shape
from hpcsched.errors import BatchError


def shape(gpus: int = 1, limit_s: float = 3600.0, nodes: int = 1, partition: str = "main") -> Shape:
    return Shape(partition=partition, nodes=nodes, gpus=gpus, limit_s=limit_s)


class FakeQueue:
    """A job waits a minute for each GPU; `refuses` those with more than so many; `silent`: no answer."""

    kind, hold_s = "slurm", 120.0

    def __init__(self, refuses: int = 100, *, silent: bool = False) -> None:
        self.asked: list[Shape] = []
        self._refuses, self._silent = refuses, silent

    def planned(self, shape: Shape, options=()) -> Planned:
        self.asked.append(shape)
        if self._silent:
            raise BatchError("sbatch did not answer within 15 s")
        if shape.gpus > self._refuses:
            return Planned(refused="too many")
        return Planned(start=1000.0 + 60.0 * shape.gpus)


def test_the_users_own_number_wins_over_all():
    waits = Waits(given_s=5.0, asked={shape(): 100.0}, past=[Past(shape=shape(), waited_s=7.0)])
    assert (waits.of(shape()).seconds, waits.of(shape()).source) == (5.0, "given")


def test_the_plan_comes_before_a_waiting_job_and_that_before_what_was():
    past = [Past(shape=shape(), waited_s=seconds) for seconds in (10.0, 20.0, 90.0)]
    waits = Waits(asked={shape(): 100.0}, pending=[(shape(4), 50.0)], past=past)
    assert waits.of(shape()).source == "test-only"
    waits.asked.clear()
    assert (waits.of(shape()).seconds, waits.of(shape()).source) == (50.0, "squeue --start")
    waits.pending = ()
    said = waits.of(shape())
    assert (said.low_s, said.seconds, said.high_s, said.of, said.source) == (10.0, 20.0, 90.0, 3, "history")
    assert waits.of(shape(8)).source == "unknown"
    assert waits.of(shape(partition="other")).seconds is None


def test_what_was_not_asked_is_between_smaller_and_larger():
    waits = Waits(asked={shape(1): 10.0, shape(2): 30.0, shape(8): 100.0})
    said = waits.of(shape(4))
    assert (said.low_s, said.high_s, said.seconds, said.source) == (30.0, 100.0, 65.0, "between")
    assert waits.of(shape(9)).seconds is None


@pytest.mark.long
@given(st.lists(st.tuples(st.integers(1, 8), st.integers(1, 8)), min_size=1, max_size=40))
def test_all_shapes_are_asked_about_once_and_the_ends_first(pairs):
    shapes = [shape(gpus, 3600.0 * hours) for gpus, hours in pairs]
    ordered = in_order(shapes)
    assert sorted(map(repr, ordered)) == sorted({repr(one) for one in shapes})
    least, most = min(one.gpus for one in shapes), max(one.gpus for one in shapes)
    assert {least, most} <= {one.gpus for one in ordered[:2]}


def test_no_more_questions_than_allowed_and_the_rest_is_between():
    queue, ticks = FakeQueue(), count()
    shapes = [shape(gpus) for gpus in range(1, 65)]
    waits = ask(queue, shapes, now=lambda: 1000.0 + next(ticks) / 1e6, most=10)
    assert len(queue.asked) == 10
    assert "54 of 64 shapes were not asked about" in waits.notes[0]
    assert all(waits.of(one).low_s <= 60.0 * one.gpus <= waits.of(one).high_s for one in shapes[1:-1]
               if waits.of(one).source == "between")  # fmt: skip
    assert all(waits.of(a).seconds <= waits.of(b).seconds for a in shapes for b in shapes if within(a, b))


def test_asking_ends_when_its_time_is_over_or_nobody_answers():
    queue, ticks = FakeQueue(), count(step=15)
    waits = ask(queue, [shape(gpus) for gpus in range(1, 40)], now=lambda: float(next(ticks)), for_s=60.0)
    assert len(queue.asked) < 6
    assert "60 s were over" in waits.notes[0]
    silent = FakeQueue(silent=True)
    assert not ask(silent, [shape(gpus) for gpus in range(1, 40)], now=lambda: 0.0).asked
    assert len(silent.asked) == MOST_SILENT


def test_what_is_larger_than_what_is_refused_is_refused_without_asking():
    queue = FakeQueue(refuses=0)
    waits = ask(queue, [shape(gpus) for gpus in range(1, 9)], now=lambda: 0.0)
    assert queue.asked == [shape(1)]
    assert waits.of(shape(5)).refused == "too many"
