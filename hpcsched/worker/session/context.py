"""The place of a training: which rank of which job it is, and what it has to speak to others."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

import torch

from hpcsched.contract.environment import Environment
from hpcsched.contract.seats import Seat
from hpcsched.worker.checkpoint.saving import Saves
from hpcsched.worker.process.contract import JobEnv, OrderReader, ProgressWriter
from hpcsched.worker.ranks.process_group import Peers
from hpcsched.worker.session.state import TrainingState
from hpcsched.worker.session.stopping import StopFlag


class Context:
    """What a session and its strategy have in common.

    Attributes:
        training: what is trained; strategies move its `step`, `samples` and `loss` on.
        env: what the agent has told this rank; None without an agent.
        device: of this rank.
        peers: the other ranks.
        saves: where states are kept.
        flag: whether this process has been asked to leave.
        orders: what the agent asks of rank 0 besides.
        progress: lines to the agent.
    """

    def __init__(
        self,
        training: TrainingState,
        *,
        env: JobEnv | None,
        device: torch.device,
        peers: Peers,
        saves: Saves,
        flag: StopFlag,
        orders: OrderReader,
        progress: ProgressWriter,
    ) -> None:
        self.training, self.env, self.device = training, env, device
        self.peers, self.saves, self.flag = peers, saves, flag
        self.orders, self.progress = orders, progress

    @property
    def rank(self) -> int:
        """This rank's number now; a resize in place may change it between two steps."""
        return self.peers.rank

    @property
    def world_size(self) -> int:
        """How many ranks there are now."""
        return self.peers.world_size

    def gather_sums(self) -> None:
        """Bring what is added up in an epoch to rank 0; all ranks call this."""
        if self.training.sums.epoch >= 0:
            self.training.sums.gather(self.peers)

    def becomes(self, attempt: int, seats: Sequence[Seat] = ()) -> None:
        """This process belongs to another attempt from now on, with the rank that `peers` says."""
        assert self.env is not None
        self.env = self.saves.env = replace(
            self.env,
            attempt=attempt,
            rank=self.rank,
            world_size=self.world_size,
            seats=tuple(seats) or self.env.seats,
        )
        os.environ.update(RANK=str(self.rank), WORLD_SIZE=str(self.world_size))
        now = Environment(attempt=attempt, rank=self.rank, world_size=self.world_size)
        os.environ.update(now.to_environ())
