"""A run begins, or goes on, through an error that may pass, whichever call meets it."""

from __future__ import annotations

import errno
import os
import signal
import stat
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, cast
from zlib import crc32

import pytest
from click.testing import CliRunner
from hiccups import Hiccups
from rundirs import a_run

from hpcsched import config, dialects, trust
from hpcsched.agent import start
from hpcsched.agent.allocation import requeue
from hpcsched.agent.allocation.requeue import RequeuePlan, requeue_or_chain
from hpcsched.agent.job_folder import is_aside
from hpcsched.agent.recovery import open_run
from hpcsched.agent.request import RunRequest
from hpcsched.agent.resources import Observer
from hpcsched.agent.run_lock import _last_sign, refuse_other_run
from hpcsched.batch import open_batch
from hpcsched.batch.base import BatchSystem, EndReason
from hpcsched.batch.lsf_text import slots_of
from hpcsched.batch.sge import Sge
from hpcsched.cli.common import needs_place
from hpcsched.cli.jobs.given_jobs import _settle_once, check_programs
from hpcsched.cli.main import cli
from hpcsched.cli.profile.lookup import layer_profile, parallel_programs, profile_finder, shared_uses
from hpcsched.cli.run.run import _checked
from hpcsched.contract import files
from hpcsched.contract.exits import WORK_LEFT
from hpcsched.core import events as ev
from hpcsched.core.model import JobSpec, Kind
from hpcsched.dialects.script import read as read_script
from hpcsched.errors import BatchError, ConfigError, StoreError
from hpcsched.jobfile import load
from hpcsched.launch.plans import claim_checkpoints
from hpcsched.launch.remote.keys import Join, join_file, read_join, write_join
from hpcsched.patience import kind_of, move
from hpcsched.policy import make_policy
from hpcsched.site_rules import Limit
from hpcsched.store import run_folders
from hpcsched.store.archive import Mark, read_part, write_part
from hpcsched.store.database import Database
from hpcsched.store.heads import claim_number, give_up_number
from hpcsched.store.journal import Journal
from hpcsched.store.profiles import load_profiles
from hpcsched.store.rundir import RunDir, RunDirError, RunLock
from hpcsched.store.trials import ProgramTrials
from hpcsched.testing.builders import a_job
from hpcsched.tuning.search import Search

ALWAYS = 10**9

PROFILES = """{"schema": 1, "profiles": [{"model": "m", "device": "d", "throughput": {"1": 1.0}}]}"""


@pytest.fixture
def hiccups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hiccups:
    return Hiccups(tmp_path, monkeypatch)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcsched.patience.PATIENCE_S", 0.0)


def begun(root: Path) -> RunDir:
    """A run of two jobs, whose agent is gone."""
    rundir = RunDir(root)
    rundir.make()
    journal = Journal(rundir.journal)
    journal.append([ev.JobsSubmitted(at=0.0, first_id=1, jobs=(a_job("a"), a_job("b")))])
    journal.close()
    return rundir


def whichever(hiccups: Hiccups, act: Callable[[], Any]) -> list[Any]:
    """What `act` gives as each of the calls that it makes fails once, for one reason or another."""
    found = []
    for number in (errno.ESTALE, errno.ETIMEDOUT):
        for calls in range(ALWAYS):
            hiccups.fails(1, number, after=calls)
            found.append(act())
            if hiccups.left:  # it has not made so many
                hiccups.left = 0
                break
    assert len(found) > 2
    return found


def test_a_run_that_has_begun_is_seen_and_taken_up(tmp_path: Path, hiccups: Hiccups) -> None:
    rundir = begun(tmp_path / "run")

    def takes_up() -> tuple[bool, int, int]:
        refuse_other_run(rundir, resume=True)
        rundir.make()
        lock = RunLock(rundir)
        rundir.sweep()
        machine, journal, _ = open_run(rundir, make_policy)
        journal.close()
        lock.release()
        return rundir.begun, len(machine.run.jobs), journal.seq

    assert set(whichever(hiccups, takes_up)) == {(True, 2, 1)}


def test_its_folder_is_the_one_that_is_meant(tmp_path: Path, hiccups: Hiccups) -> None:
    begun(tmp_path / "hpcsched-run")
    second = begun(tmp_path / "hpcsched-run-2")
    assert set(whichever(hiccups, lambda: run_folders.newest(tmp_path))) == {second.root}
    assert set(whichever(hiccups, lambda: run_folders.named(second.root, tmp_path))) == {""}


