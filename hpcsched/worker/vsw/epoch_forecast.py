"""What a training expects of its next epoch: its global batches, and its speed by the number of devices
(JABAS, sections 6.2 and 6.3)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from hpcsched.compat import dataclass, zip
from hpcsched.contract.progress import Scaling
from hpcsched.planning.vsw.configure import ClusterGpu, NoConfiguration, scale
from hpcsched.planning.vsw.forecast import forecast, with_fluctuations
from hpcsched.planning.vsw.options import local_batches
from hpcsched.worker.vsw.control import GUESSED, BatchControl
from hpcsched.worker.vsw.measurements import Measurements

CELLS = 20
"""Into so many parts is an epoch cut: each has a global batch, that of its samples in the mean."""

MOST_CELLS = 400
"""Older ones are forgotten."""

QUICK = ("last", "damped")

RECENT = 5 * CELLS
"""What these look at."""

LARGEST = 5
"""So many local batches are looked at besides the smallest: the largest ones."""

AT_LEAST = 8
"""Devices on each host up to which is said what they would do; or twice as many as there are now."""


class Trajectory:
    """The global batches of a training so far, by the samples it has seen.

    Args:
        size: samples of an epoch.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._samples = 0
        self.cells: list[float] = []
        self._part = 0.0
        """What the present cell has so far: batches, weighted with the parts of it that had them."""

    @property
    def epoch(self) -> float:
        """Passes over the data so far."""
        return self._samples / self._size

    def begin(self, samples: int) -> None:
        """The training has seen so many samples: others may have trained before."""
        self._samples = max(self._samples, samples)

    def add(self, batch: int) -> None:
        """A step with so many samples was taken."""
        begin = self._samples * CELLS / self._size
        self._samples += batch
        end = self._samples * CELLS / self._size
        while (full := int(begin) + 1) <= end:
            self._part += batch * (full - begin)
            self.cells = [*self.cells[1 - MOST_CELLS :], self._part]
            self._part, begin = 0.0, float(full)
        self._part += batch * (end - begin)

    def state_dict(self) -> dict[str, Any]:
        return {"samples": self._samples, "cells": self.cells, "part": self._part}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._samples, self.cells = state["samples"], list(state["cells"])
        self._part = state["part"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """Steps of the job a second by the number of devices on each host, and the mean global batch."""

    rates: Mapping[int, float]
    batch: float

    def told(self) -> Scaling:
        """As the agent is told of it."""
        rates = {count: float(f"{rate:.6g}") for count, rate in self.rates.items()}
        return Scaling(rates, round(self.batch, 1))


def expect(
    control: BatchControl, trajectory: Trajectory, size: int, *, quick: bool = False
) -> Expectation | None:
    """The speed in the coming epoch, by how many devices compute it; None if nothing can be said.

    On as many as there are by what was measured of each, on more as if these were like the usual one.
    `quick`: with the forecasts that take milliseconds only.
    """
    tables = Measurements(control.tables)
    if control.options.pinned or not tables.largest:
        return None
    rule = control.batching
    if rule.adapts and trajectory.cells:
        cells, methods = (trajectory.cells[-RECENT:], QUICK) if quick else (trajectory.cells, None)
        course = forecast(cells, CELLS, low=rule.low, high=rule.high, methods=methods).values
        values = with_fluctuations(course, trajectory.cells)
    else:
        values = (float(control.batch),)
    batches = [rule.rounded(_coarse(value)) for value in values]
    parts = [(batch, size * count / len(batches)) for batch, count in sorted(Counter(batches).items())]
    least, *more = local_batches(control.options, max(batches), 1, tables.largest)
    chosen = [least, *more[-LARGEST:]]
    costs = tables.costs(control.buckets, control.line or GUESSED)
    hosts = list(dict.fromkeys(table.host for table in tables.tables))
    kinds = ["usual" if tables.is_usual(rank) else str(rank) for rank in range(len(tables.tables))]
    here = [[k for k, t in zip(kinds, tables.tables, strict=True) if t.host == host] for host in hosts]
    rates: dict[int, float] = {}
    for count in range(1, max(AT_LEAST, 2 * max(map(len, here))) + 1):
        gpus = [
            ClusterGpu(kind=kind, host=host)
            for host, ranks in zip(hosts, here, strict=True)
            for kind in (*ranks[:count], *["usual"] * (count - len(ranks)))
        ]
        try:
            (found,) = scale(
                costs,
                gpus,
                parts,
                local_batches=chosen,
                even=rule.adapts,
                accumulation=(0, max(batches)),
                sync=control.options.synchronize,
                least=len(gpus),
            )
        except NoConfiguration:
            break  # more devices than workers
        rates[count] = size / control.base / found.epoch_s
    return Expectation(rates=rates, batch=sum(values) / len(values)) if rates else None


def _coarse(batch: float) -> float:
    """One of few batches, within 5 %: each that is different takes time to solve for."""
    return float(1.1 ** round(math.log(batch, 1.1)))
