"""The attempts that run: their processes, and what their programs report through files."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from hpcsched.agent.clock import RunClock, monotonic
from hpcsched.agent.followed import Followed
from hpcsched.agent.progress import ProgressMeter
from hpcsched.agent.rendezvous_check import RendezvousCheck
from hpcsched.agent.self_saving import SelfSaving
from hpcsched.contract import files, words
from hpcsched.contract.codec import SMALL_BYTES
from hpcsched.contract.exits import SUSPENDED
from hpcsched.contract.orders import Forget, Resize
from hpcsched.contract.state import State
from hpcsched.contract.words import Held, Ready, refusal
from hpcsched.core.exits import said_exit
from hpcsched.core.model import Progress
from hpcsched.decoding import read_file
from hpcsched.errors import BadInput, LaunchError
from hpcsched.launch.base import Workers, attempt_code
from hpcsched.patience import PATIENCE_S, passes

FAILED_GROUP_GRACE_S = 5.0
"""Time from the failure of one rank to SIGKILL for the others (chosen)."""

READY_FAST_POLL_FOR_S = 10.0
"""Time after a launch in which the ready file is polled often, so that no promotion waits for it (chosen)."""


def read_record(folder: Path, data: bytes | None = None) -> State | None:
    """A job's STATE.json (or `data`, where that is newer); None if there is none.

    Raises BadInput if it cannot be decoded, OSError where it can perhaps be read soon.
    """
    try:
        data = read_file(folder / files.STATE, most_bytes=SMALL_BYTES) if data is None else data
    except OSError as error:
        if passes(error):
            raise
        return None
    return State.decode(data)


def remove_attempt_files(folder: Path, attempt: int, *, held: bool = True) -> None:
    """Remove the files of an attempt's number from a job's folder: the number may have been given before.

    A journal that lost its tail gives a number again, and so does a resize that failed. `held` False: leave
    the file that says that a keeper is at work. Raises OSError.
    """
    for name in (files.ready, files.refused, files.unusable, *([files.held] if held else [])):
        (folder / name(attempt)).unlink(missing_ok=True)


@dataclass(slots=True)
class Resizing:
    """A resize in place under way.

    `attempt`, `ranks` and `gpus` (in rank order; none on CPU cores) are those after it. `joining`: the ranks
    that join, None if there are none (any more). `done`: the report of rank 0 when it is done. `failed`: why
    it failed; `refused`: rank 0 did not agree. `given_up`: the job is to do something else by now.
    """

    attempt: int
    gpus: tuple[int, ...]
    ranks: int
    joining: Workers | None
    began: float = field(default_factory=monotonic)
    failed: str = ""
    refused: bool = False
    done: Ready | None = None
    given_up: bool = False


@dataclass(slots=True)
class WatchedAttempt:
    """The processes of an attempt: those of its launch, rank 0 among them, then those that joined later."""

    job_id: int
    attempt: int
    workers: Workers
    gpus: tuple[int, ...]
    ranks: int
    folder: Path
    output: Path
    measured: bool
    """Whether its throughput and its costs are its own: a stand-in only follows a profile."""
    taken_over: bool = False
    """Whether another agent has launched it: nobody here knows when."""
    self_saving: SelfSaving | None = None
    """What is seen of it, if its program saves by itself."""
    followed: Followed | None = None
    """What is seen of its steps, if its program does not save by itself and the job file says how."""
    rendezvous: RendezvousCheck | None = None
    """The check that its ranks have met, where that can be seen."""
    checkpoints: Path | None = None
    meter: ProgressMeter | None = None
    watched: set[int] = field(default_factory=set)
    joined: list[Workers] = field(default_factory=list)
    resizing: Resizing | None = None
    ended: list[Workers] = field(default_factory=list)
    """Groups that were to join and have ended; their descriptors are still open."""
    ready: bool = False
    began: float = field(default_factory=monotonic)
    asked_to_save: float | None = None
    asked_to_leave: float | None = None
    """When it was asked to leave, or killed, first."""
    kill_at: float | None = None
    over: int | LaunchError | None = None
    """How it has ended, for all of its groups; its GPUs may still be in use by what was killed."""
    over_at: float = 0.0
    """When that was."""
    unreadable: str = ""
    """Why the newest STATE.json cannot be read; "" if it can, or there is none."""
    last_record: State | None = None
    """What STATE.json said at the last look, once it is over."""
    _unread_since: float | None = None
    """When STATE.json could first not be read, of an attempt that is over."""
    _record_seen: int | bytes = 0
    _codes: dict[int, int] = field(default_factory=dict)
    """Exit codes of the groups that have ended, by id()."""
    _failed: list[int] = field(default_factory=list)
    """The groups in which a rank has failed, by id() and in order of time: later ones were told to end."""
    _failure: LaunchError | None = None

    @property
    def oom(self) -> tuple[str, bool]:
        """How main memory ran out under it ("": it did not), and whether that was its own limit."""
        found = ((group.oom, group.over_limit) for group in self.groups if group.oom)
        return next(found, ("", False))

    @property
    def groups(self) -> list[Workers]:
        """All groups of processes, also the one that joins in a resize that is not done."""
        group = self.resizing.joining if self.resizing else None
        return [self.workers, *self.joined, *([group] if group else [])]

    @property
    def held_gpus(self) -> set[int]:
        """The GPUs that it has, and in a resize also those that it is to have."""
        return {*self.gpus, *(self.resizing.gpus if self.resizing else ())}

    def left(self) -> int:
        """How many processes have not ended yet that were killed as their rank had."""
        return sum(group.left() for group in self.groups)

    @property
    def written_folders(self) -> list[Path]:
        """The directories that its program writes to by the contract."""
        return [self.folder, self.output.parent, *([self.checkpoints] if self.checkpoints else [])]

    def news_expected(self, now: float) -> bool:
        """Whether a report of its program is likely to come at any moment."""
        if self.over is not None:
            return self.self_saving is not None or self.followed is not None  # a last look
        if self.self_saving is not None and self.self_saving.settles:
            return True
        return self.resizing is not None or (not self.ready and now < self.began + READY_FAST_POLL_FOR_S)

    def send(self, sig: signal.Signals) -> None:
        """Send a signal to all its processes."""
        for group in self.groups:
            group.signal(sig)

    def ask_to_save(self, within_s: float) -> None:
        """Have it save and end in the way that its program understands; SIGTERM if it has not said any."""
        if self.self_saving and not self.ready:
            self.self_saving.ask(within_s)
        else:
            self.send(signal.SIGTSTP if self.ready else signal.SIGTERM)

    # -- how it ends -----------------------------------------------------------------------------------

    def looked(self) -> bool:
        """Whether there was a last look at what it leaves, now that it is over."""
        if self.self_saving:
            if not self.self_saving.looked(self.over if isinstance(self.over, int) else 1):
                return False
        elif self.followed is not None and not self.followed.looked():
            return False
        try:
            self.last_record = self.record()
        except OSError:
            self._unread_since = self._unread_since or time.monotonic()
            if time.monotonic() < self._unread_since + PATIENCE_S:
                return False
            with contextlib.suppress(BadInput):
                self.last_record = State.decode(self.workers.record) if self.workers.record else None
        return True

    def reap(self) -> int | None:
        """The exit code of all processes; None while one lives.

        Once a rank has failed, the others get SIGTERM and then SIGKILL: they would wait for it for ever.
        Raises LaunchError, once nothing lives, if not all could be started.
        """
        self._look_if_done()
        members = self._members
        for group in members:
            if id(group) not in self._codes:
                try:
                    code = group.reap()
                except LaunchError as error:
                    code, self._failure = 1, self._failure or error
                if code is not None:
                    self._codes[id(group)] = code
        self._reap_joining()
        over = len(self._codes) == len(members)
        for group in members:
            failed = group.failed_early() or self._codes.get(id(group), 0) not in (0, SUSPENDED)
            if failed and id(group) not in self._failed:
                self._failed.append(id(group))
        joining = self.resizing.joining if self.resizing and not self.resizing.done else None
        if over and joining:
            self._fail("it ended first")  # nobody is left to let them in
        elif not over and self.kill_at is None and self._failed and not self._saving_by_itself:
            self.send(signal.SIGTERM)
            self.kill_at = time.monotonic() + FAILED_GROUP_GRACE_S
        if not over or joining:
            return None
        if self._failure is not None:
            raise self._failure
        first = [self._codes[group] for group in self._failed]
        return attempt_code([*first, *self._codes.values()])

    def ends(self) -> bool:
        """Whether it is over: then `over` says how, and `over_at` when."""
        try:
            self.over = self.reap()
        except LaunchError as error:
            self.over = error
        if self.over is not None:
            self.over_at = time.monotonic() - min(group.told_after_s for group in self.groups)
        return self.over is not None

    @property
    def _saving_by_itself(self) -> bool:
        """Whether its ranks save and leave by themselves, with whatever exit codes, each in its own time."""
        return self.self_saving is not None and self.self_saving.asked_at is not None

    @property
    def _members(self) -> list[Workers]:
        """The groups that train together, or have done so."""
        resizing = self.resizing
        new = [resizing.joining] if resizing and resizing.done and resizing.joining else []
        return [self.workers, *self.joined, *new]

    def _look_if_done(self) -> None:
        """Note whether rank 0 has let the joining ranks in: from then on they are members."""
        resizing = self.resizing
        if resizing and not resizing.done and not resizing.failed:
            word = self._read(files.ready(resizing.attempt), self.workers.ready)
            resizing.done = None if word is None else read_ready(word)

    def _reap_joining(self) -> None:
        resizing = self.resizing
        if resizing is None or resizing.joining is None or resizing.done:
            return
        try:
            code = resizing.joining.reap()
        except LaunchError as error:
            code, resizing.failed = 1, resizing.failed or str(error)
        if code is not None:
            self.ended.append(resizing.joining)
            resizing.joining = None
            self._fail(f"a joining rank ended with {said_exit(code)}")
        elif resizing.joining.failed_early():
            self._fail("a joining rank failed")

    def close(self) -> None:
        """Close the descriptors; ends no process."""
        for group in (*self.groups, *self.ended):
            group.close()

    # -- resizing in place -----------------------------------------------------------------------------

    def resize(self, resizing: Resizing, order: Resize) -> None:
        """Send rank 0 the order to let ranks join, or leave."""
        self.resizing = resizing
        self.workers.expect(resizing.attempt)
        self.workers.tell(order)

    def give_up_resizing(self, sig: signal.Signals) -> None:
        """Give a resize up, as the job is to do something else; ranks that have not joined get `sig`."""
        if self.resizing:
            self.resizing.given_up = True
            self.workers.tell(Forget(self.resizing.attempt))
            if self.resizing.joining:
                self.resizing.joining.signal(sig)

    def resized(self, free: Callable[[set[int]], bool] = lambda gpus: True) -> Ready | Resizing | None:
        """The end of the resize: the report of rank 0, or the Resizing that failed; None while it goes on.

        It is done when the leaving ranks have ended, and their GPUs are `free`; it has failed when the
        joining ranks have ended.
        """
        resizing = self.resizing
        if resizing is None or resizing.given_up:
            return None
        self._look_if_done()
        if resizing.done is not None:
            if sum(group.living for group in self.groups) > resizing.ranks:
                return None
            if not free(set(self.gpus) - set(resizing.gpus)):
                return None
            self._adopt(resizing)
            return resizing.done
        if why := self._read(files.refused(resizing.attempt), self.workers.refused):
            resizing.refused = True
            self._fail(refusal(why))
        if resizing.failed and resizing.joining is None:
            self.resizing = None
            return resizing
        return None

    def _fail(self, why: str) -> None:
        assert self.resizing is not None
        if not self.resizing.failed:
            self.resizing.failed = why
            self.workers.tell(Forget(self.resizing.attempt))
        if self.resizing.joining:
            self.resizing.joining.signal(signal.SIGKILL)  # they have nothing to save

    def _adopt(self, resizing: Resizing) -> None:
        if resizing.joining:
            self.joined.append(resizing.joining)
        self.attempt, self.resizing = resizing.attempt, None
        self.gpus, self.ranks = resizing.gpus, resizing.ranks
        if self.meter:
            self.meter.restart()

    def progress(self, clock: RunClock) -> Progress | None:
        """How far it is; None for one that does not report it."""
        if self.meter is None or (last := self.meter.last) is None:
            return None
        timed = self.measured and not self.meter.repeats
        return Progress(
            job_id=self.job_id,
            attempt=self.attempt,
            step=last.step,
            rate=self.meter.rate,
            # A program may tell any time.
            done_s=max(0.0, min(clock.now(), clock.at_wall(last.t))) if timed else None,
            total=last.total,
            again=self.meter.again,
        )

    # -- what it says ----------------------------------------------------------------------------------

    def ready_report(self) -> Ready | None:
        """The content of the program's ready file; None while it is not ready."""
        data = self._read(files.ready(self.attempt), self.workers.ready)
        return None if data is None else read_ready(data)

    def new_record(self) -> State | None:
        """The record, if there is another one than at the last call."""
        if not self._record_changed():
            return None
        try:
            return self.record()
        except OSError:
            self._record_seen = 0  # once more then
            return None

    def record(self) -> State | None:
        """The newest STATE.json: from the host of rank 0, or the file as seen here; either may be older.
        Raises OSError where it can perhaps be read soon.

        `unreadable` says afterwards why it could not be read, where one was written.
        """
        told = self.workers.record
        found, bad = [], ""
        for data in [None, told] if told else [None]:
            try:
                record = read_record(self.folder, data)
            except BadInput as error:
                bad = str(error)
            else:
                found += [record] if record else []
        self.unreadable = "" if found else bad
        return max(found, key=lambda record: (record.attempt or 0, record.step), default=None)

    def _record_changed(self) -> bool:
        """Whether STATE.json has changed since the last call."""
        seen: int | bytes | None = self.workers.record
        if seen is None:
            try:
                seen = (self.folder / files.STATE).stat().st_mtime_ns
            except OSError:
                return False
        changed = seen != self._record_seen
        self._record_seen = seen
        return changed

    def held_step(self) -> int | None:
        """The step whose state a quick suspend has left in shared memory; None without one."""
        attempts = {self.attempt, self.resizing.attempt if self.resizing else self.attempt}
        for attempt in sorted(attempts, reverse=True):
            data = self._read(files.held(attempt), self.workers.held)
            with contextlib.suppress(BadInput):
                if data is not None:
                    return Held.decode(data).step
        return None

    def _read(self, name: str, told: bytes | None) -> bytes | None:
        if told is not None:
            return told
        try:
            return read_file(self.folder / name, most_bytes=words.MOST_BYTES)
        except OSError:
            return None
        except BadInput:
            return b""  # all that it says is that it is there


def read_ready(data: bytes) -> Ready:
    """A ready file's content; an empty or undecodable file is `Ready()`."""
    try:
        return Ready.decode(data)
    except BadInput:
        return Ready()
