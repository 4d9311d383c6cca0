"""The program's side of the contract for code that owns its training: `hpcsched.Link`. No torch, no numpy.

`Session` trains; a link only says and hears: it is what adapters for frameworks are made of.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from enum import IntFlag
from pathlib import Path
from typing import NoReturn

from hpcsched.contract import files
from hpcsched.contract.state import State
from hpcsched.contract.words import Ready
from hpcsched.errors import BadInput
from hpcsched.worker.process.contract import JobEnv, OrderReader, ProgressWriter, say
from hpcsched.worker.session.stopping import StopFlag


class Wish(IntFlag):
    """What is wanted of a training after a step. Wishes of several ranks are put together with `|`."""

    NOTHING = 0
    SAVE = 1
    """A periodic checkpoint is due."""
    STOP = 2
    """Save and leave."""


class Link:
    """One rank's link to hpcsched; without hpcsched it is not `active`, and nothing it does has an effect.

    The loop that uses it calls `ready` once it can be suspended, `report` and `wishes` after each step,
    `saved` after each checkpoint, and `leave` when it has saved for Wish.STOP. All ranks have a link; they
    have to act on the same wishes (`integrations.agreement.Agreement` for torch).

    Raises ConfigError for variables that make no sense, WrongContract for an agent that does not fit.
    """

    def __init__(self) -> None:
        self.env = JobEnv.from_environ()
        """All that the agent has told this rank; None without hpcsched."""
        env = self.env
        self._flag = StopFlag(env.notify_pid, env.stop_file) if env else StopFlag(None)
        self._progress = ProgressWriter(env.progress_fd if env else None)
        self._orders = OrderReader(env.control_fd if env else None)
        self._saved_at = time.monotonic()
        self._is_ready = False
        self._state = self._read_state()
        if env:
            self._flag.install()

    # -- what is told ------------------------------------------------------------------------

    @property
    def active(self) -> bool:
        """Whether hpcsched has started this process."""
        return self.env is not None

    @property
    def rank(self) -> int:
        """Which rank this is, from 0."""
        return self.env.rank if self.env else 0

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self.env.world_size if self.env else 1

    @property
    def local_rank(self) -> int:
        """Which rank of its host this is."""
        return self.env.local_rank if self.env else 0

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
        """The newest checkpoint that is whole, by what `saved` has put on record: to go on from; or None."""
        if self._state is None or self._state.checkpoint is None:
            return None
        found = Path(self._state.checkpoint)
        return found if found.exists() else None

    @property
    def step(self) -> int:
        """The step of `checkpoint`; 0 without one."""
        return self._state.step if self._state and self.checkpoint else 0

    # -- what is said ------------------------------------------------------------------------

    def ready(self, *, parallel: bool = True) -> None:
        """Say that this training can be suspended from now on; `parallel`: it can be one of several ranks.

        Rank 0 says it, once.
        """
        if self.env and self.rank == 0 and not self._is_ready:
            self.env.mark_ready(Ready(parallel=parallel))
        self._is_ready = True

    def report(self, step: int, loss: float | None = None) -> None:
        """Say how many steps are done in all; cheap enough for every step. Rank 0's counts."""
        if self.rank == 0:
            self._progress.report(step, lambda: loss)

    def wishes(self) -> Wish:
        """What is wanted of this rank after this step. A rank alone must not act on it."""
        if self.env is None:
            return Wish.NOTHING
        due = self.rank == 0 and time.monotonic() >= self._saved_at + self.env.checkpoint_every_s
        return (Wish.STOP if self._flag.wanted else Wish.NOTHING) | (Wish.SAVE if due else Wish.NOTHING)

    def saved(
        self,
        step: int,
        path: str | os.PathLike[str],
        *,
        samples: int = 0,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Put on record that `path` holds the state after `step` steps, whole and for good.

        Call it on all ranks once all have written; rank 0 says it. Raises OSError.
        """
        self._saved_at = time.monotonic()
        if self.env and self.rank == 0:
            self.env.write_state(step=step, samples=samples, checkpoint=Path(path), metrics=metrics)
            self._state = State(step=step, samples=samples, checkpoint=str(Path(path).resolve()))

    def leave(self) -> NoReturn:
        """Leave, saved: raises SystemExit with the exit code that says so."""
        if self.env is None:
            raise SystemExit(0)
        code = self.env.leave()
        if self.rank == 0:
            self.env.wake_agent()
        raise SystemExit(code)

    def take_signals(self) -> None:
        """Take SIGTSTP and SIGTERM again, after a framework has put its own handlers in place."""
        if self.env:
            self._flag.install()

    def close(self) -> None:
        """The training is over: put back the handlers of signals that were there before."""
        self._flag.close()

    def _read_state(self) -> State | None:
        if self.env is None or not self.env.resume:
            return None
        try:
            return State.decode((self.env.job_dir / files.STATE).read_bytes())
        except OSError:
            return None
        except BadInput as error:
            say(f"{files.STATE} cannot be read, so this begins without it: {error}")
            return None
