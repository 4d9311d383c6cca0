"""Virtual stream workers: a global batch that adapts, on devices that may differ (JABAS)."""

from __future__ import annotations

from hpcsched.contract.strategies import Vsw
from hpcsched.planning.vsw.options import WorkerOptions
from hpcsched.worker.process.contract import JobEnv
from hpcsched.worker.session.session import train
from hpcsched.worker.session.trainer import Trainer
from hpcsched.worker.vsw.adaptive_batches import AdaptiveBatches


def run(trainer: Trainer, env: JobEnv, options: Vsw) -> None:
    """Train to the end, save the final state and its metrics."""
    train(trainer, env, lambda parts: AdaptiveBatches(parts, WorkerOptions.of(options)))
