"""What a job file says of a training with stream workers: `strategy = { kind = "vsw", ... }`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from hpcsched.compat import dataclass
from hpcsched.contract import schema, strategies
from hpcsched.contract.strategies import DEFAULT_SIMILARITY, Vsw, batch_bounds, pair_of
from hpcsched.errors import ConfigError
from hpcsched.planning.vsw.batching import METRICS, BatchRule, worker_count

CHOICES = 32
"""Numbers of workers that are looked at for a batch, from the least one on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """The options as they were given; what they come to depends on the trainer's own global batch.

    `local_batch`: from the smallest to the largest one that a worker may have; None: as `pinned` makes it.
    `global_batch`: its bounds; None: it stays the trainer's own. `target`: of the metric of that name.
    `pinned`: stream workers on each device, and how many further local batches each has in a step.
    """

    local_batch: tuple[int, int] | None
    global_batch: tuple[int, int] | None
    metric: str
    target: float
    every: int
    rate: float
    learning_rate: str
    synchronize: str
    pinned: tuple[int, int] | None

    @classmethod
    def parse(cls, table: Mapping[str, Any], where: str = "strategy vsw") -> WorkerOptions:
        """Read the strategy's table; ConfigError for what makes no sense."""
        said = strategies.read({**table, "kind": "vsw"}, where=where)
        assert isinstance(said, Vsw)
        return cls.of(said)

    @classmethod
    def of(cls, said: Vsw) -> WorkerOptions:
        """The same of options that have been read."""
        by_noise = said.noise_scale is not None
        target = said.noise_scale if by_noise else said.similarity
        return cls(
            local_batch=pair_of(said.local_batch),
            global_batch=pair_of(said.global_batch),
            metric="noise-scale" if by_noise else "similarity",
            target=float(DEFAULT_SIMILARITY if target is None else target),
            every=said.every,
            rate=float(said.rate),
            learning_rate=said.learning_rate,
            synchronize=said.synchronize,
            pinned=said.pinned,
        )

    def within(self, samples: int, where: str = "strategy vsw") -> WorkerOptions:
        """The same for a dataset of so many samples: no batch between bounds is larger than that.

        Raises ConfigError if the smallest one is.
        """
        if self.global_batch is None or self.local_batch is None:
            return self
        low, high = self.global_batch
        unit = 2 * self.local_batch[0]
        if low > samples:
            raise ConfigError(
                where=where,
                key="global_batch",
                got=f"from {low} samples, more than the {samples} of the dataset",
                accepted=f"at most {samples // unit * unit}"
                if samples >= unit
                else "a smaller local_batch too",
            )
        return replace(self, global_batch=(low, max(low, min(high, samples // unit * unit))))

    def batching(self, base: int, where: str = "strategy vsw") -> BatchRule:
        """The rule for the global batch of a trainer whose own is `base`; ConfigError where they do not
        fit."""
        metric = METRICS[self.metric]
        make = partial(BatchRule, metric=metric, target=self.target, every=self.every, rate=self.rate)
        if self.local_batch is None:
            return make(low=base, high=base, unit=base)
        local = self.local_batch[0]
        if self.global_batch is None:
            if base % local:
                raise ConfigError(
                    where=where,
                    key="local_batch",
                    got=f"{local}, of which the trainer's global batch of {base} is no whole number",
                    accepted=f"a divisor of {base}",
                )
            return make(low=base, high=base, unit=base)
        low, high = batch_bounds(*self.global_batch, 2 * local, partial(schema.refuse, where))
        if low < base:
            raise ConfigError(
                where=where,
                key="global_batch",
                got=f"from {low} samples, fewer than the trainer's global batch of {base}",
                accepted=f"at least {base}: a step of the job is that many samples",
            )
        return make(low=low, high=high, unit=2 * local)


def local_batches(options: WorkerOptions, batch: int, devices: int, most: int) -> tuple[int, ...]:
    """The local batches to choose from for about so many samples on so many devices, smallest first.

    The smallest one, and the largest multiples of it up to `most` that come near to the batch with an even
    number of workers, one for each device at least: within the rate by which the batch changes, and within
    its bounds. Where it does not change, any number of workers that is exact will do.
    """
    assert options.local_batch is not None
    least = options.local_batch[0]
    largest = max(least, min(most, options.local_batch[1]))
    low, high = options.global_batch or (batch, batch)
    group = 2 if low < high else 1  # only where batches adapt the gradient comes in two halves
    miss = options.rate * batch if low < high else 0.0
    fewest = max(devices, batch / (largest + least / 2), 1)  # with fewer the local batch would be too large
    first = -int(-fewest // group) * group
    counts = range(first, first + CHOICES * group, group)
    found = {least}
    for local in {largest // least * least, *(round(batch / count / least) * least for count in counts)}:
        if not least <= local <= largest:
            continue
        samples = local * worker_count(batch, local, even=group == 2)
        if abs(samples - batch) <= miss and low <= samples <= high and samples // local >= devices:
            found.add(local)
    return tuple(sorted(found))
