"""Callbacks of trainers, with the names that Lightning has for them; and what is measured while it trains."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hpcsched.contract import files
from hpcsched.contract.metrics import RESERVED
from hpcsched.errors import ConfigError, StoreError
from hpcsched.worker.process import rng
from hpcsched.worker.process.contract import say
from hpcsched.worker.session.trainer import Parts, evaluate

if TYPE_CHECKING:
    from hpcsched.worker.session.session import Session

EPOCH = "epoch"
"""What `Parts.evaluate_every` says of each pass over the data."""


class Callback:
    """What is called while a trainer trains, on every rank alike; each method does nothing by default.

    What it does must be the same on all ranks: `metrics` are. `session` has `step`, `rank`, `model` and so
    on, `log` and `stop`. Its state is saved with the training's and put back when that goes on.
    """

    def on_train_start(self, session: Session) -> None:
        """Once in each process, before its first step, with all restored."""

    def on_train_batch_end(self, session: Session) -> None:
        """After each step."""

    def on_train_epoch_end(self, session: Session) -> None:
        """After the last step of each pass over the data."""

    def on_validation_end(self, session: Session, metrics: Mapping[str, float]) -> None:
        """After each `evaluate`; `metrics` is what it returned."""

    def on_train_end(self, session: Session) -> None:
        """After the last step of the training, before its final state is saved."""

    def state_dict(self) -> dict[str, Any]:
        """What is saved, of numbers, texts, lists, dicts and tensors."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Go on from what `state_dict` gave."""


class Monitor(Callback):
    """Watches one of the metrics of `evaluate`.

    Args:
        monitor: its name.
        mode: whether less ("min") or more ("max") is better.
        min_delta: by how much a value must be better to count.
    """

    def __init__(self, monitor: str, *, mode: str = "min", min_delta: float = 0.0) -> None:
        if mode not in ("min", "max"):
            raise ConfigError(where=type(self).__name__, key="mode", got=repr(mode), accepted="min, max")
        self.monitor, self.mode, self.min_delta = monitor, mode, min_delta
        self.best: float | None = None
        self.best_step: int | None = None

    def better(self, session: Session, metrics: Mapping[str, float]) -> bool:
        """Whether the newest value is the best so far, which it is from then on."""
        if self.monitor not in metrics:
            accepted = ", ".join(sorted(metrics)) or "an evaluate that returns it"
            raise ConfigError(where=type(self).__name__, key="monitor", got=self.monitor, accepted=accepted)
        value = float(metrics[self.monitor])
        gain = math.nan if self.best is None else (value - self.best) * (1 if self.mode == "max" else -1)
        if math.isnan(value) or not (self.best is None or gain > self.min_delta):
            return False
        self.best, self.best_step = value, session.step
        return True

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "best_step": self.best_step}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        self.best, self.best_step = state_dict["best"], state_dict["best_step"]


class EarlyStopping(Monitor):
    """Ends the training, completed, when a metric has not become better for `patience` evaluations."""

    def __init__(self, monitor: str, *, patience: int = 3, mode: str = "min", min_delta: float = 0.0) -> None:
        super().__init__(monitor, mode=mode, min_delta=min_delta)
        self.patience, self.waited = patience, 0

    def on_validation_end(self, session: Session, metrics: Mapping[str, float]) -> None:
        self.waited = 0 if self.better(session, metrics) else self.waited + 1
        if self.waited >= self.patience:
            if session.rank == 0:
                say(
                    f"step {session.step}: {self.monitor} has not become better than {self.best} for "
                    f"{self.waited} evaluations: the training ends"
                )
            session.stop()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "waited": self.waited}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        super().load_state_dict(state_dict)
        self.waited = state_dict["waited"]


class ModelCheckpoint(Monitor):
    """Keeps the model that was best by a metric, as `best.pt` in the folder of the job's checkpoints.

    `load_checkpoint` reads the file: `model` (a state dict), `step`, and `metrics`. A second one needs a
    `filename` of its own, which begins with "best" too.
    """

    def __init__(
        self, monitor: str, *, mode: str = "min", min_delta: float = 0.0, filename: str = files.BEST
    ) -> None:
        super().__init__(monitor, mode=mode, min_delta=min_delta)
        if not re.fullmatch(r"best[\w.-]{0,60}\.pt", filename):
            accepted = f"best.pt, or a name such as best-{monitor}.pt"
            raise ConfigError(where="ModelCheckpoint", key="filename", got=repr(filename), accepted=accepted)
        self.filename = filename

    def on_validation_end(self, session: Session, metrics: Mapping[str, float]) -> None:
        if not self.better(session, metrics) or session.rank > 0:
            return
        found = {"model": session.model.state_dict(), "step": session.step, "metrics": dict(metrics)}
        try:
            session.save_beside(self.filename, found)
        except StoreError as error:
            say(f"step {session.step}: the best model could not be saved, training goes on: {error}")


