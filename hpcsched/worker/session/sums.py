"""What a loop adds up within an epoch, over all ranks, and over a suspend."""

from __future__ import annotations

from typing import Any, Union

import torch

from hpcsched.worker.ranks.process_group import Peers

Value = Union[torch.Tensor, float]


class EpochSums:
    """What is added up in the epoch under way, by name: a value and a weight.

    Each rank adds up its own, on its device, until all are brought to rank 0: at each save, before a change
    of ranks, and when the sums are wanted. So nothing is lost with a rank that leaves. What rank 0 has been
    given so far is kept apart; on other ranks that does not count.
    """

    def __init__(self) -> None:
        self.epoch = -1
        self._own: dict[str, list[Value]] = {}
        self._kept: dict[str, list[float]] = {}

    def begin(self, epoch: int) -> None:
        """Forget what was added up in another epoch."""
        if epoch != self.epoch:
            self.epoch, self._own, self._kept = epoch, {}, {}

    def add(self, name: str, value: Value, weight: float) -> None:
        """Add a value, and its weight."""
        found = self._own.setdefault(name, [0.0, 0.0])
        found[0] = found[0] + (value.detach() if isinstance(value, torch.Tensor) else value)
        found[1] += weight

    def gather(self, peers: Peers) -> None:
        """Bring all ranks' to rank 0; all ranks call this."""
        own = {name: [float(value), float(weight)] for name, (value, weight) in self._own.items()}
        self._own = {}
        for of_rank in peers.gather(own, dict[str, list[float]]):
            for name, (value, weight) in of_rank.items():
                kept = self._kept.setdefault(name, [0.0, 0.0])
                kept[0] += value
                kept[1] += weight

    def totals(self, peers: Peers) -> dict[str, list[float]]:
        """By name the sum over all ranks, and of the weights; all ranks call this, and get the same."""
        self.gather(peers)
        found: dict[str, list[float]] = peers.tell(self._kept, dict[str, list[float]])
        return found

    def state_dict(self) -> dict[str, Any]:
        """Of rank 0, after `gather`."""
        kept = {name: list(pair) for name, pair in self._kept.items()}
        for name, (value, weight) in self._own.items():  # other ranks are gone: what is here is all there is
            pair = kept.setdefault(name, [0.0, 0.0])
            pair[0] += float(value)
            pair[1] += float(weight)
        return {"epoch": self.epoch, "sums": kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        self.epoch, self._own = state["epoch"], {}
        self._kept = {name: list(pair) for name, pair in state["sums"].items()}
