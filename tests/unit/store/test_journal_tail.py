"""The journal: what was acknowledged is there again, what is half written is not, and damage is told."""

from __future__ import annotations

import errno
import os
import re

import pytest

from hpcsched import patience
from hpcsched.core import events as ev
from hpcsched.errors import BadInput, StoreError
from hpcsched.patience import PASSING
from hpcsched.policy import make_policy
from hpcsched.store import journal
from hpcsched.store.journal import Journal
from hpcsched.store.replay import replay
from hpcsched.store.rundir import SNAPSHOT_PERIOD_S, STALE_AFTER_S
from hpcsched.testing.builders import Driver, a_job, a_profile


@pytest.fixture
def events():
    """A short life with most kinds of events."""
    driver = Driver(a_job("a", "m"), a_job("b", "m"), profiles=[a_profile("m", [1, 2, 3])])
    driver.runs("a", "b")
    driver.reports("a", 10, rate=2.5)
    driver.saves("a", 12)
    driver.suspend("a")
    driver.leaves("a", 20)
    driver.exits("b", 1, 5, detail="it is goné\nand more")
    driver.lose(3)
    driver.drain()
    return driver.events


@pytest.fixture
def path(tmp_path, events):
    path = tmp_path / "journal.jsonl"
    writer = Journal(path)
    writer.append(events)
    writer.close()
    return path


def told(path):
    return [event for event, _ in journal.read(path)]


def test_everything_comes_back(path, events):
    assert told(path) == events
    assert path.stat().st_mode & 0o777 == 0o600
    assert [end for _, end in journal.read(path)][-1] == path.stat().st_size


@pytest.mark.long
def test_a_tail_torn_at_any_byte_is_cut_and_overwritten(path, events):
    data = path.read_bytes()
    start = data[:-1].rindex(b"\n") + 1
    for cut in range(start, len(data)):
        path.write_bytes(data[:cut])
        assert told(path) == events[:-1]
        found = replay(path, make_policy)
        assert (found.length, found.records) == (start, len(events) - 1)
        writer = Journal(path, length=found.length, records=found.records)
        writer.append(events[-1:])
        writer.close()
        assert path.read_bytes() == data


@pytest.mark.parametrize("tail", [b"\0" * 100, b"\0" * 100 + b"\n", b"\xff\xfe{"])
def test_rubbish_after_the_last_record_is_cut(path, events, tail):
    """What a power cut leaves of blocks that were never written, and of a line without its end."""
    path.write_bytes(path.read_bytes() + tail)
    assert told(path) == events


def test_damage_in_the_middle_names_byte_and_record(path, events):
    data = path.read_bytes()
    starts = [0, *(found.end() for found in re.finditer(b"\n", data))]
    for record in range(1, len(events) - 1):
        for offset in (
            starts[record - 1] + 1,
            (starts[record - 1] + starts[record]) // 2,
            starts[record] - 1,
        ):
            path.write_bytes(data[:offset] + bytes([data[offset] ^ 1]) + data[offset + 1 :])
            with pytest.raises(StoreError) as caught:
                told(path)
            assert f"damaged at byte {starts[record - 1]}, record {record}:" in str(caught.value)


def test_a_record_that_is_missing_is_damage(path):
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:3] + lines[4:]))
    with pytest.raises(StoreError, match="record 4: record 5 where 4 belongs"):
        told(path)


def record(seq, kind, body, version=journal.VERSION):
    """A record of another version, or of a kind that this one does not know, with a right checksum."""
    crc = journal._checksum(seq, kind, body)
    head = f'{{"v":{version},"seq":{seq},"crc":"{crc}","type":"{kind}","event":'
    return head.encode() + body + b"}\n"


STRANGE = [
    pytest.param(2, "WorkersReady", b'{"at":1.0,"job_id":1,"attempt":1}', id="version"),
    pytest.param(1, "WorkersDancing", b'{"at":1.0}', id="type"),
]


@pytest.mark.parametrize(("version", "kind", "body"), STRANGE)
def test_unknown_records_before_known_ones_are_refused(path, events, version, kind, body):
    number = len(events) + 1
    known = journal.encode(number + 1, events[-1])
    path.write_bytes(path.read_bytes() + record(number, kind, body, version) + known)
    with pytest.raises(StoreError, match=f"record {number}"):
        told(path)


@pytest.mark.parametrize(("version", "kind", "body"), STRANGE)
def test_unknown_records_at_the_end_are_refused_not_cut(path, events, version, kind, body):
    """They are whole and were acknowledged: an older hpcsched must not cut them off."""
    number = len(events) + 1
    path.write_bytes(path.read_bytes() + record(number, kind, body, version))
    with pytest.raises(StoreError, match=f"record {number}"):
        told(path)


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(StoreError, match="No such file"):
        told(tmp_path / "none")


