"""Hosts that are lost, that join the run, and whose ends move, as events."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

from hpcsched.agent.clock import RunClock
from hpcsched.agent.gpu_watch import prohibited
from hpcsched.agent.resources import NodeAgents
from hpcsched.core import events as ev
from hpcsched.core.machine import Machine
from hpcsched.core.mechanisms.cpu.mechanism import Cpu
from hpcsched.core.model import Device

MOVED_S = 2.0
"""The end of a host that differs by less has not moved: messages take their time (chosen)."""


class HostChanges:
    """What becomes of the hosts of a run over several.

    Args:
        remote: the node agents.
        profiles: what is known of the run's models on devices that come, as events at a time.
    """

    def __init__(
        self,
        remote: NodeAgents,
        machine: Machine,
        clock: RunClock,
        profiles: Callable[[Sequence[Device], float], Sequence[ev.Event]],
    ) -> None:
        self._remote, self._machine, self._clock, self._profiles = remote, machine, clock, profiles
        self._lost: set[str] = set()

    def lost(self) -> list[ev.Event]:
        """The loss of what hosts had that are lost since the last call; it has been told already."""
        lost = self._remote.lost()
        if len(lost) == len(self._lost):
            return []
        known = {*self._lost, *self._machine.hosts.leaving}  # those first have to be back
        new = [host for host in lost if host not in known]
        self._lost.update(new)
        at, devices = self._clock.now(), self._machine.ledger.devices.values()
        cores = [host for host in self._machine.mechanism(Cpu).cores.hosts if host in new]
        return [
            *(ev.DeviceLost(at=at, gpu=d.index, why=lost[d.host]) for d in devices if d.host in new),
            *(ev.CoresLost(at=at, host=host, why=lost[host]) for host in cores),
        ]

    def events(self) -> list[ev.Event]:
        """The hosts that have come since the last call, and those whose end has moved."""
        ends = {host: self._clock.at_monotonic(end) for host, end in self._remote.ends().items()}
        at, events = self._clock.now(), list[ev.Event]()
        for devices, cores in self._remote.come():
            names = dict.fromkeys([*(one.host for one in devices), *(one.host for one in cores)])
            known = {host: end for host in names if (end := ends.pop(host, None)) is not None}
            events += self._profiles(devices, at)
            events.append(ev.HostsJoined(at=at, devices=devices, cores=cores, ends=known))
            events += prohibited(devices, at)
        hosts = self._machine.hosts
        for host, end in ends.items():
            known_end = hosts.end_of(host)
            if host in hosts.leaving or (end is None and known_end is None):
                continue
            moved_s = abs(end - known_end) if end is not None and known_end is not None else inf
            if moved_s > MOVED_S * self._clock.speed:
                events.append(ev.HostEndMoved(at=at, host=host, end=end))
        return events
