"""What a worker does about lanes and packs before and while it trains. Imports torch only where it becomes
a host."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

from hpcsched.contract import variables
from hpcsched.worker.background import settings
from hpcsched.worker.background.settings import Mode
from hpcsched.worker.process.contract import JobEnv, say


def before_torch() -> int | None:
    """To be called before anything touches a GPU; the exit code of a job that another process has done.

    Raises ConfigError when the environment asks for what there is not.
    """
    lane = settings.lane(os.environ)
    if lane is None:
        if os.environ.get(variables.PACK):
            from hpcsched.worker.packing.job_process import be_member

            return be_member(os.environ)
        return None
    mode = settings.mode(os.environ)
    if mode is Mode.MPS:
        from hpcsched.worker.background import mps

        mps.use(os.environ, lane=lane)
    if lane == "background" and mode.hosted:
        from hpcsched.worker.background import proxy

        if (code := proxy.be_guest(os.environ)) is not None:
            return code
    if lane == "background" and mode is not Mode.MPS:
        from hpcsched.worker.background.own_process import refuse_exclusive

        refuse_exclusive(os.environ)
    return None


@contextlib.contextmanager
def hosting(
    load: Callable[[str | None], Any], strategy: Callable[[dict[str, Any]], Any]
) -> Iterator[Callable[[Any], Any]]:
    """While a foreground trains in here, a background job may be its guest.

    The foreground's trainer has to be imported in here too, and go through what this yields. `load` and
    `strategy` make of a guest's names what they made of the foreground's.
    """
    env = JobEnv.from_environ(os.environ)
    hosted = settings.lane(os.environ) == "foreground" and settings.mode(os.environ).hosted
    if hosted and env is not None and env.strategy.get("kind") == "burst":
        # It calls the layers of its model, and refuses one with the hooks by which a step is followed.
        say("no guests are taken here: the steps of a burst job cannot be followed")
        hosted = False
    if not hosted:
        yield lambda trainer: trainer
        return
    from hpcsched.worker.background.host import GuestHost

    host = GuestHost(os.environ, load=load, strategy=strategy)
    with host.open():
        yield host.watched
