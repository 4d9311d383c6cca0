"""What an agent does beside its jobs, each round of its loop: it looks, and changes nothing of the run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Protocol

from hpcsched.agent.effects import Effects
from hpcsched.agent.job_use import JobUseRecord, read_processes
from hpcsched.agent.launch_plans import Site
from hpcsched.agent.save_room import SaveRoom, places_of
from hpcsched.core.machine import Machine
from hpcsched.devices.base import Sample
from hpcsched.store.snapshot import SnapshotWriter

Look = Callable[[float], None]
"""Called with the time on the run's clock; never waits, never raises."""


class Tell(Protocol):
    """Shows people a line; `about`: the kind of message that it is worth too. May raise OSError."""

    def __call__(self, text: str, *, about: str = "") -> None: ...


def alongside(
    site: Site,
    effects: Effects,
    machine: Machine,
    snapshot: SnapshotWriter,
    *,
    sample: Callable[[int], Sample | None],
    here: bool,
    tell: Tell,
    closing: ExitStack,
) -> Sequence[Look]:
    """All of it, for this run.

    Args:
        sample: the newest sample of a device.
        here: whether all jobs run on this host.
        tell: shows people a line.
        closing: what has to be closed at the end.
    """

    def say(text: str, about: str) -> None:
        with contextlib.suppress(OSError):  # nobody reads standard error any more
            tell(text, about=about)

    room = SaveRoom(
        lambda: places_of([*machine.run.active.values()], site.checkpoints_of, effects.saved_by_itself),
        publish=lambda disks: setattr(snapshot, "short_disks", disks),
        tell=say,
    )
    if site.stand_ins:
        return []
    processes = read_processes if here else None
    use = JobUseRecord(site.rundir.job_use, machine, sample, processes=processes)
    closing.callback(use.close)
    return [room.look, use.look]
