"""Packed: the trainings of one device in one process, or this one by itself where that cannot be.

Jobs that are members of a pack do not come here: they train in its process (`worker.packing.host`).
"""

from __future__ import annotations

import time

from hpcsched.contract.strategies import Ddp, Packed
from hpcsched.errors import ConfigError
from hpcsched.worker.background.rng_isolation import NotHostable
from hpcsched.worker.ddp.strategy import run as run_data_parallel
from hpcsched.worker.packing.engine import Pack
from hpcsched.worker.packing.failures import Failed, MemberExited
from hpcsched.worker.packing.host.session import LOOK_S, bring
from hpcsched.worker.process.contract import JobEnv
from hpcsched.worker.session.trainer import Trainer


def run(trainer: Trainer, env: JobEnv, options: Packed) -> None:
    """Train to the end as a pack of one, save the final state and its metrics.

    Which jobs are packed together is for the agent to say.
    """
    if env.world_size > 1:
        raise ConfigError(
            where="strategy packed", got=f"{env.world_size} ranks", accepted="1: it shares a device"
        )
    try:
        member = bring(trainer, env)
    except NotHostable:  # nobody computes it together with others: it trains as any other
        run_data_parallel(trainer, env, Ddp())
        return
    session = member.session
    pack = Pack(session.device, mode=options.mode)
    pack.join(member)
    next_look = 0.0
    try:
        while not member.done:
            pack.step()
            if time.monotonic() >= next_look:
                session.report()
                if session.due:
                    pack.write_back()
                    member.look()
                next_look = time.monotonic() + LOOK_S
        pack.leave(member)
    except Failed as failed:
        error = failed.errors[0][1]
        raise (error.end if isinstance(error, MemberExited) else error) from None
    member.finish()
