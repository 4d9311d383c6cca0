"""Virtual stream workers: a global batch that adapts, on devices that may differ (JABAS)."""

from __future__ import annotations

from hpcsched.planning.vsw import options as workers
from hpcsched.worker.process.contract import JobEnv
from hpcsched.worker.session.trainer import Trainer, build, evaluate
from hpcsched.worker.vsw.session import WorkerSession

OPTIONS = workers.OPTIONS


def run(trainer: Trainer, env: JobEnv) -> None:
    """Train to the end, save the final state and its metrics. Options: see `planning.vsw.options`."""
    options = workers.WorkerOptions.parse(env.strategy)
    parts = build(trainer, env.args)
    parts.model.train()
    session = WorkerSession(parts, options)
    session.end_after(parts.epochs)
    for _ in session.steps():
        session.take_step()
    session.finish(lambda: evaluate(parts))
