"""Hosts of other allocations that join a run: the head's side of `hpcsched join`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite

from hpcsched.launch.remote import protocol
from hpcsched.launch.remote.host import RemoteHost

MOST_HOSTS = 4096
"""The most hosts that may join in one life of the head (chosen)."""


MOST_NAME = 255
"""The longest name of a host."""


ENDING = "the run is ending"
NOT_JOINABLE = "the run takes no hosts in: it was not started with `run --joinable`"


@dataclass(slots=True)
class Guest:
    """An allocation whose hosts have joined: `names` are those in the run, by their names there."""

    names: dict[str, str]
    peer: bytes


class Guests:
    """Admits hosts of other allocations, and knows when these end.

    Args:
        nodes: all hosts of the run, to which those that are admitted are added.
        say: takes one line that people should see.
        welcome: whether the run takes any in.
    """

    def __init__(self, nodes: dict[str, RemoteHost], say: Callable[[str], None], *, welcome: bool) -> None:
        self._nodes, self._say, self._welcome = nodes, say, welcome
        self._guests: dict[str, Guest] = {}

    def take(self, peer: bytes, message: protocol.Joining, now: float) -> protocol.HeadMessage:
        """The answer to a Joining; what it says of the allocation's end holds from now on."""
        guest = self._guests.get(message.allocation)
        if guest is None or (guest.peer != peer and self._is_gone(guest)):
            if why := self._why_not(message):
                return protocol.SentAway(why)
            guest = self._guests[message.allocation] = self._admit(peer, message)
        elif guest.peer != peer:
            return protocol.SentAway(f"{message.allocation} has joined already")
        left_s = message.left_s
        end = now + max(0.0, left_s) if left_s is not None and isfinite(left_s) else None
        for name in guest.names.values():
            self._nodes[name].end = end
        return protocol.Admitted(tuple(guest.names.values()))

    def _is_gone(self, guest: Guest) -> bool:
        """Whether no host of an allocation is here any more: it may come again (`hpcsched join`, twice)."""
        nodes = [self._nodes[name] for name in guest.names.values()]
        return all(node.why and (node.fenced or node.gone) for node in nodes)

    def _why_not(self, message: protocol.Joining) -> str:
        if not self._welcome:
            return NOT_JOINABLE
        if not message.hosts or len(set(message.hosts)) != len(message.hosts):
            return "it names no hosts, or one twice"
        if any(not name.isprintable() or len(name) > MOST_NAME for name in message.hosts):
            return "a host's name is not one"
        if len(self._nodes) + len(message.hosts) > MOST_HOSTS:
            return f"the run has had {MOST_HOSTS} hosts already"
        return ""

    def _admit(self, peer: bytes, message: protocol.Joining) -> Guest:
        names: dict[str, str] = {}
        for host in message.hosts:
            name, number = host, 2
            while name in self._nodes:  # of the run already, or lost before: a name means one host for good
                name, number = f"{host}-{number}", number + 1
            names[host] = name
            self._nodes[name] = RemoteHost(name, guest=True)
        self._say(f"{message.allocation} joins the run with {_hosts(list(names.values()))}")
        return Guest(names, peer)

    def ends(self) -> Mapping[str, float | None]:
        """When each host that has joined ends, by the monotonic clock (None: not known)."""
        return {node.name: node.end for node in self._nodes.values() if node.guest and node.up}


def _hosts(names: list[str]) -> str:
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    return f"host{'s' * (len(names) > 1)} {shown}"
