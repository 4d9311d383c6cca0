"""The record of how busy devices were: small for ever, whole after a crash, and never trusted."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcsched.errors import StoreError
from hpcsched.store.device_use import MOST_BYTES, UseRecord, read_use


def test_a_long_run_stays_small_and_visible_from_end_to_end(tmp_path: Path) -> None:
    path = tmp_path / "use.jsonl"
    record = UseRecord(path, most_bytes=4000)
    for k in range(2000):
        record.add(5.0 * k, {0: (k / 2000, 100.0), 1: (0.5, None)})
        assert not path.exists() or path.stat().st_size <= 4000
    uses = read_use(path)
    assert 10 < len(uses) < 100 and record.stride >= uses[-1].n > 1
    assert uses[0].at < 1000 and uses[-1].at > 9000
    assert [use.at for use in uses] == sorted(use.at for use in uses)
    first = uses[0].gpus[0][0]
    assert first is not None and first == pytest.approx((uses[0].n - 1) / 2 / 2000, abs=1e-3)
    assert {use.gpus[1] for use in uses} == {(0.5, None)}


def test_an_agent_goes_on_after_a_torn_line_and_from_the_time_of_its_run(tmp_path: Path) -> None:
    path = tmp_path / "use.jsonl"
    first = UseRecord(path)
    for at in (1.0, 2.0, 3.0):
        first.add(at, {0: (0.25, None)})
    with path.open("ab") as file:
        file.write(b'{"at":4.0,"n":1,"gp')
    again = UseRecord(path)
    again.add(2.5, {0: (0.75, None)})  # its journal ended there
    again.add(3.5, {0: (0.75, None)})
    assert [(use.at, use.gpus[0][0]) for use in read_use(path)] == [
        (1.0, 0.25),
        (2.0, 0.25),
        (2.5, 0.75),
        (3.5, 0.75),
    ]


@pytest.mark.parametrize(
    "line",
    [
        b'{"at":-1,"n":1,"gpus":{}}',
        b'{"at":1e300,"n":1,"gpus":{}}',
        b'{"at":1,"n":0,"gpus":{}}',
        b'{"at":1,"n":1,"gpus":{"x":[0.5,null]}}',
        b'{"at":1,"n":1,"gpus":{"0":[7,null]}}',
        b'{"at":1,"n":1,"gpus":{"0":[NaN,null]}}',
        b"[" * 10_000,
        b"\xff",
    ],
)
def test_what_is_no_record_is_left_out(line: bytes, tmp_path: Path) -> None:
    path = tmp_path / "use.jsonl"
    path.write_bytes(line + b'\n{"at":2,"n":1,"gpus":{"0":[0.5,1.0]}}\n')
    assert [use.at for use in read_use(path)] == [2.0]


def test_a_file_that_cannot_be_the_record_is_refused_and_begun_anew(tmp_path: Path) -> None:
    assert read_use(tmp_path / "none") == []
    path = tmp_path / "use.jsonl"
    with path.open("wb") as file:
        file.truncate(2 * MOST_BYTES + 1)
    with pytest.raises(StoreError, match="longer than"):
        read_use(path)
    UseRecord(path).add(1.0, {0: (0.5, None)})
    assert [use.at for use in read_use(path)] == [1.0]


def test_a_full_disk_ends_no_run(tmp_path: Path) -> None:
    UseRecord(tmp_path / "gone" / "use.jsonl").add(1.0, {0: (0.5, None)})
