"""Which of the plans that a training could run by is the fastest: measured in steps that are made anyway.

The plain alternatives of a burst plan are burst plans themselves: every layer on all ranks (data parallel),
and every layer on the first rank. By all of them a training learns the same, so it may go from one to another
at any step boundary.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from statistics import median

import torch

from hpcsched.planning.burst.plan import BurstPlan
from hpcsched.worker.ranks.process_group import Peers
from hpcsched.worker.session.mode_trial import TURN, WARM_UP, ModeTrial

SPREAD, PLANNED, ALONE = "data parallel", "burst plan", "one rank"
"""The names of the alternatives, in the order in which they are tried; of what is alike the first is kept."""

VISIT = WARM_UP + TURN
"""Steps by one plan, until all ranks hear which one is next."""

ROOM = 0.9
"""Of a GPU's memory, what one rank may need for all."""

CHANGED = 1.25
"""So many times longer, or less, than when plans were compared a step takes where much has changed."""

LEAST_LEFT = 10 * VISIT
"""Steps; before the end it does not pay to compare once more."""

SHARE = 0.02
"""Of its time, what a training may lose by comparing plans that it has compared before."""


class StepClock:
    """Seconds of steps: each by itself on a CPU; on a GPU those of a turn together, as it works off later
    what it is told now."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.begin()

    def begin(self) -> None:
        """A turn begins."""
        self._made = self._counted = 0
        self._since = time.perf_counter()
        self._disturbed = False

    def disturbed(self) -> None:
        """Something else has happened since the newest step: how long it took is not known."""
        self._disturbed = True

    def passed(self, *, last: bool) -> list[float]:
        """A step is made, of a turn the last one or not: seconds of each that was not counted yet, as far as
        they are known."""
        if self._disturbed:
            self.begin()
            return []
        self._made += 1
        if self._device.type == "cuda":
            if self._made != WARM_UP and not last:
                return []
            torch.cuda.synchronize(self._device)
        now, steps = time.perf_counter(), self._made - self._counted
        took = [(now - self._since) / steps] * steps
        self._since, self._counted = now, self._made
        return took


class PlanTrial:
    """Has all ranks train by one plan after another, until it is known which is the fastest.

    Args:
        peers: all ranks; each makes its own trial with the same plans, and rank 0 measures.
        plans: by name, in the order of `SPREAD, PLANNED, ALONE`.
        go_over: has this rank go on by another plan.
        decided: called on rank 0 in the end.
    """

    def __init__(
        self,
        peers: Peers,
        plans: Mapping[str, BurstPlan],
        go_over: Callable[[BurstPlan], object],
        decided: Callable[[PlanTrial], object],
    ) -> None:
        self._peers, self.plans, self._go_over, self._decided = peers, plans, go_over, decided
        self._trial = ModeTrial(list(plans), clear=0.0)
        self._clock = StepClock(peers.device)
        self._steps_s: list[float] = []
        self._left = 0
        self.now = ""
        """The plan whose turn it is; in the end the one that is kept."""
        self.over = False

    @property
    def times(self) -> dict[str, float]:
        """Seconds of a step by plan, as far as they are known; on rank 0."""
        return self._trial.times

    @property
    def refused(self) -> dict[str, str]:
        """Plans that were not tried, and why; on rank 0."""
        return self._trial.refused

    def between_steps(self) -> None:
        """Before each step, on all ranks: count the one before; at a turn's end go over to the next plan."""
        if self.now:
            self._steps_s += self._clock.passed(last=self._left == 0)
        if self._left == 0:
            self._next()
        self._left -= 1

    def disturbed(self) -> None:
        """Something else has happened since the newest step: how long it took is not known."""
        self._clock.disturbed()

    def _next(self) -> None:
        if self._steps_s:  # a turn whose steps were all disturbed is made once more
            unknown = [median(self._steps_s)] * (VISIT - len(self._steps_s))
            for seconds in (*unknown, *self._steps_s):
                self._trial.took(self.now, seconds)
            self._steps_s = []
        self._look_at_memory()
        name = self._trial.current if self._peers.rank == 0 else None
        self.now, self.over = self._peers.tell((name or self._trial.best, name is None), tuple[str, bool])
        self._go_over(self.plans[self.now])
        self._left = VISIT
        self._clock.begin()
        if self.over and self._peers.rank == 0:
            self._decided(self)

    def _look_at_memory(self) -> None:
        """Leave out that one rank does all where its GPU may not have the room: as much as all have used."""
        if self._peers.device.type != "cuda" or not self.now or ALONE not in self.plans:
            return
        used = sum(self._peers.gather(torch.cuda.max_memory_allocated(self._peers.device), int))
        most = ROOM * torch.cuda.get_device_properties(self._peers.device).total_memory
        if used > most and ALONE not in self._trial.times:
            self._trial.refused[ALONE] = f"all ranks together have used {used / 2**30:.3g} GiB of memory"


class Pace:
    """How long steps take while nothing is compared, and what comparing would cost."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=VISIT)
        self._last: float | None = None
        self._times: dict[str, float] = {}
        self._decided = time.monotonic()

    def decided(self, times: Mapping[str, float]) -> None:
        """Plans have been compared; seconds of a step by each, the kept one's among them."""
        self._times, self._decided = dict(times), time.monotonic()
        self._recent.clear()
        self._last = None

    def passed(self) -> None:
        """A step begins."""
        now = time.perf_counter()
        if self._last is not None:
            self._recent.append(now - self._last)
        self._last = now

    def disturbed(self) -> None:
        """Something else has happened since the newest step: how long it took is not known."""
        self._last = None

    def due(self, kept: str, steps_left: int) -> bool:
        """Whether the plans should be compared anew: steps take another time, or it costs next to nothing."""
        if kept not in self._times or steps_left < LEAST_LEFT:
            return False
        known = self._times[kept]
        if len(self._recent) == self._recent.maxlen:
            ratio = median(self._recent) / known
            if not 1 / CHANGED <= ratio <= CHANGED:
                return True
        lost_s = sum(VISIT * max(0.0, s - known) + 2 * s for s in self._times.values())
        return lost_s <= SHARE * (time.monotonic() - self._decided)
