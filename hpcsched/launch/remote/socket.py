"""The head's socket: it admits only node agents of this run, and never blocks."""

from __future__ import annotations

import select
from collections.abc import Callable, Iterator

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from hpcsched.errors import LaunchError
from hpcsched.launch.remote.keys import KeyPair
from hpcsched.launch.remote.protocol import (
    HANDSHAKE_MS,
    HEARTBEAT_MS,
    HEARTBEAT_TIMEOUT_MS,
    MAX_MESSAGE_BYTES,
)

_FAILED = (
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL,
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL,
    zmq.Event.HANDSHAKE_FAILED_AUTH,
)
_OTHERS = (zmq.Event.ACCEPTED, zmq.Event.HANDSHAKE_SUCCEEDED, zmq.Event.DISCONNECTED)


def arrived(socket: zmq.Socket[bytes]) -> bool:
    """Whether there is a message to receive: ZeroMQ's descriptors show changes only."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


class HeadSocket:
    """A ROUTER socket with CURVE on an ephemeral port of `address`, that admits one client key.

    Args:
        address: an IP address of this host.
        say: called once, with a line for people, when a connection was refused.

    Raises LaunchError when it cannot listen there.
    """

    def __init__(self, address: str, keys: KeyPair, admitted: str, say: Callable[[str], None]) -> None:
        self._say, self._said = say, False
        self._admitted = z85.decode(admitted)
        self._context = zmq.Context(io_threads=1)
        self._epoll = select.epoll()
        # ZeroMQ asks a handler at this address about every client key (ZAP); it must be there first.
        self._zap = self._context.socket(zmq.REP)
        self._zap.linger = 0
        self._zap.bind("inproc://zeromq.zap.01")
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._monitor = self._socket.get_monitor_socket(sum({*_FAILED, *_OTHERS}))
        self._welcomed = 0
        self._waiting: dict[int, int] = {}
        """By descriptor of a connection: the number of admitted connections when it came."""
        self._peers: dict[int, bytes] = {}
        """By descriptor of a connection: the peer of its last message."""
        self._descriptors: dict[bytes, int] = {}
        self._broken: list[bytes] = []
        self._configure(keys, ":" in address)
        where = f"[{address}]" if ":" in address else address
        try:
            self._socket.bind(f"tcp://{where}:*")
        except zmq.ZMQError as error:
            self.close()
            raise LaunchError(
                f"cannot listen on {address} for node agents: {error}", transient=False
            ) from None
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        for socket in (self._socket, self._zap, self._monitor):
            self._epoll.register(socket.fileno(), select.EPOLLIN)

    def _configure(self, keys: KeyPair, ipv6: bool) -> None:
        socket = self._socket
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = keys.public.encode(), keys.secret.encode()
        socket.setsockopt(zmq.ZAP_DOMAIN, b"hpcsched")
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a node agent that comes back takes its old place
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # what cannot be sent is sent again: see MessageChannel
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.IPV6, int(ipv6))
        socket.setsockopt(zmq.BACKLOG, 1024)  # all hosts come at once

    def fileno(self) -> int:
        """Readable when there may be something to receive."""
        return self._epoll.fileno()

    def watch(self, descriptor: int) -> None:
        """Make `fileno` readable too when this descriptor is."""
        self._epoll.register(descriptor, select.EPOLLIN)

    def unwatch(self, descriptor: int) -> None:
        """Undo `watch`."""
        self._epoll.unregister(descriptor)

    def wait(self, timeout_s: float) -> None:
        """Wait until there may be something to receive, or the time is over."""
        self._epoll.poll(timeout_s)

    def receive(self) -> Iterator[tuple[bytes, bytes]]:
        """(peer, data) of all messages that have arrived; admits connections that wait."""
        while arrived(self._zap):
            self._admit()
        while arrived(self._monitor):
            self._happened()
        while arrived(self._socket):
            frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            if len(frames) == 2:
                peer, data = (frame.bytes for frame in frames)
                self._spoke(peer, int(frames[1].get(zmq.SRCFD)))
                yield peer, data

    def _spoke(self, peer: bytes, descriptor: int) -> None:
        if descriptor in self._waiting:  # else it is closed already, and this was on its way
            self._peers[descriptor] = peer
            self._descriptors[peer] = descriptor

    def connected(self, peer: bytes) -> bool:
        """Whether the connection of a peer's last message is still there."""
        return peer in self._descriptors and self._peers.get(self._descriptors[peer]) == peer

    def broken(self) -> list[bytes]:
        """The peers whose connection has broken since the last call, and that have no other."""
        broken, self._broken = self._broken, []
        return broken

    def _happened(self) -> None:
        """Handle one event of a connection."""
        message = recv_monitor_message(self._monitor, zmq.NOBLOCK)
        assert isinstance(message, dict)
        event, value = message["event"], message["value"]
        if event in _FAILED:
            self._refused()
        elif event == zmq.Event.ACCEPTED:
            self._waiting[value] = self._welcomed
        elif event == zmq.Event.HANDSHAKE_SUCCEEDED:
            self._welcomed += 1
        elif event == zmq.Event.DISCONNECTED:
            if self._waiting.pop(value, None) == self._welcomed:
                self._refused()  # who says nothing that ZeroMQ understands just goes, with no failure told
            peer = self._peers.pop(value, None)
            if peer is not None and self._descriptors.get(peer) == value:
                del self._descriptors[peer]
                self._broken.append(peer)

    def _admit(self) -> None:
        """Answer one question of ZeroMQ's authentication protocol (ZAP 1.0)."""
        frames = self._zap.recv_multipart(zmq.NOBLOCK)
        _, number, _, address, _, mechanism, *credentials = (*frames, *[b""] * (7 - len(frames)))
        good = mechanism == b"CURVE" and credentials == [self._admitted]
        status = [b"200", b"OK"] if good else [b"400", b"not a key of this run"]
        self._zap.send_multipart([b"1.0", number, *status, b"", b""], zmq.NOBLOCK)
        if not good:
            self._refused(f" from {address.decode(errors='replace')}")

    def _refused(self, whence: str = "") -> None:
        if not self._said:
            self._said = True
            self._say(
                f"somebody{whence} who is no node agent of this run tried to connect to {self.endpoint} "
                "and was turned away (said once)"
            )

    def send(self, peer: bytes, data: bytes) -> None:
        """Send a message, or drop it if the peer is away or does not read."""
        try:
            self._socket.send_multipart([peer, data], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise

    def close(self) -> None:
        """Close the socket; messages still to be sent get 200 ms. May be called twice."""
        if self._socket.closed:
            return
        self._epoll.close()
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=200)
        self._zap.close(linger=0)
        self._context.term()
