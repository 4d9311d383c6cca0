"""The head's sessions with its node agents, and the loss of hosts.

A host is lost when its node agent is silent or leaves, or the command that ran it has ended; it does not
come back in this life of the head. What ran there counts as ended only when it surely has: the job
starts again elsewhere, and two copies must not write the same checkpoint.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable

import msgspec

from hpcsched.errors import BadInput
from hpcsched.launch.remote import protocol
from hpcsched.launch.remote.channel import MessageChannel
from hpcsched.launch.remote.guests import ENDING, Guests
from hpcsched.launch.remote.host import FENCE_S, RemoteHost
from hpcsched.launch.remote.keys import new_life
from hpcsched.launch.remote.socket import HeadSocket
from hpcsched.launch.remote.starter import NodeAgentCommand
from hpcsched.launch.remote.workers import RemoteWorkers

LOST_NODE_S = 6.0
"""Time without a message after which a host is lost (chosen)."""

SILENCE_NOTICE_S = 2.0
"""Time after a loss at which people are told of a host that is silent (chosen)."""

ORPHANS_GRACE_S = 30.0
"""Time that a node agent gets, beyond the grace time, to end orphans on its host (chosen)."""

TIMER_PERIOD_S = 0.25
"""Period of the checks of all hosts (chosen)."""

STALL_S = 1.0
"""Time between calls of `pump` that does not count as silence of the node agents (chosen)."""

SLEW_S = 0.001
"""Seconds a beat by which the estimate of a host's clock falls (chosen): the fastest messages set it."""


