"""What a parameter-server job uses: measured in every process, put together by the chief.

The metric collector of NEARCHUS, section IV.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable
from dataclasses import astuple
from statistics import median
from typing import Any

from hpcsched.compat import dataclass, zip
from hpcsched.contract.progress import Usage
from hpcsched.planning.ps.stability import WINDOW_SAMPLES, Stability
from hpcsched.worker.process.contract import say
from hpcsched.worker.ps.cpu_throttle import CpuShare
from hpcsched.worker.ps.link import ServerLink
from hpcsched.worker.ps.roles import WiredPeers

SAMPLE_S, SAMPLE_STEPS = 1.0, 5
"""What a sample spans at least: with fewer steps, where it begins and ends would look like noise."""

SILENT_S = 10.0
"""After which a process that says nothing while others train is missed."""

CHANGED = 0.1
"""By how much a rate or the CPU use has to change to be reported at once."""

PAUSES_S = 5.0, 600.0
"""Between reports in which nothing has changed: twice as long each time."""


@dataclass(frozen=True, slots=True)
class UsageNote:
    """What a process has used so far, at the end of a step: `at_s` by its own clock.

    `windows` are those in which its link was looked at, `busy` those of them in which it was fully used.
    """

    step: int
    at_s: float
    cpu_s: float
    windows: int
    busy: int


class Meter:
    """Leaves a note on the board of all ranks, about once a second, between two steps.

    Args:
        board: a store with the keys of this attempt.
        used_s: CPU seconds of this process so far.
        link: a server's.
    """

    def __init__(
        self,
        board: Any,
        rank: int,
        used_s: Callable[[], float],
        link: ServerLink | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._board, self._rank, self._used_s, self._link, self._clock = board, rank, used_s, link, clock
        self._next = 0.0

    def note(self, step: int) -> bool:
        """A step has ended; whether a note was due."""
        now = self._clock()
        if now < self._next:
            return False
        self._next = now + SAMPLE_S
        if self._link is not None:
            self._link.look(time.time())
        windows, busy = (self._link.windows, self._link.busy_windows) if self._link else (0, 0)
        self._board.set(
            str(self._rank), json.dumps(astuple(UsageNote(step, now, self._used_s(), windows, busy)))
        )
        return True


class UsageCollector:
    """On the chief: makes samples of the notes, and of those what the agent is told.

    Args:
        board: where the notes are.
        attempt: that is measured.
        ranks: how many leave notes.
    """

    def __init__(
        self, board: Any, attempt: int, ranks: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._board, self._attempt, self._keys, self._clock = (
            board,
            attempt,
            list(map(str, range(ranks))),
            clock,
        )
        self._stability = Stability()
        self._from: list[UsageNote] = []
        self._heard: list[tuple[UsageNote | None, float, int | None]] = [(None, clock(), None)] * ranks
        self._missed = False
        self._samples: deque[tuple[list[float], list[tuple[int, int]]]] = deque(maxlen=WINDOW_SAMPLES)
        self._told: tuple[float, ...] = ()
        self._due, self._pause = 0.0, PAUSES_S[0]
        self._usage: Usage | None = None

    def look(self, step: int) -> None:
        """Read the notes, and see what they come to: about once a second, when the chief ends `step`."""
        notes = self._read(step)
        if notes is None:
            return
        if not self._from:
            self._from = notes
            return
        pairs = list(zip(self._from, notes, strict=True))
        if any(b.at_s - a.at_s < SAMPLE_S or b.step - a.step < SAMPLE_STEPS for a, b in pairs):
            return
        self._from = notes
        cpu = [(b.cpu_s - a.cpu_s) / (b.at_s - a.at_s) for a, b in pairs]
        self._samples.append((cpu, [(b.windows - a.windows, b.busy - a.busy) for a, b in pairs]))
        first, last = pairs[0]
        self._stability.add((last.step - first.step) / (last.at_s - first.at_s), sum(cpu))
        self._report()

    def take(self) -> Usage | None:
        """What is to be reported and has not been yet."""
        usage, self._usage = self._usage, None
        return usage

    def _read(self, step: int) -> list[UsageNote] | None:
        """Everybody's note; None if somebody has none, or nothing new for long although we go on."""
        now = self._clock()
        there = self._keys
        if not self._board.check(there):  # all at once, as a rule
            there = [key for key in there if self._board.check([key])]
        texts = dict(zip(there, self._board.multi_get(there), strict=True)) if there else {}
        notes = [UsageNote(*json.loads(texts[key])) if key in texts else None for key in self._keys]
        silent = []
        for rank, (note, (former, heard, since)) in enumerate(zip(notes, self._heard, strict=True)):
            if since is None or note != former:
                self._heard[rank] = note, now, step
            elif now - heard > SILENT_S and step - since > SAMPLE_STEPS:
                silent.append(rank)
        if silent and not self._missed:
            say(f"rank {silent[0]} has measured nothing for {SILENT_S:g} s: no use of resources is reported")
        self._missed = bool(silent)
        if silent:
            self._from, self._stability = [], Stability()
            self._samples.clear()
            return None
        found = [note for note in notes if note is not None]
        return found if len(found) == len(notes) else None

    def _report(self) -> None:
        if len(self._samples) < WINDOW_SAMPLES or not (self._told or self._stability.settled):
            return
        now, medians = self._clock(), self._stability.medians()
        changed = any(abs(new - old) > CHANGED * old for new, old in zip(medians, self._told, strict=False))
        if self._told and not changed and now < self._due:
            return
        first, longest = PAUSES_S
        self._pause = first if changed or not self._told else min(longest, 2 * self._pause)
        self._due, self._told = now + self._pause, medians
        cpus, nets = zip(*self._samples, strict=True)
        self._usage = Usage(
            attempt=self._attempt,
            rate=round(medians[0], 6),
            cpu=tuple(round(median(cpu), 4) for cpu in zip(*cpus, strict=True)),
            net=tuple(round(_busy(windows), 4) for windows in zip(*nets, strict=True)),
            samples=self._stability.samples,
            stable=self._stability.stable,
        )


class UsageReports:
    """A meter in every process, and on the chief what they come to, anew for each attempt.

    Args:
        peers: the ranks.
        cpu_share: knows the CPU seconds of this process.
    """

    def __init__(self, peers: WiredPeers, cpu_share: CpuShare) -> None:
        self._peers, self._cpu_share = peers, cpu_share
        self._attempt = 0
        self._meter: Meter | None = None
        self._collector: UsageCollector | None = None

    def note(self, step: int, attempt: int, link: ServerLink | None) -> None:
        """The step of this number has ended; `link` is a server's."""
        if self._meter is None or self._attempt != attempt:
            self._attempt = attempt
            board, first = self._peers.board(attempt), self._peers.rank == 0
            self._meter = Meter(board, self._peers.rank, lambda: self._cpu_share.used_s, link)
            self._collector = UsageCollector(board, attempt, self._peers.world_size) if first else None
        if self._meter.note(step) and self._collector is not None:
            self._collector.look(step)

    def take(self) -> Usage | None:
        """What is to be reported and has not been yet."""
        return self._collector.take() if self._collector is not None else None


def _busy(windows: tuple[tuple[int, int], ...]) -> float:
    """The share of windows that were busy; 0 where no link is known, which is no bottleneck then."""
    seen = sum(count for count, _ in windows)
    return sum(busy for _, busy in windows) / seen if seen else 0.0
