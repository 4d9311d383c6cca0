"""The progress of a program, from the lines that it writes: `{"step": n, "t": s}`, one a line."""

from __future__ import annotations

import contextlib
import os
from dataclasses import asdict
from math import inf
from typing import Any

from hpcsched.contract.codec import LINE_BYTES, MOST_STEPS
from hpcsched.contract.progress import Line, Scaling, Usage
from hpcsched.dialects import Report
from hpcsched.errors import BadInput

MIN_RATE = 1e-9
"""The lowest throughput that is believed, in steps per second (chosen)."""

MIN_SPAN_S = 1.0
"""The shortest time that a throughput is measured over, in seconds of the run's clock (chosen)."""

MIN_STEPS = 5
"""The fewest steps that a throughput is measured over (chosen)."""

MAX_READS = 4
"""Reads of 64 KiB at a time (chosen): a program that never stops writing must not block the agent."""


class ProgressMeter:
    """Reads one attempt's progress descriptor and measures its throughput.

    The first step reported only starts the clock, when it is last reported: what came before it
    (start-up, the first slow step) is no throughput. `speed` is how many times faster than real time
    the run's clock goes. `again` is how many steps the attempt has lost so far by going back to a checkpoint
    without ending, `last` how far it is.
    """

    def __init__(self, descriptor: int, *, speed: float = 1.0) -> None:
        self._descriptor = descriptor
        self._speed = speed
        self._rest = b""
        self._first: Line | None = None
        self._scaling_told: Scaling | None = None
        self._usage: Usage | None = None
        self._usage_told: Usage | None = None
        self._reports = False
        self._begun = self._farthest = 0
        self.again = self._again_told = 0
        self.last: Line | None = None

    def read(self) -> bool:
        """Read the lines that are there; False when the program has closed its end."""
        for _ in range(MAX_READS):
            try:
                data = os.read(self._descriptor, 65536)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not data:
                return False
            *lines, self._rest = (self._rest + data).split(b"\n")
            # A program that never ends its line must not fill our memory.
            self._rest = self._rest[-LINE_BYTES:]
            for line in lines:
                # What is not a report is no reason to stop listening.
                with contextlib.suppress(BadInput):
                    self._take(Line.decode(line))
                    self._reports = True
        return True

    def seen(self, report: Report | None) -> None:
        """Take what was seen from outside of a program that does not report itself."""
        if report is not None and not self._reports:
            self._take(Line(step=report[0], t=report[1]))

    def begin(self, step: int, *, again: int) -> None:
        """Go on with an attempt that another agent has watched so far."""
        self._begun, self.again, self._again_told = step, again, again

    def restart(self) -> None:
        """Forget what was measured: the program goes on at another speed, as another attempt."""
        self._first, self.again, self._again_told = None, 0, 0

    def _take(self, line: Line) -> None:
        if line.resumed:
            done = self.last.step if self.last else self._begun
            self.again = min(self.again + max(0, done - line.step), MOST_STEPS)
            self._first, self.last = None, line
            return
        if not (self.last.step if self.last else 0) <= line.step:
            return
        if self._first is None or line.step == self._first.step:
            self._first = line
        self.last, self._farthest = line, max(self._farthest, line.step)
        self._usage = line.usage or self._usage

    @property
    def repeats(self) -> bool:
        """Whether it does steps that the attempt had done before."""
        return self.last is not None and self.last.step < self._farthest

    def new_repeats(self) -> bool:
        """Whether it went back since this was last asked."""
        told, self._again_told = self._again_told, self.again
        return told != self.again

    def new_scaling(self) -> Scaling | None:
        """The program's newest forecast for its next epoch; None if it is not new, or not valid."""
        found = self.last.scaling if self.last else None
        if found is None or found == self._scaling_told:
            return None
        self._scaling_told = found
        good = all(gpus >= 1 and MIN_RATE <= rate < inf for gpus, rate in found.rates.items())
        return found if found.rates and good and 0 < found.batch < inf else None

    def new_usage(self, attempt: int) -> dict[str, Any] | None:
        """The newest usage of the processes of this attempt; None if it is not new, or not valid."""
        found = self._usage
        if found is None or found == self._usage_told or found.attempt != attempt:
            return None
        self._usage_told = found
        good = MIN_RATE <= found.rate < inf and len(found.cpu) == len(found.net) and found.samples >= 1
        good = good and all(0 <= cpu < inf for cpu in found.cpu) and all(0 <= net <= 1 for net in found.net)
        facts = asdict(found)
        del facts["attempt"]
        return facts if good else None

    @property
    def rate(self) -> float | None:
        """Steps per second of the run's clock since the first report; None while too little is known."""
        if self._first is None or self.last is None:
            return None
        span_s = (self.last.t - self._first.t) * self._speed
        steps = self.last.step - self._first.step
        if span_s < MIN_SPAN_S or steps < MIN_STEPS:
            return None
        # What a program makes up (t = 1e308) must not become a throughput of 0.
        rate = steps / span_s
        return rate if rate >= MIN_RATE else None
