"""An agent that stays when nothing can run, for what may still be submitted (`run --stay`)."""

from __future__ import annotations

import time
from collections.abc import Callable
from math import inf

from hpcsched.agent.admission import Admission
from hpcsched.agent.clock import monotonic
from hpcsched.core.machine import Machine
from hpcsched.store.snapshot import SnapshotWriter
from hpcsched.store.status import Idle, iso

STUCK_LINES = 10
"""Jobs of which it is said why they can never start (chosen)."""


class Staying:
    """The time that an agent stays with nothing to do.

    Args:
        most_s: seconds; inf: until it is drained, or its allocation ends. None: it leaves at once.
        for_hosts_s: the least time for jobs that wait for hosts that may join; None: none may.
        snapshot: says since when it is idle.
    """

    def __init__(
        self,
        most_s: float | None,
        snapshot: SnapshotWriter,
        *,
        tell: Callable[[str], None],
        for_hosts_s: float | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._for_hosts_s = for_hosts_s
        self._most_s, self._snapshot, self._tell, self._clock = most_s, snapshot, tell, clock
        self._since: float | None = None

    def busy(self) -> None:
        """Note that there is something that can run."""
        if self._since is not None:
            self._since = None
            self._snapshot.idle = None

    def stays(self, *, stuck: bool = False) -> bool:
        """Whether the agent stays although nothing can run; `stuck`: jobs wait."""
        most_s = self._most_s
        if for_hosts := stuck and self._for_hosts_s is not None:
            most_s = max(most_s or 0.0, self._for_hosts_s or 0.0)
        if most_s is None:
            return False
        now = self._clock()
        if self._since is None:
            self._since = now
            wall, ends = time.time(), most_s < inf
            until = iso(wall + most_s) if ends else None
            self._snapshot.idle = Idle(since=iso(wall) or "", until=until)
            limit = f"for {most_s:g} s at most" if ends else "until `hpcsched drain`"
            what = "hosts that join" if for_hosts else "what `hpcsched submit` brings"
            self._tell(f"nothing is left that can run: staying {limit}, for {what}")
        if now - self._since < most_s:
            return True
        self._tell(f"nothing has come that can run for {most_s:g} s: leaving")
        return False

    @property
    def idle(self) -> bool:
        """Whether it stays with nothing to do."""
        return self._since is not None


def why_stuck(machine: Machine, admission: Admission, then: str) -> list[str]:
    """Lines that say why no job that is left can run, and what follows."""
    late = bool(machine.waiting.late)
    what = (
        "in the time that is left"
        if late
        else f"on the {machine.ledger.noun}s, cores and memory that are left"
    )
    lines = [] if late else admission.cannot_start()
    more = [f"and {len(lines) - STUCK_LINES} more jobs"] if len(lines) > STUCK_LINES else []
    return [f"no job that is left can run {what}: {then}", *lines[:STUCK_LINES], *more]
