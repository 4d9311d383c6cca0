"""The predicted time of a pack.

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
from hpcsched.planning.packing.costs import ModelBatch, PackCosts

EPOCH_SAMPLES = 10_000
"""Samples of an epoch where none are given: as many as in the paper's measurements (section 4.1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackMember:
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
    def key(self) -> ModelBatch:
        return ModelBatch(self.model, self.batch)


Pack = tuple[PackMember, ...]
"""Members that share a device at the same time."""


class MemberKind(NamedTuple):
    """All that a prediction depends on: members of one kind may stand in for one another."""

    key: ModelBatch
    samples: int


Shape = tuple[tuple[MemberKind, int], ...]
"""A pack as far as predictions go: how many members of each kind, in the order of the kinds."""


def shaped(counts: Mapping[MemberKind, int]) -> Shape:
    """The shape with so many of each kind."""
    return tuple(sorted((kind, n) for kind, n in counts.items() if n))


def size(shape: Shape) -> int:
    """The number of its members."""
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
        factors: Mapping[tuple[ModelBatch, ModelBatch], float] | None = None,
        epoch: int = EPOCH_SAMPLES,
    ) -> None:
        self.costs: dict[ModelBatch, PackCosts] = {}
        for each in costs:
            if each.key in self.costs:
                got = f"{each.model!r} with batch {each.batch} a second time"
                raise ConfigError(where="costs", got=got, accepted="each model and batch once")
            self.costs[each.key] = each
        self.factors = {(min(pair), max(pair)): factor for pair, factor in (factors or {}).items()}
        self.epoch = epoch
        self._own_s: dict[tuple[ModelBatch, int], float] = {}
        self._peak_mib: dict[tuple[ModelBatch, int], float | None] = {}

    def kind(self, member: PackMember) -> MemberKind:
        """Raises ConfigError if nothing was measured of its model and batch."""
        if member.key not in self.costs:
            known = ", ".join(f"{key.model} with batch {key.batch}" for key in sorted(self.costs))
            got = f"no costs of {member.model} with batch {member.batch}"
            raise ConfigError(where=f"member {member.name!r}", got=got, accepted=known or "costs of it")
        return MemberKind(member.key, self.epoch if member.steps is None else member.steps * member.batch)

    def shape(self, pack: Sequence[PackMember]) -> Shape:
        """The shape of a pack."""
        return shaped(Counter(map(self.kind, pack)))

    def pace_s(self, groups: Mapping[ModelBatch, int]) -> float:
        """Seconds that a pack takes for each sample of its stream, with so many members of each key."""
        stream = _Stream(self)
        for key, n in groups.items():
            stream.add(key, n)
        return stream.pace_s

    def own_s(self, key: ModelBatch, n: int) -> float:
        """Seconds that a group takes for each sample beyond what is shared; kept, as a search asks often."""
        if (key, n) not in self._own_s:
            self._own_s[key, n] = self.costs[key].own_s(n) / key.batch
        return self._own_s[key, n]

    def peak_mib(self, key: ModelBatch, n: int) -> float | None:
        """Peak memory of a group; None: not known. Kept as well."""
        if (key, n) not in self._peak_mib:
            self._peak_mib[key, n] = self.costs[key].peak_mib(n)
        return self._peak_mib[key, n]

    def alone_s(self, kind: MemberKind) -> float:
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
        if len(shape) == 1 and shape[0][1] == 1:
            return self.alone_s(shape[0][0])
        # From the end backwards, such that members come and none leaves.
        stream, total_s, until = _Stream(self), 0.0, 0
        last = max(kind.samples for kind, _ in shape)
        for (key, samples), n in sorted(shape, key=lambda part: -part[0].samples):
            total_s += (until - samples) * stream.pace_s if until > samples else 0.0
            until = samples
            stream.add(key, n)
            total_s += n * self.costs[key].switch_s * (1 if samples == last else 2)
        return total_s + until * stream.pace_s


class _Stream:
    """The pace of a pack that grows."""

    def __init__(self, speeds: Speeds) -> None:
        self._speeds = speeds
        self._groups: dict[ModelBatch, int] = {}
        self._shared_s = self._own_s = 0.0
        self._factor = 1.0

    def add(self, key: ModelBatch, n: int) -> None:
        """Add `n` members of this key."""
        speeds, before = self._speeds, self._groups.get(key, 0)
        if before:
            self._own_s -= speeds.own_s(key, before)
        else:
            self._shared_s = max(self._shared_s, speeds.costs[key].shared_s / key.batch)
            if speeds.factors:
                for other in self._groups:
                    self._factor *= speeds.factors.get((min(key, other), max(key, other)), 1.0)
        self._own_s += speeds.own_s(key, before + n)
        self._groups[key] = before + n

    @property
    def pace_s(self) -> float:
        """Seconds for each sample."""
        if list(self._groups.values()) == [1]:
            (key,) = self._groups
            return self._speeds.costs[key].separate_s / key.batch
        return (self._shared_s + self._own_s) * self._factor
