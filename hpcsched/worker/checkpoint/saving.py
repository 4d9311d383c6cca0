"""Where the state of one training is kept: on disk for good, in shared memory for the moment."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hpcsched.contract import files
from hpcsched.errors import ConfigError, StoreError
from hpcsched.patience import patiently
from hpcsched.worker.checkpoint.files import CheckpointStore
from hpcsched.worker.checkpoint.load import read_checkpoint
from hpcsched.worker.checkpoint.shared_memory import Arena, Held
from hpcsched.worker.process.contract import JobEnv, say
from hpcsched.worker.process.guest import check_not_gone

KEEPER_WAIT_S = 60.0
"""A `held` file that nobody has touched for so long is waited for no longer: its keeper has gone."""

_POLL_S = 0.05

Own = Callable[[], Mapping[str, Any]]
"""Where a state may be copied to, asked for only when it is."""


class Saves:
    """The checkpoints of a job and, where the agent lends one, its arena.

    All but `has`, `load` and `touch` is for rank 0.

    `env` is who we are, and changes with the attempt. `checkpoint_dir` counts where there is no agent.
    """

    collective = False
    """Whether all ranks save and load together."""

    def __init__(self, env: JobEnv | None, checkpoint_dir: str | Path | None) -> None:
        self.env = env
        folder = env.checkpoint_dir if env else checkpoint_dir
        self.store = CheckpointStore(folder, env.keep if env else 2) if folder is not None else None
        self.arena = Arena.open(env.arena_fd) if env and env.arena_fd is not None else None
        for inherited in (env.arena_fd, env.control_fd) if env else ():
            if inherited is not None:
                with contextlib.suppress(OSError):  # closed
                    os.set_inheritable(inherited, False)  # what the program starts has no business with it
        self._checkpoint: Path | None = None
        self._step: int | None = None
        """What the newest checkpoint holds; None while there is none, or its step is not known."""

    # -- saving ----------------------------------------------------------------------------------------

    def save(self, state: Mapping[str, Any], *, loss: float | None, background: bool = False) -> None:
        """Make the state durable, and say so in STATE.json. Raises StoreError.

        `background`: the training goes on; it may be durable only when `look` has seen that it is.
        """
        if self.store is None:
            return
        check_not_gone()
        if self._checkpoint is None or self._step != state["step"]:
            self._checkpoint, self._step = self.store.save(state), state["step"]
        self.record(state["step"], state["samples"], loss=loss)

    def save_beside(self, name: str, state: Mapping[str, Any]) -> None:
        """Write a file of this name into the folder of checkpoints, if there is one. Raises StoreError."""
        if self.store is not None:
            check_not_gone()
            self.store.save_beside(name, state)

    def look(self) -> None:
        """See to what is being saved in the background; to be called now and then. Raises StoreError."""

    def hold(self, state: Mapping[str, Any]) -> bool:
        """Leave the state in the arena and say so; whether that could be done."""
        if self.arena is None or self.env is None:
            return False
        check_not_gone()
        try:
            self.arena.save(state)
            self.env.mark_held(step=state["step"], samples=state["samples"])
        except (StoreError, OSError) as error:
            say(f"shared memory cannot take the state: {error}")
            return False
        return True

    def reserve(self, state: Mapping[str, Any]) -> None:
        """Have the arena make room for such a state, behind our back: new pages take their time."""
        if self.arena is not None:
            threading.Thread(target=self.arena.reserve, args=(state,), name="arena", daemon=True).start()

    def record(
        self, step: int, samples: int, *, loss: float | None, metrics: Mapping[str, float] | None = None
    ) -> None:
        """Write STATE.json: what the newest checkpoint holds. Raises StoreError."""
        if self.env is None or self._checkpoint is None:
            return
        check_not_gone()  # again: a checkpoint takes its time
        alone = self.arena.alone_with_state_file() if self.arena else contextlib.nullcontext()
        try:
            with alone:  # a keeper may be about to write of an older state
                self.env.write_state(
                    step=step, samples=samples, checkpoint=self._checkpoint, metrics=metrics, loss=loss
                )
        except OSError as error:
            where = f"{self.env.job_dir}/{files.STATE}"
            raise StoreError(f"{where}: cannot be written: {error.strerror}") from error

    def hand_over(self, state: Mapping[str, Any]) -> Held | None:
        """Put the state into the arena for other ranks of this host; None if it has no room."""
        try:
            if self.arena is None:
                return None
            self.arena.save(state)
            self.reserve(state)  # for the next one, which is written elsewhere
            return self.arena.newest()
        except StoreError as error:
            say(f"shared memory cannot take the state: {error}")
            return None

    # -- going on --------------------------------------------------------------------------------------

    def newest(self, own: Own, *, wanted: bool) -> tuple[Path | Held | None, dict[str, Any] | None]:
        """Where the newest good state is, on disk or in the arena, and the state (see `load`).

        What is in the way of a job that goes on from there, or starts over (not `wanted`), is put aside.
        """
        if self.store is None:
            return None, None
        self.store.clear_leftovers()
        if not wanted:
            name = f"before-attempt-{self.env.attempt if self.env else 0}"
            patiently(partial(self.store.set_aside, name))
            if self.arena:
                self.arena.clear()
            return None, None
        held = self.arena.newest() if self.arena else None
        self._await_keeper(held.step if held else 0)
        if held is not None and held.step >= (self.store.newest_step() or 0):
            try:
                return held, self.load(held, own)
            except StoreError as error:
                say(f"{error}; going on from a checkpoint")
        path = self.store.newest()
        self.store.quarantine_newer(path)
        if path is None:
            if self.env is not None:
                say(f"{self.store.folder}: no good checkpoint to resume from; starting at step 0")
            return None, None
        return path, None if self.collective else self.load(path, own)

    def of_another(self, folder: Path) -> tuple[Path, dict[str, Any] | None]:
        """The newest good state of the job whose checkpoints these are; ConfigError if there is none."""
        path = CheckpointStore(folder).newest()
        if path is None:
            accepted = "the checkpoints of the job that this one continues"
            raise ConfigError(where=str(folder), got="no good checkpoint", accepted=accepted)
        return path, None if self.collective else read_checkpoint(path)

    def has(self, found: Path | Held) -> bool:
        """Whether this rank can load that: every host has memory of its own."""
        return isinstance(found, Path) or (self.arena is not None and self.arena.newest() == found)

    def load(self, found: Path | Held, own: Own) -> dict[str, Any]:
        """The state that is there; its tensors may be those of `own`, overwritten. Raises StoreError."""
        if isinstance(found, Path):
            self._checkpoint, state = found, read_checkpoint(found)
            self._step = state["step"]
            return state
        if self.arena is None:
            raise StoreError("the state is in shared memory that this rank does not have")
        return self.arena.load(found.generation, own())

    def touch(self, device: torch.device) -> None:
        """Make the next load from shared memory onto this device quicker."""
        if self.arena is not None:
            with contextlib.suppress(OSError, ValueError):
                self.arena.touch(device)

    def _await_keeper(self, ours: int) -> None:
        """On another host the last attempt's state may be on its way to disk: that is the newest then.

        `ours`: the step whose state we have here.
        """
        env, store = self.env, self.store
        if env is None or store is None or env.from_step is None:
            return
        seen: dict[str, int] = {}
        deadline = 0.0
        while max(ours, store.newest_step() or 0) < env.from_step:
            found = patiently(partial(_touched, env.job_dir))
            if found != seen:  # compared with what it was, not with our clock: the hosts' may differ
                seen, deadline = found, time.monotonic() + KEEPER_WAIT_S
            if not found or time.monotonic() >= deadline:
                return
            time.sleep(_POLL_S)

    def close(self) -> None:
        """Wait for what is being saved in the background, and let go of all."""


def _touched(folder: Path) -> dict[str, int]:
    """The states that are being made durable, and when somebody has last said so."""
    found = {}
    for path in folder.glob(f"{files.HELD}.*"):
        with contextlib.suppress(OSError):  # just removed
            found[path.name] = path.stat().st_mtime_ns
    return found


class ShardedSaves(Saves):
    """The same for a model that is spread over the ranks; all of them save and load together."""

    collective = True

    def __init__(
        self,
        env: JobEnv | None,
        checkpoint_dir: str | Path | None,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        super().__init__(env, checkpoint_dir)
        from hpcsched.worker.checkpoint.sharded import ShardedStore  # takes its time to import

        self.arena = None
        self._model, self._optimizer = model, optimizer
        self._sharded = ShardedStore(self.store) if self.store is not None else None
        self._first = env is None or env.rank == 0
        self._pending: tuple[Callable[[], Path | None], int, int] | None = None

    def save(self, state: Mapping[str, Any], *, loss: float | None, background: bool = False) -> None:
        if self._sharded is None:
            return
        rest = {key: value for key, value in state.items() if key not in ("model", "optimizer")}
        if background:
            ask = self._sharded.begin_save(rest, self._model, self._optimizer)
            self._pending = ask, state["step"], state["samples"]
            return
        self.look()
        self._checkpoint = self._sharded.save(rest, self._model, self._optimizer)
        self._pending = None
        if self._first:
            self.record(state["step"], state["samples"], loss=loss)

    def look(self) -> None:
        if self._pending is None:
            return
        ask, step, samples = self._pending
        try:
            path = ask()
        except StoreError:
            self._pending = None
            raise
        if path is not None:
            self._checkpoint, self._pending = path, None
            if self._first:
                self.record(step, samples, loss=None)

    def load(self, found: Path | Held, own: Own) -> dict[str, Any]:
        assert self._sharded is not None and isinstance(found, Path)
        self._checkpoint = found
        return self._sharded.load(found, self._model, self._optimizer)

    def close(self) -> None:
        if self._sharded is not None:
            self._sharded.close()
