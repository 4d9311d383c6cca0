"""A classifier in Keras: an early stopping, a dropout, a validation after each epoch."""

import argparse
import math
from pathlib import Path

import keras
import numpy as np

from hpcsched.integrations.keras import elastic

BATCH, PER_EPOCH = 256, 15


class PrintLoss(keras.callbacks.Callback):
    """A line for each step: the loss is the mean of the epoch so far, as Keras has it."""

    def __init__(self, per_epoch):
        super().__init__()
        self.per_epoch, self.epoch = per_epoch, 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        print(f"step {self.epoch * self.per_epoch + batch + 1} loss {float(logs['loss'])!r}", flush=True)


def samples(count, seed):
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(count, 64)).astype(np.float32)
    return x, (x[:, :10] + x[:, 10:20]).argmax(1)


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--steps", type=int, default=60)
    options.add_argument("--out", type=Path, default=Path("out"))
    options = options.parse_args()

    keras.utils.set_random_seed(7)
    x, y = samples(PER_EPOCH * BATCH, 0)
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(1024, activation="relu"),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(1024, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.AdamW(1e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    history = model.fit(
        x,
        y,
        batch_size=BATCH,
        epochs=-(-options.steps // PER_EPOCH),
        validation_data=samples(1_000, 1),
        verbose=0,
        callbacks=elastic([PrintLoss(PER_EPOCH), keras.callbacks.EarlyStopping("loss", patience=3)]),
    ).history
    options.out.mkdir(parents=True, exist_ok=True)
    model.save(options.out / "model.keras")
    last = history.get("val_loss", [math.nan])[-1]  # nan where all steps were made before
    print(f"done step {int(model.optimizer.iterations)} loss {last!r}", flush=True)


if __name__ == "__main__":
    main()