class Hooks:
    """Calls the callbacks of a trainer, and evaluates when that is due. `add_to` first.

    Raises ConfigError for an `evaluate_every` that makes no sense.
    """

    def __init__(self, parts: Parts) -> None:
        self._every = _every(parts)
        self._parts, self._callbacks = parts, tuple(parts.callbacks)
        files_ = [one.filename for one in self._callbacks if isinstance(one, ModelCheckpoint)]
        if twice := {name for name in files_ if files_.count(name) > 1}:
            accepted = "another filename for each ModelCheckpoint"
            raise ConfigError(where="training", key="callbacks", got=f"{min(twice)} twice", accepted=accepted)
        self._epoch = 0
        self._newest: tuple[int, Mapping[str, float]] | None = None

    @property
    def loggers(self) -> list[Any]:
        """The callbacks that get what is logged, by `log(metrics, step)`, and are closed at the end."""
        return [one for one in self._callbacks if callable(getattr(one, "log", None))]

    def states(self) -> dict[str, Callback]:
        """What is saved with the training, by name."""
        named = enumerate(self._callbacks, 1)
        kept = ((number, one) for number, one in named if isinstance(one, Callback))
        return {f"callback {number}: {type(one).__name__}": one for number, one in kept}

    def start(self, session: Session) -> None:
        """Before the first step of this process."""
        self._epoch = session.samples // self._parts.size
        self._call("on_train_start", session)

    def step_made(self, session: Session) -> None:
        """After each step."""
        self._call("on_train_batch_end", session)
        epoch = session.samples // self._parts.size
        ended, self._epoch = epoch > self._epoch, epoch
        due = session.step % self._every == 0 if isinstance(self._every, int) else ended and bool(self._every)
        if due:
            self.evaluate(session)
        if ended:
            self._call("on_train_epoch_end", session)

    def end(self, session: Session) -> None:
        """After the last step: measures what the training has come to, unless that was after this step."""
        if self._parts.evaluate is not None and (self._newest is None or self._newest[0] != session.step):
            self.evaluate(session)
        self._call("on_train_end", session)

    def evaluate(self, session: Session) -> None:
        """Measure, log and pass on what the user wants to know.

        On all ranks, as none could go on meanwhile; rank 0's numbers are told to the others. Whatever is
        drawn at random here changes nothing of the training.
        """
        before, mode = rng.capture(session.device), self._parts.model.training
        try:
            measured = _numbers(evaluate(self._parts))
        finally:
            self._parts.model.train(mode)
            rng.restore(before, session.device)
        metrics = session.agreed(measured)
        self._newest = session.step, metrics
        session.log(metrics)
        for callback in self._callbacks:
            if hasattr(callback, "on_validation_end"):
                callback.on_validation_end(session, metrics)

    def final(self) -> Mapping[str, float]:
        """What the training has come to, after `end`."""
        return {} if self._newest is None else self._newest[1]

    def _call(self, name: str, session: Session) -> None:
        for callback in self._callbacks:
            if (method := getattr(callback, name, None)) is not None:
                method(session)


def _numbers(found: Any) -> dict[str, float]:
    """What an `evaluate` of a user's has returned. Raises ConfigError for what is no table of numbers."""
    numbers: dict[str, float] | None
    try:
        numbers = {str(name): float(value) for name, value in found.items()}
    except (AttributeError, TypeError, ValueError, RuntimeError):
        numbers = None
    if numbers is None or (odd := sorted(numbers.keys() & {*RESERVED, ""})):
        got = f"evaluate returned {type(found).__name__}" if numbers is None else f"a number {odd[0]!r}"
        accepted = f"numbers by name, other names than {', '.join(RESERVED)}"
        raise ConfigError(where="training", key="evaluate", got=got, accepted=accepted)
    return numbers


def _every(parts: Parts) -> int | str | None:
    every: Any = parts.evaluate_every
    fine = every in (None, EPOCH) or (isinstance(every, int) and not isinstance(every, bool) and every > 0)
    if not fine:
        accepted = f'a number of steps, "{EPOCH}" or None'
        raise ConfigError(where="training", key="evaluate_every", got=repr(every), accepted=accepted)
    if every is not None and parts.evaluate is None:
        raise ConfigError(
            where="training",
            key="evaluate_every",
            got=repr(every),
            accepted="it with `evaluate`, which is missing",
        )
    if not isinstance(parts.callbacks, Sequence) or isinstance(parts.callbacks, str):
        got = type(parts.callbacks).__name__
        raise ConfigError(where="training", key="callbacks", got=got, accepted="a list of callbacks")
    return every  # type: ignore[no-any-return]
