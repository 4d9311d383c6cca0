"""What head and node agents have said, said again: by who has listened, and by who has keys of the run."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from hpcsched.agent.node.connection import HeadConnection
from hpcsched.devices import Sample
from hpcsched.launch.remote import protocol
from hpcsched.launch.remote.channel import MessageChannel
from hpcsched.launch.remote.keys import Join, KeyPair, join_file, read_join, successor, write_join
from hpcsched.launch.remote.launcher import RemoteLauncher
from hpcsched.launch.remote.socket import HeadSocket
from hpcsched.testing.nodes import SimulatedNode, local_hosts, pump_until

PATIENCE_S = 60.0


class Recorder:
    """Carries connections to an endpoint, and keeps what each side has said in the first one."""

    def __init__(self, endpoint: str) -> None:
        host, port = endpoint.removeprefix("tcp://").split(":")
        self._to, self._server = (host, int(port)), socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._server.getsockname()[1]}"
        self.to_head, self.to_node = bytearray(), bytearray()
        self._threads = [threading.Thread(target=self._serve)]
        self._threads[0].start()
        self._streams: list[socket.socket] = []

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            one, other = self._server.accept()[0], socket.create_connection(self._to)
            self._streams += [one, other]
            for a, b, heard in ((one, other, self.to_head), (other, one, self.to_node)):
                self._threads.append(threading.Thread(target=self._carry, args=(a, b, heard)))
                self._threads[-1].start()

    @staticmethod
    def _carry(one: socket.socket, other: socket.socket, heard: bytearray) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(65536):
                heard += data
                other.sendall(data)

    def close(self) -> None:
        for stream in (self._server, *self._streams):
            with contextlib.suppress(OSError):
                stream.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for stream in (self._server, *self._streams):
            stream.close()


def until(met: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not met():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def join_to(endpoint: str, server: KeyPair, client: KeyPair, **more: object) -> Join:
    keys = {"server_key": server.public, "client_public": client.public, "client_secret": client.secret}
    rest = {"life": "l", "run_id": "r", "hosts": ("a",), "devices": "replay:1", "grace_s": 5.0}
    return Join(endpoint=endpoint, **{**keys, **rest, **more})  # type: ignore[arg-type]


@pytest.fixture
def recorded() -> Iterator[tuple[HeadSocket, list[str], Recorder, Join]]:
    """A head, what it has said to people, and a session with it as it went over the wire."""
    server, client, said = KeyPair.new(), KeyPair.new(), list[str]()
    head = HeadSocket("127.0.0.1", server, client.public, said.append)
    wire = Recorder(head.endpoint)
    node = HeadConnection(join_to(wire.endpoint, server, client), "a")
    node.send(MessageChannel().unnumbered(protocol.Gone("once")))
    peers = list[bytes]()
    until(lambda: peers.extend(peer for peer, _ in head.receive()) or peers)
    head.send(peers[0], MessageChannel().unnumbered(protocol.Leave(0.0)))
    until(lambda: list(node.receive()))
    node.close(0)
    wire.close()
    yield head, said, wire, join_to(head.endpoint, server, client)
    head.close()


def test_a_recorded_session_that_is_played_again_orders_nothing(
    recorded: tuple[HeadSocket, list[str], Recorder, Join],
) -> None:
    head, said, wire, join = recorded
    assert (
        len(wire.to_head) > 400
        and b"once" not in wire.to_head
        and join.client_secret.encode() not in wire.to_head
    )
    host, port = head.endpoint.removeprefix("tcp://").split(":")
    heard = list[object]()
    for _ in range(2):
        with socket.create_connection((host, int(port)), timeout=5) as again:
            again.sendall(bytes(wire.to_head))
            until(lambda: heard.extend(head.receive()) or said or heard)
    assert not heard and len(said) == 1 and "no node agent of this run" in said[0]
    node = HeadConnection(join, "a")  # who has the keys is heard
    node.send(b"x")
    until(lambda: heard.extend(data for _, data in head.receive()) or heard)
    assert heard == [b"x"]
    node.close(0)


def test_a_heads_words_that_are_played_again_order_nothing(
    recorded: tuple[HeadSocket, list[str], Recorder, Join],
) -> None:
    """Somebody answers on a port in the head's place."""
    _, _, wire, join = recorded
    assert len(wire.to_node) > 300
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        node = HeadConnection(msgspec.structs.replace(join, endpoint=endpoint), "a")
        server.settimeout(PATIENCE_S)
        with server.accept()[0] as stream, contextlib.suppress(ConnectionError):
            stream.settimeout(PATIENCE_S)
            stream.sendall(bytes(wire.to_node))
            while stream.recv(65536):  # until it has had enough
                pass
        assert not list(node.receive()) and node.gone_s(time.monotonic()) > 0
        node.close(0)


