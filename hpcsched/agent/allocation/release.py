"""Hosts are given back to the batch system: it is asked in a thread, and its answer is an event."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol

from hpcsched.batch.base import Allocation, BatchSystem
from hpcsched.core import events as ev
from hpcsched.errors import BatchError
from hpcsched.threads import started

KEPT_WITHIN_S = 600.0
"""Time that states in the memory of a host may take to disk before it stays after all (chosen)."""


class Nodes(Protocol):
    """The node agents, as far as their hosts are given back (`launch.remote.launcher`)."""

    def keeps(self, host: str) -> bool:
        """Whether the newest state of a job is still in a host's memory alone."""

    def releasing(self, hosts: Sequence[str]) -> None:
        """From now on the end of their node agents is no loss."""

    def released(self, hosts: Sequence[str]) -> None:
        """They are gone for good."""

    def guests_among(self, hosts: Sequence[str]) -> tuple[str, ...]:
        """Those of these hosts that have joined from other allocations."""

    def stay(self, hosts: Sequence[str]) -> None:
        """They are hosts like others again; those whose node agents have ended meanwhile are lost."""


@dataclass(frozen=True, slots=True)
class _Answer:
    hosts: tuple[str, ...]
    error: str = ""


def release_after_s(
    asked_s: float | None,
    batch: BatchSystem,
    allocation: Allocation,
    speed: float,
    tell: Callable[[str], None],
    *,
    joinable: bool = False,
) -> float | None:
    """After how many seconds of the run's clock a host that nothing can use is given back; None: never.

    Args:
        asked_s: the same in real seconds, as the user wants it.
        speed: seconds of the run's clock in a real one.
        tell: takes a line on why none is.
        joinable: hosts of other allocations may join; these can leave whatever this batch system does.
    """
    if asked_s is None:
        return None
    if joinable:
        return asked_s * speed
    why = "" if batch.takes_back else "no batch system here takes hosts back"
    if not why and len(allocation.hosts) == 1:
        why = "this allocation has one host alone"
    if why:
        tell(f"--release-idle-nodes: {why}: none is given back")
        return None
    return asked_s * speed


class HostReleases:
    """Gives hosts back, those first of whose memory nothing is needed any more."""

    def __init__(self, batch: BatchSystem, nodes: Nodes, *, tell: Callable[[str], None]) -> None:
        self._batch, self._nodes, self._tell = batch, nodes, tell
        self._waiting: list[tuple[tuple[str, ...], float]] = []
        """Hosts whose memory is still needed, and until when that is waited for."""
        self._answers: SimpleQueue[_Answer] = SimpleQueue()
        self._complaints: set[str] = set()

    def begin(self, hosts: tuple[str, ...]) -> None:
        """Give these hosts back; nothing of the run is on them."""
        self._waiting.append((hosts, time.monotonic() + KEPT_WITHIN_S))

    def events(self, at: float) -> Iterator[ev.Event]:
        """What has come of it since the last call; `at`: now, on the run's clock."""
        for entry in list(self._waiting):
            hosts, until = entry
            if not any(map(self._nodes.keeps, hosts)):
                self._waiting.remove(entry)
                yield from self._go(hosts, at)
            elif time.monotonic() > until:
                self._waiting.remove(entry)
                self._answers.put(_Answer(hosts, "states of jobs are still on their way from there to disk"))
        while not self._answers.empty():
            yield self._event(self._answers.get(), at)

    def _go(self, hosts: tuple[str, ...], at: float) -> Iterator[ev.Event]:
        self._nodes.releasing(hosts)
        guests = self._nodes.guests_among(hosts)
        if guests:  # their batch job ends by itself when nothing runs in it any more
            self._nodes.released(guests)
            self._tell(f"{_named(guests)} left the run")
            yield ev.HostsReleased(at=at, hosts=guests)
        if ours := tuple(host for host in hosts if host not in guests):
            try:
                started(self._ask, "release", ours)
            except OSError as error:
                self._answers.put(_Answer(ours, str(error)))

    def _ask(self, hosts: tuple[str, ...]) -> None:
        error = ""
        try:
            self._batch.release(hosts)
        except BatchError as refused:
            error = str(refused)
        except Exception as failed:  # whatever a binding raises: the hosts are used as before
            error = repr(failed)
        self._answers.put(_Answer(hosts, error))

    def _event(self, answer: _Answer, at: float) -> ev.Event:
        hosts, error = answer.hosts, answer.error
        names = _named(hosts)
        if not error:
            self._nodes.released(hosts)
            self._tell(f"nothing is left that could use {names}: given back to {self._batch.kind}")
            return ev.HostsReleased(at=at, hosts=hosts)
        if error not in self._complaints:
            self._complaints.add(error)
            self._tell(f"{names} cannot be given back: {error}; used as before")
        self._nodes.stay(hosts)
        return ev.ReleaseFailed(at=at, hosts=hosts, error=error)


def _named(hosts: Sequence[str]) -> str:
    return f"host{'s' * (len(hosts) > 1)} {', '.join(hosts)}"
