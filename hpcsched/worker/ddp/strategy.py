"""Data parallel: every rank has the whole model and an equal share of each global batch."""

from __future__ import annotations

from hpcsched.contract.strategies import Ddp
from hpcsched.worker.process.contract import JobEnv
from hpcsched.worker.session.data_parallel import DataParallel
from hpcsched.worker.session.session import train
from hpcsched.worker.session.trainer import Trainer


def run(trainer: Trainer, env: JobEnv, options: Ddp) -> None:
    """Train to the end, save the final state and its metrics."""
    train(
        trainer,
        env,
        lambda parts: DataParallel(
            parts,
            micro_batch=options.micro_batch,
            reproducible=options.reproducible,
            shards=options.shards,
        ),
    )
