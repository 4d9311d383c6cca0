"""Parameter servers and workers on CPU cores, found and changed while it trains (NEARCHUS)."""

from __future__ import annotations

import math
import os

from hpcsched.errors import ConfigError
from hpcsched.worker.ddp.strategy import run as run_data_parallel
from hpcsched.worker.process.contract import JobEnv
from hpcsched.worker.ps.parameter_server import ParameterServer
from hpcsched.worker.ps.roles import WiredPeers
from hpcsched.worker.ranks.process_group import own_device
from hpcsched.worker.session.session import session_of
from hpcsched.worker.session.trainer import Trainer, build, evaluate

OPTIONS = ("cpus", "staleness", "servers", "workers", "start", "scale_up", "link")


def run(trainer: Trainer, env: JobEnv) -> None:
    """Train to the end, save the final state and its metrics.

    Options: `staleness`, how many steps a worker may be ahead of the slowest one (0). `link`, what a server's
    link can take in, and give out, in MiB/s: no more than that is used. All others are the agent's, which
    gives each rank its seat; a single rank that has none trains in this process alone.
    """
    staleness, link = env.strategy.get("staleness", 0), env.strategy.get("link")
    if type(staleness) is not int or staleness < 0:
        accepted = "a whole number of at least 0"
        raise ConfigError(where="strategy ps", key="staleness", got=repr(staleness), accepted=accepted)
    if link is not None and (type(link) not in (int, float) or not 0 < link < math.inf):
        raise ConfigError(
            where="strategy ps", key="link", got=repr(link), accepted="a positive number of MiB/s"
        )
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # all is on the CPU
    if env.world_size == 1 and not env.seats and not env.joining:
        run_data_parallel(trainer, env)
        return
    parts = build(trainer, env.args)
    strategy = ParameterServer(parts, env, staleness=staleness, link_mib_s=link)
    session = session_of(parts, strategy, ranks=WiredPeers.join(env, own_device(env)))
    session.train(lambda: evaluate(parts))
