"""A run that outlasts the allocation of its agent: who leads it next (ADR 58)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from hpcsched.agent.allocation.ending import MOVED_S, AllocationEnd
from hpcsched.agent.clock import RunClock
from hpcsched.core import events as ev
from hpcsched.core.machine import Machine

LONGER_S = 30.0
"""Time by which another allocation has to last longer than this one for the run to move there (chosen)."""

LEAVE_S, LEAVE_PART = 5.0, 1 / 6
"""Time before the end of its allocation at which the agent leaves, whatever still runs in it: at most so many
seconds, and so much of the time that is kept for saving (chosen)."""


class NodeAgents(Protocol):
    """The node agents, as far as their allocations end (`launch.remote.launcher`)."""

    def ends(self) -> Mapping[str, float | None]:
        """When each host that has joined ends, by the monotonic clock; None: it is not known."""

    def lent_by(self, token: str) -> Sequence[str]:
        """The hosts of the `hpcsched join` with this token ("": of the agent's own allocation)."""

    def end_of(self, host: str) -> float | None:
        """When such a host ends, or would have: it may have left the run."""

    def is_up(self, host: str) -> bool:
        """Whether a host is in the run."""

    def ends_with_us(self, hosts: Sequence[str]) -> None:
        """These hosts end with the agent's allocation: the batch system is not asked to take them back."""


class Moving:
    """Compares the end of the agent's own allocation with those of the hosts that have joined.

    While others last longer, the run's end is theirs, and the agent's own hosts have an end of their own,
    like those that have joined: their jobs go on elsewhere, and the agent leaves the run to one in another
    allocation.

    Args:
        token: that of the `hpcsched join` whose allocation the agent is in; "": it has hosts of its own.
        lent: the hosts that this `join` had in the run when the agent began.
        tell: shows a line to people.
    """

    def __init__(
        self,
        remote: NodeAgents,
        machine: Machine,
        clock: RunClock,
        ending: AllocationEnd,
        *,
        token: str,
        lent: Sequence[str] = (),
        tell: Callable[[str], None],
    ) -> None:
        self._remote, self._machine, self._clock, self._ending = remote, machine, clock, ending
        self._token, self._lent, self._tell = token, lent, tell
        self._leaves_by: float | None = None
        """When the agent's hosts are to be empty, on the run's clock, as this allocation is being ended."""
        self._were_up = bool(lent)

    @property
    def for_a_join(self) -> bool:
        """Whether the agent was started by a `hpcsched join`, which hears of the end of its allocation."""
        return bool(self._token)

    @property
    def _own(self) -> Sequence[str]:
        return self._remote.lent_by(self._token) or self._lent

    def _own_end(self) -> float | None:
        """The end of the agent's allocation, on the run's clock."""
        if self._token:
            own = (self._remote.end_of(host) for host in self._own)
            return self._clock.at_monotonic(min((end for end in own if end is not None), default=None))
        # While it is asked what a signal means, nothing begins here.
        possible = (self._ending.at, self._ending.told_end, self._leaves_by)
        return min((end for end in possible if end is not None), default=None)

    def _ends(self) -> dict[str, float | None]:
        """When each host that has joined ends, on the run's clock."""
        return {host: self._clock.at_monotonic(end) for host, end in self._remote.ends().items()}

    def _outlasting(self) -> tuple[float | None, list[float | None]]:
        """The end of this allocation, and those of others that last longer."""
        ends, own, hosts = self._ends(), self._own, self._machine.hosts
        mine = self._own_end()
        if mine is None:
            return None, []
        others = [
            end
            for host, end in ends.items()
            if host not in own and host not in hosts.closing and host not in hosts.leaving
        ]
        return mine, [end for end in others if end is None or end > mine + LONGER_S * self._clock.speed]

    def instead(self, events: Sequence[ev.Event]) -> list[ev.Event]:
        """The events of the end of this allocation, less those that others than its hosts need not know."""
        if not events or self._token or self._machine.deadline.draining or not self._outlasting()[1]:
            return list(events)
        kept = list[ev.Event]()
        for event in events:
            if isinstance(event, ev.DrainRequested):
                margin_s = self._machine.deadline.margin_s()
                by = self._clock.now() + margin_s
                self._leaves_by = by if self._leaves_by is None else min(self._leaves_by, by)
                self._tell("other allocations of the run go on: its jobs here go there")
            elif not isinstance(event, ev.DeadlineMoved):
                kept.append(event)
        return kept

    def events(self) -> list[ev.Event]:
        """What has changed of the end of the run, and of the hosts in this allocation."""
        machine, now = self._machine, self._clock.now()
        if machine.deadline.draining:
            return []
        mine, others = self._outlasting()
        end = mine
        if others:
            end = None if None in others else max(one for one in others if one is not None)
        events: list[ev.Event] = []
        if (mine is not None or self._token) and self._differ(machine.deadline.at, end):
            events.append(ev.DeadlineMoved(at=now, deadline=end))
        if self._token:
            return events
        for host in self._own:
            own_end = mine if others else None
            if self._remote.is_up(host) and self._differ(machine.hosts.end_of(host), own_end):
                events.append(ev.HostEndMoved(at=now, host=host, end=own_end))
        self._remote.ends_with_us(self._own if others else ())
        return events

    def _differ(self, known: float | None, end: float | None) -> bool:
        if known is None or end is None:
            return known is not end
        return abs(known - end) > MOVED_S * self._clock.speed

    def due(self) -> bool:
        """Whether the agent is to leave the run to another one now: nothing of it is left in its allocation,
        or that is about to end."""
        own = self._own
        up = any(map(self._remote.is_up, own))
        self._were_up |= up
        mine, others = self._outlasting()
        if not others or mine is None or self._machine.deadline.draining:
            return False
        leave_s = min(LEAVE_S * self._clock.speed, LEAVE_PART * self._machine.deadline.reserve_s)
        return (self._were_up and not up) or self._clock.now() > mine - leave_s
