"""Workers on all hosts of an allocation, through one node agent on each.

The node agents are started once, by the batch system's commands, and come to the head by themselves.
A host is lost when its node agent is silent or leaves, or the command that ran it has ended; it does not
come back in this life of the head. What ran there counts as ended only when it surely has: the job
starts again elsewhere, and two copies must not write the same checkpoint.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, Generic

import msgspec

from hpcsched.core.model import Device
from hpcsched.errors import LaunchError
from hpcsched.launch import wire
from hpcsched.launch.base import LaunchPlan
from hpcsched.launch.door import Door
from hpcsched.launch.host import FENCE_S, MakeSample, NamedHost, RemoteHost, S
from hpcsched.launch.keys import Join, KeyPair, join_file, new_life, write_join
from hpcsched.launch.parts import Part, RemoteWorkers, part_orders
from hpcsched.launch.starter import Command, end_all, last_words

LOST_NODE_S = 6.0
"""A node agent that has said nothing for so long is lost."""

WORTH_SAYING_S = 2.0
"""So long after a loss it is clear whether it is a silent one."""

ORPHANS_S = 30.0
"""Beside the grace: how long a node agent may take to end what an earlier life left on its host."""

LEFT_WITHIN_S, LEAVE_GRACE_S = 5.0, 2.0
"""At the end: how long node agents may take to leave, and the workers they still have to save."""

TIMERS_S = 0.25
STALL_S = 1.0
"""When `pump` was not called for longer than that, the time does not count as a node agent's silence."""

SLEW_S = 0.001
"""How fast, in seconds a beat, the estimate of a host's clock may fall: it is set by the fastest messages."""


