"""An attempt's processes, and what its program says through files: all that the agent watches of it."""

from __future__ import annotations

import contextlib
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

from hpcsched.agent.progress import ProgressMeter
from hpcsched.agent.rendezvous_check import Meeting
from hpcsched.contract import files, words
from hpcsched.contract.codec import SMALL_BYTES
from hpcsched.contract.exits import SUSPENDED
from hpcsched.contract.orders import Forget, Resize
from hpcsched.contract.state import State
from hpcsched.contract.words import Held, Ready, refusal
from hpcsched.decoding import read_file
from hpcsched.errors import BadInput, LaunchError
from hpcsched.launch.base import Workers, attempt_code

REST_OF_GROUP_S = 5.0
"""How long the other ranks may live once one has failed, before they are killed."""

READY_SOON_S = 10.0
"""So long after its launch an attempt is looked at often, so that a promotion does not wait for it."""


def read_record(folder: Path, data: bytes | None = None) -> State | None:
    """A job's STATE.json (or `data`, where that is newer), or None if there is none.

    Raises BadInput if it makes no sense.
    """
    try:
        data = read_file(folder / files.STATE, most_bytes=SMALL_BYTES) if data is None else data
    except OSError:
        return None
    return State.decode(data)


def forget_words(folder: Path, attempt: int, *, held: bool = True) -> None:
    """Remove what is in a job's folder under this attempt's number, which may have been given before.

    A journal that lost its tail gives it again, and so does a resize that came to nothing. `held` False: not
    what says that a keeper is at work. Raises OSError.
    """
    for name in (files.ready, files.refused, files.unusable, *([files.held] if held else [])):
        (folder / name(attempt)).unlink(missing_ok=True)


@dataclass(slots=True)
class Resizing:
    """A resize in place under way: into `attempt`, of so many `ranks`, on `gpus` in the order of these (none
    on CPU cores).

    `crew` are the ranks that join, None if there are none (any more). `done` is what rank 0 says when it is;
    `failed` why it came to nothing, as rank 0 has `refused` it or for another reason; `given_up`: something
    else is wanted of the job by now, and nobody asks how this ends.
    """

    attempt: int
    gpus: tuple[int, ...]
    ranks: int
    crew: Workers | None
    began: float = field(default_factory=time.monotonic)
    failed: str = ""
    refused: bool = False
    done: Ready | None = None
    given_up: bool = False


