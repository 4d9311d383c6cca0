"""Ranks of torch.distributed that agree on what to do after a step."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hpcsched.errors import LaunchError
from hpcsched.worker.link import Wish
from hpcsched.worker.ranks.rendezvous import listen_towards

_BITS = (Wish.SAVE, Wish.STOP)
_LONG_STEP_S = 1.0
"""From steps of this length on an answer is worth waiting for: a millisecond, instead of a step later."""


class Agreement:
    """Puts the wishes of all ranks together, over a group of gloo of its own, so that no GPU is waited for.

    What is asked after step n is answered after step n + 1, so that no rank waits for another; from steps of
    one second on at once. All ranks get the same answer after the same step. Without a process group the
    answer is the wish, at once.

    Args:
        within_s: how long a rank waits for one that has not made the step, such as one that evaluates.
    """

    def __init__(self, *, within_s: float = 1800.0) -> None:
        self._within = timedelta(seconds=within_s)
        self._world: Any = None  # the default group that `_group` is of
        self._group: Any = None
        self._box: torch.Tensor | None = None
        self._work: Any = None
        self._at_once = False
        self._last = 0.0

    def __call__(self, wish: Wish) -> Wish:
        """The wishes of all ranks as of one call ago. All ranks call it once after each step.

        Raises LaunchError if another rank has ended, or has not called it in time.
        """
        if not self._meet():
            return wish
        before = self._answer()
        if before & Wish.STOP:  # on all ranks: gloo aborts a process that ends while something is under way
            return before
        now, last = time.monotonic(), self._last
        self._last = now
        long = dist.get_rank() == 0 and 0.0 < last <= now - _LONG_STEP_S
        self._box = torch.tensor([*(int(bool(wish & bit)) for bit in _BITS), int(long)])
        self._work = dist.all_reduce(self._box, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        return before | self._answer() if self._at_once else before

    def any(self, flag: bool) -> bool:
        """Whether it is so on any rank, as soon as all have asked: also a barrier. Raises LaunchError."""
        if not self._meet():
            return flag
        box = torch.tensor([int(flag)])
        self._wait(dist.all_reduce(box, op=dist.ReduceOp.MAX, group=self._group, async_op=True))
        return bool(box.item())

    def close(self) -> None:
        """After the last step, on all ranks: nothing is under way any more. Raises LaunchError."""
        self._answer()
        self._world = self._group = None

    def _meet(self) -> bool:
        """Whether there are other ranks; has a group with them then."""
        if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
            return False
        if self._world is not dist.group.WORLD:  # the first time, or the process group was made anew
            self._box = self._work = None
            self._at_once = False
            if address := os.environ.get("MASTER_ADDR"):
                listen_towards(address)  # by itself gloo takes what the host's name leads to
            try:
                self._group = dist.new_group(backend="gloo", timeout=self._within)
            except RuntimeError as error:  # one that ends while all connect
                raise self._alone(error) from error
            self._world = dist.group.WORLD
        return True

    def _answer(self) -> Wish:
        work, box = self._work, self._box
        self._work = self._box = None
        if work is None or box is None:
            return Wish.NOTHING
        self._wait(work)
        found = box.tolist()
        self._at_once = bool(found[-1])  # the same on all ranks, as rank 0 has said it
        return Wish(sum(int(bit) for bit, wanted in zip(_BITS, found) if wanted))

    def _wait(self, work: Any) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise self._alone(error) from error

    def _alone(self, error: RuntimeError) -> LaunchError:
        within = f"{self._within.total_seconds():g} s"
        message = f"a rank has ended, or has not made this step within {within}: {error}"
        return LaunchError(message, transient=True)
