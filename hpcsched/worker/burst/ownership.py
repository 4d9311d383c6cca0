"""Who owns what: a parameter or buffer belongs to the ranks of the layers that use it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from hpcsched.errors import ConfigError
from hpcsched.planning.burst.plan import BurstPlan
from hpcsched.worker.burst.channels import Channels, Ranks
from hpcsched.worker.burst.prepare import RankLayer
from hpcsched.worker.ranks.gradient_sum import Bucket, in_buckets


@dataclass(frozen=True, eq=False)
class OwnedTensor:
    """A parameter or buffer, and the layers that use it. All ranks list them in the same order."""

    tensor: torch.Tensor
    layers: tuple[int, ...]

    def owners(self, plan: BurstPlan) -> Ranks:
        """All ranks of its layers."""
        return tuple(sorted({rank for at in plan.layers if at.id in self.layers for rank in at.ranks}))


def belongings(units: Sequence[RankLayer]) -> tuple[OwnedTensor, ...]:
    """Everything that is trained or kept by these layers, each thing once."""
    found: dict[torch.Tensor, dict[int, None]] = defaultdict(dict)
    for unit in units:
        for tensor in (*unit.module.parameters(), *unit.module.buffers()):
            found[tensor][unit.id] = None
    return tuple(OwnedTensor(tensor, tuple(layers)) for tensor, layers in found.items())


def check_norms(
    norms: Iterable[tuple[int, str, Sequence[nn.Module]]],
    plan: BurstPlan,
    where: str,
    *,
    alone_of: int | None = None,
) -> None:
    """Raise ConfigError for a batch norm that several layers use on different ranks, or in another order than
    the model's: whose statistics?

    `norms` are each layer's id, name and batch norms. Where each rank's statistics are its own, `alone_of` is
    the global batch: then one that a rank would have a single sample for is refused too.
    """
    turn = {at.id: number for number, at in enumerate(plan.layers)}
    seen: dict[nn.Module, tuple[int, str]] = {}
    for layer, name, own in norms:
        ranks = len(plan.layers[turn[layer]].ranks)
        if own and alone_of is not None and ranks > 1 and alone_of // ranks < 2:
            raise ConfigError(
                where=where,
                key=f"layer {name!r}",
                got=f"{ranks} ranks for a batch of {alone_of}: batch norm of a single sample",
                accepted='at least 2 samples a rank, or batch_norm = "shared"',
            )
        for norm in own:
            other, other_name = seen.get(norm, (layer, name))
            seen[norm] = layer, name
            apart = plan.layers[turn[other]].ranks != plan.layers[turn[layer]].ranks
            if apart or turn[other] > turn[layer]:
                place = "other ranks than" if apart else "a turn before"
                raise ConfigError(
                    where=where,
                    key=f"layer {name!r}",
                    got=f"{place} layer {other_name!r}, which uses the same batch norm",
                    accepted="the same ranks for both, in the model's order",
                )


class OwnerSums:
    """Replaces gradients by their sums over the owners, while the backward pass still runs.

    A parameter is complete when the first layer that uses it has passed backward. A bucket starts at the turn
    at which all in it is: one that all ranks know, whether they have gradients for it or not, as NCCL works
    off sums and samples in the order of calls, and waits for ever where ranks differ in it.
    """

    def __init__(self, things: Iterable[OwnedTensor], plan: BurstPlan, wires: Channels) -> None:
        turn = {at.id: number for number, at in enumerate(plan.layers)}
        by_owners: dict[Ranks, list[tuple[int, nn.Parameter]]] = defaultdict(list)
        for thing in things:
            owners = thing.owners(plan)
            if isinstance(thing.tensor, nn.Parameter) and thing.tensor.requires_grad and len(owners) > 1:
                by_owners[owners].append((min(turn[layer] for layer in thing.layers), thing.tensor))
        self.ranks = tuple(sorted(by_owners))
        self._wires = wires
        self._buckets: list[tuple[int, Ranks, Bucket]] = []
        turns: set[int] = set()
        for owners in self.ranks:
            known = sorted(by_owners[owners], key=lambda pair: -pair[0])
            complete = {parameter: at for at, parameter in known}
            for group in in_buckets(parameter for _, parameter in known):
                at = min(map(complete.__getitem__, group))
                turns.add(at)
                if wires.rank in owners:
                    self._buckets.append((at, owners, Bucket(group)))
        self.turns = frozenset(turns)
        """After whose backward pass sums start, here or on other ranks: there a stage must begin."""
        self._buckets.sort(key=lambda found: -found[0])  # the last turn is the first to come back
        self._launched = 0

    def begin(self) -> None:
        """Before a backward pass."""
        self._launched = 0

    def passed(self, turns: range) -> None:
        """The backward pass of these turns is done, by whichever ranks compute them."""
        for at, owners, bucket in self._buckets[self._launched :]:
            if at < turns.start:
                break
            bucket.launch(partial(self._wires.sum, ranks=owners))
            self._launched += 1

    def complete(self) -> None:
        """Wait for all sums."""
        for _, _, bucket in self._buckets:
            bucket.complete()
