"""When nothing can live on a lost host any more: what is proof, and how long the rest takes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcsched.agent.node.guard import Guard
from hpcsched.batch.lsf import SIGNALS_ALL
from hpcsched.launch.remote import protocol
from hpcsched.launch.remote.host import FENCE_S, RemoteHost
from hpcsched.launch.remote.starter import NodeAgentCommand

LONG_S = 50.0


@pytest.fixture
def command(tmp_path: Path) -> Iterator[NodeAgentCommand]:
    command = NodeAgentCommand(("sh", "-c", "read x; exit 137"), ("a",), tmp_path / "log")
    yield command
    command.signal(signal.SIGKILL)
    ended(command)
    command.close()


def ended(command: NodeAgentCommand) -> None:
    deadline = time.monotonic() + 60
    while not command.look():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def lost(command: NodeAgentCommand | None) -> RemoteHost:
    return RemoteHost("a", command=command, why="lost", heard_at=time.monotonic(), lost_at=time.monotonic())


def left_s(host: RemoteHost, now: float) -> float:
    return host.fence(now, may_kill=False, silence_s=LONG_S)


def test_a_node_agent_that_died(command: NodeAgentCommand) -> None:
    host = lost(command)
    ended(command)  # standard input is empty: it ends by itself
    now = time.monotonic()
    assert left_s(host, now) == LONG_S  # nothing says that it was the agent that ended
    host.heard_at = now  # waiting for the end may have taken longer than CLOSED_S
    host.broke(now, trusted=True)
    assert left_s(host, now) == FENCE_S and not host.fenced
    assert left_s(host, now + FENCE_S) == 0 and host.fenced


def test_what_a_lost_host_makes_durable_counts_until_it_is_fenced() -> None:
    host = lost(None)
    host.told_keeping = frozenset({3})
    host.broke(host.lost_at, trusted=True)
    left_s(host, host.lost_at)
    assert host.keeping == {3}
    left_s(host, host.lost_at + LONG_S)
    assert not host.keeping


def test_a_node_agent_that_left_well(tmp_path: Path) -> None:
    """It had no worker left, and could not tell: the head was stopped."""
    command = NodeAgentCommand(("true",), ("a",), tmp_path / "log")
    host = lost(command)
    ended(command)
    command.close()
    assert command.ended_at is not None
    assert left_s(host, command.ended_at) == FENCE_S and left_s(host, command.ended_at + FENCE_S) == 0


def test_our_own_signal_is_no_proof(tmp_path: Path) -> None:
    command = NodeAgentCommand(("sleep", "60"), ("a",), tmp_path / "log")
    host = lost(command)
    command.signal(signal.SIGTERM)
    ended(command)
    command.close()
    now = time.monotonic()
    host.broke(now, trusted=True)
    assert left_s(host, now) == LONG_S and left_s(host, now + LONG_S) == 0 and host.fenced


def test_signals_to_a_whole_job_end_no_command_that_runs_a_node_agent(tmp_path: Path) -> None:
    command = NodeAgentCommand(("sleep", "60"), ("a",), tmp_path / "log", shielded=SIGNALS_ALL)
    process = command._process
    assert process is not None
    for number in SIGNALS_ALL:
        os.killpg(process.pid, number)
    time.sleep(0.1)
    assert not command.look()
    command.signal(signal.SIGTERM)  # ours still ends it
    ended(command)
    command.close()
    assert command.why == "`sleep` was ended by SIGKILL" and not command.by_itself


def test_a_warning_to_a_whole_job_ends_no_guard() -> None:
    guard = Guard("no run", "no mark")
    time.sleep(0.1)
    for number in (*SIGNALS_ALL, signal.SIGUSR1):
        os.kill(guard.pid, number)
    time.sleep(0.1)
    assert os.waitpid(guard.pid, os.WNOHANG) == (0, 0)
    guard.dismiss()


def test_an_ssh_that_has_lost_its_connection_is_no_proof(tmp_path: Path) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text("#!/bin/sh\nexit 255\n")
    ssh.chmod(0o700)
    command = NodeAgentCommand((str(ssh),), ("a",), tmp_path / "log")
    ended(command)
    command.close()
    assert not command.by_itself and command.why == "`ssh` ended with exit code 255"


@pytest.mark.parametrize(("quiet_s", "trusted"), [(5.0, True), (0.0, False)])
def test_silence_is_no_proof(command: NodeAgentCommand, quiet_s: float, trusted: bool) -> None:
    host = lost(command)
    ended(command)
    now = time.monotonic() + quiet_s
    host.broke(now, trusted=trusted)
    assert left_s(host, now) == LONG_S and not host.fenced


def test_the_last_word_is_proof() -> None:
    host = lost(None)
    host.gone = True
    left_s(host, host.lost_at)
    assert host.fenced


def test_nothing_is_over_while_it_is_connected() -> None:
    """Its node agent hangs, and would not notice that it is to leave."""
    host = lost(None)
    assert left_s(host, host.lost_at + 2 * LONG_S) == LONG_S and not host.fenced


def test_the_long_way_covers_all_that_a_node_agent_does() -> None:
    assert protocol.silence_s(30.0) > 6.0 + protocol.LOST_HEAD_S + 30.0 + protocol.KILL_AFTER_S
    assert protocol.silence_s(0.0) < 20
