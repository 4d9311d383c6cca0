"""An error that may pass says nothing of what is there: it is asked again, and nobody ends of it."""

from __future__ import annotations

import errno
import os
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hiccups import Hiccups
from rundirs import a_run

from hpcsched import dialects, patience
from hpcsched.agent import disk_space, join, next_head
from hpcsched.agent.attempts import read_record
from hpcsched.agent.checkpoint_files import find_checkpoints
from hpcsched.agent.inbox import Inbox
from hpcsched.agent.join import Parted
from hpcsched.agent.node import agent as node_agent
from hpcsched.agent.node import workers as node_workers
from hpcsched.agent.node.workers import PartWatcher
from hpcsched.agent.own_checkpoints import FILE, OwnCheckpoints
from hpcsched.agent.recovery import saved_steps
from hpcsched.agent.resuming import Search
from hpcsched.agent.save_room import Place, SaveRoom
from hpcsched.batch.local import Local
from hpcsched.cli.common import run_folder
from hpcsched.cli.pool import group
from hpcsched.contract import files
from hpcsched.contract.state import State
from hpcsched.core import events as ev
from hpcsched.core.model import Restart
from hpcsched.dialects.progress import Output
from hpcsched.errors import ConfigError, LaunchError, StoreError
from hpcsched.launch.remote.keys import join_file, joined_file, read_join, remove_join
from hpcsched.launch.workers import LocalWorkers
from hpcsched.patience import PASSING, but_for_lasting, patiently
from hpcsched.store import trials
from hpcsched.store.files import write_atomically
from hpcsched.store.heads import claim_number
from hpcsched.store.journal import Journal
from hpcsched.store.rows import ENDED, JobRows
from hpcsched.store.rundir import RunDir, last_status, snapshot_age_s
from hpcsched.store.spare import SpareFile
from hpcsched.store.status import read_run
from hpcsched.testing.builders import Driver, a_job, a_profile

ALWAYS = 10**9


