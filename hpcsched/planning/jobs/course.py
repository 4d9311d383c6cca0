"""The course of one attempt of a replayed job: the stand-in program follows it, the simulator predicts by it.

Pure: no clock, no file. Both sides call the same functions, so a simulated and a real replay can
differ only by the time a signal and a process need.
"""

from __future__ import annotations

import math
from dataclasses import replace

from hpcsched.compat import dataclass

STEP_TOLERANCE = 1e-6
"""The part of a step by which an exact step boundary may be missed through rounding, and still counts as one
(chosen)."""

PAUSED_RATE_SHARE = 1e-9
"""The share of its rate that a job has while it pauses: above 0, as a course needs a rate."""


@dataclass(frozen=True, kw_only=True)
class Course:
    """One attempt, in profile seconds after its launch.

    `start_s` goes by before the first step; then steps `from_step`..`steps` are done at `rate` steps
    per second; saving and leaving takes `suspend_s`.

    Raises ValueError for a rate that is not positive, negative costs, or steps that run backwards.
    """

    from_step: int
    steps: int
    rate: float
    start_s: float
    suspend_s: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.rate) and self.rate > 0):
            raise ValueError(f"rate is {self.rate}, not a positive finite number")
        for name, cost in (("start_s", self.start_s), ("suspend_s", self.suspend_s)):
            if not (math.isfinite(cost) and cost >= 0):
                raise ValueError(f"{name} is {cost}, not a finite number of at least 0")
        if not 0 <= self.from_step <= self.steps:
            raise ValueError(f"steps run from {self.from_step} to {self.steps}")

    @property
    def end_s(self) -> float:
        """The time at which all steps are done and the processes are gone."""
        return self.start_s + (self.steps - self.from_step) / self.rate

    def step_at(self, t: float) -> int:
        """Whole steps of the job done `t` seconds after the launch."""
        done = math.floor((t - self.start_s) * self.rate + STEP_TOLERANCE)
        return self.from_step + min(max(done, 0), self.steps - self.from_step)

    def boundary_at(self, t: float) -> tuple[int, float]:
        """(steps done, seconds after launch) at the next step boundary from `t` on, after the start."""
        begun = max(math.ceil((t - self.start_s) * self.rate - STEP_TOLERANCE), 0)
        step = self.from_step + begun
        if step >= self.steps:
            return self.steps, self.end_s
        return step, max(t, self.start_s + begun / self.rate)

    def suspend_at(self, t: float) -> tuple[int, float]:
        """(step saved, seconds after launch when the devices are free) if asked at `t` to save and leave.

        During the start nothing is done yet, and nothing to wait for. Later the current step is
        finished first; when that is the last one, the job completes instead.
        """
        if t < self.start_s:
            return self.from_step, t + self.suspend_s
        step, at = self.boundary_at(t)
        return step, at if step >= self.steps else at + self.suspend_s

    def at_rate(self, t: float, rate: float) -> tuple[Course, float]:
        """The rest of the course from `t` seconds after the launch on, at another rate.

        A course, and its launch in seconds after this one's: the step that has begun is as far as it was.
        """
        since = t - self.start_s
        if since < 0:
            return replace(self, start_s=-since, rate=rate), t
        step = self.step_at(t)
        begun = min(max(0.0, since * self.rate - (step - self.from_step)), 1.0)
        return replace(self, from_step=step, start_s=0.0, rate=rate), t - begun / rate
