"""Keras trainings that are suspended, between epochs and in their midst, end as ones that were not."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("KERAS_BACKEND", "torch")
keras = pytest.importorskip("keras", reason="Keras is not installed")

from attempts import Attempts  # noqa: E402

from hpcsched.contract import files  # noqa: E402
from hpcsched.errors import ConfigError  # noqa: E402
from hpcsched.integrations import keras as ours  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class Losses(keras.callbacks.Callback):
    """Notes the loss after each batch that it is told of, and has the job stopped after some of them."""

    def __init__(self, stops: tuple[tuple[int, int], ...]) -> None:
        super().__init__()
        self.stops, self.epoch, self.seen = stops, 0, {}

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen[self.epoch, batch] = float(logs["loss"])
        if (self.epoch, batch) in self.stops:
            Attempts.stop()


def samples(seed: int) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(70, 6)).astype(np.float32)
    return x, x[:, :3].argmax(1)


def trained(*stops: tuple[int, int], epochs: int = 4, dropout: float = 0.3, **more: Any) -> Any:
    ours.current.cache_clear()
    keras.utils.set_random_seed(3)
    layers = [keras.Input((6,)), keras.layers.Dense(8, activation="relu")]
    layers += [keras.layers.Dropout(dropout), keras.layers.Dense(3)]
    model = keras.Sequential(layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.Adam(0.05), loss=loss, metrics=["accuracy"])
    losses = Losses(stops)
    history = model.fit(
        *samples(0),
        batch_size=10,
        epochs=epochs,
        validation_data=samples(1),
        verbose=0,
        callbacks=ours.elastic([losses, *more.pop("callbacks", [])]),
        **more,
    )
    return losses.seen, history.history, [np.asarray(each) for each in model.get_weights()]


@pytest.mark.slow
@pytest.mark.parametrize("stops", [((1, 3), (2, 0)), ((0, 6), (2, 5))], ids=["midst", "end"])
@pytest.mark.parametrize("more", [{}, {"shuffle": False}, {"dropout": 0.0}], ids=["", "ordered", "no draws"])
def test_suspended_is_as_never(
    tmp_path: Path, stops: tuple[tuple[int, int], ...], more: dict[str, Any]
) -> None:
    seen, history, weights = trained(**more)
    attempts = Attempts(tmp_path)
    later, again, same = attempts.run(lambda: trained(*stops, **more))
    assert attempts.codes == [75] * len(stops)
    assert [state.step for state in attempts.states] == [epoch * 7 + batch + 1 for epoch, batch in stops]
    assert later == {at: loss for at, loss in seen.items() if at > stops[-1]}
    assert again == history
    assert all((one == other).all() for one, other in zip(weights, same, strict=True))
    ends = {point.step: point.values for point in attempts.points if "val_loss" in point.values}
    assert [*ends] == [7, 14, 21, 28]
    assert ends[28] == {name: values[-1] for name, values in history.items()}
    assert attempts.points[0].step == 1 and attempts.totals == {28}
    assert b"true" not in (tmp_path / files.ready(1)).read_bytes()


@pytest.mark.slow
def test_early_stopping_remembers(tmp_path: Path) -> None:
    def stopping() -> list[Any]:
        return [
            keras.callbacks.EarlyStopping(monitor="val_loss", patience=2, restore_best_weights=True),
            keras.callbacks.ReduceLROnPlateau(patience=1),
        ]

    _, history, weights = trained(epochs=30, callbacks=stopping())
    ended = len(history["loss"])
    assert ended < 30
    attempts = Attempts(tmp_path)
    stop = (ended - 1, 2)
    _, again, same = attempts.run(lambda: trained(stop, epochs=30, callbacks=stopping()))
    assert attempts.codes == [75]
    assert again == history
    assert all((one == other).all() for one, other in zip(weights, same, strict=True))


@pytest.mark.slow
def test_a_learning_rate_is_set_once_in_an_epoch(tmp_path: Path) -> None:
    """Also if it is made of the one before: an epoch that was cut begins twice."""

    def decay() -> list[Any]:
        return [keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.8)]

    seen, history, weights = trained(epochs=3, callbacks=decay())
    attempts = Attempts(tmp_path)
    later, again, same = attempts.run(lambda: trained((0, 6), (1, 3), epochs=3, callbacks=decay()))
    assert attempts.codes == [75, 75]
    assert again == history
    assert later == {at: loss for at, loss in seen.items() if at > (1, 3)}
    assert all((one == other).all() for one, other in zip(weights, same, strict=True))


@pytest.mark.slow
def test_a_table_of_epochs_is_whole(tmp_path: Path) -> None:
    def table(name: str, *stops: tuple[int, int]) -> None:
        logger = keras.callbacks.CSVLogger(tmp_path / name)
        try:
            trained(*stops, callbacks=[logger])
        finally:
            logger.csv_file.close()  # as the end of a process does

    (tmp_path / "parts").write_text("of an earlier run\n")
    table("whole")
    attempts = Attempts(tmp_path)
    attempts.run(lambda: table("parts", (0, 6), (2, 3)))
    assert attempts.codes == [75, 75]
    assert (tmp_path / "parts").read_text() == (tmp_path / "whole").read_text()


@pytest.mark.slow
def test_a_second_fit_begins_anew(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It has neither the first one's epoch nor its checkpoint."""

    def twice(*stops: tuple[int, int]) -> Any:
        first = trained(*stops, epochs=2)
        keras.utils.set_random_seed(5)
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
        model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        second = model.fit(*samples(0), epochs=2, verbose=0, callbacks=ours.elastic([]))
        return first[1:2], second.history

    whole = twice()
    assert Attempts(tmp_path).run(lambda: twice((1, 2))) == whole
    assert capfd.readouterr().err.count("only the first fit of this program can be suspended") == 1


@pytest.mark.slow
def test_a_full_disk(tmp_path: Path, monkeypatch: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """It ends no training, and no suspension in a traceback; h5py says it in its own words."""

    def dies(self: Any, path: Path) -> None:
        path.write_bytes(b"half")
        raise RuntimeError("Can't decrement id ref count\n(no space left)")

    monkeypatch.setattr(keras.Model, "save_weights", dies)
    attempts = Attempts(tmp_path, HPCSCHED_CHECKPOINT_EVERY_S="0")
    with attempts._attempt():
        seen, _, _ = trained(epochs=1)
        assert len(seen) == 7
        with pytest.raises(SystemExit) as left:
            trained((0, 1), epochs=1)
    assert left.value.code == 74
    said = capfd.readouterr().err
    why = "RuntimeError: Can't decrement id ref count (no space left)\n"
    assert f"step 1: periodic checkpoint failed, training goes on: {why}" in said
    assert f"step 2 could not be saved: {why}" in said
    assert not [*(tmp_path / "checkpoint").iterdir()]


def test_several_processes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="processes: 2 processes; accepted: one"):
        Attempts(tmp_path, HPCSCHED_RANK="0", HPCSCHED_WORLD_SIZE="2").run(trained)


def test_without_hpcsched_nothing_is_added() -> None:
    ours.current.cache_clear()
    stop = keras.callbacks.EarlyStopping()
    assert ours.elastic([stop]) == [stop]