class HeadSessions:
    """The head's sessions with all node agents; all work is done in `pump`, on the caller's thread.

    Args:
        names: the hosts that node agents are expected from.
        grace_s: how long workers may take to save when the head has gone.
        say: takes one line that people should see.
        joinable, movable: whether hosts of other allocations may join, and one of these lead the run next:
            those of the head before may go on then.
    """

    def __init__(
        self,
        names: Iterable[str],
        *,
        grace_s: float,
        say: Callable[[str], None],
        joinable: bool = False,
        movable: bool = True,
    ) -> None:
        self._nodes: dict[str, RemoteHost] = {name: RemoteHost(name) for name in names}
        self._holds_s = protocol.HOLD_S if joinable and movable else 0.0
        self._grace_s, self._say = grace_s, say
        self.joinable, self.guests = joinable, Guests(self._nodes, welcome=joinable)
        self._by_peer: dict[bytes, RemoteHost] = {}
        self._commands: list[NodeAgentCommand] = []
        self._head_socket: HeadSocket | None = None
        self._pumped = self._timers_due = 0.0
        self._stalled_at = float("-inf")
        self._closing = self._gathers = False
        self.life = new_life()
        self._said: set[str] = set()
        self.skew_s: dict[str, float] = {}
        """By host: the seconds that its clock is ahead of ours, less the time that a message takes."""

    def fileno(self) -> int:
        """Readable when `pump` has something to do at once."""
        assert self._head_socket is not None
        return self._head_socket.fileno()

    def pump(self) -> None:
        """Handle the messages that have arrived, and do what is due. To be called at least every 0.25 s."""
        if self._head_socket is None:
            return
        now = time.monotonic()
        if now - self._pumped > STALL_S and self._pumped:
            for node in self._nodes.values():
                node.heard_at += now - self._pumped
            self._stalled_at = now
        self._pumped = now
        for peer, data in self._head_socket.receive():
            self._take(peer, data, now)
        for peer in self._head_socket.broken():
            if peer in self._by_peer:
                trusted = now - self._stalled_at > LOST_NODE_S
                self._by_peer[peer].broke(now, trusted=trusted)
        for command in self._commands:
            if command.pidfd is not None and command.look():
                self._command_ended(command)
        if now >= self._timers_due:
            self._timers_due = now + TIMER_PERIOD_S
            for node in self._nodes.values():
                self._timers(node, now)

    def is_up(self, host: str) -> bool:
        """Whether a host is in the run."""
        return host in self._nodes and self._nodes[host].up

    def name_here(self, hostname: str) -> str:
        """The name in the run of a host that calls itself so; "" where it is none of the run's."""
        up = (node for node in self._nodes.values() if node.up)
        return next((node.name for node in up if node.hello and node.hello.hostname == hostname), "")

    def leave_to_the_next(self) -> None:
        """Stay, without a word, until the node agents have ended that were started here: another head leads
        them."""
        if self._head_socket is not None:
            self._head_socket.close()
            self._head_socket = None
        while not all(command.look() for command in self._commands):
            time.sleep(1.0)

    def end_of(self, host: str) -> float | None:
        """When a host that joined ends, or would have, by the monotonic clock; None: it is not known."""
        return self._nodes[host].end if host in self._nodes else None

    @property
    def silence_s(self) -> float:
        """See `protocol.silence_s`."""
        return protocol.silence_s(self._grace_s, self._holds_s)

    @property
    def spared(self) -> tuple[str, ...]:
        """The marks (`NODE`) of what runs on for node agents of heads before."""
        nodes = [node for node in self._nodes.values() if node.earlier and node.up]
        return tuple(f"{node.hello.life}:{node.name}" for node in nodes if node.hello)

    def _wait(self, timeout_s: float) -> None:
        assert self._head_socket is not None
        self._head_socket.wait(timeout_s)
        self.pump()

    def _send(self, host: str, message: protocol.HeadMessage) -> None:
        node = self._nodes[host]
        if self._head_socket is not None and node.talks:
            self._head_socket.send(node.peer, node.channel.numbered(message, time.monotonic()))

    def _take(self, peer: bytes, data: bytes, now: float) -> None:
        assert self._head_socket is not None
        node = self._by_peer.get(peer)
        if node is not None:
            node.heard_at = now
            if self._head_socket.connected(peer):
                node.broke_at = None
        try:
            envelope = protocol.read_to_head(data)
        except BadInput as error:
            self._say_once(f"dropped a message from {node.name if node else 'a stranger'}: {error}")
            return
        if isinstance(envelope.body, protocol.Hello):
            self._hello(peer, envelope.body, now)
        elif isinstance(envelope.body, protocol.Coming) and node is None:
            self._coming(envelope.body.name, now)
        elif isinstance(envelope.body, protocol.Joining) and node is None:
            self._joining(peer, envelope.body, now)
        elif node is None or not node.talks:
            if node is not None and isinstance(envelope.body, protocol.Gone):
                node.gone = True
            else:
                self._dismiss(peer)
        elif node.channel.take(envelope, now):
            self._told(node, envelope.body)

    def _joining(self, peer: bytes, joining: protocol.Joining, now: float) -> None:
        assert self._head_socket is not None
        ending = protocol.SentAway(ENDING)
        answer = ending if self._closing else self.guests.take(peer, joining, now)
        if isinstance(answer, protocol.Admitted):
            answer = msgspec.structs.replace(answer, spared=self.spared)
        self._head_socket.send(peer, MessageChannel().unnumbered(answer))

    def _coming(self, name: str, now: float) -> None:
        node = self._nodes.get(name)
        if node is not None and node.hello is None and not node.join_by:
            node.join_by = now + self._grace_s + ORPHANS_GRACE_S
            self._say_once(f"host {name} still has processes of an earlier life: they are being ended")

    def _hello(self, peer: bytes, hello: protocol.Hello, now: float) -> None:
        node = self._nodes.get(hello.name)
        other = node is not None and node.earlier != (hello.life != self.life)
        if node is None or node.why or other or (node.hello and node.peer != peer):
            known = "has come twice" if node else "is no host of this run"
            if node is None or not node.why:
                self._say_once(
                    f"a node agent on {hello.hostname} says it is {hello.name}, which {known}: sent away"
                )
            self._dismiss(peer)
            return
        if node.hello is None:
            node.peer, node.heard_at = peer, now
            self.skew_s[node.name] = hello.wall - time.time()
            self._by_peer[peer] = node
        if node.hello is None or node.earlier:
            node.hello = hello
        if node.earlier and self._gathers:
            return  # what waits there to be told would be lost before its parts are known
        assert self._head_socket is not None
        self._head_socket.send(peer, node.channel.unnumbered(protocol.Welcome()))

    def _dismiss(self, peer: bytes) -> None:
        """Tell a node agent to leave: its host counts as lost, and its jobs run elsewhere."""
        assert self._head_socket is not None
        self._head_socket.send(peer, MessageChannel().unnumbered(protocol.Leave(0.0)))

    def _told(self, node: RemoteHost, message: protocol.NodeMessage) -> None:
        if isinstance(message, protocol.Beat):
            node.readings, node.age_s = message.readings, message.age_s
            ahead_s = message.wall - time.time()
            self.skew_s[node.name] = max(self.skew_s[node.name] - SLEW_S, ahead_s)
            if node.channel.owes_ack and self._head_socket is not None:
                self._head_socket.send(node.peer, node.channel.unnumbered(protocol.Heard()))
            return
        if isinstance(message, protocol.Leaving | protocol.Gone):
            node.gone = isinstance(message, protocol.Gone)
            node.leaving = not node.gone
            if not node.why:
                self._lose(node, f"node agent leaves: {message.why}")
            return
        if isinstance(message, protocol.Said):
            self._say(f"host {node.name}, by its own numbers: {message.line}")
            return
        if isinstance(message, protocol.Keeping):
            node.told_keeping = frozenset(message.jobs)
            return
        strangers = protocol.Hello | protocol.Coming | protocol.Joining
        if isinstance(message, strangers) or message.part not in node.parts:
            return
        workers, part = node.parts[message.part]
        match message:
            case protocol.Launched(port=port):
                workers.launched(part, port)
            case protocol.Progressed(data=data):
                workers.progressed(data)
            case protocol.Ready() | protocol.Refused():
                workers.answered(message)
            case protocol.Living(count=count):
                part.living = count
            case protocol.Recorded(data=data):
                workers.record = data
            case protocol.Catches(so=so):
                part.catches = so
            case protocol.SavedBy(code=code, words=words):
                workers.saved_by = code, words
            case protocol.Failing():
                workers.failing(part)
            case protocol.LaunchFailed(error=error, transient=transient, host_fault=host_fault):
                workers.launch_failed(part, error, transient=transient, host_fault=host_fault)
            case protocol.Exited(code=code, record=record, held=held, after_s=after_s):
                workers.ran_out(part, message.oom, over_limit=message.over_limit)
                workers.record = workers.record if record is None else record
                workers.held = workers.held if held is None else held
                workers.ended(part, code, after_s)
        self._forget_ended(workers)

    def _forget_ended(self, workers: RemoteWorkers) -> None:
        for part in workers.parts:
            if part.over:
                self._nodes[part.host].parts.pop(part.order.part, None)

    # -- lost hosts ------------------------------------------------------------------------------------

    def _command_ended(self, command: NodeAgentCommand) -> None:
        assert self._head_socket is not None and command.pidfd is not None
        self._head_socket.unwatch(command.pidfd)
        command.close()
        for name in command.hosts:
            if self._nodes[name].up:
                self._lose(self._nodes[name], command.why)

    def _lose(self, node: RemoteHost, why: str) -> None:
        node.why, node.lost_at = why, time.monotonic()
        if self._closing:
            return
        if not node.releasing:
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
            if now - node.heard_at > LOST_NODE_S:
                if node.leaving:
                    node.leaving, node.lost_at = False, now
                    self._send_away(node)
                else:
                    self._lose(node, f"no word for {LOST_NODE_S:g} s")
                return
            assert self._head_socket is not None
            for data in node.channel.resends(now):
                self._head_socket.send(node.peer, data)
        elif node.why and not node.fenced:
            left_s = node.fence(now, may_kill=self._own(node), silence_s=self.silence_s)
            if node.fenced:
                # Only now: what ran there is started again elsewhere.
                for workers, part in list(node.parts.values()):
                    workers.lost(part, node.why)
                    self._forget_ended(workers)
            elif (
                node.parts and left_s > FENCE_S and now - node.lost_at > SILENCE_NOTICE_S and not node.warned
            ):
                node.warned = True
                self._say(
                    f"host {node.name} is silent: its jobs start elsewhere in {left_s:.0f} s, "
                    "when surely nothing of them is left there"
                )

    def _say_once(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            self._say(line)
