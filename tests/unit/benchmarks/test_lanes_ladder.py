"""The ladder of the DeepPool paper (sections 5, 7.2, 7.3; figures 11 and 12) on a simulated device."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from benchmarks.simulated.device import Chunk, Device, Kernel, Lane, Model
from hpcsched.planning.background.feedback import Feedback
from hpcsched.planning.background.pacing import Duty, Pacer
from hpcsched.planning.background.referee import Referee

pytestmark = pytest.mark.slow

MODEL = Model()
SPAN_US = 600_000.0


def kernels(blocks: int, us: float, number: int, suffers: float = 0.0) -> tuple[Kernel, ...]:
    return tuple(Kernel(blocks, us, suffers) for _ in range(number))


VGG = (
    # A rank of VGG-16 under a burst plan, strongly scaled: the early convolutions fill the device, the late
    # ones do not, the classifier is computed elsewhere, and the all-reduce suffers from any company.
    Chunk("conv 1-2", kernels(216, 60, 8)),
    Chunk("conv 3", kernels(108, 90, 6)),
    Chunk("conv 4", kernels(54, 110, 6)),
    Chunk("conv 5", kernels(28, 120, 6)),
    Chunk("classifier elsewhere", (Kernel(4, 1600),)),
    Chunk("backward 5-4", kernels(54, 110, 14)),
    Chunk("backward 3-1", kernels(216, 60, 14)),
    Chunk("all-reduce", kernels(12, 12, 40, suffers=1.2)),
)
ALL_REDUCE = len(VGG) - 1


def background(batch: int, parts: int = 8) -> tuple[Chunk, ...]:
    """One step of 48 kernels as so many graphs; what a block has to do grows with the batch."""
    return tuple(Chunk(f"part {n}", kernels(50, 4 + 18.0 * batch, 48 // parts)) for n in range(parts))


def alone(chunks: tuple[Chunk, ...], *, graphs: bool = True) -> float:
    """Steps of a program that has the device to itself, in SPAN_US."""
    lane = Lane(chunks, graphs=graphs)
    Device(MODEL, [lane]).run(SPAN_US)
    return lane.steps


@dataclass
class Outcome:
    slowdown: float
    """Of the foreground's steps, as a share of their time in isolation with CUDA graphs."""
    throughput: float
    """Of the background, as a share of what its largest batch reaches with the device to itself."""
    referee: Referee | None
    foreground: Lane
    background: Lane


def collocate(
    *,
    batch: int = 8,
    priorities: bool = True,
    graphs: bool = True,
    parts: int = 8,
    limit: int | None = None,
    feedback: bool = False,
    share: float = 1.0,
) -> Outcome:
    referee = None
    if limit is not None:
        barred = [index == ALL_REDUCE for index in range(len(VGG))]
        referee = Referee(Pacer(limit, Duty(share)), Feedback(barred) if feedback else None)
    first = Lane(
        VGG,
        priority=int(priorities),
        graphs=graphs,
        gate=None if limit is None else Referee(Pacer(2)),
        watcher=referee,
    )
    second = Lane(background(batch, parts), graphs=graphs, gate=referee)
    Device(MODEL, [first, second]).run(SPAN_US)
    return Outcome(
        slowdown=alone(VGG) / first.steps - 1,
        throughput=second.steps * batch / (alone(background(8)) * 8),
        referee=referee,
        foreground=first,
        background=second,
    )


def test_naive_collocation_makes_the_foreground_much_slower() -> None:
    assert collocate(priorities=False, graphs=False).slowdown > 0.5


def test_priorities_alone_change_little_as_launches_queue_up_in_front_of_the_device() -> None:
    naive, ranked = collocate(priorities=False, graphs=False), collocate(graphs=False)
    assert ranked.slowdown == pytest.approx(naive.slowdown, rel=0.1)


@pytest.mark.slow
def test_short_kernels_launched_one_by_one_leave_the_device_idle_and_graphs_do_not() -> None:
    inception = (Chunk("many short kernels", kernels(60, 4, 200)),)
    assert alone(inception) > 1.5 * alone(inception, graphs=False)
    assert alone(VGG) == pytest.approx(alone(VGG, graphs=False), rel=0.15)


