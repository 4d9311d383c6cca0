"""Burst parallel: every layer on ranks of its own (DeepPool, section 4)."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any, Union

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from hpcsched.contract.strategies import Burst
from hpcsched.errors import ConfigError, HpcschedError
from hpcsched.planning.burst.graph import LayerProfile
from hpcsched.planning.burst.plan import BurstPlan
from hpcsched.worker.burst.burst_parallel import BurstParallel
from hpcsched.worker.burst.channels import Channels
from hpcsched.worker.burst.choose import Chooser, measure_network, pinned
from hpcsched.worker.burst.engine import Engine
from hpcsched.worker.burst.ownership import check_norms
from hpcsched.worker.burst.prepare import EXAMPLE_SAMPLES
from hpcsched.worker.layers.graph import Layers, capture_inputs, trace
from hpcsched.worker.layers.measure import measure
from hpcsched.worker.process import rng
from hpcsched.worker.process.contract import JobEnv
from hpcsched.worker.ranks.backend import order_launches
from hpcsched.worker.ranks.process_group import Peers
from hpcsched.worker.session.session import Session, session_of
from hpcsched.worker.session.trainer import Parts, Trainer, build, evaluate, to_device

MEASURE_LAYER_S = 0.02
"""For one layer and batch, where the layers are measured at the start."""


def run(trainer: Trainer, env: JobEnv, options: Burst) -> None:
    """Train to the end, save the final state and its metrics."""
    parts = build(trainer, env.args)
    session, _ = begin(parts, env, options)
    session.train(lambda: evaluate(parts))


def begin(parts: Parts, env: JobEnv, options: Burst, **session_options: Any) -> tuple[Session, BurstParallel]:
    """A session of these parts, ready to make its steps, and its strategy.

    The plan is that of a file, for exactly as many ranks. Else one is made, from the layer profile in a file
    or as measured here at the start, and made anew at a periodic checkpoint when what was measured since says
    that this pays; it is run if it is measured to be faster than its plain alternatives.

    `session_options` are more of `Session`'s arguments.
    """
    local_norms = options.batch_norm == "local"
    _check_optimizer(parts.optimizer)
    strategy = BurstParallel(parts)
    order_launches()
    session = session_of(parts, strategy, **session_options)
    example = _example(parts, session.device)
    layers = trace(parts.model, example)
    wires = Channels(session.rank, session.world_size, session.device)
    chooser = _chooser(env, options, parts, layers, wires)
    plan_file = Path(options.plan) if options.plan else None
    plan = _agree(strategy.context.peers, lambda: pinned(plan_file) if plan_file else chooser.first())
    engine = Engine(
        layers,
        example,
        plan,
        batch=parts.global_batch,
        seed=parts.seed,
        wires=wires,
        optimizer=parts.optimizer,
        local_norms=local_norms,
        where=str(plan_file or "plan"),
    )
    if session.rank == 0:
        chooser.write(plan)
    strategy.run_by(engine, wires, None if plan_file else chooser)
    return session, strategy


def _check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raise ConfigError for one that needs all gradients: a rank has those of its own layers."""
    got = ""
    if isinstance(optimizer, torch.optim.LBFGS):
        got = "LBFGS, which needs all gradients at once"
    elif optimizer._optimizer_step_pre_hooks:
        got = "has hooks before its step (clipping by the norm of all gradients?)"
    if got:
        raise ConfigError(where="optimizer", got=got, accepted="one that treats each parameter by itself")


def _example(parts: Parts, device: torch.device, samples: int = EXAMPLE_SAMPLES) -> tuple[torch.Tensor, ...]:
    """What the model is called with for some samples of the dataset."""
    with rng.seeded(parts.seed, "example"):
        batch = to_device(parts.batch([i % parts.size for i in range(samples)]), device)
        before = rng.capture(device)
        inputs = capture_inputs(parts.loss, parts.model, batch)
        if rng.moved(before, device):  # ranks with inputs and ranks with losses would draw different ones
            raise ConfigError(
                where="loss",
                got="draws random numbers before it calls the model",
                accepted="a dataset that draws them for each sample",
            )
        for tensor in inputs:
            if len(tensor) != samples:
                got = f"gives the model {list(tensor.shape)} for {samples} samples"
                raise ConfigError(where="loss", got=got, accepted="one row a sample")
        return inputs


def _chooser(env: JobEnv, options: Burst, parts: Parts, layers: Layers, wires: Channels) -> Chooser:
    def measured() -> LayerProfile:
        counts = range(1, wires.world_size + 1)
        batches = sorted({-(-parts.global_batch // n) for n in counts if n <= parts.global_batch})
        generators = rng.capture(wires.device)
        on_gpu = wires.device.type == "cuda"
        found = measure(
            layers,
            lambda samples: _example(parts, wires.device, samples),
            batches,
            model=type(parts.model).__name__,
            device=torch.cuda.get_device_name(wires.device) if on_gpu else "cpu",
            seconds=MEASURE_LAYER_S,
        )
        *_, last = found
        rng.restore(generators, wires.device)
        assert last.times is not None
        return last.times.profile("measured at the start of the job")

    norms = [
        (layer.id, layer.name, [part for part in layer.module.modules() if isinstance(part, _BatchNorm)])
        for layer in layers.layers
    ]
    alone_of = parts.global_batch if options.batch_norm == "local" else None
    return Chooser(
        folder=env.job_dir,
        gpus=wires.world_size,
        global_batch=parts.global_batch,
        network=measure_network(wires),
        amplification=options.amplification or inf,
        measure=measured,
        profile_file=Path(options.profile) if options.profile else None,
        shared_norms=options.batch_norm == "shared",
        shape=[(layer.name, layer.prev) for layer in layers.layers],
        fits=lambda plan: check_norms(norms, plan, "plan", alone_of=alone_of),
    )


def _agree(peers: Peers, choose: Callable[[], BurstPlan]) -> BurstPlan:
    """The plan that rank 0 chooses, on all ranks; where it cannot, all of them end."""
    error: HpcschedError | None = None
    answer: BurstPlan | int = 0
    if peers.rank == 0:
        try:
            answer = choose()
        except HpcschedError as found:
            error, answer = found, found.exit_code
    told: BurstPlan | int = peers.tell(answer, Union[BurstPlan, int])
    if error is not None:
        raise error
    if isinstance(told, int):
        raise SystemExit(told)
    return told
