"""Which checkpoints are a job's own, and which of them are whole; the times are the test's."""

from __future__ import annotations

import os
import time
import zipfile
from pathlib import Path

import pytest

from hpcsched.agent.own_checkpoints import FILE, SETTLED_FILE_S, SETTLED_S, OwnCheckpoints
from hpcsched.core.model import Restart
from hpcsched.errors import StoreError

BY_HAND = Restart(checkpoints=("c-*",))
WITH_LAST = Restart(checkpoints=("c-*",), complete="state")


class Place:
    """A job's folder, and the directory of its program; each write is a second after the one before."""

    def __init__(self, root: Path) -> None:
        self.job, self.workdir = root / "jobs" / "1", root / "work"
        self.job.parent.mkdir()
        self.workdir.mkdir()
        self._time = 1_700_000_000.0

    def saves(self, step: int, *files: str) -> None:
        """Writes to checkpoint `step`: a file, or files of a folder."""
        self._time += 1
        path = self.workdir / f"c-{step}"
        for name in files:
            path.mkdir(exist_ok=True)
            (path / name).write_text(str(self._time))
            os.utime(path / name, (self._time, self._time))
        if not files:
            path.write_text(str(self._time))
        os.utime(path, (self._time, self._time))

    @property
    def now(self) -> float:
        """The Unix time of the last write."""
        return self._time

    def checkpoints(self, restart: Restart = BY_HAND) -> OwnCheckpoints:
        return OwnCheckpoints(restart, folder=self.job, workdir=self.workdir)

    def begun(self, restart: Restart = BY_HAND) -> OwnCheckpoints:
        """Those of the first attempt of a job."""
        checkpoints = self.checkpoints(restart)
        checkpoints.begin(anew=True, at_s=0.0)
        return checkpoints

    def at_launch(self, restart: Restart = BY_HAND) -> int | None:
        """The step that the next attempt goes on from."""
        checkpoints = self.checkpoints(restart)
        checkpoints.begin(anew=False, at_s=0.0)
        return step(checkpoints)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def step(checkpoints: OwnCheckpoints) -> int | None:
    return checkpoints.newest.step if checkpoints.newest else None


def test_what_was_there_before_is_somebody_elses(place: Place) -> None:
    place.saves(900)
    checkpoints = place.begun()
    assert step(checkpoints) is None
    place.saves(10)
    checkpoints.over(1.0, by_itself=True, ended=place.now)
    assert step(checkpoints) == place.at_launch() == 10
    assert place.begun().newest is None, "anew: all that it has saved before does not count"
    assert place.at_launch() is None


def test_times_in_the_future_of_what_was_there_before_hide_nothing(place: Place) -> None:
    place.saves(900)
    ahead = time.time() + 3600
    os.utime(place.workdir / "c-900", (ahead, ahead))
    checkpoints = place.begun()
    assert step(checkpoints) is None
    place.saves(10)
    checkpoints.look(1.0)
    assert checkpoints.settling
    checkpoints.over(10.0, by_itself=True, ended=place.now)
    assert step(checkpoints) == place.at_launch() == 10
    assert not checkpoints.settling


def test_one_that_does_not_change_any_more_is_whole(place: Place) -> None:
    checkpoints = place.begun()
    place.saves(10, "a")
    checkpoints.look(100.0)
    assert checkpoints.changed_at == 100.0
    place.saves(10, "a", "b")
    checkpoints.look(100.0 + SETTLED_S)
    assert step(checkpoints) is None
    assert checkpoints.changed_at == 100.0 + SETTLED_S
    checkpoints.look(100.0 + 2 * SETTLED_S)
    assert step(checkpoints) == 10
    assert checkpoints.changed_at == 100.0 + SETTLED_S


def test_a_file_needs_less_time_than_a_folder(place: Place) -> None:
    checkpoints = place.begun()
    place.saves(10)
    checkpoints.look(100.0)
    checkpoints.look(100.0 + SETTLED_FILE_S)
    assert step(checkpoints) == 10


def test_one_after_which_another_was_begun_is_whole(place: Place) -> None:
    checkpoints = place.begun()
    place.saves(10, "a")
    place.saves(20, "a")
    checkpoints.look(100.0)
    assert step(checkpoints) == 10


def test_with_the_last_file_it_is_whole_at_once(place: Place) -> None:
    checkpoints = place.begun(WITH_LAST)
    place.saves(10, "a")
    checkpoints.look(100.0)
    checkpoints.look(1000.0)
    assert step(checkpoints) is None, "however long that takes"
    place.saves(10, "state")
    checkpoints.look(1001.0)
    assert step(checkpoints) == 10
    place.saves(10, "a")  # written over: the last file is an old one
    checkpoints.look(1002.0)
    assert step(checkpoints) is None


def test_one_that_was_being_written_when_it_was_killed_never_counts(place: Place) -> None:
    checkpoints = place.begun()
    place.saves(10, "a")
    checkpoints.look(100.0)
    checkpoints.look(200.0)
    place.saves(20, "a")
    checkpoints.look(300.0)
    checkpoints.over(301.0, by_itself=False, ended=place.now)
    assert step(checkpoints) == place.at_launch() == 10
    again = place.checkpoints()
    again.begin(anew=False, at_s=0.0)
    again.look(1000.0)
    again.over(2000.0, by_itself=True, ended=place.now)
    assert step(again) == 10, "nor later"
    place.saves(20, "a", "b")
    again.look(3000.0)
    again.look(4000.0)
    assert step(again) == 20, "unless it is written once more"


