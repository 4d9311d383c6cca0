"""A classifier in JAX: data parallel over all devices of all processes, saved with Orbax."""

import argparse
import os
from functools import partial
from pathlib import Path

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

FEATURES, HIDDEN, CLASSES, BATCH = 64, 512, 10, 512


def start_state(optimizer):
    keys = jax.random.split(jax.random.key(0), 3)
    sizes = [(FEATURES, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, CLASSES)]
    layers = [jax.random.normal(key, size) / size[0] ** 0.5 for key, size in zip(keys, sizes, strict=True)]
    return {
        "model": layers,
        "optimizer": optimizer.init(layers),
        "key": jax.random.key_data(jax.random.key(1)),
    }


def loss_of(layers, key, x, y):
    for layer in layers[:-1]:
        key, draw = jax.random.split(key)
        x = jax.nn.relu(x @ layer)
        x = x * jax.random.bernoulli(draw, 0.9, x.shape) / 0.9
    return optax.softmax_cross_entropy_with_integer_labels(x @ layers[-1], y).mean()


@partial(jax.jit, static_argnums=0)
def train_step(optimizer, state, x, y):
    key, draw = jax.random.split(jax.random.wrap_key_data(state["key"]))
    loss, gradients = jax.value_and_grad(loss_of)(state["model"], draw, x, y)
    updates, kept = optimizer.update(gradients, state["optimizer"], state["model"])
    model = optax.apply_updates(state["model"], updates)
    return {"model": model, "optimizer": kept, "key": jax.random.key_data(key)}, loss


def batch(step, sharding):
    """The global batch of a step; each process makes its own part of it."""
    draw = np.random.default_rng(step)
    x = draw.normal(size=(BATCH, FEATURES)).astype(np.float32)
    y = (x[:, :CLASSES] + x[:, CLASSES : 2 * CLASSES]).argmax(1)
    share = BATCH // jax.process_count()
    own = slice(jax.process_index() * share, (jax.process_index() + 1) * share)
    return [jax.make_array_from_process_local_data(sharding, each[own]) for each in (x, y)]


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--steps", type=int, default=60)
    options.add_argument("--out", type=Path, default=Path("out"))
    options.add_argument("--save-every", type=int, default=20)
    options = options.parse_args()

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        jax.distributed.initialize(address, int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"]))
    mesh = Mesh(mesh_utils.create_device_mesh((jax.device_count(),)), ("data",))
    whole, split = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))

    optimizer = optax.adamw(optax.cosine_decay_schedule(1e-3, 1000))
    state = jax.jit(start_state, static_argnums=0, out_shardings=whole)(optimizer)
    manager = ocp.CheckpointManager(
        options.out.resolve() / "checkpoints",
        options=ocp.CheckpointManagerOptions(save_interval_steps=options.save_every, max_to_keep=2),
    )
    start = manager.latest_step() or 0
    if start:
        state = manager.restore(start, args=ocp.args.StandardRestore(state))

    loss = np.nan  # where all steps were made before
    for step in range(start, options.steps):
        state, loss = train_step(optimizer, state, *batch(step, split))
        if jax.process_index() == 0:
            print(f"step {step + 1} loss {float(loss)!r}", flush=True)
        manager.save(step + 1, args=ocp.args.StandardSave(state))
    manager.wait_until_finished()
    if jax.process_index() == 0:
        print(f"done step {options.steps} loss {float(loss)!r}", flush=True)


if __name__ == "__main__":
    main()
