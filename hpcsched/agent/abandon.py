"""The end of all attempts without a journal: what is left when it cannot be written any more."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable

from hpcsched.agent.attempts import FAILED_GROUP_GRACE_S, WatchedAttempt
from hpcsched.contract import orders
from hpcsched.core.machine import Machine
from hpcsched.errors import LaunchError


def time_to_save_s(machine: Machine) -> float:
    """Seconds of the run's clock in which any job should have saved."""
    longest = max((costs.longest_suspend_s for costs in machine.estimates.costs.values()), default=0.0)
    return max(machine.run.grace_s, 3 * longest)


def abandon(
    attempts: dict[int, WatchedAttempt],
    grace_s: float,
    between: Callable[[], None],
) -> list[tuple[int, int | None]]:
    """Have all workers save and leave; job ids and exit codes (None: unknown).

    Workers that have not left after `grace_s` are killed. `between` is called repeatedly meanwhile.
    `attempts`, by job, is empty afterwards but for those that cannot be killed.
    """
    codes, deadline, killed = list[tuple[int, int | None]](), time.monotonic() + grace_s, False
    for attempt in attempts.values():
        with contextlib.suppress(Exception):  # whatever is wrong with one, the others are asked
            attempt.workers.tell(orders.Suspend(quick=False))
            attempt.give_up_resizing(signal.SIGTERM)
            attempt.ask_to_save(grace_s)
    while attempts:
        for attempt in list(attempts.values()):
            if attempt.self_saving:
                attempt.self_saving.end_asked()
            try:
                code = attempt.reap()
            except LaunchError:
                code = 1
            if code is not None:
                codes.append((attempt.job_id, code))
                attempt.close()
                del attempts[attempt.job_id]
        if time.monotonic() > deadline and not killed:
            killed = True
            for attempt in attempts.values():
                attempt.send(signal.SIGKILL)
        elif time.monotonic() > deadline + FAILED_GROUP_GRACE_S:
            return [*codes, *((job_id, None) for job_id in attempts)]
        between()
        time.sleep(0.02)
    return codes
