"""Which processes get the signal that asks to save: those that catch it, not what is around them."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpcsched.launch import caught
from hpcsched.launch.caught import catchers, catches, send
from hpcsched.launch.orphans import Process
from hpcsched.launch.proc import stat
from hpcsched.launch.workers import LocalWorkers

PYTHON = f"{sys.executable} -S -E"
PATIENCE_S = 20.0

PROGRAM = """
import os, pathlib, signal, sys, time
name = sys.argv[1]
signal.signal(signal.SIGUSR1, lambda *_: (pathlib.Path(name + ".told").touch(), os._exit(0)))
if "loader" in sys.argv and os.fork() == 0:
    name = "loader"
pathlib.Path(name + ".tmp").write_text(str(os.getpid()))
os.rename(name + ".tmp", name)
time.sleep(60)
"""
"""Catches SIGUSR1; with "loader" it has forked a process that has inherited the handler."""

LAUNCHER = """
import signal, subprocess, sys
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(1))
ranks = [subprocess.Popen([*sys.argv[1:], f"rank{i}"], start_new_session=True) for i in range(2)]
for rank in ranks: rank.wait()
"""
"""Like torchrun: has handlers of its own, and its ranks are in sessions of theirs."""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    """Starts a command as the leader of a session, and waits until its programs of these names are there."""
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "torchrun").write_text(LAUNCHER)
    leaders: list[subprocess.Popen[bytes]] = []

    def begin(command: str, *names: str) -> Process:
        leader = subprocess.Popen(command, shell=True, cwd=tmp_path, start_new_session=True)
        leaders.append(leader)
        until(lambda: all((tmp_path / name).exists() for name in names))
        seen = stat(leader.pid)
        assert seen
        return leader.pid, seen.start_ticks

    yield begin
    for path in tmp_path.iterdir():
        if "." not in path.name and path.name != "torchrun":
            with_pid = int(path.read_text())
            if stat(with_pid):
                os.kill(with_pid, signal.SIGKILL)
    for leader in leaders:
        leader.kill()
        leader.wait()


def until(met: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not met():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def pids(folder: Path, *names: str) -> list[int]:
    return sorted(int((folder / name).read_text()) for name in names)


def test_the_program_itself_and_not_what_it_has_forked(start: Callable[..., Process], tmp_path: Path) -> None:
    leader = start(f"exec {PYTHON} program.py a loader", "a", "loader")
    assert [pid for pid, _ in catchers([leader], signal.SIGUSR1)] == pids(tmp_path, "a")
    assert catches(*pids(tmp_path, "loader"), signal.SIGUSR1), "it has inherited the handler"
    assert catchers([leader], signal.SIGTERM) == [], "no handler, so it would only be ended"


def test_what_a_shell_has_started(start: Callable[..., Process], tmp_path: Path) -> None:
    leader = start(f"{PYTHON} program.py a; echo", "a")
    found = catchers([leader], signal.SIGUSR1)
    assert [pid for pid, _ in found] == pids(tmp_path, "a")
    send(found, signal.SIGUSR1)
    until((tmp_path / "a.told").exists)


@pytest.mark.parametrize("trap", ["trap : USR1", "trap : EXIT", "trap : EXIT TERM USR1"])
def test_a_program_and_not_the_shell_around_it(
    start: Callable[..., Process], tmp_path: Path, trap: str
) -> None:
    """A shell runs its trap only when its program has ended."""
    leader = start(f"exec bash -c '{trap}; {PYTHON} program.py a; echo'", "a")
    assert catches(leader[0], signal.SIGUSR1)
    assert [pid for pid, _ in catchers([leader], signal.SIGUSR1)] == pids(tmp_path, "a")


@pytest.mark.parametrize(("trap", "told"), [("trap : USR1", True), ("trap : EXIT", False)])
def test_a_shell_with_a_trap_is_the_program_where_no_other_catches(
    start: Callable[..., Process], trap: str, told: bool
) -> None:
    """For `trap ... EXIT` bash catches all signals that end it, and dies without a word to its programs."""
    inner = trap if told else ":"  # what it has forked is no second program
    leader = start(f"exec bash -c '{trap}; ({inner}; echo $BASHPID > inner; sleep 60; echo); echo'", "inner")
    assert catches(leader[0], signal.SIGUSR1)
    assert catchers([leader], signal.SIGUSR1) == ([leader] if told else [])


def test_the_ranks_and_not_their_launcher(start: Callable[..., Process], tmp_path: Path) -> None:
    """torchrun would end its ranks by SIGTERM, and kill them half a minute later."""
    leader = start(f"exec {PYTHON} torchrun {PYTHON} program.py", "rank0", "rank1")
    assert catches(leader[0], signal.SIGUSR1)
    assert [pid for pid, _ in catchers([leader], signal.SIGUSR1)] == pids(tmp_path, "rank0", "rank1")


def test_what_has_lost_its_parent_but_is_in_the_group(start: Callable[..., Process], tmp_path: Path) -> None:
    leader = start(f"({PYTHON} program.py a &); sleep 60", "a")
    assert [pid for pid, _ in catchers([leader], signal.SIGUSR1)] == pids(tmp_path, "a")


def test_a_pid_that_is_used_again_gets_nothing(start: Callable[..., Process], tmp_path: Path) -> None:
    leader = start(f"exec {PYTHON} program.py a", "a")
    other = leader[0], leader[1] - 1
    assert catchers([other], signal.SIGUSR1) == []
    send([other], signal.SIGUSR1)
    assert not (tmp_path / "a.told").exists()
    assert stat(leader[0])


def test_who_cannot_be_seen_is_told_as_last_seen(
    start: Callable[..., Process], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader = start(f"exec {PYTHON} program.py a", "a")
    workers = LocalWorkers()
    workers.add(leader[0])
    assert workers.catches(signal.SIGUSR1)

    def refuse(*_: object) -> list[Process]:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(caught, "catchers", refuse)
    assert workers.catches(signal.SIGUSR1)
    workers.ask_to_save(signal.SIGUSR1)
    until((tmp_path / "a.told").exists)
    workers.close()


def test_what_is_not_ours_to_see_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with hidepid=1, where the entry of /proc is listed and cannot be read."""

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError

    monkeypatch.setattr("builtins.open", refuse)
    assert stat(os.getpid()) is None and not catches(os.getpid(), signal.SIGUSR1)


def test_what_cannot_be_read_is_not_taken_for_no_handler(
    start: Callable[..., Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    leader = start(f"exec {PYTHON} program.py a", "a")
    with monkeypatch.context() as patched, pytest.raises(OSError, match="does not say"):
        patched.setattr(caught, "_STATUS_BYTES", 64)  # as with very many groups before that line
        catchers([leader], signal.SIGUSR1)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            catches(leader[0], signal.SIGUSR1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
