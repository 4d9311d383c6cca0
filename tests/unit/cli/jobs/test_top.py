"""`top`: a page fits the terminal, running jobs come first, and it outlives the run it shows."""

from __future__ import annotations

import re

import msgspec
import pytest
from rundirs import a_status

from hpcsched.cli.jobs.top import Screen, _Watch
from hpcsched.errors import NoSuchRun
from hpcsched.printing import spans
from hpcsched.store.status import RunStatus, Status


@pytest.mark.parametrize("width", [40, 80, 120])
@pytest.mark.parametrize("height", [8, 24, 50])
@pytest.mark.parametrize(("jobs", "hosts"), [(0, 1), (5, 1), (500, 40)])
def test_a_page_fits(width: int, height: int, jobs: int, hosts: int) -> None:
    lines = Screen(width=width, height=height).lines(a_status(jobs, hosts), "the run is gone")
    assert len(lines) <= height and max(map(len, lines)) <= width


def test_the_page_says_what_one_looks_for() -> None:
    text = "\n".join(Screen(width=120, height=None).lines(a_status()))
    assert text.startswith("RUNNING  marble  slurm job 123  ")
    assert re.search(r"left  seen 0:0\d ago", text)
    assert "4 of 4 GPUs busy, 50% used, 1 running, 3 pending, 1 completed" in text
    assert "node0  0:2 ▄50%" in text
    rows = [line.split() for line in text.splitlines() if "a-training" in line]
    assert [row[0] for row in rows] == ["2", "3", "4", "5"]
    assert rows[0][2:] == ["R", "primary", "0-3", "50/100", "50%", "1:00", "1:00", "node0"]
    assert rows[1][-1] == "(Resources)"


def test_gpus_without_samples_are_named() -> None:
    status = a_status()
    for gpu in status.gpus[1:]:
        gpu.sample_age_s, gpu.health = 150.0, "unknown"
    text = "\n".join(Screen(width=120, height=None).lines(status))
    assert "! no sample of GPUs 1-3 for 2:30: the driver does not answer; their health is unknown" in text


def test_what_does_not_fit_is_counted() -> None:
    text = "\n".join(Screen(width=80, height=20).lines(a_status(500, 40)))
    assert "more jobs" in text and "40 hosts in all, 0 of 160 GPUs free" in text
    assert "a-traini~ng-name-2" in text  # both ends of a long name tell it from others


def test_plain_output_is_ascii() -> None:
    assert all(line.isascii() for line in Screen(width=60, height=None, fancy=False).lines(a_status()))


@pytest.mark.parametrize(
    ("numbers", "text"), [([], "-"), ([3], "3"), ([0, 1, 2], "0-2"), ([7, 0, 1, 5], "0-1,5,7")]
)
def test_spans(numbers: list[int], text: str) -> None:
    assert spans(numbers) == text


def test_a_run_that_vanishes_and_comes_back_stays_in_view() -> None:
    seen = iter([a_status(), NoSuchRun("no run in /x"), a_status(3)])

    def read() -> Status:
        one = next(seen)
        if isinstance(one, Exception):
            raise one
        return one

    watch = _Watch(read)
    watch.look()
    assert watch.status and not watch.trouble
    watch.look()
    assert "no run in /x" in watch.trouble and len(watch.status.jobs) == 5
    assert any(
        line.startswith("! no run") for line in Screen(width=80, height=24).lines(watch.status, watch.trouble)
    )
    watch.look()
    assert not watch.trouble and len(watch.status.jobs) == 3


def test_the_batch_system_is_asked_once_for_a_snapshot_that_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    from hpcsched.cli.jobs import batch_job_status

    questions = []

    def ask(run: RunStatus) -> None:
        questions.append(run.seq)
        run.allocation["life"] = "PENDING"

    monkeypatch.setattr(batch_job_status, "ask", ask)
    stopped = msgspec.json.encode(a_status(state="STOPPED", age_s=100))
    watch = _Watch(lambda: msgspec.json.decode(stopped, type=Status))
    for _ in range(3):
        watch.look()
    assert questions == [1] and watch.status
    page = "\n".join(Screen(width=120, height=None).lines(watch.status))
    assert "job 123 waits in the queue" in page
