"""How a job that saves by itself is suspended, and what that costs, in words."""

from __future__ import annotations

from hpcsched.core.jobs import Job


def how_suspended(job: Job, now: float, unsaved_s: float) -> str:
    """One line about a job that saves by itself, of which `unsaved_s` seconds of work are not saved at `now`;
    "" for one that does not, or does not run."""
    restart, saves = job.spec.restart, job.traits.saves
    if restart is None or not job.saves_by_itself or not job.state.active:
        return ""
    if restart.suspend_command:
        how = "by its suspend_command"
    elif not restart.signal:
        how = "only as it goes"
    elif not job.ready:
        how = f"{restart.signal} if it catches that, which is not known yet"
    else:
        how = restart.signal if saves.handles else f"only as it goes: it does not catch {restart.signal}"
        how += ", which it caught the last time without saving" * (saves.handles and saves.in_vain)
    speaks = f" ({restart.speaks}{': ' if restart.recognised else ''}{restart.recognised})" * bool(
        restart.speaks
    )
    return f"saves by itself{speaks}, {how}; {newest(job, now)}; a suspend now loses {_lost(unsaved_s)}"


def newest(job: Job, now: float) -> str:
    """The newest checkpoint of a job that saves by itself."""
    saved_at = job.traits.saves.at
    if job.saved_step is None:
        return "no checkpoint yet"
    step = f" of step {job.saved_step}" if job.reports else ""
    age = f", {said_time(max(0.0, now - saved_at))} ago" if saved_at is not None else ""
    return f"newest checkpoint{step}{age}" if step or age else "it has a checkpoint"


def what_is_lost(job: Job, now: float, unsaved_s: float) -> str:
    """What a suspend costs a running job as far as is known, for the one that asks for it; "" for nothing.

    It may have saved since in what is not known to be whole yet."""
    if not job.saves_by_itself or unsaved_s < 1:
        return ""
    return f"; {newest(job, now)}: {_lost(unsaved_s)} is lost, unless it saves before it ends"


def _lost(unsaved_s: float) -> str:
    return f"{said_time(unsaved_s)} of work" if unsaved_s >= 1 else "nothing"


def said_time(seconds: float) -> str:
    """A time to two digits or so: "45 s", "3 min", "2.5 h"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