def test_a_background_launched_as_one_large_graph_keeps_the_foreground_waiting() -> None:
    large, split = collocate(parts=1), collocate(parts=8)
    assert large.slowdown > 2 * split.slowdown


@pytest.mark.slow
def test_pacing_lets_priorities_work_and_the_fewer_launches_are_outstanding_the_better() -> None:
    unbounded = collocate(parts=1)
    by_limit = [collocate(limit=limit).slowdown for limit in (8, 4, 2, 1)]
    assert by_limit == sorted(by_limit, reverse=True)
    assert by_limit[-1] < 0.5 * unbounded.slowdown


def test_no_more_launches_are_outstanding_than_the_pacer_allows() -> None:
    outcome = collocate(limit=3)
    assert outcome.background.most_outstanding == 3
    assert outcome.foreground.most_outstanding == 2


@pytest.mark.slow
def test_feedback_keeps_the_background_out_of_what_suffers_and_lets_it_in_elsewhere() -> None:
    without, with_it = collocate(limit=2), collocate(limit=2, feedback=True)
    assert with_it.slowdown < 0.25 * without.slowdown
    assert with_it.referee is not None and with_it.referee.feedback is not None
    barred = {chunk.name for chunk, at in zip(VGG, with_it.referee.feedback.chunks, strict=True) if at.barred}
    assert barred == {"conv 1-2", "conv 3", "backward 3-1", "all-reduce"}


@pytest.mark.slow
def test_the_all_reduce_takes_a_third_longer_in_company_and_not_under_feedback() -> None:
    by_itself = Lane(VGG)
    Device(MODEL, [by_itself]).run(SPAN_US)
    usual_us = by_itself.chunk_us(ALL_REDUCE)
    assert collocate(limit=2).foreground.chunk_us(ALL_REDUCE) > 4 / 3 * usual_us
    assert collocate(limit=2, feedback=True).foreground.chunk_us(ALL_REDUCE) < 1.1 * usual_us


@pytest.mark.slow
def test_smaller_background_batches_cost_the_foreground_less() -> None:
    slowdowns = [collocate(limit=2, batch=batch).slowdown for batch in (8, 4, 2, 1)]
    assert slowdowns == sorted(slowdowns, reverse=True)
    assert slowdowns[-1] < 0.5 * slowdowns[0]


def test_with_all_of_it_the_foreground_loses_5_percent_at_most_and_the_background_keeps_40() -> None:
    outcome = collocate(limit=2, feedback=True, batch=4)
    assert outcome.slowdown <= 0.05
    assert outcome.throughput >= 0.40


@pytest.mark.slow
def test_what_the_feedback_tells_is_what_the_foreground_really_loses() -> None:
    outcome = collocate(limit=2, feedback=True, batch=4)
    assert outcome.referee is not None and outcome.referee.feedback is not None
    told = outcome.referee.feedback.slowdown()
    assert told is not None and abs(told - outcome.slowdown) < 0.03


@pytest.mark.slow
def test_the_background_paced_to_a_quarter_does_about_a_quarter() -> None:
    full, quarter = collocate(limit=1), collocate(limit=1, share=0.25)
    assert quarter.slowdown < full.slowdown
    assert 0.15 < quarter.throughput / full.throughput < 0.45
    assert collocate(limit=1, share=0.0).throughput == 0.0


@pytest.mark.parametrize("long_us", [10.0, 100.0, 1000.0])
@pytest.mark.parametrize("own_us", [10.0, 100.0, 1000.0])
def test_only_short_urgent_kernels_suffer_from_long_ones_of_low_priority(
    own_us: float, long_us: float
) -> None:
    """Figure 12: the device does not preempt, so an urgent kernel may have to wait for one that has begun."""
    urgent = (Chunk("urgent", kernels(150, own_us, 4)),)
    first = Lane(urgent, priority=1)
    Device(MODEL, [first, Lane((Chunk("other", kernels(150, long_us, 4)),))]).run(SPAN_US)
    kept = first.steps / alone(urgent)
    if long_us >= 10 * own_us:
        assert kept < 0.6
    elif long_us < own_us:
        assert kept > 0.85
