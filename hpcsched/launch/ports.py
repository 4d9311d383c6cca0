"""Free ports of this host's loopback, for ranks that meet."""

from __future__ import annotations

import errno
import socket
import time
from collections import deque

PORT_REST_S = 30.0
"""Time until a port is given out again (chosen): its owner may not have bound it yet."""

PORTS_RESTING = 4096
"""The most ports that wait for that (chosen); the kernel's ephemeral range holds 28,000."""


class Ports:
    """Free loopback ports, none twice within PORT_REST_S."""

    def __init__(self) -> None:
        self._resting = deque[tuple[float, int]]()
        """When which port was given out, the oldest first."""
        self._given = set[int]()

    def take(self) -> int:
        """A free TCP port."""
        now = time.monotonic()
        while self._resting and (
            now - self._resting[0][0] >= PORT_REST_S or len(self._given) >= PORTS_RESTING
        ):
            self._given.remove(self._resting.popleft()[1])
        for _ in range(100):
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            if port not in self._given:
                self._given.add(port)
                self._resting.append((now, port))
                return int(port)
        raise OSError(errno.EAGAIN, "no free port on 127.0.0.1")
