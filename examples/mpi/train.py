"""Linear regression by stochastic gradients over MPI: each rank has its part of the batch, rank 0 saves."""

import argparse
from pathlib import Path

import numpy as np
from mpi4py import MPI

FEATURES, BATCH = 400, 2048


def batch(step, rank, world_size, truth):
    """This rank's part of the batch of a step, which is the same one on any number of ranks."""
    own = slice(rank * BATCH // world_size, (rank + 1) * BATCH // world_size)
    draw = np.random.default_rng(step)
    x = draw.normal(size=(BATCH, FEATURES))[own]
    return x, x @ truth + 0.1 * draw.normal(size=BATCH)[own]


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--steps", type=int, default=60)
    options.add_argument("--out", type=Path, default=Path("out"))
    options.add_argument("--save-every", type=int, default=20)
    options = options.parse_args()

    world = MPI.COMM_WORLD
    rank, world_size = world.Get_rank(), world.Get_size()
    loss = np.nan  # where all steps were made before
    truth = np.random.default_rng(0).normal(size=FEATURES)
    saved = options.out / "state.npz"
    weights, momentum, start = np.zeros(FEATURES), np.zeros(FEATURES), 0
    if rank == 0 and saved.exists():
        with np.load(saved) as found:
            weights, momentum, start = found["weights"], found["momentum"], int(found["step"])
    weights, momentum, start = world.bcast((weights, momentum, start))

    def save(step):
        if rank == 0:
            options.out.mkdir(parents=True, exist_ok=True)
            part = saved.with_name("part.npz")
            np.savez(part, weights=weights, momentum=momentum, step=step)
            part.replace(saved)
        world.barrier()

    for step in range(start + 1, options.steps + 1):
        x, y = batch(step, rank, world_size, truth)
        error = x @ weights - y
        own = np.append(x.T @ error, error @ error)
        sums = np.empty_like(own)
        world.Allreduce(own, sums)
        momentum = 0.9 * momentum + sums[:-1] / BATCH
        weights = weights - 0.02 * momentum
        loss = float(sums[-1]) / BATCH
        if rank == 0:
            print(f"step {step} loss {loss!r}", flush=True)
        if step % options.save_every == 0:
            save(step)
    if rank == 0:
        print(f"done step {options.steps} loss {loss!r}", flush=True)


if __name__ == "__main__":
    main()
