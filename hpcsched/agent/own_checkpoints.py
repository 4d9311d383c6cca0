"""The checkpoints that a job has saved by itself: which are its own, which are whole, which is the newest.

Whole is one to which the file that is written last has been written; without such a file one that has not
changed for a while, after which another was begun, or whose program has ended by itself; and a file that ends
as archives do. One that may have been in the middle of a write when its program was killed never counts. What
is known outlives the agent in a file in the job's folder.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from hpcsched import dialects
from hpcsched.agent.checkpoint_files import Checkpoint, Last, Mark, ends_as_an_archive, find_checkpoints
from hpcsched.core.model import Restart
from hpcsched.decoding import decode_file
from hpcsched.errors import BadInput, StoreError
from hpcsched.patience import passes, patiently
from hpcsched.store.files import write_atomically

FILE = "checkpoints.json"
"""The name of the file in a job's folder."""

SETTLED_S, SETTLED_FILE_S = 5.0, 2.0
"""Time without a change after which a checkpoint is taken for whole while its program runs (chosen): one that
is a folder, whose files are written one after the other, and one that is a file."""

SURELY_SETTLED = 2.0
"""How many times as old one has to be by its own time when its program is killed (chosen): file servers have
clocks of their own."""

MOST_DOUBTED = 64
"""Checkpoints that are remembered as not whole (chosen), the newest ones."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A whole checkpoint. `step` None: nothing says which. `saved_at`: Unix time. `done`: it is of the last
    step of its training."""

    path: Path
    step: int | None
    saved_at: float
    mark: Mark
    done: bool = False


class _Record(msgspec.Struct):
    """`before_ns`: what is not newer was there before the job began, and is somebody else's; it began at
    `began_s` on the run's clock. `doubted`: what is not whole, by path, and what was there before with a time
    in the future. `newest`: what was known to be whole, last. `outside`: a suspend command has saved the
    program."""

    before_ns: int = 0
    began_s: float = 0.0
    doubted: dict[str, Mark] = {}
    newest: tuple[str, Mark] | None = None
    outside: bool = False