def test_one_that_has_ended_by_itself_was_not_in_the_middle_of_anything(place: Place) -> None:
    checkpoints = place.begun()
    place.saves(10, "a")
    checkpoints.over(100.0, by_itself=True, ended=place.now)
    assert step(checkpoints) == place.at_launch() == 10


@pytest.mark.parametrize(("files", "settled_s"), [((), SETTLED_FILE_S), (("a",), SETTLED_S)])
def test_one_that_was_old_when_its_program_was_killed_is_whole(
    place: Place, files: tuple[str, ...], settled_s: float
) -> None:
    """Also if nobody had looked at it for so long; by twice the time, for clocks differ."""
    for late_s, found in ((-0.5, None), (0.0, 10)):
        killed = place.begun()
        place.saves(10, *files)
        killed.over(100.0, by_itself=False, ended=place.now + 2 * settled_s + late_s)
        assert step(killed) == found
        assert bool(killed.not_taken) == (found is None)
    place.saves(20, *files)
    lost = place.checkpoints()
    lost.after_a_crash(by_itself=False, ended=place.now + 2 * settled_s)
    assert step(lost) == 20
    place.saves(30, *files)
    lost = place.checkpoints()
    lost.after_a_crash(by_itself=False, ended=place.now + 1.0)
    assert step(lost) == 20
    assert lost.not_taken == "c-30, written 1 s before its end, may not be whole and does not count"


def test_a_file_that_ends_as_an_archive_does_is_whole_whenever_its_program_was_killed(place: Place) -> None:
    """As PyTorch's are; one that is written over again and again is all that there is."""
    for saved, found in ((True, 10), (False, None)):
        checkpoints = place.begun()
        place.saves(10)
        if saved:
            with zipfile.ZipFile(place.workdir / "c-10", "w") as archive:
                archive.writestr("data.pkl", "x")
        checkpoints.over(100.0, by_itself=False, ended=(place.workdir / "c-10").stat().st_mtime)
        assert step(checkpoints) == found


def test_a_number_beyond_all_steps_is_no_step(place: Place) -> None:
    for steps, found in ((2000, 1234), (None, 1234), (1000, None)):
        checkpoints = OwnCheckpoints(BY_HAND, folder=place.job, workdir=place.workdir, steps=steps)
        checkpoints.begin(anew=True, at_s=0.0)
        place.saves(1234)
        checkpoints.look(0.0)
        checkpoints.look(100.0)
        assert checkpoints.newest and checkpoints.newest.step == found


def test_without_its_last_file_it_is_not_whole_even_then(place: Place) -> None:
    checkpoints = place.begun(WITH_LAST)
    place.saves(10, "a")
    checkpoints.over(100.0, by_itself=True, ended=place.now)
    assert step(checkpoints) is None


@pytest.mark.parametrize(
    ("restart", "files", "by_itself", "found"),
    [
        (BY_HAND, ["a"], False, 10),
        (BY_HAND, ["a"], True, 20),
        (WITH_LAST, ["a", "state"], False, 20),
        (WITH_LAST, ["a"], True, 10),
    ],
    ids=["not known", "it ended by itself", "its last file is there", "its last file is not there"],
)
def test_after_a_crash(place: Place, restart: Restart, files: list[str], by_itself: bool, found: int) -> None:
    checkpoints = place.begun(restart)
    place.saves(10, "a", "state")
    checkpoints.look(100.0)
    checkpoints.look(200.0)
    place.saves(20, *files)
    after = place.checkpoints(restart)
    after.after_a_crash(by_itself=by_itself)
    assert step(after) == place.at_launch(restart) == found


def test_one_that_was_known_to_be_whole_is_so_after_a_crash(place: Place) -> None:
    checkpoints = place.begun()
    place.saves(10, "a")
    checkpoints.look(100.0)
    checkpoints.look(200.0)
    after = place.checkpoints()
    after.after_a_crash(by_itself=False)
    assert step(after) == 10


@pytest.mark.parametrize("record", [b"", b"{", b'{"doubted": 7}', b"\xff"])
def test_a_record_that_cannot_be_read_says_nothing(place: Place, record: bytes) -> None:
    place.begun()
    place.saves(10, "a")
    (place.job / FILE).write_bytes(record)
    assert place.at_launch() == 10


def test_without_a_record_nothing_is_its_own_after_a_crash(place: Place) -> None:
    """Its agent was killed before the job had begun."""
    place.saves(10, "a")
    place.saves(20, "a")
    after = place.checkpoints()
    assert not after.known
    after.after_a_crash(by_itself=True)
    assert step(after) is None
    assert not after.not_taken


def test_that_a_job_begins_has_to_be_on_record(place: Place) -> None:
    place.job.write_text("a file in the way")
    with pytest.raises((OSError, StoreError)):
        place.begun()


def test_the_step_that_a_dialect_reads(place: Place) -> None:
    checkpoints = place.begun(Restart(speaks="submitit", checkpoints=("c-*",)))
    place.saves(10)
    checkpoints.over(100.0, by_itself=True, ended=place.now)
    assert checkpoints.newest is not None
    assert checkpoints.newest.step is None, "the number of a submitit job's file is the job's"