@dataclass(slots=True)
class Attempt:
    """The processes of an attempt: those of its launch, rank 0 among them, then those that joined later."""

    job_id: int
    attempt: int
    workers: Workers
    gpus: tuple[int, ...]
    ranks: int
    folder: Path
    output: Path
    teaches: bool
    """Whether its throughput and its costs are its own: a stand-in only follows a profile."""
    meeting: Meeting | None = None
    """Whether its ranks have met, where that can be seen."""
    checkpoints: Path | None = None
    meter: ProgressMeter | None = None
    watched: set[int] = field(default_factory=set)
    joined: list[Workers] = field(default_factory=list)
    resizing: Resizing | None = None
    ended: list[Workers] = field(default_factory=list)
    """Who was to join and did not: nothing of them lives, but their descriptors are still open."""
    ready: bool = False
    began: float = field(default_factory=time.monotonic)
    asked_to_save: float | None = None
    kill_at: float | None = None
    unreadable: str = ""
    """Why the newest record cannot be read; "" if it can, or there is none."""
    _record_seen: int | bytes = 0
    _codes: dict[int, int] = field(default_factory=dict)
    """Exit codes of the crews that have ended."""
    _failed: list[int] = field(default_factory=list)
    """The crews that a rank has failed in, in order of time: who came later was only told to end."""
    _failure: LaunchError | None = None

    @property
    def crews(self) -> list[Workers]:
        """All processes there may be, also those of a resize that is not done."""
        crew = self.resizing.crew if self.resizing else None
        return [self.workers, *self.joined, *([crew] if crew else [])]

    @property
    def written(self) -> list[Path]:
        """The directories that it writes to by the contract."""
        return [self.folder, self.output.parent, *([self.checkpoints] if self.checkpoints else [])]

    def soon(self, now: float) -> bool:
        """Whether news is likely to come at any moment."""
        return self.resizing is not None or (not self.ready and now < self.began + READY_SOON_S)

    def send(self, sig: signal.Signals) -> None:
        """To all its processes."""
        for crew in self.crews:
            crew.signal(sig)

    # -- how it ends -----------------------------------------------------------------------------------

    def reap(self) -> int | None:
        """None while a process lives; else the exit code of all.

        A rank that has failed takes the others with it, SIGTERM first: they would wait for it for ever.
        Raises LaunchError once nothing lives if not all could be started.
        """
        self._look_if_done()
        members = self._members
        for crew in members:
            if id(crew) not in self._codes:
                try:
                    code = crew.reap()
                except LaunchError as error:
                    code, self._failure = 1, self._failure or error
                if code is not None:
                    self._codes[id(crew)] = code
        self._reap_joining()
        over = len(self._codes) == len(members)
        for crew in members:
            failed = crew.failed_early() or self._codes.get(id(crew), 0) not in (0, SUSPENDED)
            if failed and id(crew) not in self._failed:
                self._failed.append(id(crew))
        joining = self.resizing.crew if self.resizing and not self.resizing.done else None
        if over and joining:
            self._fail("it ended first")  # nobody is left to let them in
        elif not over and self.kill_at is None and self._failed:
            self.send(signal.SIGTERM)
            self.kill_at = time.monotonic() + REST_OF_GROUP_S
        if not over or joining:
            return None
        if self._failure is not None:
            raise self._failure
        first = [self._codes[crew] for crew in self._failed]
        return attempt_code([*first, *self._codes.values()])

    @property
    def _members(self) -> list[Workers]:
        """All who train together, or have done so."""
        resizing = self.resizing
        new = [resizing.crew] if resizing and resizing.done and resizing.crew else []
        return [self.workers, *self.joined, *new]

    def _look_if_done(self) -> None:
        """Whether rank 0 has let in who was to join: from then on they are as good as the others."""
        resizing = self.resizing
        if resizing and not resizing.done and not resizing.failed:
            word = self._read(files.ready(resizing.attempt), self.workers.ready)
            resizing.done = None if word is None else read_word(word)

    def _reap_joining(self) -> None:
        resizing = self.resizing
        if resizing is None or resizing.crew is None or resizing.done:
            return
        try:
            code = resizing.crew.reap()
        except LaunchError as error:
            code, resizing.failed = 1, resizing.failed or str(error)
        if code is not None:
            self.ended.append(resizing.crew)
            resizing.crew = None
            self._fail(f"a joining rank ended with exit code {code}")
        elif resizing.crew.failed_early():
            self._fail("a joining rank failed")

    def close(self) -> None:
        """Close the descriptors; ends no process."""
        for crew in (*self.crews, *self.ended):
            crew.close()

    # -- resizing in place -----------------------------------------------------------------------------

    def resize(self, resizing: Resizing, order: Resize) -> None:
        """Ask rank 0 to let others in, or go."""
        self.resizing = resizing
        self.workers.expect(resizing.attempt)
        self.workers.tell(order)

    def give_up_resizing(self, sig: signal.Signals) -> None:
        """Something else is wanted of the job: who has not joined yet is not needed any more."""
        if self.resizing:
            self.resizing.given_up = True
            self.workers.tell(Forget(self.resizing.attempt))
            if self.resizing.crew:
                self.resizing.crew.signal(sig)

    def resized(self) -> Ready | Resizing | None:
        """How the resize has ended: what rank 0 says, or the one that failed; None while it goes on.

        Done is it when those who were to leave have left; failed, when those who were to join have ended.
        """
        resizing = self.resizing
        if resizing is None or resizing.given_up:
            return None
        self._look_if_done()
        if resizing.done is not None:
            if sum(crew.living for crew in self.crews) > resizing.ranks:
                return None
            self._adopt(resizing)
            return resizing.done
        if why := self._read(files.refused(resizing.attempt), self.workers.refused):
            resizing.refused = True
            self._fail(refusal(why))
        if resizing.failed and resizing.crew is None:
            self.resizing = None
            return resizing
        return None

    def _fail(self, why: str) -> None:
        assert self.resizing is not None
        if not self.resizing.failed:
            self.resizing.failed = why
            self.workers.tell(Forget(self.resizing.attempt))
        if self.resizing.crew:
            self.resizing.crew.signal(signal.SIGKILL)  # they have nothing to save

    def _adopt(self, resizing: Resizing) -> None:
        if resizing.crew:
            self.joined.append(resizing.crew)
        self.attempt, self.resizing = resizing.attempt, None
        self.gpus, self.ranks = resizing.gpus, resizing.ranks
        if self.meter:
            self.meter.restart()

    # -- what it says ----------------------------------------------------------------------------------

    def ready_word(self) -> Ready | None:
        """What the program said when it became ready; None while it is not."""
        data = self._read(files.ready(self.attempt), self.workers.ready)
        return None if data is None else read_word(data)

    def record(self) -> State | None:
        """The newest record: what the host of rank 0 sees may not have reached us yet, or the reverse.

        `unreadable` says afterwards why there is none that could be read, where one was written.
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

    def record_changed(self) -> bool:
        """Whether STATE.json is another one than at the last look."""
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
        """The step whose state a quick suspend has left in shared memory."""
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


def read_word(data: bytes) -> Ready:
    """A ready file's content; an empty one, or one that makes no sense, only says that it is there."""
    try:
        return Ready.decode(data)
    except BadInput:
        return Ready()
