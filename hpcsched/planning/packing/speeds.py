"""How long a pack is predicted to take.

All members of a pack read one stream of samples and go through it at the same pace *in samples*: a member
with batch b does W / b steps while the pack goes through W samples. So nobody's samples are discarded, and
all that have an epoch to do end it together. This differs from the paper (section 3.1.1), where a step of
the pack takes the largest batch and members with smaller ones use a slice of it and drop the rest.

With groups g of n_g members of one model and batch b_g, a sample of the stream takes

    max_g(shared_g / b_g) + sum_g(step_g(n_g) - shared_g) / b_g        seconds,

times the measured factor of every two groups that disturb, or help, one another. Identical members have
step(n) / b, as measured. A member on its own, also the last one left of a pack, takes separate / b.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hpcsched.errors import ConfigError
from hpcsched.planning.packing.costs import Key, PackCosts

EPOCH = 10_000
"""Samples of an epoch if nobody says how many: as many as in the paper's measurements (section 4.1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A training that may be packed.

    `config`: its hyper-parameters, for distances. `steps`: how many of its own steps it is to do; None: an
    epoch.
    """

    name: str
    model: str
    batch: int
    config: Mapping[str, Any] = field(default_factory=dict)
    steps: int | None = None

    @property
    def key(self) -> Key:
        return Key(self.model, self.batch)


Pack = tuple[Member, ...]
"""Members that share a device at the same time."""


class Kind(NamedTuple):
    """All that a prediction depends on: members of one kind may stand in for one another."""

    key: Key
    samples: int


Shape = tuple[tuple[Kind, int], ...]
"""A pack as far as predictions go: how many members of each kind, in the order of the kinds."""


def shaped(counts: Mapping[Kind, int]) -> Shape:
    """The shape with so many of each kind."""
    return tuple(sorted((kind, n) for kind, n in counts.items() if n))


def size(shape: Shape) -> int:
    """How many members it has."""
    return sum(n for _, n in shape)


class Speeds:
    """Predicts what packs take.

    Args:
        costs: of each model and batch.
        factors: by two different keys in their order, what a pack takes that has both, over what it would by
            their costs alone; where there is none, 1.
        epoch: samples of an epoch.

    Raises ConfigError for two costs of one model and batch.
    """

    def __init__(
        self,
        costs: Iterable[PackCosts],
        *,
        factors: Mapping[tuple[Key, Key], float] | None = None,
        epoch: int = EPOCH,
    ) -> None:
        self.costs: dict[Key, PackCosts] = {}
        for each in costs:
            if each.key in self.costs:
                got = f"{each.model!r} with batch {each.batch} a second time"
                raise ConfigError(where="costs", got=got, accepted="each model and batch once")
            self.costs[each.key] = each
        self.factors = {(min(pair), max(pair)): factor for pair, factor in (factors or {}).items()}
        self.epoch = epoch
        self._own_s: dict[tuple[Key, int], float] = {}

    def kind(self, member: Member) -> Kind:
        """Raises ConfigError if nothing was measured of its model and batch."""
        if member.key not in self.costs:
            known = ", ".join(f"{key.model} with batch {key.batch}" for key in sorted(self.costs))
            got = f"no costs of {member.model} with batch {member.batch}"
            raise ConfigError(where=f"member {member.name!r}", got=got, accepted=known or "costs of it")
        return Kind(member.key, self.epoch if member.steps is None else member.steps * member.batch)

    def shape(self, pack: Sequence[Member]) -> Shape:
        """The shape of a pack."""
        return shaped(Counter(map(self.kind, pack)))

    def pace_s(self, groups: Mapping[Key, int]) -> float:
        """Seconds that a pack takes for each sample of its stream, with so many members of each key."""
        if sum(groups.values()) == 1:
            (key,) = groups
            return self.costs[key].separate_s / key.batch
        shared_s = max(self.costs[key].shared_s / key.batch for key in groups)
        own_s = sum(self._own(key, n) for key, n in groups.items())
        factor = 1.0
        if self.factors:
            keys = sorted(groups)
            for i, key in enumerate(keys):
                for other in keys[i + 1 :]:
                    factor *= self.factors.get((key, other), 1.0)
        return (shared_s + own_s) * factor

    def _own(self, key: Key, n: int) -> float:
        """What such a group takes for each sample beyond what is shared; kept, as a search asks often."""
        if (key, n) not in self._own_s:
            self._own_s[key, n] = self.costs[key].own_s(n) / key.batch
        return self._own_s[key, n]

    def alone_s(self, kind: Kind) -> float:
        """Seconds that a member of this kind trains on its own."""
        return kind.samples / kind.key.batch * self.costs[kind.key].separate_s

    def separate_s(self, shape: Shape) -> float:
        """Seconds that its members take one after another, each on its own (Eq. 1)."""
        return sum(n * self.alone_s(kind) for kind, n in shape)

    def time_s(self, shape: Shape) -> float:
        """Seconds until every member of the pack has done what it is to do.

        Members that have less to do than others leave, and the rest goes on without them (section 3.1.2).
        Each member joins a pack of several once and leaves it once, unless it is one of the last.
        """
        if size(shape) == 1:
            return self.alone_s(shape[0][0])
        groups = Counter[Key]()
        leaving: dict[int, list[tuple[Key, int]]] = {}
        total_s = 0.0
        for kind, n in shape:
            groups[kind.key] += n
            leaving.setdefault(kind.samples, []).append((kind.key, n))
            total_s += n * self.costs[kind.key].switch_s
        done = 0
        for samples in sorted(leaving):
            total_s += (samples - done) * self.pace_s(groups)
            done = samples
            for key, n in leaving[samples]:
                groups[key] -= n
                if not groups[key]:
                    del groups[key]
            if groups:
                total_s += sum(n * self.costs[key].switch_s for key, n in leaving[samples])
        return total_s
