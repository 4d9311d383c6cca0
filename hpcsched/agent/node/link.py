"""A node agent's link to the head; when that is gone, to the one that leads the run after it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from hpcsched.agent.node.connection import HeadConnection
from hpcsched.errors import BadInput
from hpcsched.launch.remote import protocol
from hpcsched.launch.remote.channel import MessageChannel
from hpcsched.launch.remote.keys import Join, successor

HEAD_ANSWERS_WITHIN_S = 60.0
"""Time after the start in which the head has to answer (chosen)."""

LOOK_S, SELDOM_S = 0.5, 3.0
"""How often another head is looked for, without a connection and with one (chosen): of a head that hangs the
connection stays."""


class HeadLink:
    """The messages from and to the head of `join`, and of the heads that follow it.

    Args:
        run_dir: where their join files are.
        name: of this host in the run.
        hello: makes the Hello to the head with this number.
        say: takes a line for the log.
    """

    def __init__(
        self,
        join: Join,
        run_dir: Path,
        name: str,
        connection: HeadConnection,
        *,
        hello: Callable[[int], protocol.Hello],
        say: Callable[[str], None],
    ) -> None:
        self.join = join
        """The keys of the head that is followed."""
        self._run_dir, self._name, self._hello, self._say = run_dir, name, hello, say
        self._connection, self._channel = connection, MessageChannel()
        self._began = time.monotonic()
        self._look_due = 0.0
        self._orphaned: float | None = None
        """When the last head was lost, while the one that follows has not answered yet."""
        self._waiting: list[protocol.NodeMessage] = []
        """What the next head is to be told once it has answered."""
        self.over: dict[int, protocol.Running] = {}
        """The parts that have ended, whose end the head may not know yet."""
        self.welcome = False
        """Whether the head has answered."""

    @property
    def filenos(self) -> tuple[int, ...]:
        """Readable when there may be something to receive."""
        return self._connection.filenos

    @property
    def pending(self) -> bool:
        """Whether messages have arrived that the descriptors may not show."""
        return self._connection.pending

    def receive(self) -> Iterator[protocol.HeadMessage]:
        """What the head says."""
        for data in self._connection.receive():
            try:
                envelope = protocol.read_to_node(data)
            except BadInput as error:
                self._say(f"dropped a message from the head: {error}")
                continue
            if self._channel.take(envelope, time.monotonic()):
                if isinstance(envelope.body, protocol.Welcome) and not self.welcome:
                    self._welcomed()
                yield envelope.body

    def _welcomed(self) -> None:
        self.welcome, self._orphaned = True, None
        waiting, self._waiting = self._waiting, []
        for message in waiting:
            self.send(message)

    def send(self, message: protocol.NodeMessage) -> None:
        """Tell the head; what must arrive waits until it has answered."""
        if isinstance(message, protocol.Progressed):
            if self.welcome:
                self._connection.send(self._channel.unnumbered(message))
        elif self.welcome:
            self._connection.send(self._channel.numbered(message, time.monotonic()))
        else:
            self._waiting.append(message)

    def beat(self, now: float, beat: protocol.Beat) -> None:
        """Show that this host lives; to be called every `protocol.BEAT_S`."""
        if not self.welcome:
            self._connection.send(self._channel.unnumbered(self._hello(self.join.epoch)))
            return
        self._connection.send(self._channel.unnumbered(beat))
        for data in self._channel.resends(now):
            self._connection.send(data)
        if not self._channel.unacknowledged:
            self.over.clear()

    def lost(self, now: float) -> str:
        """Why there is no head any more, nor will be; "" while there may be one."""
        join = self.join
        if not self.welcome and self._orphaned is None:
            if now - self._began <= HEAD_ANSWERS_WITHIN_S:
                return ""
            return f"no answer from the head at {join.endpoint} within {HEAD_ANSWERS_WITHIN_S:g} s"
        gone_s = self._connection.gone_s(now) if self._orphaned is None else now - self._orphaned
        return "the head is gone" if gone_s > protocol.LOST_HEAD_S + join.holds_s else ""

    def follows(self, now: float) -> bool:
        """Whether another head leads the run from now on: `filenos` are others then.

        What the last one has not acknowledged is told to it.
        """
        gone_s = self._connection.gone_s(now)
        if not self.join.holds_s or now < self._look_due:
            return False
        self._look_due = now + (LOOK_S if gone_s or not self.welcome else SELDOM_S)
        found = successor(self._run_dir, self.join)
        if found is None:
            return False
        self._say(f"{self._name}: follows the head at {found.endpoint}, number {found.epoch}")
        if self._orphaned is None:
            self._orphaned = now - gone_s
        untold = self._channel.unacknowledged
        self._waiting = [*(one for one in untold if isinstance(one, protocol.NodeMessage)), *self._waiting]
        self._connection.close(flush_ms=0)
        self.join, self.welcome = found, False
        self._connection, self._channel = HeadConnection(found, self._name), MessageChannel()
        return True

    def close(self) -> None:
        """Close the connection; what was sent gets a moment to leave."""
        self._connection.close()
