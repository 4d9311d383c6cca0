"""Data parallel: every rank has the whole model and an equal share of each global batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from hpcsched.errors import ConfigError
from hpcsched.worker.contract import JobEnv
from hpcsched.worker.session import Metrics, Session
from hpcsched.worker.trainer import Parts, Trainer, build, to_device

OPTIONS = ("micro_batch",)


def run(trainer: Trainer, env: JobEnv) -> None:
    """Train to the end, save the final state and its metrics.

    Option `micro_batch`: the most samples a rank takes through the model at a time; larger shares
    are split and their gradients added up, which changes memory and nothing else.
    """
    micro_batch = env.strategy.get("micro_batch")
    if micro_batch is not None and (type(micro_batch) is not int or micro_batch < 1):
        raise ConfigError(
            where="strategy", key="micro_batch", got=repr(micro_batch), accepted="a positive whole number"
        )
    parts = build(trainer, env.args)
    session = Session(
        model=parts.model,
        optimizer=parts.optimizer,
        scheduler=parts.scheduler,
        dataset_size=parts.size,
        global_batch=parts.global_batch,
        seed=parts.seed,
    )
    if session.total_steps is None:
        session.total_steps = session.steps_for(1 if parts.epochs is None else parts.epochs)
    parts.model.train()
    batches = _batches(parts, session, micro_batch)
    for indices in session.steps():
        parts.optimizer.zero_grad()
        for _ in range(-(-len(indices) // (micro_batch or len(indices)))):
            session.backward(parts.loss(parts.model, next(batches)))
        parts.optimizer.step()
        if parts.scheduler is not None:
            parts.scheduler.step()
    session.finish(lambda: _evaluate(parts))


def _batches(parts: Parts, session: Session, micro_batch: int | None) -> Iterator[Any]:
    """This rank's batches of all coming steps, on its device, at most `micro_batch` samples each."""
    pieces = (
        share[start : start + (micro_batch or len(share))]
        for share in session.upcoming()
        for start in range(0, len(share), micro_batch or len(share))
    )
    if parts.loaders == 0 or parts.tensors is not None:
        return (parts.batch(torch.tensor(piece), session.device) for piece in pieces)
    # The loader processes inherit handlers that only take a note, so a signal to the whole process
    # group does not end them while the last step still needs them.
    loader = DataLoader(
        parts.dataset,  # type: ignore[arg-type]
        batch_sampler=pieces,
        num_workers=parts.loaders,
        collate_fn=parts.collate,
        pin_memory=session.device.type == "cuda",
        # Its own, so that reading ahead takes nothing out of the generators that are saved.
        generator=torch.Generator().manual_seed(parts.seed + session.step),
    )
    return (to_device(batch, session.device) for batch in loader)


@torch.no_grad()
def _evaluate(parts: Parts) -> Metrics:
    if parts.evaluate is None:
        return {}
    parts.model.eval()
    return parts.evaluate(parts.model)
