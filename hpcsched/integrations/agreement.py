"""Ranks of torch.distributed that agree on what to do after a step."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from hpcsched.worker.link import Wish


class Agreement:
    """Puts the wishes of all ranks together, over a group of gloo of its own.

    What is asked after step n is answered after step n + 1, so that no rank waits for another; all ranks get
    the same answer after the same step. Without a process group the answer is the wish, at once.
    """

    def __init__(self) -> None:
        self._group: Any = None
        self._box: torch.Tensor | None = None
        self._work: Any = None

    def __call__(self, wish: Wish) -> Wish:
        """The wishes of all ranks as of one call ago. All ranks call it once after each step."""
        if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
            return wish
        if self._group is None:
            self._group = dist.new_group(backend="gloo")
        answer = Wish.NOTHING
        if self._work is not None and self._box is not None:
            self._work.wait()
            answer = Wish(sum(bit << at for at, bit in enumerate(self._box.tolist())))
        self._box = torch.tensor([int(bool(wish & bit)) for bit in (Wish.SAVE, Wish.STOP)])
        self._work = dist.all_reduce(self._box, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        return answer
