"""Whether the processes of a command have met: copies of a program that knows nothing of ranks never do."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

APART_AFTER_S, LOOK_EVERY_S = 60.0, 5.0
"""So long after the launch it is said that they have not met, and so often it is looked whether they have."""

_LISTENS = "0A"
"""The state of a listening socket in /proc/net/tcp."""


def listens(port: int) -> bool:
    """Whether anybody on this host listens at a TCP port, by the kernel's tables."""
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
class Meeting:
    """The ranks of one attempt on this host, which meet where their first one listens: at MASTER_PORT."""

    port: int
    ranks: int
    began: float = field(default_factory=time.monotonic)
    apart: bool = False
    """It was said that they have not met."""
    _look_at: float = 0.0
    _over: bool = False

    def news(self, *, ready: bool) -> bool | None:
        """False when it is time to say that they have not met, True when they have since; None: nothing new.

        `ready`: their program has said that it is, so it knows what it is doing.
        """
        now = time.monotonic()
        if self._over or now < max(self._look_at, self.began + LOOK_EVERY_S):
            return None
        self._look_at = now + LOOK_EVERY_S
        if ready or listens(self.port):
            self._over = True
            return True if self.apart else None
        if self.apart or now < self.began + APART_AFTER_S:
            return None
        self.apart = True
        return False
