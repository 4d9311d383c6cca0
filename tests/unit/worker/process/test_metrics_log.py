"""What a program logs itself is not logged for it as well, nor in the attempts that go on after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpcsched.integrations.metrics import Metrics
from hpcsched.store.metrics import read_points
from hpcsched.worker import link as links
from hpcsched.worker.process import metrics_log


@pytest.fixture
def attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Begins an attempt of a job, in this process."""

    def begin(number: int) -> None:
        told = {"JOB_ID": 1, "JOB_DIR": tmp_path, "ATTEMPT": number, "RUN_ID": "r", "RANK": 0}
        for name, value in told.items():
            monkeypatch.setenv(f"HPCSCHED_{name}", str(value))
        links._of_process.clear()
        metrics_log._of_folder.clear()

    yield begin
    links._of_process.clear()
    metrics_log._of_folder.clear()


def test_what_a_link_logs_is_left_to_the_program(attempt: Callable[[int], None], tmp_path: Path) -> None:
    attempt(1)
    own, program = Metrics(links.Link()), links.Link()
    program.log({"loss": 100.0, "note": 1.0}, step=1)
    own.at_pace({"loss": 0.5, "lr": 0.1}, 1)
    own._pace._next = 0.0
    own.at_pace({"loss": 0.4}, 2)

    attempt(2)
    Metrics(links.Link()).at_pace({"loss": 0.3, "lr": 0.1}, 3)
    links.Link().log({"loss": 160.0}, step=4)

    points = [(point.step, dict(point.values)) for point in read_points(tmp_path / "metrics.jsonl")]
    assert points == [
        (1, {"loss": 100.0, "note": 1.0}),
        (1, {"lr": 0.1}),
        (3, {"lr": 0.1}),
        (4, {"loss": 160.0}),
    ]


def test_a_record_of_names_that_is_damaged_says_nothing(
    attempt: Callable[[int], None], tmp_path: Path
) -> None:
    attempt(1)
    (tmp_path / "logged.json").write_text("[1")
    Metrics(links.Link()).at_pace({"loss": 0.3}, 1)
    assert [point.values for point in read_points(tmp_path / "metrics.jsonl")] == [{"loss": 0.3}]
