"""Parameter servers and workers on CPU cores, found and changed while it trains (NEARCHUS)."""

from __future__ import annotations

import os

from hpcsched.contract.strategies import Ddp, Ps
from hpcsched.contract.visibility import CUDA
from hpcsched.worker.ddp.strategy import run as run_data_parallel
from hpcsched.worker.process.contract import JobEnv
from hpcsched.worker.ps.parameter_server import ParameterServer
from hpcsched.worker.ps.roles import WiredPeers
from hpcsched.worker.ranks.process_group import own_device
from hpcsched.worker.session.session import session_of
from hpcsched.worker.session.trainer import Trainer, build, evaluate


def run(trainer: Trainer, env: JobEnv, options: Ps) -> None:
    """Train to the end, save the final state and its metrics.

    Seats are the agent's, which gives each rank its own; a single rank that has none trains in this process
    alone.
    """
    os.environ.update(CUDA.hidden())  # all is on the CPU
    if env.world_size == 1 and not env.seats and not env.joining:
        run_data_parallel(trainer, env, Ddp())
        return
    parts = build(trainer, env.args)
    strategy = ParameterServer(parts, env, staleness=options.staleness, link_mib_s=options.link)
    session = session_of(parts, strategy, ranks=WiredPeers.join(env, own_device(env)))
    session.train(lambda: evaluate(parts))
