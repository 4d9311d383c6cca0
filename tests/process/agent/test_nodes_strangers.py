"""Others on the network talk to the head's port: they get nothing, are told of once, and disturb nothing."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from hpcsched.agent.node.connection import HeadConnection
from hpcsched.devices import Sample
from hpcsched.launch.base import LaunchPlan
from hpcsched.launch.remote import protocol
from hpcsched.launch.remote.channel import MessageChannel
from hpcsched.launch.remote.keys import Join, KeyPair, read_join
from hpcsched.launch.remote.launcher import RemoteLauncher
from hpcsched.testing.nodes import SimulatedNode, code_of, local_hosts, pump_until


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context = zmq.Context()
    context.linger = 0
    yield context
    context.destroy(linger=0)


def go_on(hosts: RemoteLauncher[Sample], folder: Path) -> None:
    """The run is as it was."""
    workers = hosts.launch(
        LaunchPlan(
            job_id=1,
            attempt=1,
            argv=("sh", "-c", "exit 0"),
            cwd=folder,
            folder=folder,
            output=folder / "out",
            devices=hosts.inventory(),
        )
    )
    assert code_of(hosts, workers) == 0
    workers.close()
    assert not hosts.lost()


def join_of(hosts: RemoteLauncher[Sample]) -> Join:
    return read_join(hosts._join)


def wait_said(hosts: RemoteLauncher[Sample], said: list[str]) -> None:
    pump_until(hosts, lambda: bool(said))


def raw_http(join: Join, context: zmq.Context[zmq.Socket[bytes]]) -> Callable[[], None]:
    host, port = join.endpoint.removeprefix("tcp://").split(":")
    stream = socket.create_connection((host, int(port)), timeout=5)
    stream.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + b"\0\xff" * 500)
    return stream.close


def half_a_greeting(join: Join, context: zmq.Context[zmq.Socket[bytes]]) -> Callable[[], None]:
    host, port = join.endpoint.removeprefix("tcp://").split(":")
    stream = socket.create_connection((host, int(port)), timeout=5)
    stream.sendall(b"\xff\0\0\0\0\0\0\0\1\x7f\3\1CURVE" + b"\0" * 47 + b"\4\x64" + b"\7WELCOME" * 20)
    return stream.close


def plain(join: Join, context: zmq.Context[zmq.Socket[bytes]]) -> Callable[[], None]:
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.ROUTING_ID, b"a/12345678")
    dealer.connect(join.endpoint)
    for _ in range(100):
        dealer.send(b"junk", zmq.NOBLOCK)
    return dealer.close


def curve(join: Join, context: zmq.Context[zmq.Socket[bytes]], *, server_key: str) -> Callable[[], None]:
    keys = KeyPair.new()
    other = msgspec.structs.replace(
        join, server_key=server_key, client_public=keys.public, client_secret=keys.secret
    )
    line = HeadConnection(other, "a")
    line.send(MessageChannel().unnumbered(protocol.Gone("a stranger says so")))
    return lambda: line.close(flush_ms=0)


def own_key(join: Join, context: zmq.Context[zmq.Socket[bytes]]) -> Callable[[], None]:
    """Knows even the head's public key."""
    return curve(join, context, server_key=join.server_key)


def wrong_server_key(join: Join, context: zmq.Context[zmq.Socket[bytes]]) -> Callable[[], None]:
    return curve(join, context, server_key=KeyPair.new().public)


@pytest.mark.parametrize("knock", [raw_http, half_a_greeting, plain, own_key, wrong_server_key])
def test_a_stranger_is_turned_away(
    tmp_path: Path,
    context: zmq.Context[zmq.Socket[bytes]],
    knock: Callable[[Join, zmq.Context[zmq.Socket[bytes]]], Callable[[], None]],
) -> None:
    said: list[str] = []
    with local_hosts(tmp_path, ("a",), say=said.append) as hosts:
        ends = [knock(join_of(hosts), context) for _ in range(3)]
        wait_said(hosts, said)
        go_on(hosts, tmp_path)
        assert len(said) == 1 and "no node agent of this run" in said[0] and "\n" not in said[0]
        for end in ends:
            end()


def test_many_idle_connections_disturb_nothing(tmp_path: Path) -> None:
    with local_hosts(tmp_path, ("a",)) as hosts:
        host, port = join_of(hosts).endpoint.removeprefix("tcp://").split(":")
        streams = [socket.create_connection((host, int(port)), timeout=5) for _ in range(100)]
        go_on(hosts, tmp_path)
        for stream in streams:
            stream.close()


def test_a_member_that_talks_nonsense(tmp_path: Path) -> None:
    """It has the keys, but another version's words."""
    said: list[str] = []
    with local_hosts(tmp_path, ("a",), say=said.append) as hosts:
        line = HeadConnection(join_of(hosts), "a")
        for _ in range(5):
            line.send(b"\xc1nonsense")
            line.send(MessageChannel().numbered(protocol.Exited(1, 0), time.monotonic()))
        wait_said(hosts, said)
        go_on(hosts, tmp_path)
        assert len(said) == 1 and "dropped a message from a stranger" in said[0]
        line.close()


def test_one_that_says_it_is_somebody_unknown(tmp_path: Path) -> None:
    said: list[str] = []
    with local_hosts(tmp_path, ("a",), say=said.append) as hosts:
        node = SimulatedNode(join_of(hosts), "n99")
        node.beat()
        wait_said(hosts, said)
        pump_until(hosts, lambda: bool(node.read()) or node.left)
        assert "says it is n99, which is no host of this run: sent away" in said[0]
        go_on(hosts, tmp_path)
        node.close()


def test_what_a_broken_connection_loses_is_sent_again(tmp_path: Path) -> None:
    """The node agent's connection is cut under a running attempt, while messages are on their way."""
    with local_hosts(tmp_path, ("a",)) as hosts:
        script = "trap 'exit 75' TSTP; touch up; while :; do sleep 30 & wait; done"
        plan = LaunchPlan(
            job_id=1,
            attempt=1,
            argv=("sh", "-c", script),
            cwd=tmp_path,
            folder=tmp_path,
            output=tmp_path / "out",
            devices=hosts.inventory()[:1],
        )
        workers = hosts.launch(plan)
        pump_until(hosts, (tmp_path / "up").exists)
        assert hosts._head_socket is not None
        send, hosts._head_socket.send = hosts._head_socket.send, lambda peer, data: None  # type: ignore[method-assign]
        workers.signal(signal.SIGTSTP)
        hosts._head_socket.send = send  # type: ignore[method-assign]
        assert code_of(hosts, workers) == 75
        workers.close()
