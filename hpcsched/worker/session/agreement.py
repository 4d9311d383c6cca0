"""What the ranks of a training agree on at a step boundary: to leave, to save, to change their number."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Optional

import torch
from torch.nn.parallel import DistributedDataParallel

from hpcsched.contract.orders import Resize
from hpcsched.errors import LaunchError, StoreError
from hpcsched.worker.process.contract import JobEnv, say
from hpcsched.worker.session.context import Context

Wishes = tuple[bool, bool, bool]
"""Whether to leave, to save, and to resize."""


class Agreement:
    """One agreement after the other, one for each boundary.

    Args:
        context: of this rank.
        refuses: why an order to resize cannot be followed; empty if it can.
        every_s: seconds between two periodic checkpoints.
    """

    def __init__(self, context: Context, refuses: Callable[[Resize], str], *, every_s: float) -> None:
        self.in_place = False
        """Whether the agent was told that this training can be resized in place."""
        self.resize: Resize | None = None
        """On rank 0: the order that it has asked the others to follow."""
        self._context, self._refuses, self._every_s = context, refuses, every_s
        self._next_save = time.monotonic() + every_s
        self._answer: Callable[[], tuple[bool, ...]] | None = None

    @property
    def asked(self) -> bool:
        """Whether the agreement for the coming boundary is under way."""
        return self._answer is not None

    @property
    def save_due(self) -> bool:
        """Whether it is time for a periodic checkpoint."""
        return self._context.saves.store is not None and time.monotonic() >= self._next_save

    def ask(self) -> None:
        """Begin to agree: travels while the ranks compute. All ranks call this once in a step, or none."""
        self._answer = self._context.peers.ask(*self.wishes())

    def skip(self) -> None:
        """Nothing is wanted at the coming boundary: this rank joins in the middle of it."""
        self._answer = lambda: (False, False, False)

    def forget(self) -> None:
        """There is no coming boundary."""
        self._answer = None

    def conclude(self) -> tuple[bool, ...]:
        """The wishes of all ranks together, the same on all of them; asks if nobody has asked yet."""
        answer, self._answer = self._answer, None
        return answer() if answer else self._context.peers.agree(*self.wishes())

    def saved(self) -> None:
        """A periodic checkpoint has been made."""
        self._next_save = time.monotonic() + self._every_s

    def wishes(self) -> Wishes:
        """Whether this rank should leave, a periodic checkpoint is due, and a resize can be done now."""
        context = self._context
        if context.rank > 0:
            return context.flag.wanted is not None, False, False
        try:
            context.saves.look()
        except StoreError as error:
            say(f"periodic checkpoint failed, training goes on: {error}")
        context.orders.look()
        self.resize = self._ready_to_resize(context.orders.resize)
        return context.flag.wanted is not None, self.save_due, self.resize is not None

    def order(self) -> Resize | None:
        """The resize that was agreed on, on all ranks; None if it has been taken back since."""
        context = self._context
        if context.rank == 0 and context.orders.resize is not self.resize:
            self.resize = None
        order: Resize | None = context.peers.tell(self.resize, Optional[Resize])
        self.resize = context.orders.resize = None
        return order

    def _ready_to_resize(self, order: Resize | None) -> Resize | None:
        """On rank 0: the order, once all who are to join wait for it; one that cannot be is refused."""
        context, env = self._context, self._context.env
        if order is None or env is None:
            return None
        why = ""
        if not self.in_place:
            why = "this program has not said that it can"
        elif cannot := self._refuses(order):
            why = cannot
        elif is_wrapped(context.training.model, env):
            why = "the model is wrapped in DistributedDataParallel, which does not learn of new ranks"
        elif len([rank for rank in order.keep if rank < context.world_size]) != len(order.keep):
            why = f"ranks {order.keep} of {context.world_size} are to stay"
        if not why:
            try:
                return order if context.peers.joined(order) else None
            except LaunchError as error:
                why = str(error)
        context.orders.resize = None
        env.refuse(order.attempt, why)
        env.wake_agent()
        return None


def is_wrapped(model: torch.nn.Module, env: JobEnv) -> bool:
    """Whether a loop of the user's own has put the model into a wrapper that fixes the ranks."""
    if env.trainer is not None:
        return False
    # By its type: to ask things themselves for their class makes some of them warn.
    wrappers = (thing for thing in gc.get_objects() if issubclass(type(thing), DistributedDataParallel))
    return any(wrapper.module is model for wrapper in wrappers)
