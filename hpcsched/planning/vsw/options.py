"""What a job file says of a training with stream workers: `strategy = { kind = "vsw", ... }`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from hpcsched.compat import dataclass
from hpcsched.errors import ConfigError
from hpcsched.planning.vsw.batching import METRICS, RULES, BatchRule, bounds, worker_count

OPTIONS = (
    "local_batch",
    "global_batch",
    "similarity",
    "noise_scale",
    "every",
    "rate",
    "learning_rate",
    "synchronize",
    "workers",
    "accumulation",
)
SYNCHRONIZE = ("auto", "sequential", "overlap")

EVERY, RATE = 100, 0.1
"""The paper's adaptive interval (steps) and rate (section 7.1)."""

CHOICES = 32
"""Numbers of workers that are looked at for a batch, from the least one on."""

_COUNT = "a positive whole number"
_RANGE = f"{_COUNT}, or two of them, the smaller one first"
_TARGETS = {"similarity": "similarity", "noise_scale": "noise-scale"}


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
        """Read the strategy's table (its `kind` is passed over); ConfigError for what makes no sense."""

        def refuse(key: str, got: str, accepted: str) -> ConfigError:
            return ConfigError(where=where, key=key, got=got, accepted=accepted)

        for key in table:
            if key not in ("kind", *OPTIONS):
                raise refuse(key, "unknown option", ", ".join(OPTIONS))
        pinned = None
        if "workers" in table or "accumulation" in table:
            for key in ("global_batch", "local_batch"):
                if key in table:
                    raise refuse(key, f"given together with {_pins(table)}", "one or the other")
            workers, more = table.get("workers", 1), table.get("accumulation", 0)
            if not _is_count(workers):
                raise refuse("workers", repr(workers), _COUNT)
            if not _is_count(more, least=0):
                raise refuse("accumulation", repr(more), "a whole number of at least 0")
            pinned = workers, more
        elif "local_batch" not in table:
            raise refuse("local_batch", "not given", "the samples that a worker computes at a time")
        targets = [key for key in _TARGETS if key in table]
        if len(targets) > 1:
            raise refuse(targets[1], f"given together with {targets[0]}", "one or the other")
        adapting = [*targets, *(key for key in ("every", "rate", "learning_rate") if key in table)]
        if adapting and "global_batch" not in table:
            raise refuse(adapting[0], "given without global_batch", "global_batch = [SMALLEST, LARGEST] too")
        metric = METRICS[_TARGETS[targets[0]] if targets else "similarity"]
        target = table[targets[0]] if targets else metric.target
        if (
            not _is_number(target)
            or (metric.name == "similarity" and not -1 < target < 1)
            or (metric.name != "similarity" and target <= 0)
        ):
            accepted = "a number between -1 and 1" if metric.name == "similarity" else "a positive number"
            raise refuse(targets[0], repr(target), accepted)
        every, rate = table.get("every", EVERY), table.get("rate", RATE)
        if not _is_count(every):
            raise refuse("every", repr(every), f"{_COUNT} of updates")
        if not _is_number(rate) or not 0 < rate < 1:
            raise refuse("rate", repr(rate), "a number between 0 and 1, such as 0.1 for 10 %")
        rule, synchronize = table.get("learning_rate", "sqrt"), table.get("synchronize", "auto")
        if rule not in RULES:
            raise refuse("learning_rate", repr(rule), ", ".join(RULES))
        if synchronize not in SYNCHRONIZE:
            raise refuse("synchronize", repr(synchronize), ", ".join(SYNCHRONIZE))
        local_batch = _range(table, "local_batch", refuse)
        global_batch = _range(table, "global_batch", refuse)
        if local_batch and global_batch:
            bounds(*global_batch, 2 * local_batch[0], where)
        return cls(
            local_batch=local_batch,
            global_batch=global_batch,
            metric=metric.name,
            target=float(target),
            every=every,
            rate=float(rate),
            learning_rate=rule,
            synchronize=synchronize,
            pinned=pinned,
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
        low, high = bounds(*self.global_batch, 2 * local, where)
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
    group = 1 if options.global_batch is None else 2
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


def _pins(table: Mapping[str, Any]) -> str:
    return " and ".join(key for key in ("workers", "accumulation") if key in table)


def _is_count(value: Any, least: int = 1) -> bool:
    return type(value) is int and least <= value <= 2**31


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _range(table: Mapping[str, Any], key: str, refuse: Any) -> tuple[int, int] | None:
    value = table.get(key)
    if value is None:
        return None
    pair = [value, value] if _is_count(value) else value
    if not isinstance(pair, (list, tuple)) or len(pair) != 2 or not all(map(_is_count, pair)):
        raise refuse(key, repr(value), _RANGE)
    if pair[0] > pair[1]:
        raise refuse(key, repr(value), _RANGE)
    return pair[0], pair[1]