@pytest.fixture
def hiccups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hiccups:
    return Hiccups(tmp_path, monkeypatch)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No longer than for one more try."""
    monkeypatch.setattr(patience, "PATIENCE_S", 0.0)


@pytest.mark.parametrize("number", sorted(PASSING))
def test_it_is_asked_again_until_there_is_an_answer(tmp_path: Path, hiccups: Hiccups, number: int) -> None:
    hiccups.fails(5, number)
    assert patiently(lambda: tmp_path.stat().st_nlink) > 1 and hiccups.left == 0


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EACCES, errno.ENOSPC])
def test_not_where_the_answer_will_be_the_same(tmp_path: Path, hiccups: Hiccups, number: int) -> None:
    hiccups.fails(5, number)
    with pytest.raises(OSError, match=os.strerror(number)):
        patiently(lambda: tmp_path.stat().st_nlink)
    assert hiccups.left == 4


def test_what_takes_long_is_begun_again_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    now, tries = 1000.0, list[float]()

    def sleep(for_s: float) -> None:
        nonlocal now
        now += for_s

    def save() -> int:
        sleep(60.0)
        tries.append(now)
        if len(tries) < 2:
            raise OSError(errno.EIO, "as its last bytes are written")
        return len(tries)

    monkeypatch.setattr(patience, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    assert patiently(save) == 2


@pytest.mark.usefixtures("impatient")
def test_nor_for_ever(tmp_path: Path, hiccups: Hiccups) -> None:
    hiccups.fails(ALWAYS)
    with pytest.raises(OSError, match="Input/output"):
        patiently(lambda: tmp_path.stat().st_nlink)


def test_errors_that_last_are_as_if_nothing_were_there() -> None:
    with but_for_lasting():
        raise FileNotFoundError(errno.ENOENT, "gone")
    with pytest.raises(OSError, match="stale"), but_for_lasting():
        raise OSError(errno.ESTALE, "stale")


# --- what a program has left --------------------------------------------------------------------------


def test_a_record_that_cannot_be_read_yet_is_not_taken_for_none(tmp_path: Path, hiccups: Hiccups) -> None:
    (tmp_path / files.STATE).write_bytes(State(step=7).encode())
    hiccups.fails(1, errno.ESTALE)
    with pytest.raises(OSError, match="Stale"):
        read_record(tmp_path)
    hiccups.fails(1, errno.EACCES)
    assert read_record(tmp_path) is None
    record = read_record(tmp_path)
    assert record is not None and record.step == 7


def test_nor_is_it_when_a_run_is_taken_up(tmp_path: Path, hiccups: Hiccups) -> None:
    """The step of a suspended job would be 0 then, and what it has saved lost."""
    driver = Driver(a_job("a", "m"), profiles=(a_profile("m", [1.0]),))
    driver.runs("a")
    driver.saves("a", 40)
    driver.suspend("a")
    driver.leaves("a", 40)
    rundir = RunDir(tmp_path)
    rundir.job(1).mkdir(parents=True)
    (rundir.job(1) / files.STATE).write_bytes(State(step=40).encode())
    (rundir.job(1) / f"{files.HELD}.1").touch()
    for calls in range(3):
        hiccups.fails(1, after=calls)
        assert saved_steps(rundir, driver.machine) == {}
        assert hiccups.left == 0
    assert not (rundir.job(1) / f"{files.HELD}.1").exists()


def ranks(folder: Path) -> LocalWorkers:
    return cast(LocalWorkers, SimpleNamespace(_folder=folder, _attempts=[1], _unanswered=False))


def test_that_a_rank_has_left_is_looked_for_again(tmp_path: Path, hiccups: Hiccups) -> None:
    workers = ranks(tmp_path)
    (tmp_path / files.left(1)).touch()
    hiccups.fails(3)
    assert LocalWorkers._has_left(workers)
    (tmp_path / files.left(1)).unlink()
    hiccups.fails(3)
    assert not LocalWorkers._has_left(workers)


@pytest.mark.usefixtures("impatient")
def test_but_no_agent_ends_of_it(tmp_path: Path, hiccups: Hiccups) -> None:
    hiccups.fails(ALWAYS)
    workers = ranks(tmp_path)
    assert not LocalWorkers._has_left(workers)
    (hiccups.fails(0), (tmp_path / files.left(1)).touch())
    assert not LocalWorkers._has_left(workers), "that was waited for once"
    hiccups.fails(ALWAYS)
    part = SimpleNamespace(_ready=False, _file=lambda name: tmp_path / name(1))
    ready = cast(Any, PartWatcher.ready).fget
    assert not ready(part)
    (hiccups.fails(0), (tmp_path / files.ready(1)).touch())
    assert ready(part)


# --- checkpoints of programs that save by themselves --------------------------------------------------


class Saver:
    """A program that has saved step 3, and what is on record of it."""

    def __init__(self, root: Path) -> None:
        self.job, self.workdir = root / "jobs" / "1", root / "work"
        self.job.parent.mkdir()
        self.workdir.mkdir()
        self.at_launch(anew=True)
        (self.workdir / "c-3").mkdir()
        (self.workdir / "c-3" / "state").write_text("3")

    def at_launch(self, *, anew: bool = False) -> OwnCheckpoints:
        found = OwnCheckpoints(Restart(checkpoints=("c-*",)), folder=self.job, workdir=self.workdir)
        found.begin(anew=anew, at_s=0.0)
        return found


@pytest.mark.parametrize("after", range(6))
def test_its_checkpoint_is_found_nevertheless(tmp_path: Path, hiccups: Hiccups, after: int) -> None:
    saver = Saver(tmp_path)
    hiccups.fails(2, after=after)
    newest = saver.at_launch().newest
    assert newest is not None and newest.step == 3 and hiccups.left == 0


def test_what_lay_there_before_is_still_nobodys(
    tmp_path: Path, hiccups: Hiccups, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record says which are older than the job; without it they would be the job's."""
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "c-99").write_text("of another")
    (tmp_path / "jobs").mkdir()
    first = OwnCheckpoints(
        Restart(checkpoints=("c-*",)), folder=tmp_path / "jobs" / "1", workdir=tmp_path / "work"
    )
    first.begin(anew=True, at_s=0.0)
    assert (tmp_path / "jobs" / "1" / FILE).exists()
    hiccups.fails(2)
    again = OwnCheckpoints(
        Restart(checkpoints=("c-*",)), folder=tmp_path / "jobs" / "1", workdir=tmp_path / "work"
    )
    again.begin(anew=False, at_s=1.0)
    assert again.newest is None
    monkeypatch.setattr(patience, "PATIENCE_S", 0.0)
    hiccups.fails(ALWAYS)
    with pytest.raises(OSError, match="Input/output"):
        OwnCheckpoints(
            Restart(checkpoints=("c-*",)), folder=tmp_path / "jobs" / "1", workdir=tmp_path / "work"
        )


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES])
def test_only_errors_that_last_hide_checkpoints(tmp_path: Path, hiccups: Hiccups, number: int) -> None:
    Saver(tmp_path)
    for calls in range(1, 5):
        hiccups.fails(calls, number)
        if number == errno.EACCES:
            assert [*find_checkpoints(tmp_path / "work", ("c-*",))] == []
        else:
            with pytest.raises(OSError, match="Input/output"):
                find_checkpoints(tmp_path / "work", ("c-*",))
        hiccups.fails(0)


