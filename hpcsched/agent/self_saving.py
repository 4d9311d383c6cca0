"""A program that saves by itself: its checkpoints and handlers watched, asked to save, its end judged."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from hpcsched.agent.own_checkpoints import OwnCheckpoints, Saved
from hpcsched.contract.exits import CANNOT_SAVE, SUSPENDED
from hpcsched.core import events as ev
from hpcsched.core.model import Restart
from hpcsched.dialects import Reader, Report
from hpcsched.launch.base import Workers
from hpcsched.threads import started

LOOK_S, SELDOM_S = 1.0, 5.0
"""How often the checkpoints are looked at while they change, and while nothing does (chosen)."""

ASKED_LOOK_S = 0.5
"""How often while the program is asked to leave (chosen)."""

MOST_SHARE = 0.1
"""The largest share of the time that goes into looking (chosen)."""

STARTS_WITHIN_S = 10.0
"""Time after a launch in which a handler may still come (chosen), unless it tells a step before; then the
program is known to have none."""

SAVING_SEEN_S = 2.0
"""The shortest time between two words that it is still saving (chosen), each a record of the journal; a
quarter of its time to leave where that is less."""

LAST_LOOK_S = 10.0
"""Time that the look after its end may take (chosen); a file system that hangs holds nothing up longer."""


SETTLES_WITHIN_S = 10.0
"""Time that a program without a handler goes on after it was asked, so that what it has just saved is whole
(chosen); half of its time to leave where that is less."""

COMMAND_ENDS_WITHIN_S = 10.0
"""Time that a suspend command has to end when its time is over (chosen)."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What was seen of it at the last look, which began at `at`; times are monotonic. `settling`: one of its
    checkpoints is whole if it does not change any more."""

    handles: bool = False
    newest: Saved | None = None
    changed_at: float = float("-inf")
    settling: bool = False
    at: float = field(default=float("-inf"), compare=False)


class SelfSaving:
    """One attempt of a job that saves by itself. A thread of its own looks; all else never waits.

    Args:
        progress: what tells its steps.
        launcher: a launcher starts the program, whose exit code is then the launcher's.
        gone: it was to go on from a checkpoint that is not there any more.
    """

    def __init__(
        self,
        restart: Restart,
        checkpoints: OwnCheckpoints,
        workers: Workers,
        progress: Reader | None = None,
        *,
        launcher: bool = False,
        gone: bool = False,
    ) -> None:
        self._restart, self._checkpoints, self._workers = restart, checkpoints, workers
        self._signal = signal.Signals[restart.signal] if restart.signal else None
        self._progress, self._launcher, self._gone = progress, launcher, gone
        self.report: Report | None = None
        """The newest step that was seen."""
        self._trains_at: float | None = None
        """When it was first known to have told a step."""
        self._began, self._wake = time.monotonic(), threading.Event()
        self.seen = Seen(newest=checkpoints.newest)
        self.asked_at: float | None = None
        """When it was asked to save and to end, first."""
        self.told = False
        """Whether a signal was sent for that, or a command started."""
        self._caught = False
        """Whether it caught that."""
        self._grace_s = 0.0
        """The time that it was given for that."""
        self._ends_by: float | None = None
        """When it gets SIGTERM at the latest, as it catches nothing."""
        self._before_asked: Saved | None = None
        self._outside: tuple[int, str] | None = None
        """What became of the suspend command, once that is known."""
        self._command_until = float("-inf")
        """When the suspend command is over at the latest."""
        self._told: tuple[bool, int | None, float | None] | None = None
        self._told_saving = float("-inf")
        self._error: Exception | None = None
        """Why a look has failed, the last that did."""
        self._ended: bool | None = None
        self._ended_at = 0.0
        self._done = threading.Event()
        try:
            started(self._watch, "checkpoints")
        except OSError:  # no room for one more
            self._done.set()

    # -- in its own thread -----------------------------------------------------------------------------

    def _watch(self) -> None:
        try:
            period_s = LOOK_S
            while self._ended is None:
                began, before = time.monotonic(), self.seen
                try:
                    self._look(began)
                except Exception as error:  # the next look may see what this one could not
                    self._error, self.seen = error, replace(before, at=began)
                starts = began < self._began + STARTS_WITHIN_S
                period_s = LOOK_S if self.seen != before or starts else min(SELDOM_S, 1.5 * period_s)
                wait_s = period_s if self.asked_at is None else ASKED_LOOK_S
                self._wake.wait(max(wait_s, (time.monotonic() - began) / MOST_SHARE))
                self._wake.clear()
            self._read_progress(over=True)
            now = time.monotonic()
            self._checkpoints.over(now, by_itself=self._ended, ended=time.time() - (now - self._ended_at))
            newest, changed_at = self._checkpoints.newest, self._checkpoints.changed_at
            self.seen = replace(self.seen, newest=newest, changed_at=changed_at)
        except Exception as error:  # told with its end
            self._error = error
        finally:
            self._done.set()

    def _look(self, now: float) -> None:
        self._checkpoints.look(now)
        self._read_progress()
        handles = bool(self._restart.suspend_command) or self._catches()
        found = self._checkpoints
        self.seen = Seen(handles, found.newest, found.changed_at, found.settling, now)

    def _read_progress(self, *, over: bool = False) -> None:
        if self._progress is not None:
            self.report = self._progress.read(time.time(), over=over) or self.report

    # -- on the agent's --------------------------------------------------------------------------------

    def ask(self, within_s: float) -> None:
        """Have it save and end: by its signal if it catches that, else by SIGTERM once what it has just saved
        is whole; or by the command that saves it from outside, within this time. One whose training is done
        is left to end by itself: started again, its framework would do a step more."""
        if self.asked_at is None:
            self.asked_at, self._before_asked = time.monotonic(), self.seen.newest
            self._caught, self._grace_s = self._catches(), within_s
        if self.seen.newest is not None and self.seen.newest.done:
            pass
        elif self._restart.suspend_command:
            self.told = True
            self._command_until = time.monotonic() + within_s + COMMAND_ENDS_WITHIN_S
            self._workers.save_by(self._restart.suspend_command, within_s)
        elif self._caught and self._signal:
            self.told = True
            self._workers.ask_to_save(self._signal)
        else:
            self._ends_by = time.monotonic() + min(SETTLES_WITHIN_S, within_s / 2)
        self.end_asked()
        self._wake.set()

    def _catches(self) -> bool:
        return self._signal is not None and self._workers.catches(self._signal)

    def news(
        self, at: float, now_wall: float, *, job_id: int, attempt: int, speed: float, trains: bool = False
    ) -> Iterator[ev.Event]:
        """What has been seen since the last call. `at`: now, on the run's clock, `now_wall` as Unix time.

        `trains`: it has told a step of this attempt: by then it has the handlers that it is to have.
        """
        seen, now = self.seen, time.monotonic()
        if self._gone:
            self._gone = False
            yield ev.CheckpointSaved(at=at, job_id=job_id, attempt=attempt, step=0)
        if trains and self._trains_at is None:
            self._trains_at = now
        # A look after that sees the handlers that it has.
        trained = self._trains_at is not None and seen.at > self._trains_at
        begun = trained or seen.newest is not None or now >= self._began + STARTS_WITHIN_S
        known = seen.handles or begun
        newest = seen.newest
        saved_at = max(0.0, min(at, at + (newest.saved_at - now_wall) * speed)) if newest else None
        step = newest.step if newest else None
        # The run's clock and ours drift: the same time is told once.
        mark = (seen.handles, step, newest.saved_at if newest else None)
        if newest is None and self._told is not None:  # the only one is being written over
            mark = (seen.handles, *self._told[1:])
        if known and mark != self._told:
            self._told = mark
            yield ev.RestartSeen(
                at=at, job_id=job_id, attempt=attempt, handles=seen.handles, step=step, saved_at=saved_at
            )
        saving = self.asked_at is not None and seen.changed_at > max(self.asked_at, self._told_saving)
        if saving and now >= self._told_saving + min(SAVING_SEEN_S, self._grace_s / 4):
            self._told_saving = now
            yield ev.SavingSeen(at=at, job_id=job_id, attempt=attempt)
        self.end_asked()

    def end_asked(self) -> None:
        """End what catches nothing, once what it has just saved is whole; and what a suspend command has
        saved, or could not save."""
        now, asked = time.monotonic(), self.asked_at or 0.0
        if self._ends_by is not None and (
            now >= self._ends_by or self._done.is_set() or (self.seen.at >= asked and not self.seen.settling)
        ):
            self._ends_by, self._caught = None, self._catches()  # it may have a handler by now
            self.told = self.told or self._ended is None
            self._workers.ask_to_save(self._signal) if self._signal else self._workers.signal(signal.SIGTERM)
        self._look_outside()

    def _look_outside(self) -> None:
        if self._outside is None and (result := self._workers.saved_by) is not None:
            self._outside = result
            if result[0] == 0:
                self._checkpoints.saved_outside()
                self._workers.signal(signal.SIGKILL)  # it must not go on beside what was saved of it
            else:
                self._workers.signal(signal.SIGTERM)
                self._workers.signal(signal.SIGCONT)  # such commands stop what they save

    # -- its end ---------------------------------------------------------------------------------------

    def looked(self, code: int) -> bool:
        """Whether the checkpoints have been looked at since it ended with `code`, or that takes too long.

        A suspend command may end it before it has ended itself.
        """
        self._look_outside()
        if self._outside is None and time.monotonic() < self._command_until:
            return False
        if self._ended is None:
            self._ended, self._ended_at = self._by_itself(code), time.monotonic()
            self._wake.set()
        return self._done.is_set() or time.monotonic() > self._ended_at + LAST_LOOK_S

    def _by_itself(self, code: int) -> bool:
        """Whether it has ended when it wanted to, so that what it saved is whole."""
        if self.outside or code in (SUSPENDED, *self._restart.saved_codes):
            return True
        if self.asked_at is None or self.settles:
            return code == 0
        if not self._caught:  # SIGTERM has ended it, whatever a shell around it says
            return False
        return code in (0, 128 + (self._signal or 0)) or (self._launcher and code < 128)

    def code(self, code: int, *, unasked: bool, done: bool) -> int:
        """Its exit code in the words of the contract: 75 if it has saved and left.

        So it has if it caught the order to, and a newer checkpoint is there, whatever its code. `unasked`: it
        had ended before it was asked. `done`: it has done all its steps.
        """
        if self._outside is not None:
            return SUSPENDED if self.outside else CANNOT_SAVE
        newest = self.seen.newest
        newer = newest is not None and newest != self._before_asked
        saved = self._caught and not unasked and newer and not (code == 0 and done)
        return SUSPENDED if saved or code in self._restart.saved_codes else code

    def done(self, code: int) -> bool:
        """Whether it has ended because all was done, and not as it was asked to: that was not sent yet, as it
        had just saved, or its newest checkpoint says so."""
        return code == 0 and (not self.told or (self.seen.newest is not None and self.seen.newest.done))

    def saved_step(self, progress: int | None, *, record: int | None) -> int | None:
        """The step of what it has saved; None: nothing, or nothing says which.

        From outside it is saved where it was, by its `progress`. `record`: the step of its STATE.json, if it
        has written one.
        """
        if self.outside:
            return progress or 0
        newest = self.seen.newest
        return newest.step if newest and newest.step is not None else record

    @property
    def not_taken(self) -> str:
        """Which of its checkpoints does not count though it is the newest, and why; "" for none."""
        return self._checkpoints.not_taken if self._done.is_set() else ""

    @property
    def detail(self) -> str:
        """Why it could not be saved from outside, or be watched; "" if nothing is known."""
        if self._outside is None or self._outside[0] == 0:
            return f"its checkpoints could not be looked at: {self._error}" if self._error else ""
        code, words = self._outside
        return f"suspend_command ended with exit code {code}{f': {words}' if words else ''}"

    @property
    def settles(self) -> bool:
        """Whether it was asked to end, and gets SIGTERM once what it has just saved is whole."""
        return self._ends_by is not None

    @property
    def outside(self) -> bool:
        """Whether it was saved from outside."""
        return self._outside is not None and self._outside[0] == 0
