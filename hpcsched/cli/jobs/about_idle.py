"""What `status` and `top` say of an agent that stays with nothing to do (`run --stay`)."""

from __future__ import annotations

from collections.abc import Callable

from hpcsched.store.status import RunStatus, seconds_until


def in_a_line(run: RunStatus, clock: Callable[[float], str]) -> str | None:
    """Since when the agent has had nothing to do, and when it leaves; None if it has. `clock` makes text of
    seconds."""
    if run.idle is None or run.stale or run.state != "RUNNING":
        return None
    since, left = seconds_until(run.idle.since), seconds_until(run.idle.until)
    for_s = "" if since is None else f" for {clock(max(0.0, -since))}"
    leaves = "" if left is None else f", and leaves in {clock(max(0.0, left))}"
    return f"nothing to run{for_s}: the agent stays for what `hpcsched submit` brings{leaves}"
