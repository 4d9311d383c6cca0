"""Commands that run node agents: when they have ended, and how."""

from __future__ import annotations

import os
import select
import signal
from pathlib import Path

import pytest

from hpcsched.launch.remote.starter import NodeAgentCommand, end_all, last_log_line

DEADLINE_MS = 60_000


def wait(command: NodeAgentCommand) -> None:
    """Until the command has ended, by its descriptor: what it is asked after that is not asked in vain."""
    assert command.pidfd is not None
    poll = select.poll()
    poll.register(command.pidfd, select.POLLIN)
    assert poll.poll(DEADLINE_MS), "it has not ended"


def test_a_command_that_cannot_be_started_has_ended(tmp_path: Path) -> None:
    command = NodeAgentCommand((str(tmp_path / "ssh"), "n2"), ("n2",), tmp_path / "log")
    assert command.look() and command.ended_at is not None
    assert "No such file" in command.why and not command.by_itself
    assert end_all([command], grace_s=0.0)


@pytest.mark.parametrize(("code", "succeeded"), [(0, True), (3, False)])
def test_how_a_command_ended_is_known_as_soon_as_it_has(tmp_path: Path, code: int, succeeded: bool) -> None:
    command = NodeAgentCommand(("sh", "-c", f"echo last; exit {code}"), ("n2",), tmp_path / "log")
    wait(command)
    assert command.look() and command.look(), "and ever after"
    assert (command.by_itself, command.succeeded) == (True, succeeded)
    assert command.why == f"`sh` ended with exit code {code}"
    assert last_log_line(tmp_path / "log") == "last"
    command.close()


def test_a_command_that_runs_has_not_ended(tmp_path: Path) -> None:
    command = NodeAgentCommand(("sleep", "60"), ("n2",), tmp_path / "log")
    assert not command.look() and command.why == ""
    process = command._process
    assert process is not None
    os.killpg(process.pid, signal.SIGKILL)
    wait(command)
    assert command.look() and command.why == "`sleep` was ended by SIGKILL"
    command.close()