class OwnCheckpoints:
    """The checkpoints of one job. Its calls may wait for a file system.

    Args:
        folder: the job's in the run directory.
        workdir: where its program runs.
        steps: all that it is to make; a greater number in a checkpoint's name is no step.
    """

    def __init__(self, restart: Restart, *, folder: Path, workdir: Path, steps: int | None = None) -> None:
        self._restart, self._workdir, self._steps = restart, workdir, steps
        self._file = folder / FILE
        self._record = _Record()
        self._since: dict[Path, tuple[Mark, float]] = {}
        self._looked = False
        self.newest: Saved | None = None
        """The newest whole one at the last look."""
        self.changed_at = float("-inf")
        """When a look last found one that is new or has changed, on the clock of `look`."""
        self.settling = False
        """Whether the last look found one that is taken for whole if it does not change for a while."""
        self.not_taken = ""
        """Which one does not count though it was the newest as its program ended, and why."""
        self.known = True
        """Whether there is a record of when the job began: else its checkpoints may be anybody's."""
        self.given_up = False
        """Whether nothing is put on record any more: the attempt is not started."""
        try:
            self._record = patiently(lambda: decode_file(self._file, _Record))
        except FileNotFoundError:
            self.known = False
        except (OSError, BadInput) as error:
            if passes(error):
                raise
            # It says nothing, but the job has begun.

    @property
    def outside(self) -> bool:
        """Whether a suspend command has saved the program, and nothing newer is there."""
        return self._record.outside

    @property
    def began_s(self) -> float:
        """When the job began, on the run's clock, as far as that is known."""
        return self._record.began_s

    def runs_on(self) -> None:
        """The program was started by an agent before this one: what is there now may not be whole."""
        self._looked = True

    def begin(self, *, anew: bool, at_s: float) -> None:
        """Look before a launch at `at_s` on the run's clock. `anew`: the job has saved nothing yet, whatever
        is there. Raises StoreError if that cannot be put on record."""
        if anew:
            self._file.parent.mkdir(mode=0o700, exist_ok=True)
            self._record = _Record()
            # Times in the future would hide what the job saves itself: such ones are known by their marks.
            now_ns, found = time.time_ns(), self._find()
            before_ns = max((one.mark[0] for one in found if one.mark[0] <= now_ns), default=0)
            later = {str(one.path): one.mark for one in found if one.mark[0] > now_ns}
            self._record = _Record(before_ns=before_ns, began_s=at_s, doubted=later)
            if not self.given_up:
                write_atomically(self._file, msgspec.json.encode(self._record))
        self.look(0.0)

    def look(self, now: float) -> None:
        """Look what is there; `now`: monotonic seconds."""
        self._choose(now, by_itself=False)

    def over(self, now: float, *, by_itself: bool, ended: float) -> None:
        """Look once more, as the program has ended at `ended` (Unix time); `by_itself`: it was not in the
        middle of anything."""
        doubted = self._choose(now, by_itself=by_itself, ended=ended)
        self._doubt(doubted)
        self._say_not_taken(doubted, ended)

    def after_a_crash(self, *, by_itself: bool, ended: float | None = None) -> None:
        """Look what a program has left that ended while no agent looked.

        The last counts only if it was known to be whole, its last file or its end says so, or the program has
        ended `by_itself`; or was old enough when the program was killed, at `ended` (Unix time; None: nobody
        knows when it ended).
        """
        if not self.known:
            return
        known = self._record.newest[1] if self._record.newest else (0, 0, 0)
        last = self._find()[-1:]
        certain = by_itself or (last and (last[0].last is Last.NEWEST or last[0].mark <= known))
        doubted = [] if certain else [one for one in last if not self._surely_whole(one, ended)]
        self._doubt(doubted)
        self.look(0.0)
        self._say_not_taken(doubted, ended)

    def saved_outside(self) -> None:
        """Note that a suspend command has saved the program."""
        self._record.outside = True
        self._write()

    def _doubt(self, checkpoints: list[Checkpoint]) -> None:
        doubted = self._record.doubted | {str(one.path): one.mark for one in checkpoints}
        self._record.doubted = dict([*doubted.items()][-MOST_DOUBTED:])
        self._write()

    def _surely_whole(self, one: Checkpoint, ended: float | None) -> bool:
        """Whether one whose program was killed is whole, by its age then or by its end."""
        if one.last in (Last.MISSING, Last.OVERTAKEN):
            return False
        if ended is not None and ended - one.saved_at >= SURELY_SETTLED * self._settled_s(one):
            return True
        try:
            return not one.folder and patiently(lambda: ends_as_an_archive(one.path))
        except OSError:
            return False

    def _say_not_taken(self, doubted: list[Checkpoint], ended: float | None) -> None:
        for one in doubted:
            if self.newest is None or (one.mark > self.newest.mark and one.last is not Last.MISSING):
                age = (
                    ""
                    if ended is None
                    else f", written {max(0.0, ended - one.saved_at):.0f} s before its end,"
                )
                self.not_taken = f"{one.path.name}{age} may not be whole and does not count"

    @staticmethod
    def _settled_s(one: Checkpoint) -> float:
        return SETTLED_S if one.folder else SETTLED_FILE_S

    def _find(self) -> list[Checkpoint]:
        restart = self._restart
        return [
            one
            for one in patiently(
                lambda: find_checkpoints(self._workdir, restart.checkpoints, restart.complete)
            )
            if one.mark[0] > self._record.before_ns and self._record.doubted.get(str(one.path)) != one.mark
        ]

    def _choose(self, now: float, *, by_itself: bool, ended: float | None = None) -> list[Checkpoint]:
        """Look, and choose the newest whole one; returns those that are not whole, oldest first. `ended`: the
        Unix time at which its program has."""
        since, whole, doubted = self._since, list[Checkpoint](), list[Checkpoint]()
        self._since = {}
        found = self._find()
        self.settling = False
        for one in found:
            mark, unchanged = since.get(one.path, (None, now if self._looked else float("-inf")))
            if mark not in (None, one.mark):
                unchanged = now
            if mark != one.mark and self._looked:
                self.changed_at = now
            self._since[one.path] = one.mark, unchanged
            # A program writes one after the other: those before the last are done with.
            settled = by_itself or one is not found[-1] or now - unchanged >= self._settled_s(one)
            settled = settled or (ended is not None and self._surely_whole(one, ended))
            settled = settled and one.last is not Last.MISSING
            self.settling |= not settled and one.last in (Last.UNKNOWN, Last.OVERTAKEN)
            (whole if settled or one.last is Last.NEWEST else doubted).append(one)
        self._looked = True
        newest = max(whole, key=lambda one: one.mark, default=None)
        if newest is None:
            self.newest = None
        elif self.newest is None or (newest.path, newest.mark) != (self.newest.path, self.newest.mark):
            self.newest = self._saved(newest)
            if self._record.newest != (str(newest.path), newest.mark):
                self._record.newest = str(newest.path), newest.mark
                self._write()
        return doubted

    def _saved(self, one: Checkpoint) -> Saved:
        """What it holds: by its name, or as the dialect of its program tells."""
        step = dialects.step_of(one.path) if self._restart.speaks else one.step
        if step is not None and not self._restart.speaks and step > (self._steps or step):
            step = None
        done = self._restart.speaks == "transformers" and dialects.all_done(one.path)
        return Saved(one.path, step, one.saved_at, one.mark, done=done)

    def _write(self) -> None:
        if self.given_up:
            return
        with contextlib.suppress(StoreError):  # it counts only after a crash
            write_atomically(self._file, msgspec.json.encode(self._record))