def knocks(hosts: RemoteLauncher[Sample], join: Join, said: list[str]) -> None:
    """A node agent of these keys is turned away."""
    line = HeadConnection(join, "a")
    line.send(MessageChannel().unnumbered(protocol.Gone("says an earlier life")))
    pump_until(hosts, lambda: bool(said))
    assert len(said) == 1 and "no node agent of this run" in said[0] and not hosts.lost()
    line.close(flush_ms=0)


@pytest.mark.parametrize("knows_the_new_head", [True, False])
def test_keys_of_an_earlier_head_admit_nobody(tmp_path: Path, knows_the_new_head: bool) -> None:
    with local_hosts(tmp_path, ("a",)) as hosts:
        earlier = read_join(hosts._join)
    said: list[str] = []
    with local_hosts(tmp_path, ("a",), say=said.append) as hosts:
        now = read_join(hosts._join)
        assert {now.server_key, now.client_secret}.isdisjoint({earlier.server_key, earlier.client_secret})
        server_key = now.server_key if knows_the_new_head else earlier.server_key
        knocks(hosts, msgspec.structs.replace(earlier, endpoint=now.endpoint, server_key=server_key), said)


def test_node_agents_follow_no_head_of_a_lower_number_or_of_another_run(tmp_path: Path) -> None:
    server, client = KeyPair.new(), KeyPair.new()
    mine = join_to("tcp://127.0.0.1:1", server, client, life="b", epoch=3)
    for epoch, run_id, followed in ((2, "r", False), (3, "r", False), (4, "x", False), (4, "r", True)):
        other = msgspec.structs.replace(mine, life="c", epoch=epoch, run_id=run_id)
        write_join(join_file(tmp_path, "c"), other)
        assert (successor(tmp_path, mine) == other) is followed
    join_file(tmp_path, "c").chmod(0o644)
    assert successor(tmp_path, mine) is None, "others could have read its keys"


def test_a_host_that_was_given_back_is_heard_no_more_and_commands_nobody(tmp_path: Path) -> None:
    """Its keys are those of the run, as long as this head lives: what it says with them does not count."""
    with local_hosts(tmp_path, ("a", "b")) as hosts:
        join = read_join(hosts._join)
        hosts.releasing(["b"])
        hosts.released(["b"])
        pump_until(hosts, lambda: hosts._nodes["b"].gone)
        back = SimulatedNode(join, "b")
        back.beat()  # a Hello
        line = HeadConnection(join, "a")  # and it says that it is another one
        channel = MessageChannel()
        for message in (protocol.Gone("a is gone"), protocol.Exited(1, 0), protocol.Leaving("a leaves")):
            line.send(channel.numbered(message, time.monotonic()))
        answers = list[protocol.HeadMessage]()

        def sent_away() -> bool:
            answers.extend(protocol.read_to_node(data).body for data in line.receive())
            return bool(answers) and (bool(back.read()) or back.left)

        pump_until(hosts, sent_away)
        assert {type(answer) for answer in answers} == {protocol.Leave}
        assert hosts.is_up("a") and not hosts.is_up("b") and not hosts.lost()
        line.close(flush_ms=0)
        back.close()


def test_keys_are_in_no_process_list_and_the_heads_own_is_in_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So who has all that node agents have cannot pose as the head."""
    made = list[KeyPair]()
    new = KeyPair.new
    monkeypatch.setattr(KeyPair, "new", lambda: made.append(new()) or made[-1])
    with local_hosts(tmp_path, ("a",)) as hosts:
        join, node = read_join(hosts._join), hosts._nodes["a"].hello
        (head,) = (keys for keys in made if keys.public == join.server_key)
        assert node is not None
        process = psutil.Process(node.pid)
        shown = " ".join([*process.cmdline(), *process.environ().values()])
        assert str(hosts._join) in shown
        assert not any(word in shown for keys in made for word in (keys.secret, keys.public))
        held = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
        assert head.secret.encode() not in held and join.client_secret.encode() in held
    assert not list(tmp_path.glob("join*")), "at the end those of the node agents are gone, too"
