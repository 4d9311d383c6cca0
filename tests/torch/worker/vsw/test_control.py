"""Rank 0's decisions: who computes how much, what is tried, how the batch follows the gradient."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hpcsched.errors import ConfigError  # noqa: E402
from hpcsched.planning.vsw.batching import Halves  # noqa: E402
from hpcsched.planning.vsw.costs import AllReduceCost  # noqa: E402
from hpcsched.planning.vsw.options import WorkerOptions  # noqa: E402
from hpcsched.worker.vsw.clock import RoundTime  # noqa: E402
from hpcsched.worker.vsw.control import KNOWN_FOR, PLAIN_FOR, TRIAL_STEPS, BatchControl, BatchCourse  # noqa: E402
from hpcsched.worker.vsw.epoch_forecast import CELLS, Trajectory, expect  # noqa: E402
from hpcsched.worker.vsw.measurements import DeviceTimes  # noqa: E402

pytestmark = pytest.mark.torch

ADAPTIVE = {"local_batch": 8, "global_batch": [64, 512], "similarity": 0.2, "every": 10, "rate": 0.25}


def control(base: int = 64, **options: Any) -> BatchControl:
    made = BatchControl(WorkerOptions.parse(options or ADAPTIVE), base)
    made.buckets = (4000,)
    made.line = AllReduceCost(per_byte_s=1e-9, latency_s=1e-5)
    return made


def measured(
    *speeds: float, host: str = "here", streams: bool = False, rounds_of_each: int = 100, **more: float
) -> list[DeviceTimes]:
    """Ranks that take so many seconds for a local batch of 8, and `more` by local batch (`b16=`)."""
    tables = []
    for second in speeds:
        rounds = {(8, 1): RoundTime(read_s=0.0, forward_s=second / 3, backward_s=second * 2 / 3)}
        for name, factor in more.items():
            rounds[int(name[1:]), 1] = RoundTime(read_s=0.0, forward_s=0.0, backward_s=second * factor)
        counts = dict.fromkeys(rounds, rounds_of_each)
        tables.append(
            DeviceTimes(
                host=host, device="a device", streams=streams, rounds=rounds, counts=counts, update_s=0.001
            )
        )
    return tables


def workers(course: BatchCourse) -> list[int]:
    return [share.workers if share else 0 for share in course.shares]


def test_as_long_as_nothing_is_known_all_ranks_have_as_many_workers() -> None:
    course = control().course(3)
    assert workers(course) == [3, 3, 2]
    assert course.trial
    assert course.until == TRIAL_STEPS


def test_ranks_get_workers_in_proportion_to_their_speed() -> None:
    one = control()
    one.tables = measured(0.01, 0.03)
    course = one.course(2)
    assert workers(course) == [6, 2]
    assert not course.trial
    assert course.until == 10


def test_all_workers_are_there_once_and_in_order() -> None:
    one = control()
    one.tables = measured(0.01, 0.02, 0.05)
    course = one.course(3)
    assert sum(workers(course)) * course.local_batch == course.batch == 64
    assert [course.first_worker(rank) for rank in range(3)] == [
        0,
        workers(course)[0],
        sum(workers(course)[:2]),
    ]


def test_a_larger_local_batch_is_tried_once_and_kept_if_it_is_faster() -> None:
    one = control(**{**ADAPTIVE, "local_batch": [8, 32]})
    one.tables = measured(0.01)
    course = one.course(1)
    assert (course.local_batch, course.trial, course.until) == (16, True, TRIAL_STEPS)
    one.tables = measured(0.01, b16=1.2)
    assert one.course(1).local_batch == 32  # 16 has gained: on to the next
    one.tables = measured(0.01, b16=1.2, b32=3.0)
    course = one.course(1)
    assert (course.local_batch, course.trial) == (16, False)
    one.tables = measured(0.01, b16=1.99)
    assert one.course(1).local_batch in (8, 16)  # nothing gained: 32 is not tried
    assert not one.course(1).trial


def test_a_bad_moment_of_the_machine_does_not_end_the_search() -> None:
    """A trial of three steps says 16 is slower: 32 is tried all the same, until more is known."""
    one = control(**{**ADAPTIVE, "local_batch": [8, 32]})
    one.tables = measured(0.01, b16=4.0, rounds_of_each=6)
    assert (one.course(1).local_batch, one.course(1).trial) == (32, True)


def test_where_nothing_is_within_twice_the_next_one_above_is_tried() -> None:
    one = control(96, local_batch=[16, 256], global_batch=[96, 960], rate=0.1, every=10)
    one.tables = [
        DeviceTimes(
            host="here",
            device="x",
            streams=False,
            rounds={(16, 1): RoundTime(read_s=0, forward_s=0.01, backward_s=0.02)},
            counts={(16, 1): 100},
        )
    ]
    assert one.course(1).local_batch == 48  # 96 samples are 6 workers with 16, or 2 with 48


def test_a_local_batch_too_large_for_the_memory_is_not_used_again() -> None:
    one = control(**{**ADAPTIVE, "local_batch": [8, 32]})
    one.tables = measured(0.01)
    one.tables[0].too_large.add((16, 1))
    course = one.course(1)
    assert (course.local_batch, course.trial) == (8, False)


def test_a_gpu_tries_more_at_once_and_keeps_what_is_fastest() -> None:
    one = control()
    one.tables = measured(0.01, streams=True)
    course = one.course(1)
    assert (course.shares[0].at_once, course.trial) == (2, True)  # type: ignore[union-attr]
    for count, factor in ((2, 1.4), (3, 2.4), (4, 3.6)):
        one.tables[0].rounds[8, count] = RoundTime(read_s=0.0, forward_s=0.0, backward_s=0.01 * factor)
    course = one.course(1)
    # 8 workers: 4 rounds of 2 take 5.6 times as long as one, 3 and 3 and 2 take 6.2, twice 4 take 7.2.
    assert course.shares[0].at_once == 2  # type: ignore[union-attr]
    assert not course.trial


def test_the_batch_follows_the_gradient_once_for_each_look() -> None:
    one = control()
    one.saw(Halves(aa=1.0, bb=1.0, ab=0.0, samples=32))
    one.adapt()
    assert one.batch == 80
    one.adapt()
    assert one.batch == 80
    one.saw(Halves(aa=1.0, bb=1.0, ab=0.9, samples=40))
    one.adapt()
    assert one.batch == 64


def test_gradients_that_are_not_finite_leave_the_batch_alone() -> None:
    one = control()
    one.saw(Halves(aa=math.nan, bb=1.0, ab=0.0, samples=32))
    one.adapt()
    assert (one.batch, one.seen, one.halves) == (64, None, None)


def test_the_learning_rate_goes_by_the_batch() -> None:
    one = control()
    one.tables, one.wish = measured(0.01), 256.0
    course = one.course(1)
    assert one.factor(course, 256) == 2.0
    assert one.factor(course, 64) == 1.0  # the shortened last step
    linear = control(**ADAPTIVE, learning_rate="linear")
    linear.tables, linear.wish = measured(0.01), 256.0
    assert linear.factor(linear.course(1), 256) == 4.0


def test_more_ranks_than_workers_leave_some_without() -> None:
    one = control(**{**ADAPTIVE, "local_batch": 32})
    one.tables = [
        DeviceTimes(
            host="here",
            device="a device",
            streams=False,
            rounds={(32, 1): RoundTime(read_s=0, forward_s=0.01, backward_s=s)},
        )
        for s in (0.02, 0.01, 0.03)
    ]
    assert workers(one.course(3)) == [1, 1, 0]  # rank 0 has one in any case: its buffers count
    assert not one.course(3).trial


def test_pinned_workers_are_as_many_on_each_device() -> None:
    course = control(48, workers=3, accumulation=1).course(2)
    assert [(share.workers, share.at_once) for share in course.shares if share] == [(6, 3), (6, 3)]
    assert course.local_batch == 4
    with pytest.raises(ConfigError, match="12 workers on 2 devices, for a global batch of 50"):
        control(50, workers=3, accumulation=1).course(2)


def test_what_a_checkpoint_keeps_is_enough_to_go_on() -> None:
    one = control()
    one.tables, one.updates, one.wish = measured(0.01, 0.02), 17, 128.0
    one.saw(Halves(aa=1.0, bb=2.0, ab=0.5, samples=32))
    other = control()
    other.load_state_dict(one.state_dict())
    assert other.state_dict() == one.state_dict()
    assert other.course(2) == one.course(2)


def test_steps_of_another_size_are_counted_from_where_it_goes_on() -> None:
    before = control(64)
    before.offset = 7
    same, other = control(64), control(32, local_batch=8)
    same.load_state_dict(before.state_dict())
    other.load_state_dict(before.state_dict())
    assert (same.offset, other.offset) == (7, None)


def test_thousands_of_workers_on_one_device_are_no_problem() -> None:
    one = control(local_batch=1, global_batch=[64, 8192])
    one.tables = [
        DeviceTimes(
            host="here",
            device="x",
            streams=False,
            rounds={(1, 1): RoundTime(read_s=0, forward_s=1, backward_s=1)},
        )
    ]
    one.wish = 4096.0
    assert workers(one.course(1)) == [4096]


def test_a_batch_beyond_new_bounds_comes_between_them() -> None:
    one = control()
    one.wish = 512.0
    narrower = control(**{**ADAPTIVE, "global_batch": [64, 256]})
    narrower.load_state_dict(one.state_dict())
    assert narrower.batch == 256


# -- looking ahead -------------------------------------------------------------------------------------


def test_devices_are_wanted_as_long_as_the_batch_gives_them_work() -> None:
    """Communication takes as long as 20 local batches: one device for 8 of them, all for 64."""
    one = control(**{**ADAPTIVE, "local_batch": 8})
    one.tables, one.line = measured(0.01, 0.01), AllReduceCost(per_byte_s=0.0, latency_s=0.2)

    def best(batch: int) -> int:
        trajectory = Trajectory(1000 * CELLS)
        trajectory.cells = [float(batch)] * CELLS
        found = expect(one, trajectory, 1000 * CELLS)
        assert found is not None
        assert found.batch == pytest.approx(batch)
        return max(found.rates, key=lambda count: found.rates[count])

    assert (best(64), best(512)) == (1, 8)


def test_rates_are_steps_of_the_job_whatever_the_batch() -> None:
    one = control()
    one.tables, one.line = measured(0.01), None
    trajectory = Trajectory(64 * 100)
    trajectory.cells = [128.0] * CELLS
    found = expect(one, trajectory, 64 * 100)
    assert found is not None
    # 16 workers of 10 ms and an update of 1 ms for 128 samples: two steps of the job.
    assert found.rates[1] == pytest.approx(2 / 0.161, rel=0.01)


def test_the_next_epoch_is_expected_to_fluctuate_as_the_last_one_did() -> None:
    one = control()
    one.tables = measured(0.01)
    trajectory = Trajectory(1000 * CELLS)
    trajectory.cells = [128.0, 512.0] * (CELLS // 2)
    found = expect(one, trajectory, 1000 * CELLS)
    assert found is not None
    # The last value, 512, is forecast: around it, half as much to twice as much.
    assert found.batch == pytest.approx(512 * (0.5 + 2.0) / 2, rel=0.1)


def test_pinned_workers_expect_nothing() -> None:
    one = control(48, workers=2)
    one.tables = measured(0.01)
    assert expect(one, Trajectory(100), 100) is None


def test_a_trajectory_begins_where_others_ended_and_never_falls_behind_its_own_end() -> None:
    seen = Trajectory(size=10)
    seen.begin(20)
    assert seen.epoch == 2
    seen.add(10)
    seen.begin(20)
    assert seen.epoch == 3


# -- plain data parallelism ----------------------------------------------------------------------------

FIXED = {"local_batch": [8, 64], "every": 100}


def test_a_batch_that_stays_may_be_one_local_batch() -> None:
    one = control(**FIXED, global_batch=64)
    one.tables = measured(0.01, b16=1.5, b32=2.0)
    course = one.course(1)
    assert (course.local_batch, workers(course), course.trial) == (64, [1], True)


def test_plain_steps_are_measured_before_unequal_shares_are_believed() -> None:
    one = control(**FIXED, global_batch=64)
    one.tables = measured(0.01, 0.03, b32=4.0)
    plain = one.course(2)
    assert (plain.local_batch, workers(plain), plain.overlap) == (32, [1, 1], False)
    assert plain.until == 2 * TRIAL_STEPS
    one.updates = plain.until
    one.took(plain, 0.12)
    course = one.course(2)
    assert (course.local_batch, workers(course)) == (8, [6, 2])
    one.took(course, 0.13)
    assert one.course(2) == plain_until(plain, course.until)
    one.took(course, 0.06)  # whatever disturbed the one before
    assert one.course(2) == course
    one.took(plain, 0.05)
    assert workers(one.course(2)) == [1, 1]


def plain_until(plain: BatchCourse, until: int) -> BatchCourse:
    return replace(plain, until=until)


def test_what_has_been_measured_is_forgotten_after_a_while() -> None:
    one = control(**FIXED, global_batch=64)
    one.tables = measured(0.01, 0.03, b32=4.0)
    plain = one.course(2)
    one.took(plain, 0.12)
    course = one.course(2)
    one.took(course, 0.5)
    for _ in range(KNOWN_FOR):
        one.took(plain, 0.12)
        assert workers(one.course(2)) == [1, 1]
    assert one.course(2) == course


def test_plain_steps_are_measured_anew_beside_others() -> None:
    one = control(**FIXED, global_batch=64)
    one.tables = measured(0.01, 0.03, b32=4.0)
    one.took(one.course(2), 0.12)
    for _ in range(PLAIN_FOR):
        course = one.course(2)
        assert workers(course) == [6, 2]
        one.took(course, 0.06)
    plain = one.course(2)
    assert (workers(plain), plain.until) == ([1, 1], 2 * TRIAL_STEPS)


def test_where_the_job_file_allows_no_plain_steps_there_are_none() -> None:
    one = control()  # local batches of 8 only
    one.tables = measured(0.01, 0.03)
    assert workers(one.course(2)) == [6, 2]
