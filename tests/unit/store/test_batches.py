"""Histories of global batches: what a training decided, whatever its crashes left in the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcsched.errors import StoreError
from hpcsched.store.batches import BATCHES_FILE, Decision, read_batches
from hpcsched.worker.vsw.history import History


def a_line(at: int, **more: Any) -> bytes:
    """As a training writes it at this step."""
    table = {
        "t": 1.8e9 + at,
        "attempt": 1,
        "step": at,
        "samples": 64 * at,
        "epoch": at / 10,
        "global_batch": 64,
        "local_batch": 16,
        "workers": [2, 2],
        "at_once": [1, 1],
        "similarity": None,
        "loss": 0.5,
        "factor": 1.0,
    }
    return json.dumps(table | more).encode() + b"\n"


def steps_of(folder: Path, *lines: bytes) -> list[int]:
    path = folder / "batches.jsonl"
    path.write_bytes(b"".join(lines))
    return [decision.step for decision in read_batches(path)]


def test_a_line_is_read_with_all_that_it_says(tmp_path: Path) -> None:
    path = tmp_path / "batches.jsonl"
    path.write_bytes(a_line(120, similarity=-0.71, workers=[3, 1]) + a_line(140, noise_scale=812.5))
    first, second = read_batches(path)
    assert first == Decision(
        t=1.8e9 + 120,
        attempt=1,
        step=120,
        samples=7680,
        epoch=12.0,
        global_batch=64,
        local_batch=16,
        workers=(3, 1),
        at_once=(1, 1),
        similarity=-0.71,
        loss=0.5,
        factor=1.0,
    )
    assert (second.similarity, second.noise_scale) == (None, 812.5)


def test_it_is_the_file_that_trainings_write(tmp_path: Path) -> None:
    facts = json.loads(a_line(7))
    facts.pop("t")
    History(tmp_path).add(facts)
    (read,) = read_batches(tmp_path / BATCHES_FILE)
    assert (read.step, read.workers, read.loss) == (7, (2, 2), 0.5)


def test_what_was_lost_in_a_crash_is_replaced(tmp_path: Path) -> None:
    lines = [a_line(step) for step in (10, 20, 30, 40)]
    again = [a_line(step, attempt=2, global_batch=128) for step in (20, 35)]
    assert steps_of(tmp_path, *lines, *again) == [10, 20, 35]
    kept = read_batches(tmp_path / "batches.jsonl")
    assert [decision.attempt for decision in kept] == [1, 2, 2]
    assert steps_of(tmp_path, *lines, a_line(0, attempt=3)) == [0]


@given(st.lists(st.integers(0, 50), max_size=40))
def test_steps_rise_and_the_last_line_always_counts(tmp_path_factory: Any, steps: list[int]) -> None:
    folder = tmp_path_factory.mktemp("history")
    found = steps_of(folder, *map(a_line, steps))
    assert found == sorted(set(found)) and found[-1:] == steps[-1:]
    # A step is gone only if the training has come back to it, or to one before it.
    assert set(steps) - set(found) <= {s for i, s in enumerate(steps) if min(steps[i:]) < s}


def test_every_cut_of_the_last_line_is_passed_over(tmp_path: Path) -> None:
    whole, last = a_line(10), a_line(20)
    for length in range(len(last) - 1):
        assert steps_of(tmp_path, whole, last[:length]) == [10], length
    assert steps_of(tmp_path, whole, last[:-1]) == [10, 20]


@pytest.mark.parametrize(
    "nonsense",
    [
        b"\n",
        b"{}\n",
        b"[1, 2]\n",
        b"\xff\xfe\n",
        b'{"step": "\xff"}\n',
        b'{"more": ' + b"[" * 5000 + b"\n",
        a_line(15, step=-1),
        a_line(15, step="15"),
        a_line(15, epoch=float("nan")),
        a_line(15, epoch=-0.5),
        a_line(15, global_batch=0),
        a_line(15, workers=[]),
        a_line(15, workers=[2, -2]),
        a_line(15, loss="low"),
    ],
    ids=lambda line: line[:24].decode(errors="replace"),
)
def test_lines_that_make_no_sense_are_passed_over(tmp_path: Path, nonsense: bytes) -> None:
    assert steps_of(tmp_path, a_line(10), nonsense, a_line(20)) == [10, 20]


def test_a_file_that_is_not_there_or_cannot_be_read(tmp_path: Path) -> None:
    assert list(read_batches(tmp_path / "batches.jsonl")) == []
    with pytest.raises(StoreError, match=r"^cannot read .*batches"):
        (tmp_path / "batches.jsonl").mkdir()
        read_batches(tmp_path / "batches.jsonl")
