"""A packed training as the process looks after it in which it takes place."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextvars import Context
from typing import Any

from hpcsched.errors import ConfigError
from hpcsched.worker.packing.engine import MODES
from hpcsched.worker.packing.member import Member, PackedSession
from hpcsched.worker.process.contract import JobEnv
from hpcsched.worker.session.trainer import Trainer, build, evaluate

LOOK_S = 0.01
"""How often to look away from the steps: some take 0.1 ms only."""


class LiveSession(PackedSession):
    """A `PackedSession` that tells when there is more to do for it than to make steps."""

    lives: Callable[[], None] = staticmethod(lambda: None)
    """Told of each step that is made."""

    def count_step(self) -> None:
        super().count_step()
        self.lives()

    @property
    def due(self) -> bool:
        """Whether it is time to `look`. Raises Gone for one that must leave no more traces."""
        orders = self._orders
        orders.look()
        return (
            self.leaving
            or orders.pace < 1
            or orders.resize is not None
            or (self._saves.store is not None and time.monotonic() >= self._next_save)
        )

    @property
    def leaving(self) -> bool:
        """Whether it has been asked to save and leave. Raises Gone."""
        return self._flag.wanted is not None

    def report(self, *, force: bool = False) -> None:
        """Tell the agent how far it is, if that is due."""
        self._report(force=force)


class LiveMember(Member):
    """A member with a `LiveSession`."""

    session: LiveSession

    def finish(self) -> None:
        """After its last step: save the final state, evaluate. Raises SystemExit when it cannot be saved."""
        self.session.report(force=True)
        self.call(self.session.finish, lambda: evaluate(self.parts))

    def look(self) -> None:
        """Save, or save and leave with SystemExit, as is wanted now."""
        self.call(self.session.look)


def bring(trainer: Trainer, env: JobEnv, *, context: Context | None = None) -> LiveMember:
    """Build a job's training, take its newest checkpoint up if that is wanted, say that it is ready."""
    parts = build(trainer, env.args)
    parts.model.train()
    session = LiveSession(
        model=parts.model,
        optimizer=parts.optimizer,
        scheduler=parts.scheduler,
        dataset_size=parts.size,
        global_batch=parts.global_batch,
        seed=parts.seed,
    )
    session.end_after(parts.epochs)
    return LiveMember(parts, session, name=f"job {env.job_id}", context=context)


def mode_of(strategy: dict[str, Any]) -> str:
    """How members are to make their steps. Raises ConfigError for unknown words."""
    mode = strategy.get("mode", "auto")
    if mode not in MODES:
        raise ConfigError(
            where="strategy packed", key="mode", got=repr(mode), accepted=", ".join(map(repr, MODES))
        )
    return str(mode)
