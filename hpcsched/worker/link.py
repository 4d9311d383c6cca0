"""The program's side of the contract for code that owns its training: `hpcsched.Link`. No torch, no numpy.

`Session` trains; a link only says and hears: it is what adapters for frameworks are made of.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from enum import IntFlag
from functools import partial
from pathlib import Path
from stat import S_ISDIR
from typing import NoReturn, SupportsFloat

from hpcsched.compat import dataclass
from hpcsched.contract import exits, files
from hpcsched.contract.codec import SMALL_BYTES
from hpcsched.contract.environment import Reader
from hpcsched.contract.ranks import TORCHRUN
from hpcsched.contract.state import State
from hpcsched.contract.words import Ready
from hpcsched.errors import BadInput, ConfigError
from hpcsched.ownership import foreign, make_private
from hpcsched.patience import patiently
from hpcsched.worker.process.contract import JobEnv, ProgressWriter, say, sync_folder
from hpcsched.worker.process.metrics_log import MetricsLog
from hpcsched.worker.session.stopping import StopFlag

_PLACE = re.compile(r"step-([0-9]+)-attempt-([0-9]+)", re.ASCII)


class Wish(IntFlag):
    """What is wanted of a training after a step. Wishes of several ranks are put together with `|`."""

    NOTHING = 0
    SAVE = 1
    """A periodic checkpoint is due."""
    STOP = 2
    """Save and leave."""


@dataclass(eq=False, slots=True)
class _OnRecord:
    """What all links of this process have said, as the agent hears one program: `state` is of the newest
    checkpoint; `saved_at`, on the monotonic clock, of the last try to save."""

    env: JobEnv | None
    progress: ProgressWriter
    state: State | None
    saved_at: float
    goes_on: bool
    """Whether all that was on record before is known, so that what is newer had not been saved."""
    step: int = 0
    ready: bool = False
    log: MetricsLog | None = None


_of_process: dict[int, _OnRecord] = {}


def _on_record(env: JobEnv | None) -> _OnRecord:
    found = _of_process.get(os.getpid())  # a forked child begins with a record of its own
    if found is None or found.env != env:
        progress = ProgressWriter(env.progress_fd if env else None)
        state = _newest(env) if env else None
        goes_on = env is None or not env.resume or state is not None
        found = _OnRecord(env, progress, state, time.monotonic(), goes_on)
        _of_process[os.getpid()] = found
    return found


class Link:
    """One rank's link to hpcsched; without hpcsched it is not `active`, and nothing it does has an effect.

    The loop that uses it calls `ready` once it can be suspended, `report` and `wishes` after each step,
    `saved` after each checkpoint, `leave` when it has saved for Wish.STOP, and `finish` at the end. All ranks
    have a link, and have to act on the same wishes (`hpcsched.integrations.agreement.Agreement` for torch).
    A process can have several links, such as a framework's callback and the user's own: they share what is
    said, and each hears what is wanted.

    Signals are heard in the main thread only; a link that is made in another one hears by the stop file, and
    says so.

    Raises ConfigError for variables that make no sense, and for a checkpoint on record that has somebody
    else's files: frameworks run what is in one. WrongContract for an agent that does not fit. OSError where
    what is on record cannot be read: to begin anew would be wrong.
    """

    def __init__(self) -> None:
        self.env = JobEnv.from_environ()
        """All that the agent has told this rank; None without hpcsched."""
        env = self.env
        self._record = _on_record(env)
        self._flag = StopFlag(env.notify_pid, env.stop_file) if env else StopFlag(None)
        self._closed = False
        if env:
            self._ranks = (env.rank, env.world_size, env.local_rank)
            self._flag.install()
        else:
            told = Reader(os.environ)
            rank = told.number(TORCHRUN[0], 0)
            self._ranks = (rank, told.number(TORCHRUN[1], 1), told.number(TORCHRUN[2], rank))

    # -- what is told ------------------------------------------------------------------------

    @property
    def active(self) -> bool:
        """Whether hpcsched has started this process."""
        return self.env is not None

    @property
    def rank(self) -> int:
        """Which rank this is, from 0; without hpcsched as `torchrun` says it."""
        return self._ranks[0]

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self._ranks[1]

    @property
    def local_rank(self) -> int:
        """Which rank of its host this is."""
        return self._ranks[2]

    @property
    def steps(self) -> int | None:
        """The whole work in steps, as the job file says it; None if it does not."""
        return self.env.steps if self.env else None

    @property
    def checkpoint_dir(self) -> Path | None:
        """The folder for checkpoints of programs that have no place of their own; None without hpcsched."""
        return self.env.checkpoint_dir if self.env else None

    @property
    def checkpoint(self) -> Path | None:
        """The newest checkpoint that is whole, by what `saved` has put on record: to go on from; or None.

        Never a newer one that was being written when the process ended. Where the one on record has been
        deleted since, it is None, and rank 0 has said so.
        """
        state = self._record.state
        return Path(state.checkpoint) if state is not None and state.checkpoint else None

    @property
    def step(self) -> int:
        """The step of `checkpoint`; 0 without one."""
        state = self._record.state
        return state.step if state is not None and state.checkpoint else 0

    @property
    def reported(self) -> int:
        """The step that this process has reported last; before that the one of `checkpoint`."""
        return max(self._record.step, self.step)

    # -- what is said ------------------------------------------------------------------------

    def ready(self, *, parallel: bool = True) -> None:
        """Say that this training can be suspended from now on; `parallel`: it can be one of several ranks.

        Call it once `checkpoint` has been taken up, on all ranks or on rank 0: rank 0 says it, once. Raises
        OSError.
        """
        if self.env and self.rank == 0 and not self._record.ready:
            # Behind a launcher, maybe in a script, what the agent starts is not one of several ranks.
            self.env.mark_ready(Ready(parallel=parallel and not self.env.launched))
            self._record.ready = True

    def report(self, step: int, loss: SupportsFloat | None = None, *, total: int | None = None) -> None:
        """Say how many steps are done in all, of `total`; cheap enough for every step. Rank 0's counts.

        `loss` is only asked for its number when a line is due, at most 20 times a second: a tensor on a GPU
        need not be waited for each time.
        """
        self._record.step = step
        if self.rank == 0:
            self._record.progress.report(
                step, lambda: None if loss is None else _finite(float(loss)), total=total
            )

    def log(self, metrics: Mapping[str, SupportsFloat | None], *, step: int | None = None) -> None:
        """Log metrics by name after `step` steps (default: the last reported), into the job's metrics.jsonl.

        `hpcsched report` draws them. Rank 0's count; None is a value that is not finite.

        Raises ValueError for names that are empty, reserved (step, t, attempt), or cannot be printed.
        """
        if self.env and self.rank == 0:
            if self._record.log is None:
                self._record.log = MetricsLog(self.env.job_dir)
            step = self.reported if step is None else step
            self._record.log.write(step, metrics, attempt=self.env.attempt)

    def wishes(self) -> Wish:
        """What is wanted of this rank after this step. A rank alone must not act on it.

        STOP: it was told so by a signal or the stop file, or the agent has gone. SAVE: so many seconds have
        passed since the last `saved` or `not_saved` as the job file says.
        """
        if self.env is None or self._closed:
            return Wish.NOTHING
        due = self.rank == 0 and time.monotonic() >= self._record.saved_at + self.env.checkpoint_every_s
        return (Wish.STOP if self._flag.wanted else Wish.NOTHING) | (Wish.SAVE if due else Wish.NOTHING)

    def place(self, step: int) -> Path:
        """Where to save the state after `step` steps: a path in `checkpoint_dir` that nothing has yet.

        For code whose framework has no folder of its own. The folder is made, the path is not. Of these
        places `saved` keeps the newest ones, as many as the job file says (`keep`). Raises RuntimeError
        without hpcsched, OSError.
        """
        if self.env is None:
            raise RuntimeError("without hpcsched there is no place for checkpoints")
        patiently(partial(make_private, self.env.checkpoint_dir))
        # Of an attempt of its own: what an earlier one was writing when it died is not written over.
        return self.env.checkpoint_dir / f"step-{step}-attempt-{self.env.attempt}"

    def saved(
        self,
        step: int,
        path: str | os.PathLike[str],
        *,
        samples: int | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Put on record that `path` (a file or a folder) holds the state after `step` steps, complete.

        Call it on all ranks once all have written: rank 0 sees to it that the files are on the disk, and says
        it. Then earlier places (`place`) make room. Raises OSError; what was on record before is still there.
        """
        found = Path(path).resolve()
        if self.env and self.rank == 0:
            _sync(found)
            self.env.write_state(step=step, samples=samples, checkpoint=found, metrics=metrics)
            if found.parent == self.env.checkpoint_dir:
                with contextlib.suppress(OSError):  # there may be more of them than need be
                    _make_room(found, self.env.keep, later=self._record.goes_on)
        self._record.saved_at = time.monotonic()
        if self.env:
            self._record.state = State(step=step, samples=samples, checkpoint=str(found))

    def not_saved(self) -> None:
        """A periodic checkpoint has failed, and the training goes on: the next one is due in its time.

        Without it Wish.SAVE is there after each step until one is `saved`.
        """
        self._record.saved_at = time.monotonic()

    def leave(self) -> NoReturn:
        """Leave, saved: raises SystemExit with the exit code that says so.

        However the process ends after this (in a framework's teardown, behind a launcher), the attempt counts
        as suspended.
        """
        if self.env is None:
            raise SystemExit(0)
        code = self.env.leave(whatever_follows=True)
        if self.rank == 0:
            self.env.wake_agent()
        raise SystemExit(code)

    def cannot_save(self, why: object) -> NoReturn:
        """It was to save and leave, and could not: says why, raises SystemExit with the code that says so."""
        say(f"step {self._record.step} could not be saved: {why}")
        raise SystemExit(exits.CANNOT_SAVE)

    def finish(self, metrics: Mapping[str, float] | None = None) -> None:
        """The training is done: rank 0 puts its results by name on record, for `status` and `report`.

        What `saved` has said last stays. Gives the signals back, as `close`. Raises OSError.
        """
        if self.env and self.rank == 0 and metrics:
            # A `Session` of this process has a record of its own: what is newest is on disk.
            found = None
            with contextlib.suppress(OSError, BadInput):
                found = _on_disk(self.env)
            newest = found if found is not None and found.attempt == self.env.attempt else self._record.state
            state = newest or State(step=self._record.step)
            known = {name: value for name, value in state.metrics.items() if value is not None}
            self.env.write_state(
                step=state.step,
                samples=state.samples,
                checkpoint=Path(state.checkpoint) if state.checkpoint else None,
                metrics={**known, **metrics},
                loss=state.loss,
            )
        self.close()

    def take_signals(self) -> None:
        """Take SIGTSTP and SIGTERM again, after a framework has put its own handlers in place."""
        if self.env and not self._closed:
            self._flag.install()

    def close(self) -> None:
        """Nothing is wanted any more: put back the handlers of signals that were there before."""
        self._closed = True
        self._flag.close()


