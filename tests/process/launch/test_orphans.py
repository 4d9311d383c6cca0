"""Finding and ending workers whose agent died."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcsched.launch import proc
from hpcsched.launch.orphans import Process, end_processes, find_orphans
from hpcsched.launch.proc import Stat, stat

# An agent that starts a worker in its own session, says its pid, and dies.
AGENT = """
import os, subprocess, sys
null = subprocess.DEVNULL
p = subprocess.Popen(sys.argv[1:], start_new_session=True, stdin=null, stdout=null)
print(p.pid, flush=True)
os._exit(0)
"""


@pytest.fixture
def run_id() -> Iterator[str]:
    name = f"test-{uuid.uuid4()}"
    yield name
    end_processes(find_orphans(name, []), 0)


def orphan(run_id: str, *argv: str) -> Process:
    """Start `argv` and let its parent die; (pid, start time)."""
    env = {**os.environ, "HPCSCHED_RUN_ID": run_id}
    done = subprocess.run(
        [sys.executable, "-S", "-c", AGENT, *argv], env=env, stdout=subprocess.PIPE, check=True, timeout=60
    )
    seen = stat(int(done.stdout))
    assert seen is not None
    return int(done.stdout), seen.start_ticks


def alive(process: Process) -> bool:
    seen = stat(process[0])
    return seen is not None and seen.start_ticks == process[1] and seen.state != "Z"


def test_found_by_environment_and_by_record(run_id: str) -> None:
    worker = orphan(run_id, "sleep", "30")
    pid, ticks = worker
    assert find_orphans(run_id, []) == [worker]
    assert find_orphans("another", [worker]) == [worker]
    assert find_orphans("another", [(pid, ticks + 1)]) == []  # the pid was used again
    assert end_processes([worker], 5) == []
    assert not alive(worker)
    assert find_orphans(run_id, [worker]) == []


@pytest.mark.parametrize("times", [0, 3])
def test_a_process_in_the_middle_of_an_exec_is_looked_at_again(
    times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, sees = list[str](), proc._read

    def blank_at_first(pid: int, name: str) -> bytes:
        seen.append(name)
        return b"" if len(seen) <= 2 * times else sees(pid, name)

    monkeypatch.setattr(proc, "_read", blank_at_first)
    assert proc.environment(os.getpid()) == sees(os.getpid(), "environ").strip(b"\0").split(b"\0")
    assert seen == ["environ", "cmdline"] * times + ["environ"]


@pytest.mark.parametrize(("program", "looks"), [(False, 1), (True, 50)])
def test_a_process_that_shows_nothing_is_not_waited_for_long(
    program: bool, looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = list[str]()

    def blank(pid: int, name: str) -> bytes:
        seen.append(name)
        return b""

    monkeypatch.setattr(proc, "_read", blank)
    monkeypatch.setattr(proc, "_has_program", lambda pid: program)  # a kernel thread has none
    assert proc.environment(os.getpid()) == []
    assert seen.count("environ") == looks


def test_ourselves_and_our_ancestors_are_spared(run_id: str) -> None:
    code = (
        "import os\nfrom hpcsched.launch.orphans import find_orphans\nfrom hpcsched.launch.proc import stat\n"
        "me, up = os.getpid(), os.getppid()\n"
        "known = [(p, stat(p).start_ticks) for p in (me, up)]\n"
        f"assert find_orphans({run_id!r}, known) == []"
    )
    env = {**os.environ, "HPCSCHED_RUN_ID": run_id}
    subprocess.run(
        ["sh", "-c", '"$0" -c "$1"; exit $?', sys.executable, code], env=env, check=True, timeout=20
    )


def test_children_go_with_the_leader(run_id: str, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    orphan(
        run_id,
        "sh",
        "-c",
        f"env -u HPCSCHED_RUN_ID sleep 30 & echo $! > {ready}.tmp; mv {ready}.tmp {ready}; wait",
    )
    deadline = time.monotonic() + 10
    while not ready.exists():
        assert time.monotonic() < deadline
        time.sleep(0.002)
    child = int(ready.read_text())
    assert end_processes(find_orphans(run_id, []), 5) == []
    while (seen := stat(child)) is not None and seen.state != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_a_deaf_one_is_killed_and_a_stopped_one_woken(run_id: str, tmp_path: Path) -> None:
    ready = tmp_path / "deaf"
    deaf = orphan(run_id, "sh", "-c", f"trap '' TERM; touch {ready}; while :; do sleep 30; done")
    stopped = orphan(run_id, "sh", "-c", f"trap ': >{tmp_path}/said; exit' TERM; kill -STOP $$; sleep 0")
    deadline = time.monotonic() + 10
    while not (ready.exists() and getattr(stat(stopped[0]), "state", "") == "T"):
        assert time.monotonic() < deadline
        time.sleep(0.002)
    assert end_processes([deaf, stopped], 2.0) == []
    assert not alive(deaf) and not alive(stopped)
    assert (tmp_path / "said").exists()


def test_a_stranger_with_an_old_pid_is_not_touched(run_id: str) -> None:
    pid, ticks = worker = orphan(run_id, "sleep", "30")
    assert end_processes([(pid, ticks - 1)], 0) == []
    assert alive(worker)


def test_what_cannot_be_ended_is_named(run_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = orphan(run_id, "sleep", "30")
    with monkeypatch.context() as patch:
        patch.setattr(os, "killpg", lambda pid, sig: None)
        patch.setattr("hpcsched.launch.orphans.KILLED_WITHIN_S", 0.01)
        assert end_processes([worker], 0.01) == [worker]
    assert end_processes([worker], 5) == []


def test_a_name_with_parentheses_is_read(tmp_path: Path) -> None:
    odd = tmp_path / "a) S 1 (b"
    odd.symlink_to("/bin/sleep")
    child = subprocess.Popen([odd, "30"])
    try:
        seen = stat(child.pid)
        assert isinstance(seen, Stat) and seen.parent == os.getpid() and seen.group == os.getpgrp()
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait(10)
    assert stat(child.pid) is None
