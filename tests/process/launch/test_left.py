"""Processes that were killed with a rank, and have not ended yet."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcsched.launch.local import LocalLauncher
from hpcsched.launch.proc import group_exists, living, stat
from hpcsched.launch.workers import LocalWorkers
from hpcsched.testing.conformance_launch import DEADLINE_S, plan, reaped


@pytest.fixture
def leader() -> Iterator[subprocess.Popen[bytes]]:
    """Leads a process group, in a session of its own."""
    process = subprocess.Popen(["sleep", "600"], start_new_session=True)
    yield process
    process.kill()
    process.wait()


def test_a_zombie_is_a_process_of_its_group_but_does_not_live(leader: subprocess.Popen[bytes]) -> None:
    seen = stat(leader.pid)
    assert seen
    known = [(leader.pid, seen.start_ticks)]
    assert (living({leader.pid}, []), living((), known)) == (1, 1)
    assert living((), [(leader.pid, seen.start_ticks + 1)]) == 0, "another one by now"
    leader.kill()
    os.waitid(os.P_PID, leader.pid, os.WEXITED | os.WNOWAIT)
    assert group_exists(leader.pid)
    assert (living({leader.pid}, []), living((), known)) == (0, 0)
    leader.wait()
    assert not group_exists(leader.pid)


def test_what_a_rank_leaves_in_its_group_is_waited_for(tmp_path: Path) -> None:
    """It takes time to die; here the kernel is quick, so one is looked at before it is killed."""
    launcher = LocalLauncher()
    workers = launcher.launch(plan(tmp_path, ["sh", "-c", "sleep 600 & echo $! > child; wait"], ranks=1))
    child = tmp_path / "child"
    deadline = time.monotonic() + DEADLINE_S
    while not (child.exists() and child.read_text().endswith("\n")) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert workers.left() == 0, "no rank has ended"
    workers._running.clear()  # as if it had
    assert workers.left() == 2
    workers._running[workers.processes[0][0]] = None
    workers.signal(signal.SIGKILL)
    assert reaped(workers) == 128 + signal.SIGKILL
    while workers.left() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert workers.left() == 0
    workers.close()
    launcher.close()


def test_what_was_killed_after_a_failure_is_waited_for_too(leader: subprocess.Popen[bytes]) -> None:
    seen, workers = stat(leader.pid), LocalWorkers()
    assert seen
    workers.kill_left.append(lambda: [(leader.pid, seen.start_ticks)])
    workers._ended.append(1)
    assert workers.reap() == 1
    assert workers.left() == 1
    leader.kill()
    leader.wait()
    assert workers.left() == 0
