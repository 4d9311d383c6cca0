"""The check that the ranks of a command have met: copies of a program without ranks never do."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from hpcsched.agent.clock import monotonic

NOT_MET_AFTER_S, CHECK_EVERY_S = 60.0, 5.0
"""Time after the launch at which ranks that have not met are reported, and time between checks (chosen)."""

_LISTENS = "0A"
"""The state of a listening socket in /proc/net/tcp."""


def listens(port: int) -> bool:
    """Whether a process on this host listens on a TCP port, by /proc/net/tcp."""
    wanted = f":{port:04X}"
    for name in ("tcp", "tcp6"):
        try:
            rows = Path("/proc/net", name).read_text().splitlines()[1:]
        except OSError:
            continue
        if any(row[1].endswith(wanted) and row[3] == _LISTENS for row in map(str.split, rows)):
            return True
    return False


@dataclass(slots=True)
class RendezvousCheck:
    """The ranks of one attempt on this host, which meet where rank 0 listens: at MASTER_PORT."""

    port: int
    ranks: int
    began: float = field(default_factory=monotonic)
    reported: bool = False
    """Whether it was reported that they have not met."""
    _look_at: float = 0.0
    _over: bool = False

    def news(self, *, ready: bool) -> bool | None:
        """False when it is time to report that they have not met, True when they have since; None: no news.

        `ready`: the program has made its ready file, so it needs no rendezvous.
        """
        now = time.monotonic()
        if self._over or now < max(self._look_at, self.began + CHECK_EVERY_S):
            return None
        self._look_at = now + CHECK_EVERY_S
        if ready or listens(self.port):
            self._over = True
            return True if self.reported else None
        if self.reported or now < self.began + NOT_MET_AFTER_S:
            return None
        self.reported = True
        return False
