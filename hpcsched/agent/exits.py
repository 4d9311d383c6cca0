"""What the end of an attempt's processes says: what it has saved, and why it failed."""

from __future__ import annotations

import time

from hpcsched.agent import disk_space
from hpcsched.agent.attempts import WatchedAttempt
from hpcsched.agent.job_folder import last_line
from hpcsched.contract.exits import SUSPENDED
from hpcsched.contract.state import State
from hpcsched.core.events import LaunchFailed, WorkersExited
from hpcsched.errors import LaunchError
from hpcsched.patience import TRANSIENT
from hpcsched.printing import printable

SURELY_BEFORE_S = 1.0
"""Time between an end and an order to end after which neither is the other's cause (chosen): a batch system
tells all of us within less."""


def exited(
    attempt: WatchedAttempt,
    code: int,
    *,
    at: float,
    known_step: int,
    blamed: str = "",
    steps: int | None = None,
) -> WorkersExited:
    """The event of an attempt that has ended with `code`.

    `at`: now, on the run's clock. `known_step`: the newest step that the job is known to have saved.
    `blamed`: why it failed, where something else than its output says so. `steps`: its whole work. The
    seconds that a suspend took are those until now: who is to go on with its GPUs has waited for their memory
    too.
    """
    last = attempt.meter.last if attempt.meter else None
    unasked = (attempt.asked_to_leave or time.monotonic()) - attempt.over_at >= SURELY_BEFORE_S
    record = attempt.last_record
    old = record is None or _outdated(record, attempt.attempt, known_step)
    saved, held = None if record is None or old else record.step, False
    if attempt.self_saving and not attempt.ready:
        unasked = unasked or attempt.self_saving.done(code)
        done = steps is not None and last is not None and last.step >= steps
        code = attempt.self_saving.code(code, unasked=unasked, done=done)
        saved = attempt.self_saving.saved_step(last.step if last else known_step, record=saved)
        blamed = blamed or attempt.self_saving.detail
    if code == SUSPENDED and (step := attempt.held_step()) is not None:
        held, saved = step > (saved or 0), max(step, saved or 0)
    seen = [] if last is None else [last.step]
    if saved is not None and code in (0, SUSPENDED):
        seen.append(saved)
    asked = attempt.asked_to_save if attempt.measured and code == SUSPENDED else None
    failed = code not in (0, SUSPENDED)
    unreadable = attempt.unreadable if not failed and not held else ""
    return WorkersExited(
        at=at,
        job_id=attempt.job_id,
        attempt=attempt.attempt,
        code=code,
        step=max(seen, default=None),
        again=attempt.meter.again if attempt.meter else 0,
        saved_step=saved,
        detail=(blamed or printable(last_line(attempt.output))) if failed else "",
        metrics=record.metrics if record and code == 0 else {},
        unreadable=unreadable,
        no_room=""
        if code == 0 or (code == SUSPENDED and not unreadable)
        else disk_space.first_full_directory(attempt.written_folders),
        took_s=None if asked is None else time.monotonic() - asked,
        oom=attempt.oom[0],
        over_limit=attempt.oom[1],
        lasted_s=attempt.over_at - attempt.began if attempt.measured and not attempt.taken_over else None,
        held=held,
        unasked=unasked,
        not_taken=attempt.self_saving.not_taken if attempt.self_saving and not attempt.ready else "",
    )


def not_launched(error: Exception) -> LaunchError:
    """What has kept an attempt from being launched, whatever it was."""
    if isinstance(error, LaunchError):
        return error
    said = str(error) if isinstance(error, OSError | ValueError) else repr(error)
    return LaunchError(said, transient=isinstance(error, OSError) and error.errno in TRANSIENT)


def launch_failed(error: LaunchError, at: float, *, job_id: int, attempt: int, no_room: str) -> LaunchFailed:
    """The event of an attempt that could not be launched. `no_room`: the directory on a full disk, or ""."""
    return LaunchFailed(
        at=at,
        job_id=job_id,
        attempt=attempt,
        error=printable(str(error)),
        no_room=no_room,
        transient=error.transient,
        host_fault=error.host_fault,
    )


def _outdated(record: State, attempt: int, known_step: int) -> bool:
    """Whether a record is an earlier attempt's and behind what is known to be saved, as what that attempt
    left in memory may not be on disk yet. One of this attempt may go back, one of none may be."""
    return record.attempt is not None and record.attempt < attempt and record.step < known_step
