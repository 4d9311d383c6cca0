"""Gradient boosted trees with LightGBM: a regression, with a validation set and early stopping."""

import argparse
from pathlib import Path

import lightgbm as lgb
import numpy as np

from hpcsched.integrations.lightgbm import train


def print_loss(env):
    """A line for each round."""
    if env.evaluation_result_list:
        print(f"step {env.iteration + 1} loss {float(env.evaluation_result_list[-1][2])!r}", flush=True)


def samples(count, seed, reference=None):
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(count, 20)).astype(np.float32)
    y = x[:, 0] * x[:, 1] + np.sin(3 * x[:, 2]) + 0.1 * draw.normal(size=count)
    return lgb.Dataset(x, y, reference=reference)


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--steps", type=int, default=60)
    options.add_argument("--out", type=Path, default=Path("out"))
    options.add_argument("--samples", type=int, default=300_000)
    options.add_argument("--bagging", type=float, default=1.0)
    options = options.parse_args()

    train_set = samples(options.samples, 0)
    validation_set = samples(5_000, 1, reference=train_set)
    history = {}
    booster = train(
        {
            "objective": "regression",
            "num_leaves": 63,
            "learning_rate": 0.1,
            "bagging_fraction": options.bagging,
            "bagging_freq": 1,
            "seed": 7,
            "deterministic": True,
            "force_row_wise": True,
            "verbosity": -1,
        },
        train_set,
        options.steps,
        valid_sets=[validation_set],
        valid_names=["validation"],
        callbacks=[print_loss, lgb.early_stopping(20, verbose=False), lgb.record_evaluation(history)],
    )
    options.out.mkdir(parents=True, exist_ok=True)
    booster.save_model(options.out / "model.txt")
    losses = history["validation"]["l2"]
    print(f"done step {len(losses)} loss {float(losses[-1])!r}", flush=True)


if __name__ == "__main__":
    main()
