"""Gradient boosted trees with XGBoost: a regression, with a validation set and early stopping."""

import argparse
from pathlib import Path

import numpy as np
import xgboost as xgb


class PrintLoss(xgb.callback.TrainingCallback):
    """A line for each round."""

    def after_iteration(self, model, epoch, evals_log):
        print(f"step {epoch + 1} loss {evals_log['validation']['rmse'][-1]!r}", flush=True)
        return False


def samples(count, seed):
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(count, 20)).astype(np.float32)
    y = x[:, 0] * x[:, 1] + np.sin(3 * x[:, 2]) + 0.1 * draw.normal(size=count)
    return xgb.DMatrix(x, y)


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--steps", type=int, default=60)
    options.add_argument("--out", type=Path, default=Path("out"))
    options.add_argument("--samples", type=int, default=300_000)
    options.add_argument("--subsample", type=float, default=1.0)
    options = options.parse_args()

    train_set, validation_set = samples(options.samples, 0), samples(5_000, 1)
    history = {}
    booster = xgb.train(
        {"max_depth": 6, "eta": 0.1, "subsample": options.subsample, "seed": 7},
        train_set,
        options.steps,
        evals=[(train_set, "train"), (validation_set, "validation")],
        early_stopping_rounds=20,
        evals_result=history,
        verbose_eval=False,
        callbacks=[PrintLoss()],
    )
    options.out.mkdir(parents=True, exist_ok=True)
    booster.save_model(options.out / "model.ubj")
    losses = history["validation"]["rmse"]
    print(f"done step {len(losses)} loss {losses[-1]!r}", flush=True)


if __name__ == "__main__":
    main()
