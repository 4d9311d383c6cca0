"""Measured gains and costs of packing: improvement, memory peak, switching overhead (pack, section 4.2).

The improvement is that of Eq. 3, the memory peak that of section 4.5. Eq. 4 takes the switching overhead of
training models one after another from whole epochs; here what a pack pays is measured event by event: loading
a member, joining, leaving.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

from hpcsched.core.profile import Profile
from hpcsched.planning.packing.costs import PackCosts
from hpcsched.planning.packing.speeds import Speeds


@dataclass(frozen=True, kw_only=True)
class PackPoint:
    """A pack of so many `models` of one kind: seconds of a step in each window, in the `mode` that was best.

    `memory_mib` is the peak of the device's memory from loading to leaving (None: not known). `join_s` are
    seconds for all of them to join, beyond those of the steps made meanwhile, and `leave_s` for one to leave.
    """

    models: int
    windows_s: tuple[float, ...]
    mode: str
    memory_mib: float | None
    join_s: float
    leave_s: float

    @property
    def step_s(self) -> float:
        """Seconds of a packed step (Eq. 2)."""
        return median(self.windows_s)


@dataclass(frozen=True, kw_only=True)
class MeasuredPacks:
    """The measurements of one model on one device, alone and packed.

    Args:
        batch: samples of a step.
        alone_s: seconds of a step alone with its own input pipeline, in each window.
        input_s: seconds of making a batch available alone, in each window.
        points: by number of models, ascending.
        loads_s: seconds of building a model and bringing it to the device, for each that was.
        full: the least number of models that did not fit into memory.
        stackable: whether several can be computed as one, or why not (`unstackable`; "" if not known).
    """

    model: str
    device: str
    batch: int
    alone_s: tuple[float, ...]
    input_s: tuple[float, ...]
    points: tuple[PackPoint, ...]
    loads_s: tuple[float, ...] = ()
    full: int | None = None
    stackable: bool = False
    unstackable: str = ""
    note: str = ""

    @property
    def separate_s(self) -> float:
        """Seconds of a step alone."""
        return median(self.alone_s)

    def impv(self, point: PackPoint) -> float:
        """The share of time saved over training them one after another (Eq. 3)."""
        sequential_s = point.models * self.separate_s
        return (sequential_s - point.step_s) / sequential_s

    @property
    def load_s(self) -> float | None:
        """Seconds that a member takes to be loaded."""
        return median(self.loads_s) if self.loads_s else None

    @property
    def join_s(self) -> float | None:
        """Seconds that a pack pays for each member that joins; packs of one count if there are no others."""
        several = [p for p in self.points if p.models > 1] or self.points
        return median(p.join_s / p.models for p in several) if several else None

    @property
    def leave_s(self) -> float | None:
        """Seconds that a pack pays for a member that leaves."""
        several = [p for p in self.points if p.models > 1] or self.points
        return median(p.leave_s for p in several) if several else None

    @property
    def costs(self) -> PackCosts:
        """The costs in the form that packs are planned by."""
        packed_s: dict[str, dict[int, Sequence[float]]] = {}
        for point in self.points:
            packed_s.setdefault(point.mode, {})[point.models] = point.windows_s
        switches = [seconds for seconds in (self.join_s, self.leave_s) if seconds is not None]
        return PackCosts.fit(
            model=self.model,
            batch=self.batch,
            device=self.device,
            separate_s=self.alone_s,
            packed_s=packed_s,
            input_s=self.input_s,
            memory_mib={p.models: [p.memory_mib] for p in self.points if p.memory_mib is not None},
            switch_s=[fmean(switches)] if switches else [],
            stackable=self.stackable,
        )

    def profile(self, known: Sequence[Profile]) -> Profile:
        """The model's profile, of the `known`, the newest first, or a new one, with these packs.

        A pack of one that was not measured takes what a step alone does.
        """
        mib = {p.models: p.memory_mib for p in self.points if p.memory_mib is not None}
        packed_s = {1: self.separate_s, **{p.models: p.step_s for p in self.points}}
        fitting = [
            p
            for p in known
            if (p.model, p.device, p.nodes) == (self.model, self.device, 1)
            and p.global_batch in (self.batch, None)
        ]
        fresh = Profile(
            model=self.model,
            device=self.device,
            throughput={1: 1 / self.separate_s},
            global_batch=self.batch,
            note=self.note,
        )
        # One whose batch nobody told is taken for it: of two, runs would ask which of them counts.
        best = min(fitting, key=lambda p: p.global_batch is None, default=fresh)
        return replace(best, packed_s=packed_s, packed_mib=mib or None)

    def to_table(self) -> dict[str, Any]:
        """Its JSON form."""
        points = [
            {
                "models": p.models,
                "step_s": p.step_s,
                "impv": self.impv(p),
                "mode": p.mode,
                "memory_mib": p.memory_mib,
                "join_s": p.join_s,
                "leave_s": p.leave_s,
            }
            for p in self.points
        ]
        return {
            "model": self.model,
            "device": self.device,
            "global_batch": self.batch,
            "separate_s": self.separate_s,
            "input_s": median(self.input_s),
            "points": points,
            "load_s": self.load_s,
            "join_s": self.join_s,
            "leave_s": self.leave_s,
            "stackable": self.stackable,
            "unstackable": self.unstackable or None,
            "full": self.full,
        }


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two different models in a pack; seconds are for a sample of each, as their batches may differ.

    `separate_s` is the sum of both alone, measured beside the pack, as machines get faster and slower.
    """

    models: tuple[str, str]
    batches: tuple[int, int]
    device: str
    separate_s: float
    packed_s: float
    mode: str
    memory_mib: float | None

    @property
    def impv(self) -> float:
        """The share of time saved over training one after the other (Eq. 3)."""
        return (self.separate_s - self.packed_s) / self.separate_s

    def factor(self, one: MeasuredPacks, other: MeasuredPacks) -> float:
        """The time of the pack, over what it would take by the costs of both models alone."""
        costs = one.costs, other.costs
        told_s = Speeds(costs).pace_s({each.key: 1 for each in costs})
        alone_s = sum(each.separate_s / each.batch for each in costs)
        return self.packed_s / self.separate_s * alone_s / told_s

    def to_table(self) -> dict[str, Any]:
        """Its JSON form."""
        return {
            "models": list(self.models),
            "device": self.device,
            "batches": list(self.batches),
            "separate_sample_s": self.separate_s,
            "packed_sample_s": self.packed_s,
            "impv": self.impv,
            "mode": self.mode,
            "memory_mib": self.memory_mib,
        }