def _on_disk(env: JobEnv) -> State | None:
    """What is on record of the job; None if there is nothing. Raises OSError, BadInput."""

    def read() -> bytes:
        with (env.job_dir / files.STATE).open("rb") as file:
            return file.read(SMALL_BYTES + 1)

    try:
        return State.decode(patiently(read))
    except FileNotFoundError:
        return None


def _newest(env: JobEnv) -> State | None:
    """What the job has on record to go on from, if it is still there. Raises OSError."""
    if not env.resume:
        return None
    try:
        state = _on_disk(env)
    except BadInput as error:
        if env.rank == 0:
            say(f"{files.STATE} cannot be read, so this begins anew: {error}")
        return None
    if state is None:
        return None
    if state.checkpoint is not None and not _is_there(Path(state.checkpoint)):
        if env.rank == 0:
            say(f"the checkpoint of step {state.step} is gone ({state.checkpoint}), so this begins anew")
        return None
    if state.checkpoint is not None and (why := patiently(lambda: foreign(Path(state.checkpoint or "")))):
        accepted = "files of yours alone, as what is in them may be run"
        raise ConfigError(where=f"checkpoint of step {state.step}", got=why, accepted=accepted)
    return state


def _is_there(path: Path) -> bool:
    """Whether a checkpoint is there, and not empty. Raises OSError where that cannot be told."""

    def look() -> bool:
        about = path.stat()
        return any(path.iterdir()) if S_ISDIR(about.st_mode) else about.st_size > 0

    try:
        return patiently(look)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _sync(path: Path) -> None:
    """Have a file, or a folder with all that is in it, on the disk. Raises OSError."""
    for part in _files_of(path):
        descriptor = patiently(partial(os.open, part, os.O_RDONLY))
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    sync_folder(path.parent)


def _files_of(path: Path) -> Iterator[Path]:
    """A file, or the files and folders of a tree, itself included; no symbolic links."""
    for folder, _, names in os.walk(path):
        yield from (one for name in names if (one := Path(folder, name)).is_file() and not one.is_symlink())
        yield Path(folder)
    if not path.is_dir():
        yield path


def _make_room(newest: Path, keep: int, *, later: bool) -> None:
    """Delete all places in the folder of `newest` but that and the `keep` - 1 before it.

    `later`: also those of later steps. They were being written when an attempt died, if the newest that was
    on record is known.
    """
    places = {
        one: tuple(map(int, found.groups()))
        for one in newest.parent.iterdir()
        if (found := _PLACE.fullmatch(one.name))
    }
    if newest not in places:
        return
    good = sorted((one for one in places if places[one] <= places[newest]), key=lambda one: places[one])
    stay = set(good[-keep:]) | (set() if later else places.keys() - set(good))
    for one in places.keys() - stay:
        with contextlib.suppress(OSError):
            shutil.rmtree(one) if one.is_dir() else one.unlink()
