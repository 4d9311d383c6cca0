"""What is told of a job's use of resources, and when."""

from __future__ import annotations

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from hpcsched.contract.progress import Usage  # noqa: E402
from hpcsched.worker.ps.link import MIB, ServerLink  # noqa: E402
from hpcsched.worker.ps.meter import Meter, UsageCollector  # noqa: E402


class Board(dict[str, str]):
    """Stands in for the ranks' store."""

    def set(self, key: str, text: str) -> None:
        self[key] = text

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)

    def multi_get(self, keys: list[str]) -> list[str]:
        return [self[key] for key in keys]


class Bench:
    """Ranks that take steps at some rate and use some cores, by a clock that the test turns."""

    def __init__(self, ranks: int = 3, capacity: float | None = None) -> None:
        self.now, self.step = 100.0, 0.0
        self.used = [0.0] * ranks
        self.rate, self.cores = 10.0, [0.25] + [1.0] * (ranks - 1)
        self.silent: set[int] = set()
        self.board = Board()
        self.told: list[Usage] = []
        self.at: list[float] = []
        links = [ServerLink(capacity, 0.0), *[None] * (ranks - 1)]
        self.meters = [
            Meter(self.board, rank, self._used(rank), links[rank], clock=lambda: self.now)
            for rank in range(ranks)
        ]
        self.link = links[0]
        self.collector = UsageCollector(self.board, 7, ranks, clock=lambda: self.now)

    def _used(self, rank: int) -> Callable[[], float]:
        return lambda: self.used[rank]

    def pass_by(self, seconds: float, jitter: Callable[[int], float] = lambda _: 1.0) -> None:
        for number in range(round(seconds * self.rate)):
            took_s = jitter(number) / self.rate
            self.now, self.step = self.now + took_s, self.step + 1
            self.used = [used + cores * took_s for used, cores in zip(self.used, self.cores, strict=True)]
            for rank in reversed(range(len(self.meters))):
                noted = rank not in self.silent and self.meters[rank].note(int(self.step))
                if rank == 0 and noted:
                    self.collector.look(int(self.step))
            if (usage := self.collector.take()) is not None:
                self.told.append(usage)
                self.at.append(self.now)


def test_the_first_report_comes_with_the_fifth_sample_of_a_steady_training() -> None:
    bench = Bench()
    bench.pass_by(5.5)
    assert bench.told == []
    bench.pass_by(2.0)
    assert bench.told == [
        Usage(
            attempt=7,
            rate=pytest.approx(10.0, rel=1e-3),
            cpu=pytest.approx((0.25, 1.0, 1.0), rel=1e-3),
            net=(0.0, 0.0, 0.0),
            samples=5,
            stable=True,
        )
    ]


def test_reports_of_what_does_not_change_become_rare() -> None:
    bench = Bench()
    bench.pass_by(2000.0)
    pauses = [b - a for a, b in zip(bench.at[:-1], bench.at[1:], strict=True)]
    for pause, expected in zip(pauses, [5, 10, 20, 40, 80, 160, 320, 600, 600], strict=False):
        assert expected <= pause < expected + 3
    assert 8 <= len(pauses) <= 10


@pytest.mark.parametrize("what", ["rate", "cores"])
def test_a_change_is_told_soon(what: str) -> None:
    bench = Bench()
    bench.pass_by(100.0)
    before = len(bench.told)
    if what == "rate":
        bench.rate = 12.0
    else:
        bench.cores = [0.25, 1.2, 1.2]
    bench.pass_by(10.0)
    assert len(bench.told) > before
    usage = bench.told[-1]
    assert usage.rate == pytest.approx(bench.rate, rel=0.01)
    assert usage.cpu == pytest.approx(tuple(bench.cores), rel=0.01)


def test_a_training_that_never_goes_steadily_is_told_of_after_thirty_samples() -> None:
    bench = Bench()
    jitter = lambda number: 1.8 if number // 20 % 2 else 0.2  # noqa: E731
    bench.pass_by(29.0, jitter)
    assert bench.told == []
    bench.pass_by(30.0, jitter)
    assert bench.told[0].samples == 30 and not bench.told[0].stable


def test_slow_steps_make_longer_samples() -> None:
    bench = Bench()
    bench.rate = 0.5
    bench.pass_by(50.0)
    assert bench.told == []
    bench.pass_by(20.0)
    assert bench.told[0].rate == pytest.approx(0.5) and bench.told[0].samples == 5


def test_without_the_notes_of_a_rank_nothing_is_reported_and_that_is_said_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    bench = Bench()
    bench.pass_by(20.0)
    before = len(bench.told)
    assert before > 0
    bench.silent = {2}
    bench.pass_by(100.0)
    assert len(bench.told) == before
    assert capsys.readouterr().err.count("rank 2 has measured nothing for 10 s") == 1
    bench.silent = set()
    bench.pass_by(20.0)
    assert len(bench.told) > before


def test_a_rank_that_has_never_said_anything_is_missed_too(capsys: pytest.CaptureFixture[str]) -> None:
    bench = Bench()
    bench.silent = {1}
    bench.pass_by(60.0)
    assert bench.told == []
    assert capsys.readouterr().err.count("rank 1 has measured nothing") == 1


def test_the_share_of_busy_windows_is_that_of_the_samples_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(capacity=1.0)
    assert bench.link is not None
    monkeypatch.setattr("hpcsched.worker.ps.meter.time.time", lambda: bench.now)
    bench.link._next = bench.now
    for _ in range(40):  # 0.6 s of every second
        bench.link.inward.transfer(int(0.6 * MIB), bench.now)
        bench.pass_by(1.0)
    assert bench.told[-1].net == (pytest.approx(0.6, abs=0.1), 0.0, 0.0)
