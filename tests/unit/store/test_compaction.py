"""A journal that has grown is begun anew, with what it held in the archive: a crash at any call leaves a run
that opens, and all of it is still to be read."""

from __future__ import annotations

import errno
import gzip
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from budget import slow

from hpcsched.agent import recovery
from hpcsched.agent.recovery import open_run
from hpcsched.core import events as ev
from hpcsched.core.machine import Machine
from hpcsched.errors import StoreError
from hpcsched.policy import make_policy
from hpcsched.store import archive, checkpoint, compaction, journal
from hpcsched.store.archive import Mark, Unreadable
from hpcsched.store.journal import Journal
from hpcsched.store.repair import check, repair
from hpcsched.store.replay import last_start, replay, valid_events, voided
from hpcsched.store.rundir import NewerRun, RunDir
from hpcsched.testing.builders import Driver, a_job, a_profile


def state(machine: Machine) -> bytes:
    return checkpoint.encode(machine, make_policy, ())


@pytest.fixture(scope="module")
def events() -> list[ev.Event]:
    jobs = [a_job(f"j{n}", "m", 100, gpus=1) for n in range(8)]
    driver = Driver(*jobs, profiles=[a_profile("m", [1, 2, 3])], gpus=2)
    for n in range(0, 8, 2):
        driver.runs(f"j{n}", f"j{n + 1}")
        driver.exits(f"j{n}", 0, 100)
        driver.exits(f"j{n + 1}", 0, 100)
    assert driver.machine.run.finished
    return driver.events


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    rundir = RunDir(tmp_path / "run")
    rundir.make()
    return rundir


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "COMPACTED_BYTES", 1)


def told(path: Path) -> list[ev.Event]:
    return [event for event, _ in journal.read(path)]


def compact(path: Path, writer: Journal) -> bool:
    compaction.prepare(path, make_policy, archives=True)
    return compaction.finish(path, writer)


def written(path: Path, events: list[ev.Event], *, every: int) -> Journal:
    """A journal that was compacted after each so many events."""
    writer = Journal(path)
    for number, event in enumerate(events, 1):
        writer.append([event])
        if number % every == 0:
            assert compact(path, writer)
    return writer


def parts_of(path: Path) -> list[Path]:
    return sorted(archive.folder_of(path).glob("*.jsonl.gz"))


@pytest.mark.long
@pytest.mark.parametrize("every", [slow(1), 4, 7])
def test_all_is_told_as_if_it_were_one_file(rundir: RunDir, events: list[ev.Event], every: int) -> None:
    whole = rundir.root / "whole.jsonl"
    Journal(whole).append(events)
    path = rundir.journal
    written(path, events, every=every).close()
    count = len(events) // every
    assert told(path) == list(valid_events(path)) == events
    contents = journal.Contents(path)
    assert [end.records for end in contents.archived] == [every * (n + 1) for n in range(count)]
    assert len(parts_of(path)) == count and len(contents.data) < whole.stat().st_size
    first, *rest = path.read_bytes().splitlines(keepends=True)
    assert first.startswith(b'{"v":2,"seq":%d,' % (every * count)) and b'"type":"Archived"' in first
    lines = [*b"".join(gzip.decompress(part.read_bytes()) for part in parts_of(path)).splitlines(True), *rest]
    assert lines == whole.read_bytes().splitlines(keepends=True)
    found, again, expected = (
        replay(path, make_policy),
        replay(path, make_policy, short_cut=False),
        replay(whole, make_policy),
    )
    assert state(found.machine) == state(again.machine) == state(expected.machine)
    assert found.records == again.records == expected.records == len(events)
    assert found.length == again.length == path.stat().st_size
    assert found.mark.records == every * count
    assert check(path, make_policy).records == len(events) and not check(path, make_policy).wrong


def test_the_newest_start_is_found_wherever_it_is(rundir: RunDir, events: list[ev.Event]) -> None:
    path, at = rundir.journal, events[-1].at
    first = events[0]
    assert isinstance(first, ev.AgentStarted)
    writer = written(path, events, every=5)
    assert last_start(path) == first
    second = replace(first, at=at, policy="equal")
    writer.append(
        [second, ev.InboxRead(at=at), ev.ResumeRequested(at=at, job_id=1, cause='"type":"AgentStarted"')]
    )
    assert last_start(path) == second
    compact(path, writer)
    assert last_start(path) == second
    void = ev.EventVoided(at=at, record=len(events) + 1, kind="AgentStarted", error="wrong")
    writer.append([void])
    assert last_start(path) == first
    other = RunDir(rundir.root.with_name("other"))
    other.make()
    other.journal.touch()
    assert last_start(other.journal) is None


