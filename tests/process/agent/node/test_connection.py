"""A node agent's connection is gone for as long as nobody who is the head has answered."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from hpcsched.agent.node import connection
from hpcsched.agent.node.connection import HeadConnection
from hpcsched.launch.remote.keys import Join, KeyPair
from hpcsched.launch.remote.socket import HeadSocket


def join_to(endpoint: str, server: KeyPair, client: KeyPair) -> Join:
    return Join(
        life="l",
        run_id="r",
        endpoint=endpoint,
        server_key=server.public,
        client_public=client.public,
        client_secret=client.secret,
        hosts=("a",),
        devices="replay:1",
        grace_s=5.0,
    )


@contextlib.contextmanager
def somebody(close: bool) -> Iterator[tuple[int, list[socket.socket]]]:
    """Accepts on a port, and closes at once or says nothing, as the kernel does for a frozen process."""
    held: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    held.append(server.accept()[0])
                    if close:
                        held[-1].close()

        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname()[1], held
        server.shutdown(socket.SHUT_RDWR)
    thread.join()
    for stream in held:
        stream.close()


@pytest.mark.parametrize("close", [True, False])
def test_attempts_that_come_to_nothing_do_not_count(close: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HANDSHAKE_MS", 200)
    with somebody(close) as (port, held):
        line = HeadConnection(join_to(f"tcp://127.0.0.1:{port}", KeyPair.new(), KeyPair.new()), "a")
        began = time.monotonic()
        while len(held) < 3:
            assert time.monotonic() < began + 60
            assert not list(line.receive())
            time.sleep(0.01)
        now = time.monotonic()
        assert line.gone_s(now) >= now - began
        line.close(0)
        line.close()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_head_comes_and_goes() -> None:
    server, client = KeyPair.new(), KeyPair.new()
    head_socket = HeadSocket("127.0.0.1", server, client.public, lambda text: None)
    line = HeadConnection(join_to(head_socket.endpoint, server, client), "a")

    def up() -> bool:
        assert not list(line.receive())
        list(head_socket.receive())
        return not line.gone_s(time.monotonic())

    until(up)
    head_socket.close()
    until(lambda: not up_of(line))
    began = time.monotonic()
    time.sleep(1.0)  # it tries again meanwhile
    assert not up_of(line)
    now = time.monotonic()
    assert line.gone_s(now) >= now - began
    line.close(0)


def up_of(line: HeadConnection) -> bool:
    list(line.receive())
    return not line.gone_s(time.monotonic())


def test_the_door_tells_whose_connection_broke() -> None:
    server, client = KeyPair.new(), KeyPair.new()
    head_socket = HeadSocket("127.0.0.1", server, client.public, lambda text: None)
    lines = [HeadConnection(join_to(head_socket.endpoint, server, client), name) for name in "ab"]
    peers: set[bytes] = set()

    def two() -> bool:
        peers.update(peer for peer, _ in head_socket.receive())
        return len(peers) == 2

    for line in lines:
        line.send(b"x")
    until(two)
    first, second = sorted(peers)
    assert head_socket.connected(first) and head_socket.connected(second) and not head_socket.broken()
    lines[0].close()

    def broken() -> bool:
        list(head_socket.receive())
        return not head_socket.connected(first)

    until(broken)
    assert head_socket.broken() == [first] and not head_socket.broken() and head_socket.connected(second)
    lines[1].close()
    head_socket.close()
