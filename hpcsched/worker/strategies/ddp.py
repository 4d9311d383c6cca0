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
    for _ in session.steps():
        parts.optimizer.zero_grad()
        for batch in next(batches):
            session.backward(parts.loss(parts.model, batch))
        parts.optimizer.step()
        if parts.scheduler is not None:
            parts.scheduler.step()  # type: ignore[attr-defined]
    session.finish(lambda: _evaluate(parts))


def _batches(parts: Parts, session: Session, micro_batch: int | None) -> Iterator[Iterator[Any]]:
    """For each coming step, this rank's batches."""
    shares = session.upcoming()
    if parts.loaders == 0 or parts.tensors is not None:
        for share in shares:
            yield (
                parts.batch(indices, session.device)
                for indices in torch.tensor(share).split(micro_batch or len(share))
            )
        return
    sizes: list[int] = []
    loader = DataLoader(
        parts.dataset,  # type: ignore[arg-type]
        batch_sampler=_Pieces(shares, micro_batch, sizes),
        num_workers=parts.loaders,
        collate_fn=parts.collate,
        pin_memory=session.device.type == "cuda",
        # Its own, so that reading ahead takes nothing out of the generators that are saved.
        generator=torch.Generator().manual_seed(parts.seed),
    )