def test_it_is_for_its_owner_alone_or_for_the_group_as_the_run_is(
    rundir: RunDir, events: list[ev.Event]
) -> None:
    written(rundir.journal, events, every=9)
    found = [rundir.journal, archive.folder_of(rundir.journal), *archive.folder_of(rundir.journal).iterdir()]
    assert [path.stat().st_mode & 0o777 for path in found] == [0o600, 0o700, *[0o600] * (len(found) - 2)]
    rundir.make(share=os.getgid())
    assert [path.stat().st_mode & 0o777 for path in found] == [0o640, 0o750, *[0o640] * (len(found) - 2)]
    other = RunDir(rundir.root.with_name("other"))
    other.make(share=os.getgid())
    written(other.journal, events, every=9)
    found = [other.journal, archive.folder_of(other.journal), *archive.folder_of(other.journal).iterdir()]
    assert [path.stat().st_mode & 0o777 for path in found] == [0o640, 0o750, *[0o640] * (len(found) - 2)]


def test_what_is_written_while_it_is_prepared_stays_in_the_journal(
    rundir: RunDir, events: list[ev.Event]
) -> None:
    path = rundir.journal
    writer = Journal(path)
    writer.append(events[:6])
    compaction.prepare(path, make_policy, archives=True)
    writer.append(events[6:10])
    assert compaction.finish(path, writer) and not compaction.finish(path, writer)
    writer.append(events[10:])
    assert told(path) == events
    assert [journal.decode(line)[0] for line in path.read_bytes().splitlines()[1:]] == [
        *range(7, len(events) + 1)
    ]


def test_a_tail_torn_at_any_byte_is_cut(rundir: RunDir, events: list[ev.Event]) -> None:
    path = rundir.journal
    written(path, events[:-1], every=len(events) - 1).append(events[-1:])
    data = path.read_bytes()
    first = data.index(b"\n") + 1
    for cut in range(first, len(data), 29):
        path.write_bytes(data[:cut])
        assert told(path) == events[:-1]
        for short_cut in (True, False):
            found = replay(path, make_policy, short_cut=short_cut)
            assert (found.length, found.records) == (first, len(events) - 1)


def test_older_versions_refuse_it_in_one_line(rundir: RunDir, events: list[ev.Event]) -> None:
    """They read a record of a version that they do not know, and say so; `journal repair` changes nothing."""
    written(rundir.journal, events, every=9)
    line = rundir.journal.read_bytes().splitlines(keepends=True)[0]
    with pytest.raises(journal.UnknownRecord, match="record version 2, type Archived, of another hpcsched"):
        journal.decode(line)


def test_a_later_form_of_the_first_line_is_of_another_hpcsched(
    rundir: RunDir, events: list[ev.Event]
) -> None:
    written(rundir.journal, events, every=9)
    later = journal.first_line([Mark(9, 9, 9)]).replace(b"Archived", b"Elsewhere")
    body = later[later.index(b'"event":') + 8 : -2]
    crc = journal._checksum(9, "Elsewhere", body).encode()
    rundir.journal.write_bytes(b'{"v":2,"seq":9,"crc":"%s","type":"Elsewhere","event":%s}\n' % (crc, body))
    with pytest.raises(NewerRun, match="not of this hpcsched"):
        told(rundir.journal)


# -- crashes -------------------------------------------------------------------------------------------------

CALLS = ("open", "write", "fsync", "fdatasync", "ftruncate", "replace", "unlink", "mkdir", "fchmod", "close")


class Died(BaseException):
    """The process was killed."""