def test_records_that_contradict_the_ones_before_are_an_error(tmp_path):
    path = tmp_path / "journal.jsonl"
    writer = Journal(path)
    writer.append([ev.CancelRequested(at=0.0, job_id=5)])
    writer.close()
    with pytest.raises(StoreError, match=r"record 1 \(CancelRequested\) contradicts"):
        replay(path, make_policy)


def test_commands_carried_out_are_known_after_a_replay(tmp_path):
    driver = Driver(a_job("a", "m"), profiles=[a_profile("m", [1])])
    driver.tell(ev.HoldRequested, "a", cause="inbox:17")
    driver.tell(ev.DrainRequested, cause="SIGTERM")
    path = tmp_path / "journal.jsonl"
    writer = Journal(path)
    writer.append(driver.events)
    writer.close()
    assert replay(path, make_policy).commands == {"17"}


@pytest.mark.parametrize("written", [0, 1, 30, 200])
def test_a_write_that_fails_half_way_leaves_nothing(path, events, monkeypatch, written):
    before = path.read_bytes()
    writer = Journal(path, length=len(before), records=len(events))
    real = os.write

    def full(descriptor, data):
        if len(data) <= written:
            return real(descriptor, data)
        if not written or os.fstat(descriptor).st_size > len(before):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, bytes(data[:written]))

    monkeypatch.setattr(os, "write", full)
    more = [ev.DrainRequested(at=9.0, cause="x" * 300), ev.DrainRequested(at=10.0)]
    with pytest.raises(StoreError, match=r"cannot write .*journal.jsonl: No space left"):
        writer.append(more)
    assert path.read_bytes() == before
    monkeypatch.setattr(os, "write", real)
    writer.append(more)
    writer.close()
    assert told(path) == [*events, *more]


class Server:
    """A file system whose calls fail until so many have been made; what was not synchronised is lost then."""

    def __init__(self, path, monkeypatch, *, number=errno.EIO, failing=()):
        self.path, self.number, self.failing = path, number, dict(failing)
        self.waited, self.synced = 0.0, path.stat().st_size
        for name in ("write", "fdatasync", "open"):
            monkeypatch.setattr(os, name, self.call(name, getattr(os, name)))
        monkeypatch.setattr(patience.time, "monotonic", lambda: self.waited)
        monkeypatch.setattr(patience.time, "sleep", self.sleep)

    def sleep(self, seconds):
        self.waited += seconds

    def call(self, name, own):
        def called(*args, **keys):
            if self.failing.get(name, 0) > 0:
                self.failing[name] -= 1
                os.truncate(self.path, self.synced)
                raise OSError(self.number, os.strerror(self.number))
            done = own(*args, **keys)
            if name == "fdatasync":
                self.synced = os.fstat(args[0]).st_size
            return done

        return called


@pytest.mark.parametrize("call", ["write", "fdatasync"])
@pytest.mark.parametrize("number", sorted(PASSING))
def test_an_error_that_may_pass_is_waited_for_and_nothing_is_lost(path, events, monkeypatch, call, number):
    before = path.read_bytes()
    writer = Journal(path, length=len(before), records=len(events))
    server = Server(path, monkeypatch, number=number)
    more = [ev.DrainRequested(at=float(at)) for at in range(10, 14)]
    writer.append(more[:1], sync=False)
    writer.append(more[1:2], sync=False)
    server.failing = {call: 3, "open": 2}
    writer.append(more[2:3])
    assert server.waited == pytest.approx(5 * patience.AGAIN_S)
    assert server.synced == path.stat().st_size
    writer.append(more[3:])
    writer.close()
    assert told(path) == [*events, *more]


def test_it_is_not_waited_for_any_longer_than_others_wait_for_a_sign_of_life(path, events, monkeypatch):
    before = path.read_bytes()
    writer = Journal(path, length=len(before), records=len(events))
    server = Server(path, monkeypatch, failing={"fdatasync": 10**6})
    with pytest.raises(StoreError, match="Input/output error"):
        writer.append([ev.DrainRequested(at=9.0)])
    assert patience.PATIENCE_S <= server.waited < STALE_AFTER_S - SNAPSHOT_PERIOD_S
    assert path.read_bytes() == before
    server.failing = {}
    writer.append([ev.DrainRequested(at=10.0)], sync=False)
    writer.close()
    writer.close()
    assert [event.at for event in told(path)][-1] == 10.0


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EBADF])
def test_others_are_not(path, events, monkeypatch, number):
    before = path.read_bytes()
    writer = Journal(path, length=len(before), records=len(events))
    server = Server(path, monkeypatch, number=number, failing={"write": 1})
    with pytest.raises(StoreError, match="cannot write"):
        writer.append([ev.DrainRequested(at=9.0)])
    assert (server.waited, path.read_bytes()) == (0.0, before)


