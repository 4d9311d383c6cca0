"""A full disk is no fault of a job's: it is tried again, later and later, until there is room."""

from __future__ import annotations

import errno
import json
import os
from types import SimpleNamespace

import pytest

from hpcsched.agent import disk_space
from hpcsched.core import events as ev
from hpcsched.core.reasons import Why
from hpcsched.core.transitions.waiting import MAX_DELAY_S, NO_ROOM_S
from hpcsched.errors import LaunchError
from hpcsched.store.spare import SpareFile
from hpcsched.testing.builders import Driver, a_job, a_profile

WHERE = "/run/jobs/1"


@pytest.fixture
def driver():
    driver = Driver(a_job("a", "m", retries=0), profiles=[a_profile("m", [1])])
    driver.tell(ev.WorkersSpawned, "a", processes=((1, 1),))
    return driver


def fails(driver, **rest):
    return driver.tell(ev.WorkersExited, "a", code=1, no_room=WHERE, **rest)


def waits(driver):
    reason = driver.machine.waiting_reason(driver.job("a"))
    return reason is not None and reason.why is Why.NO_SPACE


def later(driver, seconds):
    driver.now += seconds
    return driver.tell(ev.TimerFired, key=("look", 0, 0))


def launched(driver):
    return driver.job("a").state == "STARTING"


def test_a_failure_without_room_does_not_count_and_the_job_waits_longer_each_time(driver):
    pause = NO_ROOM_S
    for n in range(1, 12):
        assert fails(driver) == []
        assert (driver.job("a").failures, driver.job("a").traits.losses) == (0, 0)
        assert driver.job("a").attempts[-1].ended == "lost"
        assert waits(driver)
        assert f"no room in {WHERE}" in str(driver.machine.waiting_reason(driver.job("a")))
        assert not driver.machine.stuck
        later(driver, pause * 0.9)
        assert not launched(driver)
        later(driver, pause * 0.2)
        assert launched(driver), n
        driver.tell(ev.WorkersSpawned, "a", processes=((1, 1),))
        pause = min(2 * pause, MAX_DELAY_S)
    driver.exits("a", 0, 100)
    assert driver.states() == ["COMPLETED"]
    assert driver.machine.waiting.delays == {}


def test_the_same_at_a_launch(driver):
    fails(driver)
    later(driver, NO_ROOM_S)
    driver.tell(ev.LaunchFailed, "a", error="x: No space left on device", transient=False, no_room=WHERE)
    assert driver.states() == ["PENDING"]
    assert driver.machine.waiting.delays[1].tries == 2


def test_a_save_that_had_no_room_keeps_what_was_saved(driver):
    driver.tell(ev.WorkersReady, "a")
    driver.saves("a", 40)
    driver.suspend("a")
    fails(driver, step=60, saved_step=40)
    job = driver.job("a")
    assert (job.state, job.step, job.failures) == ("SUSPENDED", 40, 0)
    driver.resume("a")
    assert not launched(driver)
    later(driver, NO_ROOM_S)
    assert launched(driver)


def test_what_says_that_there_is_room_begins_anew(driver):
    fails(driver)
    later(driver, NO_ROOM_S)
    driver.tell(ev.WorkersSpawned, "a", processes=((1, 1),))
    driver.tell(ev.WorkersReady, "a")
    fails(driver)
    assert driver.machine.waiting.delays[1].tries == 1


def test_so_does_who_has_waited_after_failures():
    driver = Driver(a_job("a", "m", retries=9), profiles=[a_profile("m", [1])])
    for _ in range(3):
        driver.tell(ev.WorkersExited, "a", code=1, lasted_s=0.1)
        later(driver, MAX_DELAY_S)
    assert launched(driver) and driver.machine.waiting.delays[1].why is Why.FAILED_AT_ONCE
    fails(driver)
    assert waits(driver) and driver.machine.waiting.delays[1].tries == 1


def test_a_cancelled_job_waits_for_no_room(driver):
    fails(driver)
    driver.cancel("a")
    later(driver, NO_ROOM_S)
    assert driver.states() == ["CANCELLED"]


def test_the_next_life_tries_at_once(driver):
    for _ in range(3):
        fails(driver)
        later(driver, MAX_DELAY_S)
        driver.tell(ev.WorkersSpawned, "a", processes=((1, 1),))
    fails(driver)
    driver.start_agent(6)
    assert launched(driver)


