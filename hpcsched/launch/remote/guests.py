"""Hosts of other allocations that join a run: the head's side of `hpcsched join`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isfinite

from hpcsched.launch.remote import protocol
from hpcsched.launch.remote.host import RemoteHost

MOST_HOSTS = 4096
"""The most hosts that may join in one life of the head (chosen)."""


MOST_NAME = 255
"""The longest name of a host."""


ENDING = "the run is ending"
RELEASED = "the run has no use for its hosts any more"
LATER = "its hosts are still being given up"
NOT_JOINABLE = "the run takes no hosts in: it was not started with `run --joinable`"


SILENT_S = 10.0
"""A `hpcsched join` that says nothing for so long is gone (chosen); its hosts may work on."""


NO_GPUS = ("replay", "simulated", "cpu")
"""Kinds of devices of which several hosts on one machine may have their own."""


def same_gpus(node: RemoteHost, others: Iterable[RemoteHost]) -> int:
    """How many of a host's GPUs another one has that is the same machine: it has joined twice."""
    assert node.hello is not None
    there = {
        (other.hello.hostname, device.handle)
        for other in others
        if other is not node and other.hello and other.up
        for device in other.hello.devices
        if device.kind not in NO_GPUS
    }
    return len(there & {(node.hello.hostname, device.handle) for device in node.hello.devices})


@dataclass(slots=True)
class Guest:
    """An allocation whose hosts have joined: `names` are those in the run, by their names there. `heard_at`:
    when its `hpcsched join` spoke last."""

    allocation: str
    names: dict[str, str]
    peer: bytes
    heard_at: float


class Guests:
    """Admits hosts of other allocations, and knows when these end.

    Args:
        nodes: all hosts of the run, to which those that are admitted are added.
        welcome: whether the run takes any in.
    """

    def __init__(self, nodes: dict[str, RemoteHost], *, welcome: bool) -> None:
        self._nodes, self._welcome = nodes, welcome
        self._guests: dict[str, Guest] = {}

    def take(self, peer: bytes, message: protocol.Joining, now: float) -> protocol.HeadMessage:
        """The answer to a Joining; what it says of the allocation's end holds from now on."""
        guest = self._guests.get(message.token)
        if guest is not None and guest.peer != peer:
            nodes = [self._nodes[name] for name in guest.names.values()]
            if all(node.releasing for node in nodes):
                return protocol.SentAway(RELEASED)
            if not self._is_gone(guest, now):
                return protocol.SentAway(LATER)
            guest = None
        if guest is None:
            if why := self._why_not(message, now):
                return protocol.SentAway(why)
            guest = self._go_on(peer, message, now) if message.names else self._admit(peer, message, now)
            if guest is None:  # its node agents are being sent away, and it comes again then
                return protocol.SentAway(LATER)
            self._guests[message.token] = guest
        guest.heard_at = now
        left_s = message.left_s
        end = now + max(0.0, left_s) if left_s is not None and isfinite(left_s) else None
        for name in guest.names.values():
            self._nodes[name].end = end
        return protocol.Admitted(tuple(guest.names.values()))

    def _is_gone(self, guest: Guest, now: float) -> bool:
        """Whether no host of an allocation is here any more, or still comes."""
        silent = now - guest.heard_at > SILENT_S
        nodes = [self._nodes[name] for name in guest.names.values()]
        return all(node.fenced or node.gone if node.why else node.hello is None and silent for node in nodes)

    def _why_not(self, message: protocol.Joining, now: float) -> str:
        if not self._welcome:
            return NOT_JOINABLE
        others = [guest for token, guest in self._guests.items() if token != message.token]
        if any(one.allocation == message.allocation and not self._is_gone(one, now) for one in others):
            return f"{message.allocation} has joined already"
        if not message.hosts or len(set(message.hosts)) != len(message.hosts):
            return "it names no hosts, or one twice"
        if any(not name.isprintable() or len(name) > MOST_NAME for name in message.hosts):
            return "a host's name is not one"
        if len(self._nodes) + len(message.hosts) > MOST_HOSTS:
            return f"the run has had {MOST_HOSTS} hosts already"
        return ""

    def _admit(self, peer: bytes, message: protocol.Joining, now: float) -> Guest:
        names: dict[str, str] = {}
        for host in message.hosts:
            name, number = host, 2
            while name in self._nodes:  # of the run already, or lost before: a name means one host for good
                name, number = f"{host}-{number}", number + 1
            names[host] = name
            self._nodes[name] = RemoteHost(name, guest=True)
        return Guest(message.allocation, names, peer, now)

    def _go_on(self, peer: bytes, message: protocol.Joining, now: float) -> Guest | None:
        """The guest whose hosts were in the run under the head before, by the names that they had there; None
        where one of them has not come to this head."""
        nodes = [self._nodes.get(name) for name in message.names]
        if len(nodes) != len(message.hosts) or not all(node and node.earlier and node.up for node in nodes):
            return None
        return Guest(message.allocation, dict(zip(message.hosts, message.names, strict=True)), peer, now)

    def of(self, token: str) -> tuple[str, ...]:
        """The hosts of the `hpcsched join` with this token, by their names in the run."""
        guest = self._guests.get(token)
        return tuple(guest.names.values()) if guest else ()

    def ended_at(self, ends: Mapping[str, float]) -> None:
        """Take these ends (by the monotonic clock) for those of hosts of the head before, until their
        `hpcsched join` says otherwise."""
        for name, end in ends.items():
            node = self._nodes.get(name)
            if node is not None and node.earlier and node.end is None:
                node.end = end

    def allocation_of(self, host: str) -> str:
        """The allocation that a host has come from, in words."""
        return next((one.allocation for one in self._guests.values() if host in one.names.values()), "")

    def ends(self) -> Mapping[str, float | None]:
        """When each host that has joined ends, by the monotonic clock (None: not known)."""
        return {node.name: node.end for node in self._nodes.values() if node.guest and node.up}
