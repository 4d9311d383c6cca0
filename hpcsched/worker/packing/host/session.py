"""A packed training as the process looks after it in which it takes place."""

from __future__ import annotations

from contextvars import Context

from hpcsched.worker.background.rng_isolation import NotHostable
from hpcsched.worker.packing.member import Member
from hpcsched.worker.packing.packed_session import PackedSession
from hpcsched.worker.process.contract import JobEnv
from hpcsched.worker.session.trainer import Trainer, build, evaluate, is_watched

LOOK_S = 0.01
"""How often to look away from the steps: some take 0.1 ms only."""


class LiveMember(Member):
    """A member that is a job's training: it ends, saves and leaves as that."""

    def finish(self) -> None:
        """After its last step: save the final state, evaluate. Raises SystemExit when it cannot be saved."""
        self.session.report(force=True)
        self.call(self.session.finish, lambda: evaluate(self.parts))

    def look(self) -> None:
        """Save, or save and leave with SystemExit, as is wanted now."""
        self.call(self.session.look)


def bring(trainer: Trainer, env: JobEnv, *, context: Context | None = None) -> LiveMember:
    """Build a job's training, take its newest checkpoint up if that is wanted, say that it is ready.

    Raises NotHostable for one that does more than train: see `is_watched`.
    """
    parts = build(trainer, env.args)
    if is_watched(parts):
        raise NotHostable("it evaluates, or has callbacks, while it trains")
    return LiveMember(parts, PackedSession(parts), name=f"job {env.job_id}", context=context)
