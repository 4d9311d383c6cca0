"""Rows of jobs that are over, beside status.json: a reader sees all jobs as of one moment, or is told."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from hpcsched.cli.common import select
from hpcsched.cli.jobs.status import status as status_command
from hpcsched.cli.site import bundle
from hpcsched.core.model import Array
from hpcsched.errors import StoreError, UnknownJob
from hpcsched.store import rows, status
from hpcsched.store.rundir import RunDir
from hpcsched.store.snapshot import SnapshotWriter, name_successor
from hpcsched.store.status import JobStatus, read_page, read_status
from hpcsched.store.summaries import _line
from hpcsched.testing.builders import Driver, a_job, a_profile
from hpcsched.watchers import FILE, FOLDER


@pytest.fixture
def rundir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setattr(status, "ANOTHER_FILE_S", 0.0)
    rundir = RunDir(tmp_path / "run")
    rundir.make()
    return rundir


class Written:
    """A run whose jobs end one after the other, and the files that its agent writes."""

    def __init__(self, rundir: RunDir, *, most: int = 2) -> None:
        self.rundir, self._most = rundir, most
        self.driver = Driver(profiles=(a_profile("m", [1, 2]),), gpus=2)
        self.writer = self.new_writer()

    def new_writer(self, most: int | None = None) -> SnapshotWriter:
        self.driver.machine.run.touch_all()
        return SnapshotWriter(
            self.rundir,
            self.driver.machine,
            allocation={"kind": "none", "id": None},
            speed=1.0,
            user="me",
            find_output=lambda job: f"/run/{job.spec.name}.out",
            most_ended=self._most if most is None else most,
        )

    def write(self) -> None:
        self.writer.write("STOPPED", self.driver.now)
        self.driver.machine.run.jobs.pack()

    def completes(self, *names: str, code: int = 0, **rest: Any) -> None:
        """These jobs come, run and end, each in its own snapshots."""
        for name in names:
            if name not in self.driver.machine.run.by_name:
                self.driver.submit(a_job(name, "m", gpus=1, retries=0, **rest))
            job_id = self.driver.machine.run.by_name[name]
            self.driver.runs(job_id)
            self.writer.output_of(job_id, f"/run/{name}.out")
            self.write()
            self.driver.exits(job_id, code)
            self.write()

    @property
    def file(self) -> Path:
        (path,) = self.rundir.root.glob(rows.ENDED)
        return path

    def in_status(self) -> list[str]:
        """The names of the jobs in status.json."""
        return [job["name"] for job in json.loads(self.rundir.status.read_bytes())["jobs"]]

    def jobs(self) -> Sequence[JobStatus]:
        """All jobs as they are read; they are as another agent would write them."""
        found = read_status(self.rundir).jobs
        page = [msgspec.json.decode(bytes(job), type=JobStatus) for job in read_page(self.rundir).jobs]
        assert page == found
        kept = self.rundir.status.read_bytes()
        fresh = self.new_writer(most=1000)
        fresh._rows.remove_others = lambda: None  # type: ignore[method-assign]
        fresh.write("STOPPED", self.driver.now)
        assert read_status(self.rundir).jobs == found
        self.rundir.status.write_bytes(kept)
        return found


def test_too_many_that_are_over_become_rows_and_all_are_read(rundir: RunDir) -> None:
    run = Written(rundir)
    run.completes("a", "b")
    assert not list(rundir.root.glob(rows.ENDED)) and run.in_status() == ["a", "b"]
    run.driver.submit(a_job("left", "m", gpus=1))
    run.completes("c")
    assert run.in_status() == ["left"] and len(run.file.read_bytes().splitlines()) == 3
    run.completes("d", code=1)
    assert run.in_status() == ["left", "d"]
    assert [(job.name, str(job.state)) for job in run.jobs()] == [
        ("a", "COMPLETED"),
        ("b", "COMPLETED"),
        ("left", "STARTING"),
        ("c", "COMPLETED"),
        ("d", "FAILED"),
    ]
    assert read_status(rundir).counts == {"COMPLETED": 3, "FAILED": 1, "STARTING": 1}
    size = rundir.status.stat().st_size
    run.completes(*"efghijklmno")
    assert len(run.jobs()) == 16 and rundir.status.stat().st_size < size + 1000


def test_who_needs_none_of_them_reads_none(rundir: RunDir) -> None:
    run = Written(rundir)
    run.completes(*"abcdef")
    run.file.unlink()
    brief = read_status(rundir, only=())
    assert brief.jobs == [] and brief.counts == {"COMPLETED": 6}
    said = CliRunner().invoke(status_command, ["--dir", str(rundir.root)])
    assert "finished: 6 completed" in said.output and said.exit_code == 0
    said = CliRunner().invoke(status_command, ["--dir", str(rundir.root), "--stats-only"])
    assert said.output.startswith("6 completed\n")
    run.completes("g")
    assert [job.name for job in run.jobs()] == [*"abcdefg"]  # written anew


@pytest.mark.parametrize("most", [2, 3])
def test_one_that_runs_again_is_told_of_once(rundir: RunDir, most: int) -> None:
    run = Written(rundir, most=most)
    run.completes(*"abcd", code=1)
    run.driver.retry("a")
    run.write()
    first = run.jobs()[0]
    assert (first.name, str(first.state), first.output) == ("a", "STARTING", "/run/a.out")
    assert read_status(rundir).counts == {"FAILED": 3, "STARTING": 1}
    run.completes("a")
    run.completes(*"efg")
    assert {job.name: str(job.state) for job in run.jobs()} == {
        "a": "COMPLETED",
        **dict.fromkeys("bcd", "FAILED"),
        **dict.fromkeys("efg", "COMPLETED"),
    }
    assert read_status(rundir).counts == {"FAILED": 3, "COMPLETED": 4}


def test_rows_that_are_mostly_void_are_written_anew(rundir: RunDir) -> None:
    run = Written(rundir)
    run.completes(*"abc", code=1)
    first = run.file
    for _ in range(4):
        run.driver.retry("a", "b", "c")
        run.completes(*"abc", code=1)
    assert run.file != first and len(run.file.read_bytes().splitlines()) <= 6
    assert [str(job.state) for job in run.jobs()] == ["FAILED"] * 3


def test_what_a_crash_has_left_behind_the_rows_counts_for_nothing(rundir: RunDir) -> None:
    run = Written(rundir)
    run.completes(*"abc")
    with run.file.open("ab") as file:
        file.write(b'{"id":1,"name":"a","state":"FAIL')
    assert [str(job.state) for job in run.jobs()] == ["COMPLETED"] * 3
    run.completes(*"defgh")
    assert [str(job.state) for job in run.jobs()] == ["COMPLETED"] * 8


@pytest.mark.parametrize("kept", [0, 1, 40, 400, 1000])
def test_a_file_that_was_cut_is_refused_and_written_anew(rundir: RunDir, kept: int) -> None:
    run = Written(rundir)
    run.completes(*"abcd")
    run.completes("e", "f")
    before, whole = read_status(rundir).jobs, run.file.stat().st_size
    assert kept < whole
    os.truncate(run.file, kept)
    for read in (read_status, read_page):
        with pytest.raises(StoreError, match=r"ended\.\d+\.jsonl is damaged \(\d+ of \d+ bytes are there\)"):
            read(rundir)
    run.write()
    assert read_status(rundir).jobs == before


def test_a_file_that_is_gone_is_refused_and_written_anew(rundir: RunDir) -> None:
    run = Written(rundir)
    run.completes(*"abcd")
    before = read_status(rundir).jobs
    run.file.unlink()
    with pytest.raises(StoreError, match=r"is damaged \(No such file"):
        read_status(rundir)
    run.write()
    assert read_status(rundir).jobs == before


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'{"id":1,', b'{"id":2,'),
        (b'"name":"b"', b'"name":["]'),
        (b"\n{", b"\n\n"),
        (b'"state":"COMPLETED"', b'"state":"COMPLETELY'),
    ],
)
def test_a_damaged_row_is_refused(rundir: RunDir, old: bytes, new: bytes) -> None:
    run = Written(rundir)
    run.completes(*"abcd")
    data = run.file.read_bytes()
    assert old in data and len(old) == len(new)
    run.file.write_bytes(data.replace(old, new, 1))
    with pytest.raises(StoreError, match="is damaged"):
        read_status(rundir)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "", "."])
def test_status_json_cannot_name_another_file(rundir: RunDir, name: str) -> None:
    run = Written(rundir)
    run.completes(*"abcd")
    page = json.loads(rundir.status.read_bytes())
    page["ended"]["file"] = name
    rundir.status.write_text(json.dumps(page))
    with pytest.raises(StoreError, match="is damaged"):
        read_status(rundir)


def test_a_reader_beside_an_agent_that_writes_another_file_sees_the_newer_one(
    rundir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Written(rundir)
    run.completes(*"abcd")
    first = run.file

    def slow(*args: Any) -> Any:  # it has read status.json; meanwhile another agent begins
        if first.exists():
            run.writer = run.new_writer()
            run.write()
            assert run.file != first
        return rows_of(*args)

    rows_of = status.rows_of
    monkeypatch.setattr(status, "rows_of", slow)
    monkeypatch.setattr(status, "ANOTHER_FILE_S", 60.0)
    assert [job.name for job in read_status(rundir).jobs] == [*"abcd"]


def test_on_a_full_disk_they_stay_in_status_json(rundir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Written(rundir)
    run.completes(*"abc")

    def full(descriptor: int, data: Any, at: int) -> int:
        if len(data) > 100:
            return pwrite(descriptor, data[:100], at)  # as much as there was room for
        raise OSError(errno.ENOSPC, "No space left on device")

    pwrite = os.pwrite
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        run.completes(*"defgh")
        assert run.in_status() == [*"defgh"] and len(run.jobs()) == 8
    run.write()
    assert run.in_status() == [] and len(run.jobs()) == 8


def test_the_group_reads_them_where_it_reads_the_run(rundir: RunDir) -> None:
    rundir.root.chmod(FOLDER)
    run = Written(rundir)
    run.completes(*"abcdef")
    assert run.file.stat().st_mode & 0o777 == FILE
    run.file.chmod(0o600)
    rundir.make(share=os.getgid())
    assert run.file.stat().st_mode & 0o777 == FILE


def test_the_next_agent_writes_its_own_file_and_removes_the_others(rundir: RunDir) -> None:
    run = Written(rundir)
    run.completes(*"abcd")
    first = run.file
    run.writer = run.new_writer()
    run.write()
    assert run.file != first and len(read_status(rundir).jobs) == 4
    run.writer = run.new_writer(most=100)
    run.write()
    assert not list(rundir.root.glob(rows.ENDED)) and run.in_status() == [*"abcd"]


def test_some_are_found_without_a_look_at_the_others(rundir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Written(rundir)
    run.driver.submit(a_job("left", "m", gpus=1))
    run.completes("a", "b", "1", "x.y", "9", code=1)
    run.completes("c", array=Array(name="sweep", index=0))
    run.driver.retry("b")
    run.completes("b")
    run.completes("d", "e")
    looked: list[int] = []

    def counted(data: bytes, kind: Any) -> list[Any]:
        looked.append(data.count(b"\n"))
        return decoded(data, kind)

    assert len(run.file.read_bytes().splitlines()) > 5
    decoded = rows.decode_lines
    monkeypatch.setattr(rows, "decode_lines", counted)
    every = read_status(rundir)
    for keys, most in [
        (["a"], 1),
        (["2", "x.y"], 2),
        (["1"], 0),  # an id goes before a name
        (["3,9"], 2),
        (["left,b"], 1),
        (["sweep"], 99),
        (["3-5"], 99),
    ]:
        looked.clear()
        found = read_status(rundir, keys)
        assert select(found, keys) == select(every, keys)
        assert max(looked) <= most
    with pytest.raises(UnknownJob, match=r"no job 'lef'.*left"):
        select(read_status(rundir, ["lef"]), ["lef"])


def test_other_readers_count_them(rundir: RunDir) -> None:
    run = Written(rundir)
    run.completes(*"abcd")
    entry = type("Entry", (), {"id": "r", "dir": str(rundir.root)})()
    assert (_line(entry).done, _line(entry).left) == (4, 0)
    before = read_status(rundir).jobs
    name_successor(rundir, "123")
    after = read_status(rundir)
    assert after.jobs == before and after.run.allocation["next"] == "123"
    said = CliRunner().invoke(status_command, ["--dir", str(rundir.root), "--json"])
    page = json.loads(said.output)
    assert [job["name"] for job in page["jobs"]] == [*"abcd"] and "ended" not in page
    with run.file.open("ab") as file:
        file.write(b"[\n")
    assert {job["name"] for job in bundle._status(rundir.root)["jobs"]} == {*"abcd"}
