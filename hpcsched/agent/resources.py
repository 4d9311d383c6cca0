"""The resources of an agent, and the interfaces that it is given."""

from __future__ import annotations

import selectors
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from hpcsched.agent.admission import Admission
from hpcsched.agent.allocation.ending import AllocationEnd
from hpcsched.agent.clock import RunClock
from hpcsched.agent.effects import Effects
from hpcsched.agent.gpu_watch import GpuWatch
from hpcsched.agent.inbox import Inbox
from hpcsched.agent.shared_use import SharedUseMeter
from hpcsched.agent.staying import Staying
from hpcsched.core import events as ev
from hpcsched.core.actions import Action
from hpcsched.core.machine import Machine
from hpcsched.core.model import Device, HostCores, JobSpec
from hpcsched.store.journal import Journal
from hpcsched.store.snapshot import SnapshotWriter

if TYPE_CHECKING:
    from hpcsched.agent.allocation.moving import Moving
    from hpcsched.agent.host_changes import HostChanges


class Observer(Protocol):
    """Shows people what happens, as `hpcsched run` does; must not change anything."""

    def event(self, event: ev.Event, actions: Sequence[Action]) -> None:
        """An event was handled and led to these actions."""

    def tick(self, now: float) -> None:
        """The loop has gone round; at most a few times a second."""

    def message(self, text: str, *, about: str = "") -> None:
        """One line that people should see; `about`: the kind of notification that it is worth too."""


class NodeAgents(Protocol):
    """The node agents, as the loop sees them (`launch.remote.launcher`)."""

    def fileno(self) -> int:
        """Readable when a message has come."""

    def pump(self) -> None:
        """Receive and send the messages that are there; never blocks."""

    def drain(self) -> None:
        """Tell them that nothing starts any more; may be called repeatedly."""

    def lost(self) -> Mapping[str, str]:
        """The reason why each lost host was lost, by host."""

    def come(self) -> Sequence[tuple[tuple[Device, ...], tuple[HostCores, ...]]]:
        """The devices and cores of each host that has joined since this was last called."""

    def ends(self) -> Mapping[str, float | None]:
        """When each host that has joined ends, by the monotonic clock; None: it is not known."""


FindJobs = Callable[[Machine], Sequence[JobSpec]]
"""Gives the jobs to add to a run; called whenever a job has ended. Raises HpcschedError when the run is to
stop."""


@dataclass(kw_only=True)
class Resources:
    """The resources of an agent; the caller that made them closes them.

    `hosts` are there where node agents run the jobs, `source` where jobs lead to others. `ends_by` and
    `signals_all`: see `Allocation`. `must_lead` raises Superseded where another agent has taken the run over.
    `alongside` is called each round, with the time on the run's clock.
    """

    machine: Machine
    journal: Journal
    effects: Effects
    inbox: Inbox
    snapshot: SnapshotWriter
    gpu_watch: GpuWatch
    shared_use: SharedUseMeter
    clock: RunClock
    selector: selectors.BaseSelector
    observer: Observer
    admission: Admission
    ending: AllocationEnd
    staying: Staying
    ends_by: frozenset[signal.Signals] = frozenset({signal.SIGTERM})
    signals_all: frozenset[signal.Signals] = frozenset()
    hosts: NodeAgents | None = None
    host_changes: HostChanges | None = None
    moving: Moving | None = None
    must_lead: Callable[[], None] = lambda: None
    source: FindJobs | None = None
    alongside: Sequence[Callable[[float], None]] = ()
