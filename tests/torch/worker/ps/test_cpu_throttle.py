"""The token bucket, and a process that keeps to its share by itself."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcsched.planning.ps.bucket import MAX_CREDIT_S, MAX_REST_S, TokenBucket

THREADS = Path("/proc/self/task")
SHARES = st.floats(0.01, 8)
WORK = st.tuples(st.floats(0, 1), st.floats(0, 1))
"""A piece of work: seconds of computing, seconds of waiting."""


class Pretended:
    """A process on `cores` cores that computes, waits, and rests as it is told; times are as pretended."""

    def __init__(self, share: float, cores: float = 8.0) -> None:
        self.now = self.used = self.rested = 0.0
        self.bucket, self.cores = TokenBucket(share, 0.0, 0.0), cores
        self.looks = [(0.0, 0.0)]

    def work(self, computing_s: float, waiting_s: float = 0.0) -> None:
        self.now += computing_s + waiting_s
        self.used += computing_s * self.cores

    def rest(self) -> float:
        """Returns how long it slept."""
        owed_s = self.bucket.owed_s(self.now, self.used)
        self.now += owed_s
        self.rested += owed_s
        assert self.bucket.owed_s(self.now, self.used) == pytest.approx(0, abs=1e-9)
        self.looks.append((self.now, self.used))
        return owed_s


# -- the bucket --------------------------------------------------------------------------------------------


@given(share=SHARES, pieces=st.lists(WORK, min_size=1, max_size=40))
def test_never_more_than_the_share_and_the_credit(share: float, pieces: list[tuple[float, float]]) -> None:
    process = Pretended(share)
    longest = MAX_REST_S * share / process.cores  # what is to be repaid in full
    for computing_s, waiting_s in pieces:
        process.work(min(computing_s, longest), waiting_s)
        process.rest()
    credit_s = MAX_CREDIT_S * min(share, 1)
    for i, (began, used) in enumerate(process.looks):
        for ended, after in process.looks[i:]:
            assert after - used <= share * (ended - began) + credit_s + 1e-6


@given(share=SHARES, pieces=st.lists(st.floats(0.001, 0.5), min_size=1, max_size=40))
def test_who_always_wants_more_gets_its_share(share: float, pieces: list[float]) -> None:
    process = Pretended(share)
    for piece in pieces:
        process.work(min(piece, MAX_REST_S * share / process.cores))
        process.rest()
    assert process.used >= share * process.now - MAX_CREDIT_S * min(share, 1) - 1e-6


@given(
    share=st.floats(0.05, 1),
    period_s=st.floats(0.01, 1),
    late=st.lists(st.floats(0, 1), min_size=4, max_size=30),
)
def test_a_server_in_bursts_loses_nothing(share: float, period_s: float, late: list[float]) -> None:
    """Rounds take their time, and up to CREDIT_S/2 more: it uses its share of the shortest in each."""
    process = Pretended(share, cores=1.0)
    for part in late:
        process.work(share * period_s)
        slept_s = process.rest()
        waiting_s = period_s * (1 - share) + part * MAX_CREDIT_S / 2
        assert slept_s <= waiting_s + 1e-9  # all that is to be rested for is over before the next burst
        process.work(0, waiting_s - slept_s)
    assert process.used == pytest.approx(share * period_s * len(late))


def test_what_one_round_takes_longer_the_next_may_take_shorter() -> None:
    process = Pretended(0.5, cores=1.0)
    process.work(0.2, 0.2 + MAX_CREDIT_S)
    assert process.rest() == 0
    process.work(0.2, 0.2 - MAX_CREDIT_S)
    assert process.rest() == pytest.approx(0)
    process.work(0.2, 0.1)
    assert process.rest() == pytest.approx(0.1)


def test_an_idle_process_saves_up_no_more_than_the_credit() -> None:
    process = Pretended(0.5, cores=1.0)
    process.work(0, 3600)
    process.rest()
    process.work(1)
    assert process.rest() == pytest.approx(1 - MAX_CREDIT_S)


def test_waiting_and_computing_count_alike_in_either_order() -> None:
    """A look late in a round, after its wait: the wait must not be lost to the limit of the credit."""
    process = Pretended(0.3, cores=1.0)
    process.work(0.3, 0.7)
    assert process.rest() == pytest.approx(0, abs=1e-9)


def test_another_share_keeps_what_is_owed() -> None:
    process = Pretended(0.5, cores=1.0)
    process.work(1)
    process.bucket.change(0.25, process.now, process.used)
    assert process.bucket.owed_s(process.now, process.used) == pytest.approx(2)
    process.bucket.change(5, process.now, process.used)
    assert process.bucket.owed_s(process.now, process.used) == pytest.approx(0.1)


def test_nobody_rests_for_ever_and_the_rest_is_forgiven() -> None:
    process = Pretended(0.01, cores=1.0)
    process.work(100)
    assert process.bucket.owed_s(process.now, process.used) == pytest.approx(MAX_REST_S)
    process.now += MAX_REST_S
    assert process.bucket.owed_s(process.now, process.used) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("share", [0, -1, float("nan")])
def test_a_share_of_nothing_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="share of"):
        TokenBucket(share, 0, 0)
    with pytest.raises(ValueError, match="share of"):
        TokenBucket(1, 0, 0).change(share, 0, 0)


# -- a process ---------------------------------------------------------------------------------------------

torch = pytest.importorskip("torch")

from hpcsched.worker.ps import cpu_throttle  # noqa: E402
from hpcsched.worker.ps.cpu_throttle import CpuShare  # noqa: E402


class Clock:
    """Stands in for the module `time`; a sleep takes exactly as long as it should."""

    def __init__(self) -> None:
        self.now, self.used = 50.0, 7.0
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def process_time(self) -> float:
        return self.used

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.slept.append(seconds)
        self.now += seconds

    def work(self, seconds: float) -> None:
        self.now += seconds
        self.used += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(cpu_throttle, "time", clock)
    return clock


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    threads, cores = torch.get_num_threads(), os.sched_getaffinity(0)
    yield
    torch.set_num_threads(threads)
    for thread in THREADS.iterdir():
        with contextlib.suppress(ProcessLookupError):  # it has ended since the folder was read
            os.sched_setaffinity(int(thread.name), cores)


@pytest.mark.torch
def test_rests_in_pieces_for_what_was_used_too_much(clock: Clock) -> None:
    share = CpuShare(0.25)
    clock.work(0.3)
    share.rest()
    assert sum(clock.slept) == pytest.approx(0.9)
    assert max(clock.slept) <= cpu_throttle.SLICE_S
    assert share.used_s == pytest.approx(7.3)
    clock.slept.clear()
    share.rest()
    assert sum(clock.slept) == pytest.approx(0, abs=1e-6)


@pytest.mark.torch
def test_a_rest_ends_when_something_else_is_wanted(clock: Clock) -> None:
    share = CpuShare(0.25)
    clock.work(1)
    share.rest(stop=lambda: len(clock.slept) == 2)
    assert len(clock.slept) == 2
    share.rest()
    assert sum(clock.slept) == pytest.approx(3)  # what is left of it is still owed


@pytest.mark.torch
def test_a_rest_ends_although_other_threads_go_on(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    share = CpuShare(0.25)
    monkeypatch.setattr(clock, "sleep", clock.work)
    began = clock.now
    clock.work(1)
    share.rest()
    assert clock.now - began <= 1 + MAX_REST_S + 1e-6


@pytest.mark.torch
def test_another_share_while_something_is_owed(clock: Clock) -> None:
    share = CpuShare(0.25)
    clock.work(1)
    share.set(0.5)
    assert share.share == 0.5
    share.rest()
    assert sum(clock.slept) == pytest.approx(0.75 / 0.5)


@pytest.mark.torch
def test_all_of_its_cores_need_no_rest(clock: Clock) -> None:
    here = os.sched_getaffinity(0)
    share = CpuShare(len(here))
    clock.used += 100
    share.rest()
    assert clock.slept == []
    clock.now += 1000
    core = min(here)
    share.set(1.0, [core])
    clock.used += 100
    share.rest()
    assert clock.slept == []
    clock.now += 1000
    share.set(0.99, [core])
    clock.used += 1
    share.rest()
    assert clock.slept != []


@pytest.mark.torch
def test_threads_for_the_share_but_no_more_than_cores() -> None:
    here = os.sched_getaffinity(0)
    core = min(here)
    share = CpuShare(0.1)
    assert torch.get_num_threads() == 1
    share.set(len(here) + 5.0)
    assert torch.get_num_threads() == len(here)
    share.set(2.0, [core])
    assert torch.get_num_threads() == 1
    if len(here) > 1:
        share.set(1.01, here)
        assert torch.get_num_threads() == 2


@pytest.mark.torch
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_all_threads_move_to_the_cores_and_none_without_cores() -> None:
    here = sorted(os.sched_getaffinity(0))
    over = threading.Event()
    others = [threading.Thread(target=over.wait, args=(30,)) for _ in range(3)]
    for other in others:
        other.start()
    try:
        share = CpuShare(0.5)
        for core in (here[0], here[1]):
            share.set(0.5, [core])
            share.set(0.25)
            assert all(os.sched_getaffinity(int(thread.name)) == {core} for thread in THREADS.iterdir())
    finally:
        over.set()
        for other in others:
            other.join(30)


@pytest.mark.torch
def test_time_of_all_threads_is_counted() -> None:
    share = CpuShare(0.5)
    before, mine = share.used_s, time.thread_time()
    end = time.monotonic() + 20

    def work() -> None:
        began = time.thread_time()
        while time.thread_time() - began < 0.1 and time.monotonic() < end:
            pass

    other = threading.Thread(target=work)
    other.start()
    other.join(30)
    assert share.used_s - before >= 0.1 > time.thread_time() - mine


@pytest.mark.torch
def test_a_process_that_works_all_the_time_gets_its_share() -> None:
    """Real clocks; a machine that is busy can only make it less."""
    share = CpuShare(0.5)
    began, used = time.monotonic(), share.used_s
    while time.monotonic() - began < 1.0:
        worked = share.used_s
        while share.used_s - worked < 0.01:
            pass
        share.rest()
    assert share.used_s - used <= 0.5 * (time.monotonic() - began) + MAX_CREDIT_S * 0.5 + 0.02
