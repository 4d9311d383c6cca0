"""What a training logs by itself: loss, learning rate and speed, into metrics.jsonl and its output."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from hpcsched.worker.process.guest import check_not_gone
from hpcsched.worker.process.metrics_log import MetricsLog, Pace
from hpcsched.worker.session.context import Context

SAID_EVERY_S = 10.0
"""Seconds between two lines in a trainer's output, at least (chosen)."""


class TrainingLog:
    """Logs a training on its rank 0; nothing without an agent.

    A trainer's output gets lines, too: a loop of the user's own prints what it likes.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        env = context.env
        self._log = MetricsLog(env.job_dir if env is not None else None)
        self._pace, self._said = Pace(), Pace(SAID_EVERY_S)
        self._says = env is not None and env.trainer is not None
        self._seen: tuple[int, float] | None = None
        self.also: Sequence[Any] = ()
        """Who else gets what is logged, on rank 0: objects with `log(metrics, step)` and `close()`."""

    def step_made(self, *, force: bool = False) -> None:
        """A step is made: log it, if that is due, but for what the user logs."""
        context = self._context
        if context.env is None or context.rank != 0 or not (self._pace.due() or force):
            return
        check_not_gone()
        training = context.training
        now, values = time.monotonic(), {"loss": training.last_loss()}
        groups = training.optimizer.param_groups
        if groups:
            values["lr"] = float(groups[0]["lr"]) if "lr" in groups[0] else None
        if self._seen is not None and now > self._seen[1]:
            values["samples_per_second"] = (training.samples - self._seen[0]) / (now - self._seen[1])
        self._seen = training.samples, now
        left = self._log.left(values)
        own = {name: value for name, value in values.items() if name in left}
        self._log.write_for_it(training.step, own, attempt=context.env.attempt)
        self._pass_on(own, training.step)
        if self._says and (self._said.due() or force):
            self._say(values)

    def write(self, values: Mapping[str, float], *, step: int) -> None:
        """Log what the user measures."""
        context = self._context
        if context.env is not None and context.rank == 0:
            check_not_gone()
            self._log.write(step, values, attempt=context.env.attempt)
            self._pass_on(values, step)

    def close(self) -> None:
        """Nothing is logged any more."""
        for logger in self.also if self._context.rank == 0 else ():
            if callable(close := getattr(logger, "close", None)):
                close()
        self.also = ()

    def _pass_on(self, values: Mapping[str, float | None], step: int) -> None:
        known = {name: value for name, value in values.items() if value is not None}
        for logger in self.also if known else ():
            logger.log(known, step)

    def _say(self, values: dict[str, float | None]) -> None:
        training = self._context.training
        total = "" if training.total_steps is None else f"/{training.total_steps}"
        known = (f"{name} {value:.4g}" for name, value in values.items() if value is not None)
        with contextlib.suppress(OSError):  # a full disk, or one that answers nothing, ends no training
            sys.stdout.write("  ".join([f"step {training.step}{total}", *known]) + "\n")
            sys.stdout.flush()
