"""The wire as a target: what the head makes of a node agent's messages, and a node agent of the head's."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from hpcsched.agent.deferred import Deferred
from hpcsched.agent.node.agent import NodeAgent
from hpcsched.agent.node.link import HeadLink
from hpcsched.batch.base import AllocatedHost
from hpcsched.contract import orders
from hpcsched.core.model import Device
from hpcsched.devices import Sample
from hpcsched.errors import LaunchError
from hpcsched.launch.base import LaunchPlan
from hpcsched.launch.remote import protocol
from hpcsched.launch.remote.channel import MessageChannel
from hpcsched.launch.remote.keys import Join, KeyPair, read_join
from hpcsched.launch.remote.launcher import RemoteLauncher
from hpcsched.launch.remote.workers import part_launches

from .sandbox import Wrong, refused

_DEVICES = tuple(Device(index=i, host="n1", kind="fake", handle=str(i)) for i in range(2))


def _plan(**more: Any) -> LaunchPlan:
    known = {"cwd": Path("/"), "folder": Path("/folder"), "output": Path("/folder/out"), "argv": ("program",)}
    return LaunchPlan(**{"job_id": 1, "attempt": 2, "devices": _DEVICES, **known, **more})


def _hello(name: str, **more: Any) -> protocol.Hello:
    told = {"pid": 1, "started": 1, "kind": "fake", "speed": 1.0, "address": "10.0.0.1", "wall": 0.0}
    return protocol.Hello(**{"name": name, "hostname": name, "devices": _DEVICES, **told, **more})


def messages_to_head() -> list[bytes]:
    """What a node agent says in its life; the part 1 is under way on its host."""
    order = part_launches(_plan(), [("n1", [0, 1])], first_host="n1", address="10.0.0.1", first_part=1)[0]
    running = protocol.Running(order=order, port=4711, living=2, attempt=2, ready=b"{}", record=b"{}")
    begun = [protocol.Launched(1, 4711), protocol.Ready(1, 2, b"{}"), protocol.Progressed(1, b'{"step":1}\n')]
    lives: list[list[protocol.NodeMessage]] = [
        [*begun, protocol.Living(1, 1), protocol.Exited(1, 0, b"{}", b"{}", 0.5)],
        [
            *begun,
            protocol.Recorded(1, b"{}"),
            protocol.Failing(1),
            protocol.Exited(1, 1, oom="m", over_limit=True),
        ],
        [
            protocol.Beat(1e9, (protocol.Reading(0.5, 1.0, True, "", 3.0), protocol.Reading()), 0.1),
            protocol.Said("a line"),
        ],
        [protocol.LaunchFailed(1, "none", True, True), protocol.Leaving("why"), protocol.Gone("why")],
        [*begun, protocol.Catches(1, True), protocol.Refused(1, 2, b"no"), protocol.SavedBy(1, 0, "w")],
        [protocol.Keeping((1, 2)), protocol.Coming("n1"), _hello("n1", parts=(running,)), _hello("n2")],
        [protocol.Joining(allocation="slurm job 12", token="t", hosts=("a", "b"), left_s=60.0)],
    ]
    return [
        msgspec.msgpack.encode([protocol.ToHead(i, 0, said) for i, said in enumerate(life, 1)])
        for life in lives
    ]


def _each(data: bytes) -> list[bytes]:
    """The messages of a list of them; all is one where it is none."""
    with contextlib.suppress(msgspec.MsgspecError, ValueError, RecursionError):
        return [bytes(one) for one in msgspec.msgpack.decode(data, type=list[msgspec.Raw])]
    return [data]


class _Socket:
    """A socket that sends into the void."""

    def send(self, peer: bytes, data: bytes) -> None: ...

    def connected(self, peer: bytes) -> bool:
        return True

    def receive(self) -> Sequence[tuple[bytes, bytes]]:
        return ()

    broken = receive


def to_head(folder: Path, data: bytes) -> str:
    """Messages of a node agent that has the right keys: the head goes on, whatever they say."""
    said: list[str] = []
    launcher = RemoteLauncher(
        hosts=[AllocatedHost(name="n1")],
        commands=lambda hosts, argv: [],
        run_id="r",
        run_dir=folder,
        devices="fake",
        address="127.0.0.1",
        make_sample=Sample,
        say=said.append,
        joinable=True,
    )
    launcher._head_socket = _Socket()  # type: ignore[assignment]
    hello = msgspec.msgpack.encode(protocol.ToHead(0, 0, _hello("n1", life=launcher.life)))
    launcher._take(b"peer", hello, 1.0)
    launcher._settle()
    workers = launcher.launch(_plan(devices=launcher.inventory()))
    for i, message in enumerate(_each(data)[:200]):
        launcher._take(b"peer" if i % 4 or i == 0 else b"stranger", message, 2.0 + i)
        launcher.come()
        launcher.sample()
        with contextlib.suppress(LaunchError):  # what the message says
            workers.reap()
    launcher.lost()
    launcher.ends()
    for host in launcher._nodes.values():
        launcher._timers(host, 1e6)
    workers.close()
    for line in said:
        if len(line) > 100_000:
            raise Wrong(f"a line of {len(line)} characters")
    return "; ".join(said)[:500]


def messages_to_node() -> list[bytes]:
    """What a head says: the part 7 is under way there."""
    first, joining = (
        part_launches(plan, [("n1", [0, 1])], first_host="n1", address="10.0.0.1", first_part=part)[0]
        for part, plan in (
            (8, _plan()),
            (9, _plan(attempt=3, first_rank=2, world_size=4, joins="10.0.0.9:4711")),
        )
    )
    lives: list[list[protocol.HeadMessage]] = [
        [protocol.Welcome(), first, protocol.Signal(7, int(signal.SIGTSTP)), protocol.Expect(7, 3)],
        [joining, protocol.Order(7, orders.encode(orders.Suspend(2))), protocol.Forget(1), protocol.Heard()],
        [protocol.AskToSave(7, int(signal.SIGUSR1)), protocol.SaveBy(7, ("save",), 5.0), protocol.Drain()],
        [protocol.Heard(), protocol.Leave(3.0)],
        [protocol.Admitted(("n1",)), protocol.SentAway("why")],
    ]
    return [
        msgspec.msgpack.encode([protocol.ToNode(i, 0, said) for i, said in enumerate(life, 1)])
        for life in lives
    ]


class _Nothing:
    """Does nothing, whatever it is asked for."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


