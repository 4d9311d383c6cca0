"""The end of the allocation: the batch system's answers and signals, as events."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from hpcsched.agent.allocation.watch import AllocationWatch, EndTimeAnswer
from hpcsched.agent.clock import RunClock
from hpcsched.batch.base import COMMAND_TIMEOUT_S, EndReason
from hpcsched.core import events as ev
from hpcsched.core.machine import Machine
from hpcsched.core.transitions.deadline import FROM_BATCH

DEFAULT_KILL_WAIT_S = 30.0
"""Time from SIGTERM to SIGKILL where the batch system does not say (Slurm's default KillWait)."""

REASON_WAIT_S = 2.0
"""Time after a SIGTERM in which the batch system is to give its reason; then saving begins (chosen)."""

REPEATED_SIGNAL_S = 10.0
"""Two SIGTERMs within this time, to a job that goes on, are no warning but a wish to stop (chosen)."""

MOVED_S = 2.0
"""A deadline that differs by less has not moved: clocks drift (chosen)."""

_WHY = {
    EndReason.LIMIT: "its time is up",
    EndReason.CANCELLED: "it was cancelled",
    EndReason.PREEMPTED: "its hosts are wanted for another job",
    EndReason.REQUEUED: "it was put back into its queue",
    EndReason.NODE_FAIL: "one of its hosts is down",
}


def forced_s(kill_wait_s: float | None) -> float:
    """The part of the time from SIGTERM to SIGKILL that is relied on, in seconds."""
    wait_s = DEFAULT_KILL_WAIT_S if kill_wait_s is None else kill_wait_s
    return max(wait_s / 2, wait_s - max(1.0, wait_s / 6))


class AllocationEnd:
    """Follows the end of one allocation.

    Args:
        watch: asks the batch system; None without one.
        at: its end on the run's clock, as far as it is known; the run's may be another one.
        tell: shows a line to people.
        publish: called with the Unix time of the deadline when it changes.
    """

    def __init__(
        self,
        machine: Machine,
        clock: RunClock,
        *,
        watch: AllocationWatch | None,
        at: float | None,
        tell: Callable[[str], None],
        publish: Callable[[float | None], None],
    ) -> None:
        self._machine, self._clock, self._watch = machine, clock, watch
        self.at, self._tell, self._publish = at, tell, publish
        self._answers = True
        self._warning: tuple[str, float] | None = None
        """The signal that waits for the end time to be asked for, and until when it does."""
        self._sure = True
        self._end_after_stop: tuple[float, float] | None = None
        """After a stop of all processes the end, on the run's clock, if that time counts, and until when the
        batch system may say that it does not."""
        self._stopped_at = float("-inf")
        """When the newest of these stops was noticed, by the monotonic clock: older answers say nothing."""
        self._told: tuple[str, float] | None = None
        """The signal of which the batch system has still to say what it means, and until when it may."""
        self._told_at: float | None = None
        """The run's time of the first signal that ends the job."""
        self._signalled_at = float("-inf")
        """When the newest signal came that may end the job, by the monotonic clock."""
        self._twice = False
        """Whether one more had come shortly before it."""
        self._guessed = False
        """Whether the deadline is our guess, for want of an answer."""

    @property
    def in_batch(self) -> bool:
        """Whether there is a batch system around us."""
        return self._watch is not None

    @property
    def awaits_why(self) -> bool:
        """Whether the batch system may still say what its signal means."""
        return self._told is not None

    def after_a_stop(self, seconds: float) -> list[ev.Event]:
        """All of us were stopped for so long, the run's clock too; the allocation's was perhaps not.

        Only the batch system knows: where saving would begin by that, it is asked first.
        """
        known = self.at
        if self._watch is None or known is None:
            return []
        self._stopped_at = time.monotonic()
        self._watch.ask_now()
        now, speed, at_worst = self._clock.now(), self._clock.speed, known - seconds * self._clock.speed
        if at_worst - self._machine.deadline.margin_s() > now:
            return [self._moved(at_worst)]
        at_worst = max(at_worst, min(known, now + self._forced_s() * speed))  # it is not over: we live
        if self._machine.deadline.draining:
            return [self._moved(at_worst)]
        self._end_after_stop = at_worst, time.monotonic() + COMMAND_TIMEOUT_S + 1.0
        return []

    def show(self) -> None:
        """Bring the comment beside the job up to date."""
        if self._watch:
            self._watch.comment = one_line(self._machine)

    def events(self) -> list[ev.Event]:
        """The events that follow from the batch system's answers since the last call."""
        events: list[ev.Event] = []
        of_end: EndTimeAnswer | None = None
        for answer in self._watch.take() if self._watch else ():
            if answer.of_end and answer.asked_at >= self._stopped_at:
                of_end = answer
                events += self._end_time(answer)
            if answer.reason is not None and not self._stale(answer):
                events += self._reason(answer.reason, answer.deadline)
        events += self._after_a_stop(of_end)
        if self._told and time.monotonic() > self._told[1]:
            events += self._reason(EndReason.UNKNOWN, None)
        if self._warning and (of_end is not None or time.monotonic() > self._warning[1]):
            name, _ = self._warning
            self._warning = None
            if of_end is None or of_end.error or of_end.deadline is None:
                # It does not warn of an end that there is not.
                wish = name == "SIGTERM" and of_end is not None and not of_end.error
                return [*events, *(self._drain(name, wish=wish) if self._sure else [])]
            left_s = of_end.deadline - time.time() - self._machine.deadline.margin_s() / self._clock.speed
            if left_s > 0:
                again = f" (a second within {REPEATED_SIGNAL_S:g} s: at once)" if name == "SIGTERM" else ""
                self._tell(f"{name} from the batch system; saving begins in {left_s:.0f} s{again}")
        return events

    def _after_a_stop(self, of_end: EndTimeAnswer | None) -> list[ev.Event]:
        """Where the batch system does not say when the allocation ends: it is taken to end early."""
        if self._end_after_stop is None:
            return []
        at_worst, until = self._end_after_stop
        if of_end is None and time.monotonic() <= until:
            return []
        self._end_after_stop = None
        if (of_end and not of_end.error) or self._machine.deadline.draining:
            return []
        self._tell(
            "the batch system does not say when the allocation ends now: saving all jobs, then stopping"
        )
        now = self._clock.now()
        return [self._moved(max(now, at_worst)), ev.DrainRequested(at=now, cause="deadline")]

    def _stale(self, answer: EndTimeAnswer) -> bool:
        """Whether it was asked for before the newest signal, and says nothing of that."""
        says_none = answer.reason in (EndReason.NONE, EndReason.UNKNOWN)
        return says_none and answer.asked_at < self._signalled_at

    def warned(self, name: str, *, sure: bool = True) -> list[ev.Event]:
        """The events of the batch system's signal that the end is near; it is asked how near.

        Without an answer, and without a known deadline, saving begins at once, unless the sender is not
        `sure`.
        """
        if self._machine.deadline.draining or self._warning:
            return []
        if self._watch is None or (self.at is None and sure and name != "SIGTERM"):
            return self._drain(name) if sure else []
        self._warning, self._sure = (name, time.monotonic() + COMMAND_TIMEOUT_S + 1.0), sure
        self._watch.ask_now()
        return []

    def told_to_end(self, name: str = "SIGTERM") -> list[ev.Event]:
        """The events of a signal that may end the job: the batch system is asked for its reason."""
        if self._watch is None:
            return []
        now = time.monotonic()
        self._twice, self._signalled_at = now - self._signalled_at < REPEATED_SIGNAL_S, now
        if self._told is None:
            self._told = name, now + min(REASON_WAIT_S, self._forced_s() / 5)
            self._told_at = self._clock.now() if self._told_at is None else self._told_at
        self._watch.ask_why()
        return []

    @property
    def told_end(self) -> float | None:
        """When the allocation is over, on the run's clock, if the signal that has come means that; None: none
        has, or it meant something else."""
        return None if self._told_at is None else self._told_at + self._forced_s() * self._clock.speed

    def _forced_s(self) -> float:
        return forced_s(self._watch.kill_wait_s if self._watch else None)

    def _reason(self, reason: EndReason, end: float | None) -> list[ev.Event]:
        """What follows from why the job ends; `end` is when it will (Unix time), if that was asked too."""
        told, signalled = self._told, self._told_at is not None
        self._told = None
        if reason is EndReason.NONE:
            self._told_at = None
            if told is None:
                return self._cause(reason)
            if self._twice and not self._machine.deadline.draining:
                self._warning = None
                return self._drain(told[0], wish=True)
            return self.warned(told[0])
        if reason is EndReason.UNKNOWN:
            return self._unsaid(*told) if told else []
        return [*self._time_left(end, signalled=signalled), *self._cause(reason)]

    def _unsaid(self, name: str, _: float) -> list[ev.Event]:
        """Save, whatever it was. At the limit it is the end that was expected; else perhaps a wish."""
        now, known = self._clock.now(), self.at
        at_limit = known is not None and now >= known - MOVED_S * self._clock.speed
        signal_at = now if self._told_at is None else self._told_at
        soon = max(now, signal_at + self._forced_s() * self._clock.speed)
        self._guessed = True
        moved = self._moved(soon if known is None or at_limit else min(known, soon))
        if self._machine.deadline.draining:
            return [moved]
        self._tell(f"{name}, and the batch system does not say why: saving all jobs, then stopping")
        return [moved, ev.DrainRequested(at=now, cause="deadline" if at_limit else "SIGTERM")]

    def _time_left(self, end: float | None, *, signalled: bool) -> list[ev.Event]:
        """The deadline of a job that is being ended: the batch system's signal is followed by SIGKILL."""
        now, known = self._clock.now(), self.at
        if signalled:
            signal_at = now if self._told_at is None else self._told_at
        elif end is not None:
            signal_at = max(now, self._clock.at_wall(end))
        else:
            return []
        deadline = signal_at + self._forced_s() * self._clock.speed
        if not signalled and self._machine.deadline.draining and known is not None:
            deadline = min(known, deadline)
        return [self._moved(deadline)]

    def _moved(self, deadline: float | None) -> ev.Event:
        self.at = deadline
        return ev.DeadlineMoved(at=self._clock.now(), deadline=deadline)

    def _cause(self, reason: EndReason) -> list[ev.Event]:
        """Saving begins; or, where it has begun already, it is known now what for."""
        cause = FROM_BATCH + reason
        draining = self._machine.deadline.draining
        if cause == self._machine.deadline.cause or (reason is EndReason.NONE and not draining):
            return []
        if reason is not EndReason.NONE:
            then = "all jobs are being saved already" if draining else "saving all jobs, then stopping"
            self._tell(f"the batch system ends this job ({_WHY[reason]}): {then}")
        return [ev.DrainRequested(at=self._clock.now(), cause=cause)]

    def _end_time(self, answer: EndTimeAnswer) -> list[ev.Event]:
        machine, known = self._machine, self.at
        if bool(answer.error) == self._answers:
            self._answers = not answer.error
            last = "no end time is known" if known is None else "going by the end time known last"
            self._tell(f"{answer.error}; {last}" if answer.error else "the batch system answers again")
        if answer.error or self._told_at is not None or (machine.deadline.draining and not self._guessed):
            return []
        self._guessed = False
        least_s = self._forced_s()
        if known is not None:  # one that comes near is not put off
            least_s = min(least_s, max(0.0, known - self._clock.now()) / self._clock.speed)
        deadline = on_run_clock(self._clock, answer.deadline, least_s)
        if known is None or deadline is None:
            moved = known is not deadline
        else:
            moved = abs(deadline - known) > MOVED_S * self._clock.speed
        if not moved:
            return []
        self._publish(answer.deadline)
        self._tell(f"the allocation now {ends(answer.deadline)}")
        return [self._moved(deadline)]

    def _drain(self, name: str, *, wish: bool = False) -> list[ev.Event]:
        """Saving begins, of a warning or as somebody's `wish`."""
        self._tell(f"{name}: saving all jobs, then stopping")
        # As a warning a SIGTERM is no wish of anybody's.
        cause = FROM_BATCH + EndReason.NONE if name == "SIGTERM" and not wish else name
        return [ev.DrainRequested(at=self._clock.now(), cause=cause)]


def on_run_clock(clock: RunClock, deadline: float | None, least_s: float | None = None) -> float | None:
    """The run's time of a Unix time, at least `least_s` (None: the usual time from SIGTERM) from now."""
    if deadline is None:
        return None
    least_s = forced_s(None) if least_s is None else least_s
    return max(clock.at_wall(deadline), clock.now() + least_s * clock.speed)


def ends(deadline: float | None) -> str:
    """The end of an allocation, in words."""
    if deadline is None:
        return "has no end that is known"
    return f"ends at {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(deadline))}"


def one_line(machine: Machine) -> str:
    """The run in one line, for the batch system's listings."""
    states = Counter[str]()
    for state, number in machine.run.jobs.counts().items():
        states["ended" if state.final else str(state.lower())] += number
    shown = ("running", "pending", "suspended", "ended")
    parts = [f"{states[state]} {state}" for state in shown if states[state]]
    ledger = machine.ledger
    busy, there = len(ledger.devices) - len(ledger.free), len(ledger.devices)
    return f"hpcsched: {', '.join(parts) or 'no jobs'}; {busy}/{there} {ledger.noun}s busy"