class Hosts(Generic[S]):
    """A Launcher over several hosts, and their devices under one numbering.

    Everything happens in `pump`, on the caller's thread; `sample` alone may be called from another one.

    Args:
        hosts: all hosts to start a node agent on, the head's own included if workers are to run there.
        commands: gives the commands that run an argv once on each host (`BatchSystem.on_hosts`).
        devices: what each node agent opens (`--devices`).
        address: an IP address of this host that the others can reach.
        make_sample: `devices.Sample`.
        log: where the commands' output goes; default: nodes.log in the run directory.
        say: takes one line that people should see.
        grace_s: how long workers may take to save when the head has gone.
    """

    def __init__(
        self,
        *,
        hosts: Sequence[NamedHost],
        commands: Callable[[Sequence[Any], Sequence[str]], list[tuple[str, ...]]],
        run_id: str,
        run_dir: Path,
        devices: str,
        address: str,
        make_sample: MakeSample[S],
        log: Path | None = None,
        say: Callable[[str], None],
        grace_s: float = 30.0,
    ) -> None:
        self._hosts, self._commands_for = tuple(hosts), commands
        self._run_id, self._devices, self._address, self._grace_s = run_id, devices, address, grace_s
        self._make_sample, self._say = make_sample, say
        self._life = new_life()
        self._join, self._log = join_file(run_dir, self._life), log or run_dir / "nodes.log"
        self._nodes = {host.name: RemoteHost(host.name) for host in hosts}
        self._by_peer: dict[bytes, RemoteHost] = {}
        self._commands: list[Command] = []
        self._door: Door | None = None
        self._inventory: tuple[Device, ...] = ()
        self._next_part = 1
        self._pumped = self._timers_due = 0.0
        self._stalled_at = float("-inf")
        self._closing = False
        self._said: set[str] = set()
        self.kind, self.speed = "", 1.0
        self.skew_s: dict[str, float] = {}
        """By host: how far its clock is ahead of ours, less the time a message takes."""

    # -- beginning and end -----------------------------------------------------------------------------

    def start(self, timeout_s: float) -> None:
        """Start the node agents and wait until all have joined, at most so long.

        Those that have orphans to end get longer. Hosts that did not come, or have died since, are
        lost from the start. Raises LaunchError when none came, and
        StoreError when the join file cannot be written; nothing is left running then.
        """
        try:
            self._open()
            deadline = time.monotonic() + timeout_s
            while True:
                now = time.monotonic()
                awaited = [max(deadline, node.patience) for node in self._nodes.values() if node.coming]
                if max(awaited, default=now) <= now:
                    break
                self._wait(min(0.1, max(awaited) - now))
            self._settle()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        server, client = KeyPair.new(), KeyPair.new()
        self._door = Door(self._address, server, client.public, self._say)
        join = Join(
            life=self._life,
            run_id=self._run_id,
            endpoint=self._door.endpoint,
            server_key=server.public,
            client_public=client.public,
            client_secret=client.secret,
            hosts=tuple(self._nodes),
            cpus={host.name: host.cpus for host in self._hosts if host.cpus},
            gpus={host.name: host.gpus for host in self._hosts if host.gpus is not None},
            devices=self._devices,
            grace_s=self._grace_s,
        )
        write_join(self._join, join)
        argv = (sys.executable, "-m", "hpcsched.agent.node", "--join", str(self._join))
        commands = self._commands_for(self._hosts, argv)
        names = tuple(self._nodes)
        for i, command in enumerate(commands):
            ours = (names[i],) if len(commands) == len(names) else names
            started = Command(command, ours, self._log)
            self._commands.append(started)
            if started.pidfd is not None:
                self._door.watch(started.pidfd)
            for name in ours:
                self._nodes[name].command = started

    def _settle(self) -> None:
        """Number the devices of the hosts that have come; the others are lost."""
        come = [node for node in self._nodes.values() if node.up]
        absent = [node for node in self._nodes.values() if node.hello is None or not come]
        for node in self._nodes.values():
            node.fenced = not node.up  # nothing was ever asked of it
        if absent:
            names = ", ".join(node.name for node in absent)
            whys = ((node.command.why if node.command else "") or node.why for node in absent)
            ended = {why for why in whys if why}
            last = last_words(self._log)
            why = "; ".join([*sorted(ended), *([f"{self._log.name} ends with: {last}"] if last else [])])
            line = f"no node agent has come from {names}: {why or 'no word from it'}"
            if not come:
                raise LaunchError(line, transient=False)
            self._say(line)
            for node in absent:
                node.why = "its node agent has not come"
        devices: list[Device] = []
        for node in come:
            assert node.hello is not None
            node.first = len(devices)
            devices += [
                replace(d, index=node.first + i, host=node.name) for i, d in enumerate(node.hello.devices)
            ]
        self._inventory = tuple(devices)
        first = come[0].hello
        assert first is not None
        self.kind, self.speed = first.kind, first.speed
        for node in come:
            assert node.hello is not None
            if node.hello.kind != self.kind:
                self._say(f"host {node.name} has {node.hello.kind}, but {come[0].name} has {self.kind}")

    def close(self) -> bool:
        """Have all node agents leave, and end those that do not; False if something could not be ended."""
        if self._door is None:
            return True
        self._closing = True
        deadline = time.monotonic() + LEFT_WITHIN_S
        for node in self._nodes.values():
            if node.talks:
                self._send(node.name, wire.Leave(LEAVE_GRACE_S))
        while not all(command.look() for command in self._commands) and time.monotonic() < deadline:
            self._wait(0.1)
            if not any(node.talks for node in self._nodes.values()):
                deadline = min(deadline, time.monotonic() + 1.0)  # for the commands to notice
        ended = end_all(self._commands, 1.0)
        self._join.unlink(missing_ok=True)
        self._door.close()
        self._door = None
        for command in self._commands:
            command.close()
        return ended

    # -- what there is ---------------------------------------------------------------------------------

    def inventory(self) -> tuple[Device, ...]:
        """The devices of all hosts that came, host by host; lost ones stay in it."""
        return self._inventory

    def address_of(self, host: str) -> str:
        """The address by which the other hosts reach it; raises KeyError for a host that did not come."""
        hello = self._nodes[host].hello
        if hello is None:
            raise KeyError(host)
        return hello.address

    def sample(self) -> list[S]:
        """The newest known sample of every device. Only reads: may be called from any thread."""
        samples = []
        for device in self._inventory:
            node = self._nodes[device.host]
            reading = node.reading(device.index - node.first)
            samples.append(
                self._make_sample(
                    gpu=device.index,
                    utilisation=reading.utilisation,
                    memory_mib=reading.memory_mib,
                    healthy=reading.healthy,
                    why=reading.why,
                )
            )
        return samples

    def lost(self) -> Mapping[str, str]:
        """Why each lost host was lost, by host."""
        return {node.name: node.why for node in self._nodes.values() if node.why}

    # -- launching -------------------------------------------------------------------------------------

    def launch(self, plan: LaunchPlan) -> RemoteWorkers:
        """Have all ranks started; whether that worked is told by the workers. Never blocks.

        Raises LaunchError (transient, the host's fault) when one of the hosts has been lost.
        """
        shares = [(host, list(devices)) for host, devices in groupby(plan.devices, lambda d: d.host)]
        for host, _ in shares:
            if self._nodes[host].why:
                error = f"host {host} was lost: {self._nodes[host].why}"
                raise LaunchError(error, transient=True, host_fault=True)
        address = self.address_of(shares[0][0]) if len(shares) > 1 else "127.0.0.1"
        local = [(host, [d.index - self._nodes[host].first for d in devices]) for host, devices in shares]
        orders = part_orders(plan, local, address=address, first_part=self._next_part)
        self._next_part += len(orders)
        parts = [Part(host, order) for (host, _), order in zip(shares, orders, strict=True)]
        workers = RemoteWorkers(parts, send=self._send, pump=self.pump)
        for part in parts:
            self._nodes[part.host].parts[part.order.part] = (workers, part)
        workers.begin()
        return workers

    # -- the conversation ------------------------------------------------------------------------------

    def fileno(self) -> int:
        """Readable when `pump` has something to do at once."""
        assert self._door is not None
        return self._door.fileno()

    def pump(self) -> None:
        """Take in what has arrived, and do what is due; to be called at least four times a second."""
        if self._door is None:
            return
        now = time.monotonic()
        if now - self._pumped > STALL_S and self._pumped:
            for node in self._nodes.values():
                node.heard += now - self._pumped
            self._stalled_at = now
        self._pumped = now
        for peer, data in self._door.receive():
            self._take(peer, data, now)
        for peer in self._door.broken():
            if peer in self._by_peer:
                trusted = now - self._stalled_at > LOST_NODE_S
                self._by_peer[peer].broke(now, trusted=trusted)
        for command in self._commands:
            if command.pidfd is not None and command.look():
                self._command_ended(command)
        if now >= self._timers_due:
            self._timers_due = now + TIMERS_S
            for node in self._nodes.values():
                self._timers(node, now)

    def _wait(self, timeout_s: float) -> None:
        assert self._door is not None
        self._door.wait(timeout_s)
        self.pump()

    def _send(self, host: str, message: wire.HeadMessage) -> None:
        node = self._nodes[host]
        if self._door is not None and node.talks:
            self._door.send(node.peer, node.link.kept(message, time.monotonic()))

    def _take(self, peer: bytes, data: bytes, now: float) -> None:
        assert self._door is not None
        node = self._by_peer.get(peer)
        if node is not None:
            node.heard = now
            if self._door.connected(peer):
                node.broke_at = None
        try:
            envelope = wire.read_to_head(data)
        except msgspec.MsgspecError as error:
            self._say_once(f"dropped a message from {node.name if node else 'a stranger'}: {error}")
            return
        if isinstance(envelope.body, wire.Hello):
            self._hello(peer, envelope.body, now)
        elif isinstance(envelope.body, wire.Coming) and node is None:
            self._coming(envelope.body.name, now)
        elif node is None or not node.talks:
            if node is not None and isinstance(envelope.body, wire.Gone):
                node.gone = True
            else:
                self._dismiss(peer)
        elif node.link.take(envelope, now):
            self._told(node, envelope.body)

    def _coming(self, name: str, now: float) -> None:
        node = self._nodes.get(name)
        if node is not None and node.hello is None and not node.patience:
            node.patience = now + self._grace_s + ORPHANS_S
            self._say_once(f"host {name} still has processes of an earlier life: they are being ended")

    def _hello(self, peer: bytes, hello: wire.Hello, now: float) -> None:
        node = self._nodes.get(hello.name)
        if node is None or node.why or (node.hello and node.peer != peer):
            known = "has come twice" if node else "is no host of this run"
            if node is None or not node.why:
                self._say_once(
                    f"a node agent on {hello.hostname} says it is {hello.name}, which {known}: sent away"
                )
            self._dismiss(peer)
            return
        if node.hello is None:
            node.hello, node.peer, node.heard = hello, peer, now
            self.skew_s[node.name] = hello.wall - time.time()
            self._by_peer[peer] = node
        assert self._door is not None
        self._door.send(peer, node.link.passing(wire.Welcome()))

    def _dismiss(self, peer: bytes) -> None:
        """What a host that counts as lost still runs must not go on: its jobs run elsewhere."""
        assert self._door is not None
        self._door.send(peer, wire.Link().passing(wire.Leave(0.0)))

    def _told(self, node: RemoteHost, message: wire.NodeMessage) -> None:
        if isinstance(message, wire.Beat):
            node.readings = message.readings
            ahead_s = message.wall - time.time()
            self.skew_s[node.name] = max(self.skew_s[node.name] - SLEW_S, ahead_s)
            if node.link.owes and self._door is not None:
                self._door.send(node.peer, node.link.passing(wire.Heard()))
            return
        if isinstance(message, wire.Leaving | wire.Gone):
            node.gone = isinstance(message, wire.Gone)
            node.leaving = not node.gone
            if not node.why:
                self._lose(node, f"node agent leaves: {message.why}")
            return
        if isinstance(message, wire.Hello | wire.Coming) or message.part not in node.parts:
            return
        workers, part = node.parts[message.part]
        match message:
            case wire.Launched(port=port):
                workers.launched(part, port)
            case wire.Progressed(data=data):
                workers.progressed(data)
            case wire.Ready():
                workers.ready = True
            case wire.Recorded(data=data):
                workers.record = data
            case wire.Failing():
                workers.failing(part)
            case wire.LaunchFailed(error=error, transient=transient, host_fault=host_fault):
                workers.launch_failed(part, error, transient=transient, host_fault=host_fault)
            case wire.Exited(code=code, record=record):
                workers.record = workers.record if record is None else record
                workers.ended(part, code)
        self._forget_ended(workers)

    def _forget_ended(self, workers: RemoteWorkers) -> None:
        for part in workers.parts:
            if part.over:
                self._nodes[part.host].parts.pop(part.order.part, None)

    # -- lost hosts ------------------------------------------------------------------------------------

    def _command_ended(self, command: Command) -> None:
        assert self._door is not None and command.pidfd is not None
        self._door.unwatch(command.pidfd)
        command.close()
        for name in command.hosts:
            if self._nodes[name].up:
                self._lose(self._nodes[name], command.why)

    def _lose(self, node: RemoteHost, why: str) -> None:
        node.why, node.lost_at = why, time.monotonic()
        if self._closing:
            return
        self._say_once(f"host {node.name} was lost: {why}")
        if not (node.leaving or node.gone):
            self._send_away(node)

    def _send_away(self, node: RemoteHost) -> None:
        self._dismiss(node.peer)
        if self._own(node) and node.command is not None:
            node.command.signal(signal.SIGTERM)

    def _own(self, node: RemoteHost) -> bool:
        """Whether its command can be ended without harm to hosts that are up."""
        return node.command is not None and not any(self._nodes[name].talks for name in node.command.hosts)

    def _timers(self, node: RemoteHost, now: float) -> None:
        if node.talks:
            if now - node.heard > LOST_NODE_S:
                if node.leaving:
                    node.leaving, node.lost_at = False, now
                    self._send_away(node)
                else:
                    self._lose(node, f"no word for {LOST_NODE_S:g} s")
                return
            assert self._door is not None
            for data in node.link.again(now):
                self._door.send(node.peer, data)
        elif node.why and not node.fenced:
            silence_s = wire.silence_s(self._grace_s)
            left_s = node.fence(now, may_kill=self._own(node), silence_s=silence_s)
            if node.fenced:
                # Only now: what ran there is started again elsewhere.
                for workers, part in list(node.parts.values()):
                    workers.lost(part, node.why)
                    self._forget_ended(workers)
            elif node.parts and left_s > FENCE_S and now - node.lost_at > WORTH_SAYING_S and not node.warned:
                node.warned = True
                self._say(
                    f"host {node.name} is silent: its jobs start elsewhere in {left_s:.0f} s, "
                    "when surely nothing of them is left there"
                )

    def _say_once(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            self._say(line)
