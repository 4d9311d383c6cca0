"""The lock of a run directory: one agent at a time, and no other run in it."""

from __future__ import annotations

import socket
import time

from hpcsched.errors import ConfigError
from hpcsched.patience import patiently
from hpcsched.store.run_folders import waits
from hpcsched.store.rundir import (
    SNAPSHOT_PERIOD_S,
    STALE_AFTER_S,
    RunDir,
    RunDirError,
    RunLock,
    agent_works,
    last_status,
    occupied,
    snapshot_age_s,
)

CLOCKS_DIFFER_S = 600.0
"""By how much the clocks of hosts and file servers may differ (chosen)."""

COMMANDS_HOLD_S = 5.0
"""Longest time that a command without an agent may hold the lock (chosen): a run that begins waits for it."""


def refuse_other_run(rundir: RunDir, *, resume: bool) -> None:
    """Raise ConfigError for a directory with a run, unless `resume`; RunDirError where its agent lives.

    Raises NewerRun for one of a newer version.
    """
    rundir.refuse_newer()
    if rundir.begun and not resume and agent_works(rundir):
        raise RunDirError(occupied(rundir))
    if rundir.begun and not resume:
        raise ConfigError(
            where=str(rundir.root),
            got="holds a run already" + (", and jobs wait there" if waits(rundir) else ""),
            accepted="--resume to go on with it, or another --dir",
        )


def take_run_lock(rundir: RunDir, *, resume: bool, follows: bool = False) -> RunLock | None:
    """The run's lock. With `resume` it waits until the earlier agent's last sign of life is old enough.

    An agent that `follows` by its number goes without (None), where one that hangs or has died on another
    host still has the lock.
    """
    begun = time.monotonic()
    deadline = begun + (STALE_AFTER_S + 5.0 if resume else 0.0)
    before, refused = _last_sign(rundir), False
    while True:
        try:
            lock = RunLock(rundir)
        except RunDirError:
            refused = True
            # The earlier agent's host may be gone without a word, as when its allocation was killed.
            elsewhere = (record := rundir.read_record()) and record.host != socket.gethostname()
            if follows and elsewhere and not agent_works(rundir):
                return None
            by_a_command = time.monotonic() < begun + COMMANDS_HOLD_S and not agent_works(rundir)
            if not (elsewhere or by_a_command):
                raise
            if elsewhere and time.monotonic() > deadline:
                if _last_sign(rundir) != before or not resume:
                    raise
                # Nothing has moved for so long: its sign of life only looks fresh, as clocks differ.
                return RunLock(rundir, signs_of_life=False)
        else:
            if resume and not (follows or refused):
                _see_that_nothing_moves(rundir, lock)
            return lock
        time.sleep(0.5)


def _see_that_nothing_moves(rundir: RunDir, lock: RunLock) -> None:
    """Raise RunDirError where an agent on another host works, whose lock does not reach us.

    Its sign of life may look old, as clocks differ.
    """
    record, word = rundir.read_record(), last_status(rundir)
    elsewhere = record is not None and record.host != socket.gethostname() and not record.left
    works = word is not None and word.state in ("RUNNING", "DRAINING")
    if not (elsewhere and works and snapshot_age_s(rundir) < CLOCKS_DIFFER_S):
        return
    before, until = _last_sign(rundir), time.monotonic() + SNAPSHOT_PERIOD_S + 1.0
    while time.monotonic() < until:
        time.sleep(0.5)
        if _last_sign(rundir) != before:
            lock.release()
            raise RunDirError(occupied(rundir))


def _last_sign(rundir: RunDir) -> int:
    try:
        return patiently(rundir.status.stat).st_mtime_ns
    except OSError:
        return 0