@pytest.mark.usefixtures("impatient")
def test_where_nobody_says_which_that_is_no_other_one_is_taken(tmp_path: Path, hiccups: Hiccups) -> None:
    begun(tmp_path / "hpcsched-run")
    second = begun(tmp_path / "hpcsched-run-2")
    hiccups.fails(ALWAYS)
    with pytest.raises(OSError):
        run_folders.newest(tmp_path)
    assert run_folders.named(second.root, tmp_path) == f" --dir {second.root}"  # right, whichever is meant
    with pytest.raises(StoreError, match="cannot read"):
        _ = second.begun
    with pytest.raises(StoreError, match="cannot write"):
        RunLock(second)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EIO])
@pytest.mark.usefixtures("impatient")
def test_a_lock_that_cannot_be_had_is_not_another_agents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    rundir = begun(tmp_path / "run")
    with pytest.raises(RunDirError, match="another agent"):
        first = RunLock(rundir)
        RunLock(rundir)
    first.release()

    def flock(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.raises(StoreError, match="cannot lock"):
        RunLock(rundir)


def test_settings_are_those_of_the_files(tmp_path: Path, hiccups: Hiccups) -> None:
    (tmp_path / "site.toml").write_text("grace = 7\n")
    user = tmp_path / "home" / ".config" / "hpcsched"
    user.mkdir(parents=True)
    (user / "config.toml").write_text("margin = 9\n")
    environ = {"HPCSCHED_SITE_CONFIG": str(tmp_path / "site.toml"), "HOME": str(tmp_path / "home")}

    def loads() -> tuple[Any, Any]:
        values = config.load(environ, here=tmp_path).values
        return values["grace"], values["margin"]

    assert set(whichever(hiccups, loads)) == {loads()}


def test_so_are_jobs_and_profiles(tmp_path: Path, hiccups: Hiccups) -> None:
    jobs, profiles = tmp_path / "jobs.toml", tmp_path / "profiles.json"
    jobs.write_text('schema = 1\n[[job]]\nname = "a"\ncommand = ["true"]\n')
    profiles.write_text(PROFILES)
    assert set(whichever(hiccups, lambda: len(load(jobs, workdir=tmp_path).jobs))) == {1}
    assert set(whichever(hiccups, lambda: len(load_profiles(profiles)))) == {1}


def test_a_script_is_recognised(tmp_path: Path, hiccups: Hiccups) -> None:
    script = tmp_path / "train.py"
    script.write_text("from transformers import Trainer\n")

    def reads() -> bool:
        dialects.script._read.cache_clear()
        return "Trainer" in read_script(script).imported

    assert set(whichever(hiccups, reads)) == {True}


@pytest.mark.usefixtures("impatient")
def test_one_that_cannot_be_read_now_is_not_taken_for_one_that_saves_nothing(
    tmp_path: Path, hiccups: Hiccups
) -> None:
    script = tmp_path / "train.py"
    script.write_text("from transformers import Trainer\n")
    hiccups.fails(ALWAYS)
    with pytest.raises(OSError):
        read_script(script)


@pytest.mark.usefixtures("impatient")
def test_without_an_answer_of_the_users_database_a_run_goes_on_without_it(
    tmp_path: Path, hiccups: Hiccups, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "profiles.db"
    with Database(path):
        pass
    hiccups.fails(ALWAYS, errno.ESTALE)
    assert profile_finder([], path)(["m"], "d") == ()
    assert (parallel_programs(path, ["m"]), shared_uses(path, "d")) == ((), ())
    assert layer_profile(path, "m", "d") is None
    assert capsys.readouterr().err.count("Stale file handle; going on without what is in it") == 4


class Batch:
    """A batch system that takes the next job at the last of so many tries."""

    says_none = False

    def __init__(self, *errors: Exception) -> None:
        self._errors = list(errors)

    def reason(self) -> EndReason:
        return EndReason.LIMIT

    def submit_next(self, script: Path | None) -> str:
        if self._errors:
            raise self._errors.pop(0)
        return "8"


class WarnsAtOnce:
    """A batch system that warns of the end before it says anything else."""

    def allocation(self) -> object:
        os.kill(os.getpid(), signal.SIGUSR2)
        raise BatchError("squeue: no answer")


def test_a_warning_before_the_first_answer_is_for_the_loop(tmp_path: Path) -> None:
    passed_by = list[int]()
    before = signal.signal(signal.SIGUSR2, lambda number, _: passed_by.append(number))
    try:
        with pytest.raises(BatchError, match="no answer"):
            start.run(
                RunRequest(dir=tmp_path / "run", devices="cpu:1"),
                batch=cast(BatchSystem, WarnsAtOnce()),
                find_profiles=lambda models, device: (),
                find_layers=lambda model, device: None,
                observe=lambda machine: pytest.fail("there is nothing to observe"),
            )
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert not passed_by


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ESTALE, "Stale file handle"),
        BatchError("sbatch cannot be started: Stale file handle"),
        BatchError("sbatch failed: error: Unable to open file next.sh: Input/output error"),
    ],
)
def test_a_chain_goes_on_through_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(requeue, "RETRY_EVERY_S", 0.0)
    rundir = RunDir(a_run(tmp_path / "run"))
    said = list[str]()
    batch = cast(BatchSystem, Batch(error, error))
    plan = RequeuePlan(how="chain", most=3, script=tmp_path / "next.sh")
    assert requeue_or_chain(batch, plan, rundir, said.append) == WORK_LEFT
    assert "batch job 8 goes on" in said[-1], said
    once = cast(BatchSystem, Batch(BatchError("invalid partition"), error))
    requeue_or_chain(once, plan, rundir, said.append)
    assert "go on by hand" in said[-1]


