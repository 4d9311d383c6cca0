"""What strategies have in common in which every rank has the whole model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Optional

import torch

from hpcsched.contract.orders import Resize
from hpcsched.contract.seats import Seat
from hpcsched.errors import StoreError
from hpcsched.worker.checkpoint.shared_memory import Held
from hpcsched.worker.process import rng
from hpcsched.worker.process.contract import NOTHING_ELSE, Facts
from hpcsched.worker.session.agreement import Agreement
from hpcsched.worker.session.context import Context
from hpcsched.worker.session.state import TrainingState
from hpcsched.worker.session.strategy import Stranded

NO_INDICES = torch.empty(0, dtype=torch.int64)


class Replicated:
    """A `Strategy` but for `train_step`: subclasses say how a step is made, and what is theirs to save."""

    in_place = False
    reproducible = False
    mixed = False
    """Whether it computes with `Parts.precision` and `Parts.clip_norm`."""
    context: Context
    agreement: Agreement
    training: TrainingState
    device: torch.device

    def refuses(self, training: TrainingState, world_size: int, seats: Sequence[Seat]) -> str:
        batch = training.global_batch
        if world_size > batch:
            return f"a global batch of {batch} samples is too small for {world_size} ranks"
        return ""

    def setup(self, context: Context, agreement: Agreement) -> None:
        self.context, self.agreement = context, agreement
        self.training, self.device = context.training, context.device

    @property
    def rank(self) -> int:
        return self.context.rank

    @property
    def world_size(self) -> int:
        return self.context.world_size

    def start(self) -> None:
        """Nothing."""

    def warm_up(self) -> None:
        self.context.saves.touch(self.device)

    def join(self) -> None:
        self._exchange(None, None)

    # -- a step ------------------------------------------------------------------------------------------

    def between_steps(self, meet: Callable[[], None]) -> None:
        meet()

    def begin_step(self) -> torch.Tensor:
        """Rank 0's buffers (batch norm's statistics) are all ranks'."""
        if not self.training.spread:
            self.context.peers.copy_from_first(self.training.model.buffers())
        return NO_INDICES

    def train_step(self) -> None:
        raise NotImplementedError(f"{type(self).__name__} makes no steps")

    def check_step(self) -> None:
        """Nothing: `train_step` makes whole steps."""

    def step_made(self) -> bool:
        return True

    def advance(self) -> None:
        self.training.step += 1
        self.training.samples += self.training.global_batch

    def facts(self) -> Facts:
        return NOTHING_ELSE

    # -- its state ---------------------------------------------------------------------------------------

    def gather_state(self) -> None:
        """Nothing: every rank has everything."""

    def state_dict(self, generators: list[Any]) -> dict[str, Any]:
        return self.training.state_dict(generators)

    def load_state_dict(self, state: dict[str, Any], where: str) -> None:
        self.training.load_state_dict(state, where)

    def checkpointed(self) -> None:
        """Nothing."""

    # -- other ranks -------------------------------------------------------------------------------------

    def resize(self, order: Resize) -> bool:
        context = self.context
        try:
            held = None
            if context.rank == 0:
                if order.joining and order.one_host:
                    held = context.saves.hand_over(self.state_dict([]))
                context.peers.let_in(order)
            if not context.peers.regroup(order, lambda: context.flag.wanted):
                return False
            context.becomes(order.attempt)
            self._exchange(held, order)
        except (RuntimeError, StoreError) as error:
            raise Stranded(f"the resize in place failed, so this attempt ends: {error}") from error
        return True

    def _exchange(self, held: Held | None, order: Resize | None) -> None:
        """In the new group: those that have just joined (with no `order`) get the state of the others."""
        context, peers = self.context, self.context.peers
        mine = held, order is not None and order.joining > 0
        held, joined = peers.tell(mine, tuple[Optional[Held], bool])
        if held is not None and order is None:
            self.load_state_dict(context.saves.load(held, self.training.tensors), "shared memory")
        elif held is None and joined:
            state = peers.broadcast_state(self.state_dict([]) if context.rank == 0 else None)
            if order is None:
                self.load_state_dict(state, "rank 0")
        # As after a restart on another number of ranks.
        rng.reseed(self.training.seed, self.training.step, context.rank)
        peers.agree(False)  # all have it: from here on a failure is that of a step

    def close(self) -> None:
        """Nothing."""
