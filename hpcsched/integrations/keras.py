"""Keras trainings that can be suspended, in the midst of an epoch too: `elastic` around the callbacks.

from hpcsched.integrations.keras import elastic

model.fit(x, y, epochs=20, callbacks=elastic([EarlyStopping(patience=3)]))
"""

from __future__ import annotations

import pickle
import random
import shutil
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import keras
import numpy as np

from hpcsched.errors import ConfigError
from hpcsched.integrations.metrics import Metrics
from hpcsched.ownership import make_private
from hpcsched.worker.link import Link, Wish
from hpcsched.worker.process.contract import say, sync_folder
from hpcsched.worker.process.metrics_log import Pace

_BATCH_HOOKS = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")
_PLAIN = (bool, int, float, str, type(None), np.generic)
_WEIGHTS, _REST = "model.weights.h5", "rest.pickle"

_REMEMBER = (
    keras.callbacks.EarlyStopping,
    keras.callbacks.ReduceLROnPlateau,
    keras.callbacks.ModelCheckpoint,
)
"""Callbacks that remember earlier epochs."""


_used: list[Link] = []
"""The link, once a fit has it."""


@lru_cache(maxsize=1)
def current() -> Link:
    """The link of this process."""
    return Link()


def elastic(callbacks: Sequence[keras.callbacks.Callback] = ()) -> list[keras.callbacks.Callback]:
    """The callbacks for `model.fit`, with one more, by which the training can be suspended and goes on.

    The model has to be built before `fit`, as for BackupAndRestore. Raises ConfigError where there are
    several processes.
    """
    if current().world_size > 1:
        raise ConfigError(
            where="Keras",
            key="processes",
            got=f"{current().world_size} processes",
            accepted="one: processes = 1 in the job file",
        )
    link = current()
    if not link.active:
        return [*callbacks]
    if link in _used:
        say("only the first fit of this program can be suspended: a later one begins anew if it is ended")
        return [*callbacks]
    _used.append(link)
    return [*callbacks, HpcschedCallback(callbacks)]


class HpcschedCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Saves and leaves when asked to, and goes on from there; `elastic` puts it after the other callbacks.

    Keras can begin at an epoch, not in its midst: the batches that were trained in this epoch are read again
    and passed over, without computing, and without the other callbacks hearing of them.
    """

    def __init__(self, others: Sequence[keras.callbacks.Callback]) -> None:
        super().__init__()
        self._link = current()
        self._metrics, self._pace = Metrics(self._link), Pace()
        self._others = list(others)
        self._step = 0  # of the training, and that with which the epoch began
        self._epoch, self._epoch_step = 0, 0
        self._total: int | None = None
        self._passing = 0  # batches of this epoch that are still to be passed over
        self._passed: Callable[[], None]
        self._begun_with: Any = None
        self._found: dict[str, Any] | None = None
        for other in self._others:
            if isinstance(other, keras.callbacks.CSVLogger) and self._link.checkpoint is not None:
                other.append = True  # it would begin the file anew, which has the epochs before
            for name in _BATCH_HOOKS:
                self._mute(other, name)

    # -- begin -------------------------------------------------------------------------------

    def on_train_begin(self, logs: Any = None) -> None:
        model = self.model
        if not model.built:
            raise ConfigError(
                where="Keras",
                key="model",
                got="not built",
                accepted="model.build(...) or an Input before fit",
            )
        folder = self._link.checkpoint
        if folder is not None:
            if model.optimizer is not None and not model.optimizer.built:
                model.optimizer.build(model.trainable_variables)  # or its variables are not read
            found = pickle.loads((folder / _REST).read_bytes())  # nosec B301 # of this user's: `Link`
            self._load(found)
            model._initial_epoch = found["epoch"]  # where BackupAndRestore says it too
            self._step, self._found = found["step"], found
            for other, kept in zip(self._others, found["callbacks"]):
                vars(other).update(kept)
        self._link.take_signals()
        self._link.ready(parallel=False)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        found, self._found = self._found, None
        self._epoch, self._epoch_step = epoch, self._step - (found["batch"] if found else 0)
        if steps := self.params.get("steps"):
            self._total = self._epoch_step + (self.params["epochs"] - epoch) * steps
        if found is None:
            self._begun_with = _random_state()
            return
        self.model._initial_epoch = None  # Keras has read it, and would begin another fit there
        history = self.model.history
        history.epoch, history.history = found["epochs"], found["history"]
        self._begun_with = found["begun_with"] if found["batch"] else found["random"]
        _restore_random(self._begun_with)
        if found["batch"]:
            # Callbacks have begun this epoch twice: what they set then (a learning rate) had been set.
            self._load(found)
            self._pass_over(found)

    # -- after each batch --------------------------------------------------------------------

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._passing:
            self._passing = max(0, self._passing - self.model.steps_per_execution)
            if not self._passing:
                self._passed()
            return
        self._step = self._epoch_step + batch + 1
        logs = logs or {}
        self._link.report(self._step, logs.get("loss"), total=self._total)
        if batch + 1 != self.params.get("steps"):  # else at the epoch's end, after its evaluation
            if self._pace.due():
                self._metrics.log(logs, self._step)
            self._look(self._epoch, batch + 1)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._metrics.log(logs or {}, self._step)
        history = self.model.history
        if epoch + 1 < self.params.get("epochs", epoch + 2) and not self.model.stop_training:
            done = [*history.epoch, epoch]  # Keras' own callback comes after this one
            names = {**dict.fromkeys(logs or {}, None), **history.history}
            kept = {name: [*history.history.get(name, []), *_value(logs, name)] for name in names}
            self._look(epoch + 1, 0, done, kept)

    # -- inside ------------------------------------------------------------------------------

    def _look(self, epoch: int, batch: int, epochs: list[int] | None = None, history: Any = None) -> None:
        wishes = self._link.wishes()
        if not wishes:
            return
        if epochs is None:
            epochs, history = self.model.history.epoch, self.model.history.history
        try:
            self._save(epoch, batch, epochs, history)
        except Exception as error:  # of h5py, too, which says a full disk by a RuntimeError
            why = f"{type(error).__name__}: {' '.join(str(error).split())}"
            if wishes & Wish.STOP:
                self._link.cannot_save(why)
            self._link.not_saved()
            say(f"step {self._step}: periodic checkpoint failed, training goes on: {why}")
        if wishes & Wish.STOP:
            self._link.leave()

    def _save(self, epoch: int, batch: int, epochs: list[int], history: dict[str, list[float]]) -> None:
        place, env = self._link.checkpoint_dir, self._link.env
        assert place is not None and env is not None  # else nothing is wished
        rest = {
            "step": self._step,
            "epoch": epoch,
            "batch": batch,
            "epochs": epochs,
            "history": history,
            "seeds": _values(_seeds(self.model)),
            "metrics": _values(_metrics(self.model)),
            "callbacks": [_memory(other) for other in self._others],
            "begun_with": self._begun_with,
            "random": _random_state(),
        }
        folder, part = place / f"step-{self._step:09d}", place / f".step-{self._step:09d}"
        for left in (folder, part):
            shutil.rmtree(left, ignore_errors=True)
        make_private(part)
        try:
            self.model.save_weights(part / _WEIGHTS)
            (part / _REST).write_bytes(pickle.dumps(rest))
            sync_folder(part)
            part.replace(folder)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)  # of no use, and the disk may be full
            raise
        self._link.saved(self._step, folder)
        for old in sorted(place.glob("step-*"))[: -env.keep]:
            shutil.rmtree(old, ignore_errors=True)

    def _load(self, found: dict[str, Any]) -> None:
        """The variables of the model and its optimizer, as they were saved."""
        folder = self._link.checkpoint
        assert folder is not None  # else nothing was found
        self.model.load_weights(folder / _WEIGHTS)
        _assign(_seeds(self.model), found["seeds"], "draws of its layers")

    def _pass_over(self, found: dict[str, Any]) -> None:
        """Have the batches of this epoch that were trained already read, and nothing else."""
        model = self.model
        train, self._passing = model.train_function, found["batch"]
        _assign(_metrics(model), found["metrics"], "metrics of this epoch")

        def read(*args: Any) -> Any:
            if not isinstance(args[-1], list):  # an iterator; with torch, Keras has read already
                for _ in range(model.steps_per_execution):
                    next(args[-1])
            return ({}, *args[:-1]) if len(args) > 1 else {}  # with JAX, what was trained goes through it

        def passed() -> None:
            model.train_function = train
            _restore_random(found["random"])

        model.train_function, self._passed = read, passed

    def _mute(self, callback: keras.callbacks.Callback, name: str) -> None:
        """Have a callback of the program's not hear of batches that are passed over."""
        hook: Callable[..., None] = getattr(callback, name)
        if getattr(hook, "_is_default", False):  # Keras asks for that too
            return

        def heard(batch: int, logs: Any = None) -> None:
            if not self._passing:
                hook(batch, logs)

        setattr(callback, name, heard)


def _seeds(model: keras.Model) -> list[Any]:
    """What a model's layers draw from: no file of weights holds it."""
    weights = {id(each) for each in model.weights}
    return [each for each in model.variables if id(each) not in weights]


def _metrics(model: keras.Model) -> list[Any]:
    """What the metrics of the epoch are made of, the loss among them."""
    return [each for metric in model.metrics for each in metric.variables]


def _values(variables: Sequence[Any]) -> list[Any]:
    return [np.array(keras.ops.convert_to_numpy(each)) for each in variables]


def _assign(variables: Sequence[Any], values: Sequence[Any], what: str) -> None:
    if len(variables) != len(values):
        say(f"the {what} begin anew: they are not those that were saved")
        return
    for variable, value in zip(variables, values):
        variable.assign(value)


def _memory(callback: keras.callbacks.Callback) -> dict[str, Any]:
    """What a callback of Keras' own remembers over epochs; of others nothing is known."""
    if not isinstance(callback, _REMEMBER):
        return {}
    return {name: value for name, value in vars(callback).items() if _is_memory(value)}


def _is_memory(value: Any) -> bool:
    """Whether it is a number, a text, weights, or what says which of two is better.

    Older versions find the last one out at the end of an epoch, and forget what was best when they do.
    """
    if isinstance(value, list):
        return all(isinstance(each, np.ndarray) for each in value)
    return isinstance(value, _PLAIN) or getattr(value, "__name__", "") in ("less", "greater")


def _value(logs: Any, name: str) -> list[float]:
    return [float(logs[name])] if logs and name in logs else []


def _random_state() -> Any:
    """The states of all generators that Keras draws from outside of a model."""
    torch = sys.modules.get("torch")
    return random.getstate(), np.random.get_state(), None if torch is None else torch.get_rng_state().numpy()


def _restore_random(state: Any) -> None:
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch = sys.modules.get("torch")
    if torch is not None and state[2] is not None:
        torch.set_rng_state(torch.from_numpy(state[2]))
