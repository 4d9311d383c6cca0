"""Several hosts on this machine: real node agents under other names, and many simulated ones in a process.

`python -m hpcsched.testing.nodes --join FILE --names a,b,c` runs simulated node agents: the real protocol on
real connections, but no workers. Ranks "end" with 75 on SIGTSTP and 128 + n on any other signal n.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from hpcsched.agent.node.connection import HeadConnection
from hpcsched.batch.base import AllocatedHost
from hpcsched.batch.local import Local
from hpcsched.contract.exits import SUSPENDED
from hpcsched.core.model import Device
from hpcsched.devices import Sample
from hpcsched.errors import LaunchError
from hpcsched.launch.base import Workers
from hpcsched.launch.remote import protocol
from hpcsched.launch.remote.channel import MessageChannel
from hpcsched.launch.remote.keys import Join, read_join
from hpcsched.launch.remote.launcher import RemoteLauncher

NODE_GPUS = 8
DEADLINE_S = 60.0
"""How long what must happen may take: many times what it takes, as a machine may be slow or busy."""


@contextmanager
def local_hosts(
    run_dir: Path,
    names: Sequence[str] = ("a", "b"),
    *,
    devices: str = "replay:2",
    say: Callable[[str], None] = lambda line: None,
    grace_s: float = 5.0,
    standbys: int | None = None,
) -> Iterator[RemoteLauncher[Sample]]:
    """Hosts with real node agents, all on this machine."""
    batch = Local(names, launcher="local")
    hosts = RemoteLauncher(
        hosts=batch.allocation().hosts,
        commands=batch.on_hosts,
        run_id=f"test-{os.getpid()}-{time.monotonic_ns()}",
        run_dir=run_dir,
        devices=devices,
        address="127.0.0.1",
        make_sample=Sample,
        say=say,
        grace_s=grace_s,
        standbys=standbys,
    )
    try:
        hosts.start(DEADLINE_S)
        yield hosts
    finally:
        hosts.close()


def pump_until(
    hosts: RemoteLauncher[Sample], condition: Callable[[], bool], *, deadline_s: float = DEADLINE_S
) -> None:
    """Go round as the agent's loop does until the condition holds; TimeoutError when it takes too long."""
    deadline = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("not in time")
        select.select([hosts], [], [], 0.02)
        hosts.pump()


def code_of(hosts: RemoteLauncher[Sample], workers: Workers, *, deadline_s: float = DEADLINE_S) -> int:
    """The attempt's exit code once all its ranks have ended."""
    codes: list[int] = []

    def over() -> bool:
        code = workers.reap()
        if code is not None:
            codes.append(code)
        return code is not None

    pump_until(hosts, over, deadline_s=deadline_s)
    return codes[0]


def written(files: Iterable[Path]) -> bool:
    """Whether each of them is there with its line: a file that has just been created is still empty."""
    return all(file.exists() and file.read_text().endswith("\n") for file in files)


def simulated(processes: int) -> Callable[[Sequence[AllocatedHost], Sequence[str]], list[tuple[str, ...]]]:
    """In place of `BatchSystem.on_hosts`: commands that simulate all hosts in so many processes."""

    def commands(hosts: Sequence[AllocatedHost], argv: Sequence[str]) -> list[tuple[str, ...]]:
        names = [host.name for host in hosts]
        join = argv[argv.index("--join") + 1]
        start = (sys.executable, "-m", "hpcsched.testing.nodes", "--join", join, "--names")
        return [(*start, ",".join(names[i::processes])) for i in range(processes)]

    return commands


@dataclass
class SimulatedNode:
    """One node agent without workers; `log` takes when it got what (seconds of the monotonic clock)."""

    join: Join
    name: str
    log: list[tuple[str, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._connection = HeadConnection(self.join, self.name)
        self._channel = MessageChannel()
        self._welcome = self.left = False
        self._readings = tuple(protocol.Reading(0.5, 1024.0) for _ in range(NODE_GPUS))
        self._orders: dict[int, protocol.Launch] = {}

    @property
    def filenos(self) -> tuple[int, int]:
        return self._connection.filenos

    def beat(self) -> None:
        """What it says once a second."""
        if self._welcome:
            self._connection.send(self._channel.unnumbered(protocol.Beat(time.time(), self._readings)))
            for data in self._channel.resends(time.monotonic()):
                self._connection.send(data)
            return
        devices = tuple(Device(index=i, host=self.name, kind="fake", handle=str(i)) for i in range(NODE_GPUS))
        hello = protocol.Hello(
            name=self.name,
            hostname=self.name,
            pid=os.getpid(),
            started=0,
            devices=devices,
            kind="fake",
            speed=1.0,
            address="127.0.0.1",
            wall=time.time(),
        )
        self._connection.send(self._channel.unnumbered(hello))

    def read(self) -> None:
        """Take in and answer what has arrived."""
        for data in self._connection.receive():
            envelope = protocol.read_to_node(data)
            now = time.monotonic()
            if self._channel.take(envelope, now):
                self._answer(envelope.body, now)

    def _answer(self, message: protocol.HeadMessage, now: float) -> None:
        match message:
            case protocol.Welcome():
                self._welcome = True
            case protocol.Launch(part=part):
                self.log.append((f"launch {part}", now))
                self._orders[part] = message
                self._say(protocol.Launched(part, message.port or 12345))
                if message.first_rank == 0:
                    self._say(protocol.Ready(part, message.attempt, b"{}"))
            case protocol.Signal(part=part, number=number):
                self.log.append((f"signal {part}", now))
                if self._orders.pop(part, None):
                    self._say(protocol.Exited(part, SUSPENDED if number == signal.SIGTSTP else 128 + number))
            case protocol.Leave():
                self._say(protocol.Gone("the head says so"))
                self.left = True

    def _say(self, message: protocol.NodeMessage) -> None:
        self._connection.send(self._channel.numbered(message, time.monotonic()))

    def close(self) -> None:
        self._connection.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate the named hosts until all have been told to leave; then write what they got, one JSON line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--join", type=Path, required=True)
    parser.add_argument("--names", required=True)
    options = parser.parse_args(arguments)
    join = read_join(options.join)
    log: list[tuple[str, float]] = []
    nodes = [SimulatedNode(join, name, log) for name in options.names.split(",")]
    epoll = select.epoll()
    owners = {fd: node for node in nodes for fd in node.filenos}
    for fd in owners:
        epoll.register(fd, select.EPOLLIN)
    began = time.monotonic()
    beats = [began + i / len(nodes) for i in range(len(nodes))]  # spread as independent hosts' are
    for node in nodes:
        node.beat()
    while not all(node.left for node in nodes):
        if os.getppid() == 1:
            raise LaunchError("the head is gone", transient=False)
        now = time.monotonic()
        for i, node in enumerate(nodes):
            if beats[i] <= now and not node.left:
                beats[i] += protocol.BEAT_S
                node.beat()
                node.read()
        ready = epoll.poll(max(0.0, min(beats) - time.monotonic()))
        for node in {id(owners[fd]): owners[fd] for fd, _ in ready}.values():
            node.read()
    print(json.dumps(log), flush=True)  # noqa: T201
    for node in nodes:
        node.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())


@contextmanager
def no_descriptor_left_open() -> Iterator[None]:
    """As many of this process's descriptors are open afterwards as before."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    yield
    assert len(list(Path("/proc/self/fd").iterdir())) == before