def test_a_number_that_could_not_be_claimed_keeps_nobody_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rundir = begun(tmp_path / "run")

    def full(descriptor: int, *_: object) -> None:
        os.close(descriptor)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdopen", full)
        with pytest.raises(StoreError, match="No space left"):
            claim_number(rundir)
    assert claim_number(rundir) == 1


@pytest.mark.usefixtures("impatient")
def test_commands_that_cannot_be_read_are_not_none(tmp_path: Path, hiccups: Hiccups) -> None:
    rundir = begun(tmp_path / "run")
    for number in range(2):
        (rundir.inbox / "new" / f"{number}").write_text('{"command": "retry"}')
    assert run_folders.waits(rundir)
    hiccups.fails(ALWAYS, after=1)  # they are there
    with pytest.raises(OSError):
        run_folders.waits(rundir)
    assert hiccups.left >= ALWAYS - 2, "each was waited for"


def test_what_leads_nowhere_is_nothing_and_what_is_not_for_us_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "file").touch()
    paths = [tmp_path / name for name in ("loop", "file", "file/below", "none")]
    assert list(map(kind_of, paths)) == [None, stat.S_IFREG, None, None]

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "stat", refused)
    with pytest.raises(PermissionError):
        kind_of(tmp_path / "file")


def test_what_has_moved_has_whatever_error_was_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, told = os.replace, [errno.EIO]

    def replaces(*paths: Path) -> None:
        own(*paths)
        if told:
            raise OSError(told.pop(), "")

    monkeypatch.setattr(os, "replace", replaces)
    (tmp_path / "a").write_text("1")
    move(tmp_path / "a", tmp_path / "b")
    assert not told and (tmp_path / "b").read_text() == "1"
    with pytest.raises(FileNotFoundError):
        move(tmp_path / "a", tmp_path / "b")


@pytest.mark.long
def test_nor_does_what_a_run_of_several_allocations_needs(tmp_path: Path, hiccups: Hiccups) -> None:
    rundir = begun(tmp_path / "run")
    names = ("run_id", "endpoint", "server_key", "client_public", "client_secret", "devices")
    join = Join(life="2", hosts=("n1",), grace_s=5.0, **dict.fromkeys(names, "x"))

    def takes_over() -> tuple[int, int, str]:
        number = claim_number(rundir)
        give_up_number(rundir, number)
        machine, journal, _ = open_run(rundir, make_policy, detach=True)
        journal.close()
        write_join(join_file(rundir.root, "2"), join)
        return number, len(machine.run.jobs), read_join(join_file(rundir.root, "2")).life

    assert set(whichever(hiccups, takes_over)) == {(1, 2, "2")}


def test_settings_that_were_accepted_are(tmp_path: Path, hiccups: Hiccups) -> None:
    path, environ = tmp_path / "hpcsched.toml", {"HOME": str(tmp_path)}
    path.write_text("margin = 9\n")
    trust.accept(path, b"margin = 9\n", environ)
    reads = partial(trust.read, path)
    assert set(whichever(hiccups, reads)) == {reads()} and reads()[0] == b"margin = 9\n"
    assert set(whichever(hiccups, partial(trust.accepted, path, b"margin = 9\n", environ))) == {True}


