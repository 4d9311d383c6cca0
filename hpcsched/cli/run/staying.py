"""--stay, --idle-timeout and --detach: an agent that waits for jobs, and one in the background."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import time
from collections.abc import Callable
from math import inf
from typing import Any, TypeVar, cast

import click

from hpcsched.cli.common import find_run, goes_on, option, say, seconds
from hpcsched.contract import files
from hpcsched.decoding import read_tail
from hpcsched.store.run_folders import named
from hpcsched.store.rundir import RunDir, RunDirError, agent_works, occupied

F = TypeVar("F", bound=Callable[..., Any])

OPTIONS = ("stay", "idle_timeout", "detach")
LOG = "agent.log"
"""In the run directory: what an agent in the background prints."""

BEGINS_WITHIN_S = 120.0
"""Longest wait for an agent in the background to begin (chosen): hosts may have to join."""

LOG_BYTES = 2**14

_STAY = "When nothing is left to run, stay for jobs that `submit` brings, until drained."
_IDLE = "With --stay: leave after so long with nothing to run, such as 30m or 2h."
_DETACH = f"Run in the background, printing to {LOG} in the run directory."


def staying_options(command: F) -> F:
    """Adds the three options; the command is given `stay_s` (see `RunRequest`), and is called unless it is to
    run in the background.
    """

    @functools.wraps(command)
    def with_staying(ctx: click.Context, /, **options: Any) -> Any:
        stay, idle_timeout, detach = (options.pop(key) for key in OPTIONS)
        if idle_timeout is not None and not stay:
            raise click.UsageError("--idle-timeout goes with --stay")
        if detach:
            return _detached(find_run(ctx, options["dir_"], begins=not goes_on(options)))
        stay_s = (inf if idle_timeout is None else idle_timeout) if stay else None
        return command(ctx, stay_s=stay_s, **options)

    with_options: Any = click.option("--detach", is_flag=True, help=_DETACH)(with_staying)
    with_options = option("--idle-timeout", metavar="T", type=seconds, help=_IDLE)(with_options)
    return cast(F, option("--stay", is_flag=True, help=_STAY)(with_options))


def _detached(rundir: RunDir) -> int:
    """Start this command again in the background; returns when its agent has begun, or it has ended."""
    if agent_works(rundir):
        raise RunDirError(occupied(rundir))
    new = not rundir.root.exists()
    rundir.make()
    log = rundir.root / LOG
    with log.open("ab") as output:
        before = output.tell()
        agent = subprocess.Popen(  # -P: not with the user's own queue.py or types.py in place of Python's
            [sys.executable, "-P", "-m", "hpcsched", "--dir", str(rundir.root), *in_foreground(sys.argv[1:])],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    deadline = time.monotonic() + BEGINS_WITHIN_S
    while time.monotonic() < deadline:
        code = agent.poll()
        if code is not None:
            say(_since(log, before).rstrip("\n"), lines=True, err=True)
            if new and not rundir.begun:
                tidy(rundir)
            return code if code >= 0 else 128 - code
        record = rundir.read_record()
        if record and record.pid == agent.pid and agent_works(rundir):
            break
        time.sleep(0.1)
    where = named(rundir.root)
    shown = os.path.relpath(log)
    say(
        f"hpcsched: the agent runs in the background (pid {agent.pid}), and prints to {shown}; "
        f"`hpcsched top{where}` shows it, `hpcsched drain{where}` ends it",
        err=True,
    )
    return 0


def in_foreground(words: list[str]) -> list[str]:
    """The words of a command line without --detach; what stands behind `--` is the job's."""
    own = words.index("--") if "--" in words else len(words)
    return [word for at, word in enumerate(words) if at >= own or word != "--detach"]


def tidy(rundir: RunDir) -> None:
    """Bad input leaves nothing behind: remove what is empty but for the log, not what others put there."""
    inbox = [rundir.inbox / name for name in ("tmp", "new", "ack")]
    try:
        for folder in (*inbox, rundir.inbox, rundir.root / files.JOBS):
            folder.rmdir()
        for file in (rundir.root / LOG, rundir.root / "agent.lock"):
            file.unlink(missing_ok=True)
        rundir.root.rmdir()
    except OSError:
        rundir.make()  # somebody has come meanwhile


def _since(log: Any, before: int) -> str:
    """What was printed after the first `before` bytes of the log, or its end."""
    with log.open("rb") as file:
        new = file.seek(0, os.SEEK_END) - before
    return read_tail(log, min(new, LOG_BYTES))