class Calls:
    """System calls, of which one is the last; `after`: it is still done."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self.last, self.after = 0, -1, False
        self.error: Exception | None = None
        for name in CALLS:
            monkeypatch.setattr(os, name, self._counted(getattr(os, name)))

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*words: Any, **more: Any) -> Any:
            self.count += 1
            if self.count == self.last:
                self.last = -1
                if self.error:
                    raise self.error
                if self.after:
                    with suppress(OSError):
                        call(*words, **more)
                raise Died
            return call(*words, **more)

        return counted

    def until(self, last: int, *, after: bool = False, error: Exception | None = None) -> None:
        self.count, self.last, self.after, self.error = 0, last, after, error


def opened(rundir: RunDir) -> recovery.Recovered:
    found = open_run(rundir, make_policy)
    whole = replay(rundir.journal, make_policy, short_cut=False)
    assert state(found.machine) == state(whole.machine)
    return found


def life(rundir: RunDir, events: list[ev.Event], acknowledged: list[int]) -> None:
    """An agent that goes on where the journal ends, and compacts it twice."""
    machine, writer, _ = open_run(rundir, make_policy)
    done = writer.seq
    for number, event in enumerate(events[done:], done + 1):
        writer.append([event])
        acknowledged[0] = number
        machine.handle(event)
        if number % 10 == 0:
            compact(rundir.journal, writer)
    writer.close()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    yield Calls(monkeypatch)


def a_life(rundir: RunDir, events: list[ev.Event], calls: Calls, last: int, after: bool) -> bool:
    """One that is killed at this call; whether it came so far. What is left of it opens, and goes on."""
    acknowledged = [0]
    calls.until(last, after=after)
    try:
        life(rundir, events, acknowledged)
        over = True
    except Died:
        over = False
    calls.until(-1)
    found = told(rundir.journal) if rundir.journal.exists() else []
    assert found == events[: len(found)] and len(found) >= acknowledged[0]
    if found:
        opened(rundir).journal.close()
    life(rundir, events, acknowledged)
    assert told(rundir.journal) == events
    assert not check(rundir.journal, make_policy).wrong
    return over


@pytest.mark.slow
@pytest.mark.parametrize("after", [False, True])
def test_a_crash_at_any_call_leaves_a_run_that_opens_and_goes_on(
    tmp_path: Path, events: list[ev.Event], calls: Calls, after: bool
) -> None:
    assert crashes(tmp_path, events, calls, after=after) > 100


@pytest.mark.long
def test_a_crash_at_some_calls_does(tmp_path: Path, events: list[ev.Event], calls: Calls) -> None:
    assert crashes(tmp_path, events[:13], calls, after=True, step=7) > 40


def crashes(tmp_path: Path, events: list[ev.Event], calls: Calls, *, after: bool, step: int = 1) -> int:
    """A life with a crash at each of these calls, one after the other; their number."""
    last, over = 1, False
    while not over:
        rundir = RunDir(tmp_path / str(last))
        rundir.make()
        over = a_life(rundir, events, calls, last, after)
        last += step
    return last


@pytest.mark.long
@pytest.mark.parametrize("number", [errno.ENOSPC, slow(errno.EIO), slow(errno.EDQUOT)])
def test_a_full_disk_puts_it_off(tmp_path: Path, events: list[ev.Event], calls: Calls, number: int) -> None:
    """At any call of it: nothing is lost, nothing half-written counts, and the next time it is done."""
    last, failed, left = 0, 0, -1
    while left < 0:
        last += 1
        rundir = RunDir(tmp_path / str(last))
        rundir.make()
        path = rundir.journal
        writer = Journal(path)
        writer.append(events[:9])
        calls.until(last, error=OSError(number, os.strerror(number)))
        try:
            compact(path, writer)
        except StoreError:
            failed += 1
        left = calls.last
        calls.until(-1)
        writer.append(events[9:12])
        assert told(path) == events[:12]
        assert compact(path, writer) and journal.Contents(path).begin.records == 12
        assert not [*rundir.root.glob(".*.tmp")]
        writer.append(events[12:])
        writer.close()
        assert told(path) == events
    # What may pass is waited for: it fails what cannot be done twice alone.
    assert 5 < failed <= 10 if number == errno.EIO else failed > 30


def test_who_was_followed_by_another_does_not_put_a_file_in_the_place_of_his(
    rundir: RunDir, events: list[ev.Event]
) -> None:
    path = rundir.journal
    writer = Journal(path)
    writer.append(events[:9])
    compaction.prepare(path, make_policy, archives=True)
    journal.detach(path)
    other = Journal(path, length=path.stat().st_size, records=9)
    other.append(events[9:12])
    with pytest.raises(StoreError, match="another one is in its place"):
        compaction.finish(path, writer)
    with pytest.raises(StoreError, match="another one is in its place"):
        writer.append(events[9:10])
    other.append(events[12:])
    assert told(path) == events and not [*rundir.root.glob(".*.tmp")]


def test_the_next_head_begins_it_anew(rundir: RunDir, events: list[ev.Event]) -> None:
    """Where another may take over the agent only writes checkpoints."""
    path = rundir.journal
    Journal(path).append(events[:9])
    compaction.prepare(path, make_policy, archives=False)
    assert not parts_of(path) and replay(path, make_policy).mark.records == 9
    found = open_run(rundir, make_policy, detach=True)
    found.journal.append(events[9:])
    assert journal.Contents(path).begin.records == 9 and told(path) == events


def test_what_a_process_that_was_killed_has_left_in_the_archive_is_removed(
    rundir: RunDir, events: list[ev.Event]
) -> None:
    path = rundir.journal
    written(path, events, every=9).close()
    kept = parts_of(path)
    (archive.folder_of(path) / ".000000000099.jsonl.gz.7.tmp").touch()
    archive.part_path(path, Mark(5)).touch()
    opened(rundir)
    assert parts_of(path)[: len(kept)] == kept
    assert {file.suffix for file in archive.folder_of(path).iterdir()} == {".gz", ""}
    assert told(path) == events


# -- damage --------------------------------------------------------------------------------------------------


@pytest.fixture
def path(rundir: RunDir, events: list[ev.Event]) -> Path:
    """A journal with two parts in its archive, and records after them."""
    written(rundir.journal, events, every=len(events) // 2 - 1).close()
    assert len(parts_of(rundir.journal)) == 2
    return rundir.journal


def lose_checkpoint(path: Path) -> None:
    (archive.folder_of(path) / archive.CHECKPOINT).unlink()


@pytest.mark.parametrize("damage", ["gone", "cut", "another", "none"])
def test_a_part_that_cannot_be_read_is_told_and_the_checkpoint_stands_for_it(path: Path, damage: str) -> None:
    part = parts_of(path)[0]
    data = part.read_bytes()
    whole = state(replay(path, make_policy).machine)
    match damage:
        case "gone":
            part.unlink()
        case "cut":
            part.write_bytes(data[:-20])
        case "another":
            part.write_bytes(gzip.compress(gzip.decompress(data).replace(b'"at":0.0', b'"at":9.9')))
        case "none":
            part.write_bytes(b"")
    assert state(replay(path, make_policy).machine) == whole
    found = check(path, make_policy)
    assert not found.wrong and f"cannot read {part}, records 1 to" in found.notes[0]
    assert repair(path, make_policy) == []
    lose_checkpoint(path)
    with pytest.raises(Unreadable, match="records 1 to"):
        replay(path, make_policy)
    assert "nothing but a copy of that file mends this" in check(path, make_policy).wrong[0]
    with pytest.raises(StoreError, match="cannot read"):
        repair(path, make_policy)
    part.write_bytes(data)
    assert state(replay(path, make_policy).machine) == whole


def test_the_first_line_is_made_again(path: Path, events: list[ev.Event]) -> None:
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"parts":[[', b'"parts":[[1', 1))
    with pytest.raises(journal.Damaged, match="at byte 0"):
        told(path)
    assert "damaged at byte 0" in check(path, make_policy).wrong[0]
    said = repair(path, make_policy)
    assert said[0] == "the line on the archive was damaged: it has 2 files"
    assert path.read_bytes() == data and told(path) == events


def test_damage_in_the_journal_is_mended_as_ever(path: Path, events: list[ev.Event]) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    assert len(lines) == 4
    path.write_bytes(lines[0] + lines[1].replace(b'"at"', b'"aT"') + lines[2] + lines[3])
    record = len(events) - 2
    assert f"record {record}" in check(path, make_policy).wrong[0]
    assert f"record {record}" in repair(path, make_policy)[0]
    assert told(path)[: record - 1] == events[: record - 1]
    assert not check(path, make_policy).wrong


def test_a_record_of_the_archive_is_voided_by_one_in_the_journal(path: Path, events: list[ev.Event]) -> None:
    lose_checkpoint(path)
    voids = ev.EventVoided(at=events[-1].at, record=3, kind="TimerFired", error="wrong")
    Journal(path, length=path.stat().st_size, records=len(events)).append([voids])
    assert voided(path) == {3} and list(valid_events(path)) == [*events[:2], *events[3:], voids]


def test_a_journal_whose_archive_is_all_gone_is_refused_in_one_line(path: Path) -> None:
    for file in archive.folder_of(path).iterdir():
        file.unlink()
    with pytest.raises(Unreadable, match="No such file"):
        replay(path, make_policy)


def test_what_claims_to_be_longer_than_it_is_takes_no_memory(path: Path) -> None:
    parts = journal.Contents(path).archived
    bomb = gzip.compress(bytes(10_000_000))
    parts_of(path)[0].write_bytes(bomb)
    with pytest.raises(Unreadable, match="not what was written"):
        archive.read_part(path, Mark(), parts[0])
    with pytest.raises(Unreadable, match="a length is wrong"):
        archive.read_part(path, Mark(), Mark(3, 2**40, 0))
