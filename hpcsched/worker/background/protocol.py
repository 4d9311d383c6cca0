"""The line between a guest's own process and its host: JSON messages over a Unix socket. No torch.

Members of a pack and its host speak so too.

The guest's process says first who the guest is, and passes on the descriptors that it was given; later
`{"stop": why}` and `{"pace": share}`. The host answers `{"accepted": true}` or `{"refused": why}`, `{"begun":
true}` when the guest's training begins, and at the end `{"exit": code, "fault": whether the guest's code was
to blame}`, or `{"left": why}` when the host goes first.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any

from hpcsched.compat import dataclass

MOST_BYTES = 1 << 20
"""Of one message; an environment is the longest."""
CONNECTS_WITHIN_S = 1.0
"""How long to wait for a host with whom many want to speak at once."""
DESCRIPTORS = ("output", "errors", "progress")
"""What the guest's process passes on, in this order; the last one only if it has it."""


@dataclass(slots=True)
class GuestConnection:
    """One end. `closed`: the other end has gone."""

    socket: socket.socket
    closed: bool = False
    descriptors: list[int] = field(default_factory=list)
    """Those that came with the messages."""

    def say(self, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> bool:
        """Send a message; False if nobody is there any more."""
        try:
            socket.send_fds(self.socket, [json.dumps(dict(message)).encode()], list(descriptors))
        except OSError:
            self.closed = True
        return not self.closed

    def hear(self, within_s: float | None) -> dict[str, Any] | None:
        """The next message; None if none comes in time, or ever again (`closed`)."""
        self.socket.settimeout(within_s)
        try:
            data, descriptors, _, _ = socket.recv_fds(self.socket, MOST_BYTES, len(DESCRIPTORS))
        except (socket.timeout, BlockingIOError):  # no TimeoutError before Python 3.10
            return None
        except OSError:
            data, descriptors = b"", []
        self.descriptors += descriptors
        if not data:
            self.closed = True
            return None
        try:
            message = json.loads(data)
        except ValueError:
            message = None
        if not isinstance(message, dict):
            self.closed = True
            return None
        return message

    def hung_up(self) -> bool:
        """Whether the other end has gone, whatever is still to be heard of it."""
        poll = select.poll()
        try:
            poll.register(self.socket, 0)
        except ValueError:  # closed here
            return True
        return self.closed or bool(poll.poll(0))

    def close(self) -> None:
        """Let go of it, and of the descriptors that nobody has taken."""
        self.closed = True
        self.socket.close()
        while self.descriptors:
            with contextlib.suppress(OSError):
                os.close(self.descriptors.pop())


def connect(address: str) -> GuestConnection | None:
    """Reach a host; None if there is none at this address, or it is somebody else's."""
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MOST_BYTES)
        line.settimeout(CONNECTS_WITHIN_S)
        line.connect(address)
        line.settimeout(None)
    except OSError:
        line.close()
        return None
    if not is_ours(line):
        line.close()
        return None
    return GuestConnection(line)


def listen(address: str) -> socket.socket | None:
    """Be reached there; None if somebody has the address."""
    listener = None
    try:
        if (listener := take(address)) is not None:
            listener.listen(4)
    except OSError:
        if listener is not None:
            listener.close()
        return None
    return listener


def take(address: str) -> socket.socket | None:
    """Have the address, where nobody is reached before somebody listens; None if another has it.

    Raises OSError if it cannot be had for any other reason.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            return None
        raise
    return listener


def is_ours(line: socket.socket) -> bool:
    """Whether the other end belongs to this user: anybody on the host can take or call an abstract name."""
    return peer(line)[1] == os.getuid()


def peer(line: socket.socket) -> tuple[int, int]:
    """The process at the other end and its user; of a listener's, who was the last to make it listen."""
    size = struct.calcsize("3i")
    pid, uid, _ = struct.unpack("3i", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return int(pid), int(uid)
