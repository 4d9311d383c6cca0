"""One end of a channel between the head agent and a node agent.

Messages that must not be lost or come twice are numbered, kept until the other end has acknowledged them, and
sent again when it does not: ZeroMQ reconnects by itself, but loses the messages that were on their way.
"""

from __future__ import annotations

from collections import deque

import msgspec

from hpcsched.launch.remote.protocol import HeadMessage, NodeMessage, ToHead, ToNode

RESEND_S = 2.5
"""Time without an acknowledgement after which messages are sent again (chosen); one comes every second."""

_encode = msgspec.msgpack.Encoder().encode


class MessageChannel:
    """One end of a channel: numbered messages arrive once and in order as long as the other end lives.

    The number of kept messages is bounded only by the time until the other end counts as lost, a few seconds.
    """

    def __init__(self) -> None:
        self._sent = 0
        self._kept: deque[tuple[int, NodeMessage | HeadMessage]] = deque()
        self._sent_at = 0.0
        self._heard = 0
        self._told = 0

    def numbered(self, message: NodeMessage | HeadMessage, now: float) -> bytes:
        """The bytes to send for a message that must arrive; it is kept until it is acknowledged."""
        self._sent += 1
        if not self._kept:
            self._sent_at = now
        self._kept.append((self._sent, message))
        return self._wrap(self._sent, message)

    def unnumbered(self, message: NodeMessage | HeadMessage) -> bytes:
        """The bytes to send for a message that may be lost."""
        return self._wrap(0, message)

    def _wrap(self, seq: int, message: NodeMessage | HeadMessage) -> bytes:
        self._told = self._heard
        return _encode((seq, self._heard, message))

    def take(self, envelope: ToHead | ToNode, now: float) -> bool:
        """Whether to act on an arrived message: not on one that came before, nor on one after a gap."""
        acknowledged = False
        while self._kept and self._kept[0][0] <= envelope.ack:
            self._kept.popleft()
            acknowledged = True
        if acknowledged:
            self._sent_at = now
        if envelope.seq == 0:
            return True
        if envelope.seq != self._heard + 1:
            self._told = -1  # the other end seems not to know what has arrived
            return False
        self._heard = envelope.seq
        return True

    @property
    def unacknowledged(self) -> list[NodeMessage | HeadMessage]:
        """The numbered messages that the other end has not acknowledged, in order."""
        return [message for _, message in self._kept]

    @property
    def owes_ack(self) -> bool:
        """Whether the other end waits for an acknowledgement."""
        return self._told != self._heard

    def resends(self, now: float) -> list[bytes]:
        """The bytes of all messages to send once more, if it is time for that."""
        if not self._kept or now - self._sent_at < RESEND_S:
            return []
        self._sent_at = now
        return [self._wrap(seq, message) for seq, message in self._kept]