def test_a_record_that_cannot_be_read_is_a_failure_where_the_program_left_to_go_on(driver):
    driver.tell(ev.WorkersReady, "a")
    driver.tell(ev.WorkersExited, "a", code=75, unreadable="not UTF-8 text: byte 0xe8")
    assert driver.states() == ["FAILED"]
    assert "STATE.json cannot be read: not UTF-8" in str(driver.job("a").reason)


def test_a_record_that_cannot_be_read_is_told_of_a_job_that_is_done(driver):
    driver.tell(ev.WorkersExited, "a", code=0, unreadable="not UTF-8 text: byte 0xe8")
    assert driver.states() == ["COMPLETED"]
    assert Why.BAD_RECORD in [note.reason.why for note in driver.job("a").story]


# --- how it is seen -------------------------------------------------------------------------------


def disk(**rest):
    about = {"f_bavail": 1000, "f_blocks": 9000, "f_files": 100, "f_favail": 50, "f_flag": 0}
    return SimpleNamespace(**{**about, **rest})


@pytest.mark.parametrize(
    ("about", "full"),
    [
        (disk(), False),
        (disk(f_bavail=0), True),
        (disk(f_bavail=disk_space.MIN_FREE_BLOCKS - 1), True),
        (disk(f_favail=0), True),
        (disk(f_files=0, f_favail=0), False),  # a file system without inodes of its own
        (disk(f_flag=os.ST_RDONLY), True),
        (disk(f_blocks=0, f_bavail=0), False),  # one that does not count
    ],
)
def test_a_file_system_is_full_without_blocks_or_inodes(tmp_path, monkeypatch, about, full):
    monkeypatch.setattr(os, "statvfs", lambda path: about)
    assert disk_space.is_full(tmp_path / "not" / "there" / "yet") is full
    assert disk_space.first_full_directory([tmp_path]) == (str(tmp_path) if full else "")


@pytest.mark.parametrize("unnamed", [True, False])
@pytest.mark.parametrize(("call", "number", "full"), [
    ("write", errno.EDQUOT, True), ("open", errno.EDQUOT, True), ("write", errno.EIO, False), ("", 0, False),
])  # fmt: skip
def test_a_quota_is_seen_by_writing(tmp_path, monkeypatch, call, number, full, unnamed):
    own = {name: getattr(os, name) for name in ("open", "write")}

    def opened(path, flags, *more):
        if not unnamed and flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "as NFS says")
        return fails("open", path, flags, *more)

    def fails(name, *args):
        if name == call:
            raise OSError(number, os.strerror(number))
        return own[name](*args)

    monkeypatch.setattr(os, "statvfs", lambda path: disk())
    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(os, "write", lambda *args: fails("write", *args))
    assert disk_space.is_full(tmp_path) is full
    monkeypatch.undo()
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES])
def test_errors_that_mean_so(tmp_path, number):
    error = OSError(number, os.strerror(number), str(tmp_path / "x"))
    from_launch = LaunchError(f"x: {os.strerror(number)}", transient=False)
    from_launch.__cause__ = error
    of_another_host = LaunchError(f"x: {os.strerror(number)}", transient=False)
    there = [bool(disk_space.full_directory(e, tmp_path)) for e in (error, from_launch, of_another_host)]
    assert there == [number != errno.EACCES] * 3


def test_a_snapshot_can_be_replaced_on_a_full_disk(tmp_path):
    path = tmp_path / "status.json"
    path.write_text("{}")
    spare = SpareFile(path)
    assert not spare.replace(b"[0]")
    spare.keep(2)
    blocks = sum(file.stat().st_blocks for file in tmp_path.iterdir())
    for n in range(5):
        assert spare.replace(b"[%d]" % n)
        assert json.loads(path.read_bytes()) == [n]
        assert len(list(tmp_path.iterdir())) == 2
    assert sum(file.stat().st_blocks for file in tmp_path.iterdir()) in range(blocks - 8, blocks + 1)
    assert not spare.replace(b"x" * 2**17)
    spare.drop()
    assert list(tmp_path.iterdir()) == [path]


def test_room_for_a_snapshot_is_kept_also_after_an_agent_that_was_killed_meanwhile(tmp_path):
    path = tmp_path / "status.json"
    path.write_text("{}")
    (tmp_path / ".status.json.old").write_text("left behind")
    spare = SpareFile(path)
    spare.keep(2)
    for n in range(3):
        assert spare.replace(b"[%d]" % n)


def test_a_record_that_the_full_disk_cut_short_is_no_failure_of_the_jobs(driver):
    driver.tell(ev.WorkersExited, "a", code=75, unreadable="cut short", no_room=WHERE)
    assert (driver.job("a").failures, driver.job("a").traits.losses) == (0, 0)
    assert waits(driver)