def test_nor_is_a_question_answered_wrongly_that_comes_before(tmp_path: Path, hiccups: Hiccups) -> None:
    rundir = begun(tmp_path / "run")
    rundir.status.touch()
    (rundir.job(1) / files.metric("1")).parent.mkdir(parents=True)
    (rundir.job(1) / files.metric("1")).touch()
    (rundir.job(1) / files.state_before(2)).touch()
    hosts, below, link = tmp_path / "hosts", tmp_path / "below", tmp_path / "link"
    hosts.write_text("n1 2 q\n")
    (below / "1").mkdir(parents=True, mode=0o777)
    (below / "1").chmod(0o777)
    link.symlink_to(below)
    records = rundir.journal.read_bytes()
    end = Mark(1, len(records), crc32(records))
    write_part(rundir.journal, end, records)
    search = cast(Search, SimpleNamespace(result="", brackets=lambda: ()))
    trials = ProgramTrials(search, rundir.root)

    def claims() -> str:
        with pytest.raises(ConfigError) as refused:
            claim_checkpoints(below, "1")
        return str(refused.value)

    asked: dict[str, Callable[[], Any]] = {
        "sign of life": partial(_last_sign, rundir),
        "begun anew": partial(is_aside, rundir.job(1), 2),
        "metrics": trials.any_read,
        "folder of a trial": partial(trials.make_folder, 1),
        "claim": claims,
        "hosts of LSF": partial(slots_of, {"LSB_DJOB_HOSTFILE": str(hosts)}),
        "hosts of SGE": Sge({"PE_HOSTFILE": str(hosts)})._slots,
        "place": partial(Limit(file="site.toml", below=(str(below),)).admits, str(link)),
        "other place": partial(Limit(file="site.toml", below=(str(link),)).admits, str(tmp_path)),
        "metrics file": partial(_checked, tmp_path / "x.prom"),
        "archive": partial(read_part, rundir.journal, Mark(), end),
        "figure": partial(needs_place, "--output", tmp_path / "x.svg"),
    }
    for what, ask in asked.items():
        first = repr(ask())
        assert set(map(repr, whichever(hiccups, ask))) == {first}, what


def test_a_program_is_there_where_its_folder_does_not_answer_for_a_while(
    tmp_path: Path, hiccups: Hiccups, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.sh").touch(mode=0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    for program in ("train.sh", "./train.sh"):
        job = JobSpec(name="z", kind=Kind.COMMAND, model="z", command=(program,), workdir=str(tmp_path))
        for calls in range(1, 9):
            _settle_once.cache_clear()
            hiccups.fails(calls, errno.ESTALE)
            assert check_programs([job]) == [] and hiccups.left == 0


class FarEnough(Exception):
    """All that is looked at has been done; tells of what comes next."""


def far_enough(*about: object) -> NoReturn:
    raise FarEnough(*about)


def test_the_command_itself_comes_that_far(
    tmp_path: Path, hiccups: Hiccups, monkeypatch: pytest.MonkeyPatch
) -> None:
    rundir = begun(tmp_path / "run")
    (rundir.inbox / "new" / "1").write_text('{"command": "retry"}')
    program, jobs = tmp_path / "train.sh", tmp_path / "jobs.toml"
    program.touch(mode=0o700)
    jobs.write_text('schema = 1\n[[job]]\nname = "c"\ncommand = ["true"]\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(start, "run", lambda order, **_: far_enough(order.resume, len(order.jobs)))

    def asks(*words: str) -> str:
        first = ["run", "--resume", "--dir", str(rundir.root), "--devices", "cpu:1", "--quiet"]
        return repr(CliRunner().invoke(cli, [*first, *words]).exception)

    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin")
    for words in ((), (str(jobs),), ("--", "./train.sh"), ("--", "train.sh"), ("train.sh",)):
        found = whichever(hiccups, partial(asks, *words))
        assert set(found) == {repr(FarEnough(True, int(bool(words))))}, words


class Silent:
    """An observer that keeps what it is told."""

    def __init__(self) -> None:
        self.told = list[str]()

    def message(self, text: str) -> None:
        self.told.append(text)


@pytest.mark.long
@pytest.mark.parametrize("again", [False, True])
def test_and_so_does_the_agent(
    tmp_path: Path, hiccups: Hiccups, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(start.Agent, "run", lambda self, events: far_enough([type(one) for one in events]))
    run, number = begun(tmp_path / "run"), count()
    job = JobSpec(name="z", kind=Kind.COMMAND, model="z", command=("true",), workdir="/tmp")

    def starts() -> tuple[str, int]:
        with hiccups.none():
            unknown = run.job(9)  # as after a repair
            if (copy := unknown.with_name("9.1.bak")).exists():
                copy.rename(unknown)
            unknown.mkdir(exist_ok=True)
            run.status.touch()
        root, jobs = (run.root, ()) if again else (tmp_path / f"run-{next(number)}", (job,))
        observer = Silent()
        with pytest.raises(FarEnough) as far:
            start.run(
                RunRequest(dir=root, devices="cpu:1", jobs=jobs, resume=again),
                batch=open_batch("none", environ={}, hosts=[], launcher="auto", pyslurm="off"),
                find_profiles=lambda models, device: (),
                find_layers=lambda model, device: None,
                observe=lambda machine: cast(Observer, observer),
            )
        return str(far.value), sum("knows no job 9" in line for line in observer.told)

    found = set(whichever(hiccups, starts))
    assert len(found) == 1 and next(iter(found))[1] == again, found
