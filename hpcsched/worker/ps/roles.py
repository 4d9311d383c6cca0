"""The processes of a parameter-server job: who is what, and how they meet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from hpcsched.contract import variables
from hpcsched.contract.seats import Seat
from hpcsched.errors import ConfigError
from hpcsched.worker.process.contract import JobEnv
from hpcsched.worker.ps.protocol import PeerChannels
from hpcsched.worker.ranks.process_group import MEET_TIMEOUT_S, STEP_TIMEOUT_S, Peers


class Roles:
    """Which ranks are servers, and which are workers, in the order of the ranks."""

    def __init__(self, seats: Sequence[Seat]) -> None:
        self.seats = tuple(seats)

    @cached_property
    def servers(self) -> tuple[int, ...]:
        return tuple(rank for rank, seat in enumerate(self.seats) if seat.server)

    @cached_property
    def workers(self) -> tuple[int, ...]:
        return tuple(rank for rank, seat in enumerate(self.seats) if not seat.server)

    def worker(self, rank: int) -> int | None:
        """Its number among the workers; None for a server."""
        return None if self.seats[rank].server else self.workers.index(rank)

    def cannot_be(self, world_size: int, global_batch: int) -> str:
        """Why so many ranks cannot train like this; empty if they can."""
        if len(self.seats) != world_size:
            return f"{len(self.seats)} seats for {world_size} ranks"
        if not self.seats[0].server:
            return "rank 0 is no server"
        if not self.workers:
            return "there is no worker"
        if len(self.workers) > global_batch:
            return f"a global batch of {global_batch} samples is too small for {len(self.workers)} workers"
        return ""

    @classmethod
    def of(cls, env: JobEnv, global_batch: int) -> Roles:
        """What the agent told us. Raises ConfigError."""
        roles = cls(env.seats)
        if why := roles.cannot_be(env.world_size, global_batch):
            accepted = "a seat for each rank: a server first, and workers for no more than the global batch"
            raise ConfigError(where="environment", key=variables.SEATS, got=why, accepted=accepted)
        return roles


class WiredPeers(Peers):
    """Peers with a `wire` besides, which is made with each group; the former one stays its owner's to close.

    All else goes over one other group: each group connects every rank with all others, which is what takes
    time in a resize. In one nobody has a state to hand over before the ranks meet, so nobody waits for long.
    """

    def __init__(self, rank: int, world_size: int, device: torch.device) -> None:
        super().__init__(rank, world_size, device)
        self.wire: PeerChannels | None = None

    def meet(self, keys: Any, *, within_s: float = STEP_TIMEOUT_S) -> None:
        super().meet(keys, within_s=within_s)
        self.wire = PeerChannels(self.keys, self.rank, self.world_size, within_s)

    def agreeing(self, patience: timedelta) -> dist.ProcessGroup:
        world = dist.group.WORLD
        return world if world is not None and self.device.type == "cpu" else super().agreeing(patience)

    def meet_anew(self, keys: Any, given_up: Callable[[], object] = lambda: False) -> None:
        keys.set(f"meets {self.rank}", "yes")
        others = [f"meets {rank}" for rank in range(self.world_size)]
        keys.wait(others, timedelta(seconds=MEET_TIMEOUT_S))
        super().meet_anew(keys, given_up)

    def board(self, attempt: int) -> Any:
        """Where all ranks of an attempt can leave notes for each other."""
        return dist.PrefixStore(f"board-{attempt}", self.keys)  # type: ignore[attr-defined]