@pytest.mark.usefixtures("impatient")
def test_a_launch_that_cannot_find_them_is_tried_again(tmp_path: Path, hiccups: Hiccups) -> None:
    saver = Saver(tmp_path)
    checkpoints = saver.at_launch()
    hiccups.fails(ALWAYS)
    search = Search(checkpoints, lambda: checkpoints.look(0.0))
    search._thread.join()
    with pytest.raises(LaunchError, match="cannot be found") as caught:
        search.done(tmp_path)
    assert caught.value.transient


def test_the_step_in_a_checkpoint_is_read_again(tmp_path: Path, hiccups: Hiccups) -> None:
    (tmp_path / "trainer_state.json").write_text('{"global_step": 5, "max_steps": 5}')
    hiccups.fails(2)
    assert dialects.all_done(tmp_path)


def test_a_metric_is_looked_at_once_but_read(tmp_path: Path, hiccups: Hiccups) -> None:
    (tmp_path / "metric.json").write_text('{"loss": 0.5}')
    hiccups.fails(3)
    assert trials._number(tmp_path / "metric.json", "loss") == 0.5


def test_so_is_its_end_and_what_stands_at_its_beginning(
    tmp_path: Path, hiccups: Hiccups, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "last.ckpt"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("data", b"5")
    monkeypatch.setattr("hpcsched.dialects.checkpoint._global_step", len)
    hiccups.fails(2)
    assert dialects.step_of(path) == path.stat().st_size
    (one,) = find_checkpoints(tmp_path, ("*.ckpt",))
    own = OwnCheckpoints(Restart(checkpoints=("*.ckpt",)), folder=tmp_path, workdir=tmp_path)
    hiccups.fails(2)
    assert own._surely_whole(one, None) and hiccups.left == 0


def test_output_of_attempts_before_is_not_read_once_more(tmp_path: Path, hiccups: Hiccups) -> None:
    (tmp_path / "out").write_text("step 900\n")
    hiccups.fails(2)
    output = Output(tmp_path / "out", lambda line: int(line.split()[1]))
    (tmp_path / "out").write_text("step 900\nstep 1\n")
    report = output.read(0.0)
    assert report is not None and report[0] == 1


# --- what others have written -------------------------------------------------------------------------


def test_a_command_that_cannot_be_read_yet_is_neither_refused_nor_lost(
    tmp_path: Path, hiccups: Hiccups
) -> None:
    rundir = RunDir(tmp_path / "run")
    rundir.make()
    inbox = Inbox(rundir)
    (rundir.inbox / "new" / "1-a").write_text('{"command": "drain"}')
    hiccups.fails(2)
    assert inbox.read() == [], "the folder cannot be listed"
    for after in (1, 2):
        hiccups.fails(9, after=after)
        assert inbox.read() == [], "nor the file be read"
    for after in range(2):  # also while it is read
        hiccups.fails(2, after=after)
        assert len(inbox.read(all_of_it=True)) == 1 and hiccups.left == 0
    for after in range(2):
        hiccups.fails(2, after=after)
        assert len(Inbox.peek(rundir)) == 1 and hiccups.left == 0
    ((name, command),) = inbox.read()
    assert name == "1-a" and getattr(command, "command", "") == "drain"


@pytest.mark.parametrize("number", [errno.ENOMEM, errno.EMFILE, errno.ENFILE])
def test_nor_where_the_agent_is_short_of_something(tmp_path: Path, hiccups: Hiccups, number: int) -> None:
    rundir = RunDir(tmp_path / "run")
    rundir.make()
    (rundir.inbox / "new" / "1-a").write_text('{"command": "drain"}')
    inbox = Inbox(rundir)
    hiccups.fails(9, number, after=1)
    assert inbox.read() == []
    hiccups.fails(0)
    assert len(inbox.read()) == 1


def test_no_number_of_an_agent_is_claimed_that_cannot_be_known(
    tmp_path: Path, hiccups: Hiccups, monkeypatch: pytest.MonkeyPatch
) -> None:
    rundir = RunDir(a_run(tmp_path / "run", age_s=60.0))
    monkeypatch.setattr(RunDir, "read_record", lambda self: None)
    hiccups.fails(ALWAYS)
    with pytest.raises(StoreError, match="cannot read"):
        claim_number(rundir)


def test_who_would_lead_a_run_tries_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def claim(rundir: RunDir) -> int:
        raise StoreError("no space")

    monkeypatch.setattr(next_head, "claim_number", claim)
    monkeypatch.setattr(next_head, "agent_works", lambda rundir: False)
    monkeypatch.setattr(next_head, "last_status", lambda rundir: SimpleNamespace(state="RUNNING"))
    monkeypatch.setattr(next_head, "kept_options", lambda rundir: ())
    monkeypatch.setattr(next_head, "NOT_ALL_AT_ONCE_S", 0.0)
    rundir = SimpleNamespace(root=tmp_path, read_record=lambda: SimpleNamespace(left=False))
    head = next_head.NextHead(cast(RunDir, rundir), "token", (), lambda line: None)
    head.look()
    assert not head.leads


class Member:
    """Hosts that are in a run, once its keys for them can be written."""

    refused = 0

    def __init__(self, *_: object) -> None:
        pass

    def serve(self) -> Parted:
        Member.refused -= 1
        if Member.refused >= 0:
            raise StoreError("joined-1: Stale file handle")
        return Parted.OVER

    def close(self) -> None:
        pass


@pytest.mark.parametrize(("refused", "wait_s", "joins"), [(3, 60.0, True), (1, 0.0, False)])
def test_hosts_join_as_soon_as_that_can_be_put_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: int, wait_s: float, joins: bool
) -> None:
    monkeypatch.setattr(join, "Membership", Member)
    monkeypatch.setattr(join, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(join, "_wait_for_agent", lambda *_: tmp_path / "join")
    monkeypatch.setattr(join, "read_join", lambda path: SimpleNamespace(endpoint="tcp://head"))
    Member.refused = refused
    told = list[str]()
    request = join.JoinRequest(dir=tmp_path, wait_s=wait_s)
    if joins:
        assert join.join(request, batch=Local(), tell=told.append) == 0 and told == ["the run is over"]
    else:
        with pytest.raises(StoreError):
            join.join(request, batch=Local(), tell=told.append)


@pytest.mark.usefixtures("impatient")
def test_the_file_of_keys_is_read_again(
    tmp_path: Path, hiccups: Hiccups, monkeypatch: pytest.MonkeyPatch
) -> None:
    hiccups.fails(ALWAYS)
    with pytest.raises(ConfigError, match="Input/output"):
        read_join(tmp_path / "join")
    monkeypatch.setattr(patience, "PATIENCE_S", 5.0)
    hiccups.fails(3)
    with pytest.raises(ConfigError, match="No such file"):
        read_join(tmp_path / "join")


def test_an_inbox_that_cannot_be_read_at_all_is_waited_for_once(
    tmp_path: Path, hiccups: Hiccups, monkeypatch: pytest.MonkeyPatch
) -> None:
    rundir = RunDir(tmp_path / "run")
    rundir.make()
    inbox, waits = Inbox(rundir), list[float]()
    monkeypatch.setattr(patience, "PATIENCE_S", 0.05)
    monkeypatch.setattr(patience.time, "sleep", lambda s: waits.append(s))
    hiccups.fails(ALWAYS)
    assert inbox.read(all_of_it=True) == [] and waits
    waits.clear()
    assert inbox.read(all_of_it=True) == [] and not waits
    hiccups.fails(0)
    assert inbox.read() == []
    hiccups.fails(2)
    assert inbox.read(all_of_it=True) == [] and waits


@pytest.mark.usefixtures("impatient")
def test_keys_that_cannot_be_removed_end_nobody(
    tmp_path: Path, hiccups: Hiccups, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = join_file(tmp_path, "life")
    head.touch()
    guest = joined_file(tmp_path, "life", "token")
    guest.touch()
    hiccups.fails(ALWAYS)
    remove_join(head, "life", joined=True)
    monkeypatch.setattr(patience, "PATIENCE_S", 5.0)
    hiccups.fails(3)
    remove_join(head, "life", joined=True)
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    ("error", "transient"),
    [
        (OSError(errno.EIO, "a hiccup"), True),
        (OSError(errno.EACCES, "closed"), False),
        (LaunchError("not now", transient=True), True),
        (RuntimeError("can't start new thread"), False),
    ],
)
def test_a_node_agent_tells_what_it_cannot_launch(
    monkeypatch: pytest.MonkeyPatch, error: Exception, transient: bool
) -> None:
    def ready_for(plan: object) -> bool:
        raise error

    told = list[Any]()
    node = SimpleNamespace(
        left="",
        _parts={},
        _inventory=(),
        _name="n",
        _launcher=SimpleNamespace(ready_for=ready_for),
        _head=SimpleNamespace(send=told.append),
    )
    monkeypatch.setattr(node_agent, "plan_from_message", lambda *_: (None, None))
    node_agent.NodeAgent._launch(cast(Any, node), cast(Any, SimpleNamespace(part=1)))
    assert [(one.part, one.transient) for one in told] == [(1, transient)]


def test_a_record_reaches_the_head_though_its_host_had_to_ask_again(tmp_path: Path, hiccups: Hiccups) -> None:
    (tmp_path / "STATE").write_bytes(b"{}")
    hiccups.fails(2)
    assert node_workers._read(tmp_path / "STATE", patient=True) == b"{}"
    hiccups.fails(1)
    assert node_workers._read(tmp_path / "STATE") is None


# --- the agent's own ----------------------------------------------------------------------------------


def test_room_is_looked_for_again_at_the_next_time(tmp_path: Path, hiccups: Hiccups) -> None:
    room = SaveRoom(list, tell=lambda *_: None, publish=lambda *_: None)
    hiccups.fails(1)
    assert room._measured([Place(1, tmp_path, bytes=5)]) == {}
    assert len(room._measured([Place(1, tmp_path, bytes=5)])) == 1
    hiccups.fails(1)
    assert not disk_space.is_full(tmp_path)


def test_a_spare_file_that_cannot_be_seen_is_none(tmp_path: Path, hiccups: Hiccups) -> None:
    spare = SpareFile(tmp_path / "status.json")
    spare.keep(10)
    hiccups.fails(ALWAYS)
    assert not spare.replace(b"{}")
    spare.keep(10)
    hiccups.fails(0)
    assert spare.replace(b"{}")


def test_a_journal_is_written_though_no_room_can_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(descriptor: int) -> object:
        raise OSError(errno.EIO, "Input/output error")

    journal = Journal(tmp_path / "journal")
    monkeypatch.setattr(os, "fstatvfs", broken)
    journal._kept = 0
    journal.append([ev.DrainRequested(at=1.0)])
    assert journal.seq == 1


def test_rows_that_cannot_be_seen_stay(tmp_path: Path, hiccups: Hiccups) -> None:
    other = tmp_path / ENDED.replace("*", "1")
    other.touch()
    rows = JobRows(tmp_path, 0o600, 5)
    hiccups.fails(1)
    rows.remove_others()
    assert other.exists()
    rows.remove_others()
    assert not other.exists()


@pytest.mark.parametrize("how", ["durable", "patient"])
def test_what_is_written_for_good_is_written_again(tmp_path: Path, hiccups: Hiccups, how: str) -> None:
    hiccups.fails(3)
    write_atomically(tmp_path / "file", b"1", **{how: True})  # type: ignore[arg-type]
    assert (tmp_path / "file").read_bytes() == b"1"
    hiccups.fails(1, after=1)
    with pytest.raises(StoreError, match="Input/output"):
        write_atomically(tmp_path / "file", b"2")


def test_what_is_known_of_a_run_is_read_again(tmp_path: Path, hiccups: Hiccups) -> None:
    rundir = RunDir(a_run(tmp_path / "run"))
    hiccups.fails(2)
    assert rundir.read_record() is not None
    hiccups.fails(2)
    assert last_status(rundir) is not None
    hiccups.fails(2)
    assert snapshot_age_s(rundir) < 60.0
    for after in range(3):  # the record says first whether a newer hpcsched has written there
        hiccups.fails(2, after=after)
        assert read_run(rundir).state and hiccups.left == 0


@pytest.mark.parametrize("given", [None, "hpcsched-run"])
def test_the_folder_of_a_run_is_waited_for(
    tmp_path: Path, hiccups: Hiccups, monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    a_run(tmp_path / "hpcsched-run")
    monkeypatch.chdir(tmp_path)
    hiccups.fails(3)
    found = run_folder(cast(Any, SimpleNamespace(obj=SimpleNamespace(values={}))), given)
    assert found == tmp_path / "hpcsched-run" and hiccups.left == 0


def test_a_pool_lives_on(capsys: pytest.CaptureFixture[str]) -> None:
    rounds = iter([OSError(errno.ESTALE, "Stale file handle"), SimpleNamespace(over=True, changed=False)])

    def once() -> object:
        if isinstance(outcome := next(rounds), OSError):
            raise outcome
        return outcome

    found, files_ = SimpleNamespace(period_s=0.0), SimpleNamespace(wanted=lambda: None)
    playing = cast(Any, SimpleNamespace(once=once))
    assert group._loop(playing, cast(Any, files_), cast(Any, found), until_done=True) == 0
    assert "Stale file handle" in capsys.readouterr().err


def test_a_held_state_is_found_and_kept(tmp_path: Path, hiccups: Hiccups) -> None:
    (tmp_path / files.held(1)).write_bytes(b"{}")
    kept = list[int]()
    workers = LocalWorkers()
    workers._folder, workers._attempts, workers.on_held = tmp_path, [1], kept.append
    hiccups.fails(2)
    workers._find_held()
    assert kept == [1] and workers.held == b"{}"
