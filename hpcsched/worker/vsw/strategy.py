"""Virtual stream workers: a global batch that adapts, on devices that may differ (JABAS)."""

from __future__ import annotations

from hpcsched.planning.vsw import options as workers
from hpcsched.worker.process.contract import JobEnv
from hpcsched.worker.session.session import train
from hpcsched.worker.session.trainer import Trainer
from hpcsched.worker.vsw.adaptive_batches import AdaptiveBatches

OPTIONS = workers.OPTIONS


def run(trainer: Trainer, env: JobEnv) -> None:
    """Train to the end, save the final state and its metrics. Options: see `planning.vsw.options`."""
    options = workers.WorkerOptions.parse(env.strategy)
    train(trainer, env, lambda parts: AdaptiveBatches(parts, options))
