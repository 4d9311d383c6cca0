"""The end of the allocation: from the batch system's answers and signals to events."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from hpcsched.agent.clock import RunClock
from hpcsched.agent.watch import AllocationWatch, EndTime
from hpcsched.batch.base import COMMAND_TIMEOUT_S
from hpcsched.core import events as ev
from hpcsched.core.machine import Machine

KILL_WAIT_S = 25.0
"""After a SIGTERM the batch system kills within about 30 s (Slurm's default KillWait)."""
MOVED_S = 2.0
"""A deadline that differs by less has not moved: clocks drift."""


class Ending:
    """Follows one allocation.

    Args:
        watch: asks the batch system; None without one.
        tell: says a line to people.
        publish: told the Unix time of the deadline when it changes.
    """

    def __init__(
        self,
        machine: Machine,
        clock: RunClock,
        *,
        watch: AllocationWatch | None,
        tell: Callable[[str], None],
        publish: Callable[[float | None], None],
    ) -> None:
        self._machine, self._clock, self._watch = machine, clock, watch
        self._tell, self._publish = tell, publish
        self._answers = True
        self._warning: tuple[str, float] | None = None
        """The signal that waits for the end time to be asked for, and until when it does."""
        self._sure, self._heard = True, False

    @property
    def in_batch(self) -> bool:
        """Whether there is a batch system around us."""
        return self._watch is not None

    def after_a_stop(self, seconds: float) -> list[ev.Event]:
        """All of us were stopped for so long, the run's clock too; the allocation's was perhaps not."""
        known = self._machine.deadline
        if self._watch is None or known is None:
            return []
        self._watch.ask_now()
        return [ev.DeadlineMoved(at=self._clock.now(), deadline=known - seconds * self._clock.speed)]

    def show(self) -> None:
        """Bring the comment beside the job up to date."""
        if self._watch:
            self._watch.comment = one_line(self._machine)

    def events(self) -> list[ev.Event]:
        """What the batch system has said since the last call."""
        answer = self._watch.take() if self._watch else None
        events = [] if answer is None else self._end_time(answer)
        if self._warning and (answer is not None or time.monotonic() > self._warning[1]):
            name, _ = self._warning
            self._warning = None
            if answer is None or answer.error or answer.deadline is None:
                return [*events, *(self._drain(name) if self._sure else [])]
            left_s = answer.deadline - time.time() - self._machine.margin_s() / self._clock.speed
            if left_s > 0:
                self._tell(f"{name} from the batch system; saving begins in {left_s:.0f} s")
        return events

    def warned(self, name: str, *, sure: bool = True) -> list[ev.Event]:
        """The batch system's signal that the end is near. It may be early, so ask how near the end is.

        Without an answer, and without a deadline to go by, saving begins at once; not if it is not `sure`
        that the signal came from there.
        """
        self._heard = self._heard or sure
        if self._machine.draining or self._warning:
            return []
        if self._watch is None or (self._machine.deadline is None and sure):
            return self._drain(name) if sure else []
        self._warning, self._sure = (name, time.monotonic() + COMMAND_TIMEOUT_S + 1.0), sure
        self._watch.ask_now()
        return []

    def told_to_end(self) -> list[ev.Event]:
        """SIGTERM: what is left is the time until the batch system kills.

        At the limit it is the end that was expected; before that somebody has cancelled the batch job.
        """
        now, known = self._clock.now(), self._machine.deadline
        if self._watch is None:
            return [ev.DrainRequested(at=now, cause="SIGTERM")]
        soon = now + KILL_WAIT_S * self._clock.speed
        # Clocks may differ: after a warning the end is near, whatever ours shows.
        at_limit = known is not None and (self._heard or now >= known - MOVED_S * self._clock.speed)
        return [
            ev.DeadlineMoved(at=now, deadline=soon if known is None or at_limit else min(known, soon)),
            ev.DrainRequested(at=now, cause="deadline" if at_limit else "SIGTERM"),
        ]

    def _end_time(self, answer: EndTime) -> list[ev.Event]:
        machine, known = self._machine, self._machine.deadline
        if bool(answer.error) == self._answers:
            self._answers = not answer.error
            last = "no end time is known" if known is None else "going by the end time known last"
            self._tell(f"{answer.error}; {last}" if answer.error else "the batch system answers again")
        if answer.error or machine.draining:
            return []
        deadline = on_run_clock(self._clock, answer.deadline)
        if known is None or deadline is None:
            moved = known is not deadline
        else:
            moved = abs(deadline - known) > MOVED_S * self._clock.speed
        if not moved:
            return []
        self._publish(answer.deadline)
        self._tell(f"the allocation now {ends(answer.deadline)}")
        return [ev.DeadlineMoved(at=self._clock.now(), deadline=deadline)]

    def _drain(self, why: str) -> list[ev.Event]:
        self._tell(f"{why}: saving all jobs, then stopping")
        return [ev.DrainRequested(at=self._clock.now(), cause=why)]


def on_run_clock(clock: RunClock, deadline: float | None) -> float | None:
    """The run's time of a Unix time; not nearer than the time the batch system leaves us at the end."""
    if deadline is None:
        return None
    return max(clock.at_wall(deadline), clock.now() + KILL_WAIT_S * clock.speed)


def ends(deadline: float | None) -> str:
    """When an allocation ends, in words people here understand."""
    if deadline is None:
        return "has no end that is known"
    return f"ends at {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(deadline))}"


def one_line(machine: Machine) -> str:
    """The run in one line, for the batch system's listings."""
    states = Counter("ended" if job.state.final else str(job.state.lower()) for job in machine.jobs.values())
    shown = ("running", "pending", "suspended", "ended")
    parts = [f"{states[state]} {state}" for state in shown if states[state]]
    busy = len(machine.devices) - len(machine.free)
    return f"hpcsched: {', '.join(parts) or 'no jobs'}; {busy}/{len(machine.devices)} GPUs busy"
