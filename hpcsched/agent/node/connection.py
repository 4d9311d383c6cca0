"""A node agent's connection to the head: made again and again by ZeroMQ, and watched for being gone."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Iterator

import zmq
from zmq.utils.monitor import recv_monitor_message

from hpcsched.launch.remote.keys import Join, head_stands_still
from hpcsched.launch.remote.protocol import (
    HANDSHAKE_MS,
    HEARTBEAT_MS,
    HEARTBEAT_TIMEOUT_MS,
    MAX_MESSAGE_BYTES,
)
from hpcsched.launch.remote.socket import arrived


class HeadConnection:
    """A DEALER socket with CURVE to the head of `join`."""

    def __init__(self, join: Join, name: str) -> None:
        self._context, self._join = zmq.Context(io_threads=1), join
        self._socket = socket = self._context.socket(zmq.DEALER)
        socket.curve_serverkey = join.server_key.encode()
        socket.curve_publickey = join.client_public.encode()
        socket.curve_secretkey = join.client_secret.encode()
        # The same after a reconnection, and nobody else's even if two agents were given one name.
        socket.setsockopt(zmq.ROUTING_ID, f"{name[:200]}/{uuid.uuid4().hex[:8]}".encode())
        socket.setsockopt(zmq.RECONNECT_IVL, 100)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        socket.setsockopt(zmq.CONNECT_TIMEOUT, 3000)
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.IPV6, int("[" in join.endpoint))
        self._monitor = socket.get_monitor_socket(zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED)
        self._gone_at: float | None = time.monotonic()
        socket.connect(join.endpoint)
        self.filenos = (int(socket.fileno()), int(self._monitor.fileno()))

    @property
    def pending(self) -> bool:
        """Whether messages have arrived that the descriptors may not show: they only show changes."""
        return arrived(self._socket) or arrived(self._monitor)

    def receive(self) -> Iterator[bytes]:
        """The messages that have arrived."""
        while arrived(self._monitor):
            event = recv_monitor_message(self._monitor, zmq.NOBLOCK)
            assert isinstance(event, dict)
            if event["event"] == zmq.Event.HANDSHAKE_SUCCEEDED:
                self._gone_at = None
            elif self._gone_at is None:  # and not anew with every attempt that fails
                self._gone_at = time.monotonic()
        while arrived(self._socket):
            yield self._socket.recv(zmq.NOBLOCK)

    def gone_s(self, now: float) -> float:
        """Seconds since the connection was lost; 0 while there is one.

        Time in which the head stands still, on this host, does not count: it can give nobody up meanwhile.
        """
        if self._gone_at is None:
            return 0.0
        if head_stands_still(self._join):
            self._gone_at = now
        return now - self._gone_at

    def send(self, data: bytes) -> None:
        """Send a message, or drop it when too many wait (`channel.MessageChannel` sends it again)."""
        with contextlib.suppress(zmq.Again):
            self._socket.send(data, zmq.NOBLOCK)

    def close(self, flush_ms: int = 1000) -> None:
        """Close the connection; sent messages get `flush_ms` to leave. May be called twice."""
        if self._socket.closed:
            return
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=flush_ms)
        self._context.term()