def test_what_another_agent_has_written_meanwhile_stays(path, events, monkeypatch):
    before = path.read_bytes()
    writer = Journal(path, length=len(before), records=len(events))
    server = Server(path, monkeypatch, number=errno.ESTALE)
    other = Journal(path, length=len(before), records=len(events))
    other.append([ev.DrainRequested(at=9.0, cause="theirs")])
    server.synced, server.failing = path.stat().st_size, {"write": 1}
    monkeypatch.setattr(os, "ftruncate", lambda *_: None)
    with pytest.raises(StoreError, match="another agent has written"):
        writer.append([ev.DrainRequested(at=9.0)])
    assert told(path)[-1].cause == "theirs"


def test_records_that_are_seen_again_are_on_disk_before_there_are_too_many(path, events, monkeypatch):
    writer = Journal(path, length=path.stat().st_size, records=len(events))
    server = Server(path, monkeypatch)
    long = ev.DrainRequested(at=9.0, cause="x" * (journal.PREALLOCATED_BYTES // 3))
    for _ in range(3):
        writer.append([long], sync=False)
    assert server.synced < path.stat().st_size
    writer.append([long], sync=False)
    assert server.synced == path.stat().st_size


def test_a_close_that_fails_ends_nobody(path, events, monkeypatch):
    writer = Journal(path, length=path.stat().st_size, records=len(events))
    own = os.close

    def close(descriptor):
        own(descriptor)
        raise OSError(errno.EIO, "what became of earlier writes")

    monkeypatch.setattr(os, "close", close)
    writer.close()
    writer.close()


def test_another_file_in_its_place_is_not_written_to(path, events, monkeypatch):
    before = path.read_bytes()
    writer = Journal(path, length=len(before), records=len(events))
    Server(path, monkeypatch, number=errno.ESTALE, failing={"write": 1})
    path.rename(path.with_suffix(".old"))
    path.write_bytes(before)
    with pytest.raises(StoreError, match="another one is in its place"):
        writer.append([ev.DrainRequested(at=9.0)])
    assert path.read_bytes() == before


def test_every_kind_of_event_can_be_written():
    kinds = {kind for kind in vars(ev).values() if isinstance(kind, type) and issubclass(kind, ev.Event)}
    assert kinds == set(journal._EVENTS.values())
    with pytest.raises(BadInput):
        journal.decode(record(1, "WorkersReady", b'{"at":"late"}'))


@pytest.mark.parametrize("bit", [0, 6])
def test_a_flipped_bit_in_the_last_record_is_told_from_a_torn_one(path, bit):
    """It was acknowledged: a crash leaves less of a record, never another one."""
    data = path.read_bytes()
    start = data[:-1].rindex(b"\n")  # the end of the record before it, too
    for offset in range(start, len(data)):
        path.write_bytes(data[:offset] + bytes([data[offset] ^ 1 << bit]) + data[offset + 1 :])
        with pytest.raises(StoreError, match="damaged at byte"):
            told(path)


@pytest.mark.parametrize("tail", [b"\n", b"{}\n", b'{"v":1}\n{"v"'])
def test_a_whole_line_that_is_no_record_is_damage(path, tail):
    path.write_bytes(path.read_bytes() + tail)
    with pytest.raises(StoreError, match="journal repair"):
        told(path)


def test_a_journal_that_is_removed_takes_no_more(path, events):
    found = replay(path, make_policy)
    writer = Journal(path, length=found.length, records=found.records)
    path.unlink()
    with pytest.raises(StoreError, match="removed"):
        writer.append(events[-1:])
    writer.close()


def test_room_for_records_is_kept_ahead_and_given_back(tmp_path, events):
    path = tmp_path / "journal.jsonl"
    writer = Journal(path)
    if not writer._kept:
        pytest.skip("a file system that cannot keep room")
    for _ in range(3):
        writer.append(events)
        about = path.stat()
        assert about.st_blocks * 512 >= about.st_size + journal.PREALLOCATED_BYTES // 2
    length = path.stat().st_size
    writer.close()
    assert path.stat().st_size == length
    assert path.stat().st_blocks * 512 < length + 2**16


def test_who_is_followed_writes_no_record_more_and_none_of_its_records_is_lost(path, events, monkeypatch):
    _, length, records, *_ = replay(path, make_policy)
    old = Journal(path, length=length, records=records)
    replace = type(path).replace

    def in_between(copy, target):
        old.append([ev.TimerFired(at=1e6, key=("drain", 0, 0))])
        return replace(copy, target)

    monkeypatch.setattr(type(path), "replace", in_between)
    journal.detach(path)
    monkeypatch.undo()
    with pytest.raises(StoreError, match="removed"):
        old.append([ev.TimerFired(at=2e6, key=("drain", 0, 0))])
    old.close()
    assert told(path) == [*events, ev.TimerFired(at=1e6, key=("drain", 0, 0))]
    assert path.stat().st_mode & 0o777 == 0o600