class _Launcher(_Nothing):
    """Can start nothing."""

    def ready_for(self, plan: LaunchPlan) -> bool:
        return True

    def launch(self, plan: LaunchPlan, place: Any) -> Any:
        raise LaunchError("not here", transient=True)

    def keeping(self) -> set[int]:
        return set()


class _Watcher(_Nothing):
    """Watches nothing."""

    workers = _Nothing()


class _Connection:
    """A connection on which messages have arrived."""

    filenos = ()
    pending = False

    def __init__(self, messages: Sequence[bytes]) -> None:
        self._messages = messages

    def receive(self) -> Sequence[bytes]:
        return self._messages

    def send(self, data: bytes) -> None: ...


def to_node(folder: Path, data: bytes) -> str:
    """Messages of a head with the right keys: the node agent goes on, whatever they say."""
    said: list[str] = []
    link = HeadLink.__new__(HeadLink)
    link._connection, link._channel = _Connection(_each(data)[:200]), MessageChannel()  # type: ignore[assignment]
    link._waiting, link.welcome, link._orphaned, link._say = [], False, None, said.append
    agent = NodeAgent.__new__(NodeAgent)
    agent._head, agent._launcher, agent._inventory, agent._name = link, _Launcher(), _DEVICES, "n1"  # type: ignore
    agent._parts = {7: _Watcher()}  # type: ignore
    agent._deferred, agent.left, agent._leave = Deferred(agent._obey), "", []
    agent._kill_at = float("inf")
    for message in link.receive():
        agent._take(message)
    return "; ".join(said)[:500]


@cache
def join_files() -> list[bytes]:
    server, client = KeyPair.new(), KeyPair.new()
    keys = {"server_key": server.public, "client_public": client.public, "client_secret": client.secret}
    told = {
        "life": "1",
        "run_id": "r",
        "endpoint": "tcp://127.0.0.1:1",
        "hosts": ("n1", "n2"),
        "devices": "auto",
    }
    more = {
        "grace_s": 30.0,
        "gpus": {"n1": ("0", "1")},
        "cpus": {"n1": 8},
        "shielded": (12,),
        "head": ("h", 1, 2),
    }
    return [msgspec.json.encode(Join(**keys, **told, **extra)) for extra in ({"grace_s": 1.0}, more)]


def join_file(folder: Path, data: bytes) -> str:
    path = folder / "join-1"
    path.write_bytes(data)
    path.chmod(0o600)
    return refused(lambda: read_join(path))
