"""What an agent works with, and whom it has to do with."""

from __future__ import annotations

import selectors
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from hpcsched.agent.admission import Admission
from hpcsched.agent.allocation.ending import Ending
from hpcsched.agent.clock import RunClock
from hpcsched.agent.effects import Effects
from hpcsched.agent.inbox import Inbox
from hpcsched.agent.monitor import Monitor
from hpcsched.core import events as ev
from hpcsched.core.actions import Action
from hpcsched.core.machine import Machine
from hpcsched.core.model import JobSpec
from hpcsched.store.journal import Journal
from hpcsched.store.snapshot import SnapshotWriter


class Observer(Protocol):
    """Whoever wants to tell people what happens; must not change anything."""

    def event(self, event: ev.Event, actions: Sequence[Action]) -> None:
        """An event was handled and led to these actions."""

    def tick(self, now: float) -> None:
        """The loop has gone round; at most a few times a second."""

    def message(self, text: str) -> None:
        """Something people should know."""


class RemoteHosts(Protocol):
    """The agent's side of the node agents, for the loop (`launch.remote.launcher`)."""

    def fileno(self) -> int:
        """Readable when a message has come."""

    def pump(self) -> None:
        """Take in and send what there is; never blocks."""

    def lost(self) -> Mapping[str, str]:
        """The hosts that are gone, and why."""


Source = Callable[[Machine], Sequence[JobSpec]]
"""Gives the jobs that a run is to have by now and does not have yet; asked whenever a job has ended. Raises
HpcschedError when there is no sense in going on."""


@dataclass(kw_only=True)
class Resources:
    """What an agent works with; whoever made it closes it.

    `hosts` are there where node agents run the jobs, `source` where jobs lead to others. `ends_by` and
    `signals_all`: see `Allocation`.
    """

    machine: Machine
    journal: Journal
    effects: Effects
    inbox: Inbox
    snapshot: SnapshotWriter
    monitor: Monitor | None
    clock: RunClock
    selector: selectors.BaseSelector
    observer: Observer
    admission: Admission
    ending: Ending
    ends_by: frozenset[signal.Signals] = frozenset({signal.SIGTERM})
    signals_all: frozenset[signal.Signals] = frozenset()
    hosts: RemoteHosts | None = None
    source: Source | None = None
