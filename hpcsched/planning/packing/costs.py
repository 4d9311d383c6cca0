"""Measured costs of one model with one batch on one type of device, alone and packed (section 4)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import median
from typing import Any, NamedTuple

from hpcsched.planning.json_reader import JsonReader

_KEYS = (
    "model",
    "batch",
    "device",
    "separate_s",
    "shared_s",
    "points",
    "memory_mib",
    "switch_s",
    "stackable",
)


class ModelBatch(NamedTuple):
    """A model and its batch: trainings with the same are alike in speed and memory."""

    model: str
    batch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PackCosts:
    """The measured costs of one model with one batch on one type of device.

    Args:
        model, batch: what was measured; `batch` in samples.
        device: the type of device, for readers.
        separate_s: seconds of a step trained alone, with its own input pipeline.
        shared_s: the seconds of a packed step that are paid once, however many models share them: reading,
            preprocessing and transferring a batch.
        points: seconds of a packed step of n of these models by n, in the mode that is best for n. What is
            missing for n = 1 is `separate_s`.
        memory_mib: peak memory of a pack of n of these models by n; empty: not known.
        switch_s: seconds that joining a pack takes, and leaving one.
        stackable: whether several of them can be computed as one (stacked parameters).
    """

    model: str
    batch: int
    device: str = ""
    separate_s: float
    shared_s: float = 0.0
    points: Mapping[int, float] = field(default_factory=dict)
    memory_mib: Mapping[int, float] = field(default_factory=dict)
    switch_s: float = 0.0
    stackable: bool = False

    @property
    def key(self) -> ModelBatch:
        return ModelBatch(self.model, self.batch)

    def step_s(self, n: int) -> float:
        """Seconds of a packed step of n of these models.

        As measured, on a straight line between the two nearest measured, and beyond the largest along the
        line through the last two. Never less for more models, whatever noise says. If no pack was ever
        measured, each further model takes what is not shared.
        """
        if not self.points.keys() - {1}:
            first_s = self.points.get(1, self.separate_s)
            return first_s + (n - 1) * max(0.0, first_s - self.shared_s)
        return _on_line({1: self.separate_s, **self.points}, n)

    def own_s(self, n: int) -> float:
        """The seconds of that step that are not shared."""
        return max(0.0, self.step_s(n) - self.shared_s)

    def peak_mib(self, n: int) -> float | None:
        """Peak memory of a pack of n of these models; None: not known.

        Between and beyond measured n as for `step_s`. From a single measurement, in proportion to n but
        never below it: what of it is fixed is not known then.
        """
        if not self.memory_mib:
            return None
        if len(self.memory_mib) == 1:
            ((known, mib),) = self.memory_mib.items()
            return mib * max(1.0, n / known)
        return _on_line(self.memory_mib, n)

    @classmethod
    def fit(
        cls,
        *,
        model: str,
        batch: int,
        device: str = "",
        separate_s: Sequence[float],
        packed_s: Mapping[str, Mapping[int, Sequence[float]]],
        input_s: Sequence[float] = (),
        loop: str = "loop",
        memory_mib: Mapping[int, Sequence[float]] | None = None,
        switch_s: Sequence[float] = (),
        stackable: bool = False,
    ) -> PackCosts:
        """The costs that raw measurements say: medians of times, maxima of memory, the best mode for each n.

        Args:
            separate_s: of steps trained alone.
            packed_s: of packed steps by mode and number of models.
            input_s: of making a batch available alone. Without it, what is shared comes from the mode
                `loop`, which computes the models one after another: whatever n of them take less than n
                separate ones is n - 1 times the shared part.
            memory_mib: peaks by number of models, in whichever mode; the largest counts.
            switch_s: of joining and leaving.

        Raises ValueError without any measurement of a step alone.
        """
        if not separate_s:
            raise ValueError(f"no step of {model} (batch {batch}) was measured alone")
        alone_s = median(separate_s)
        modes = {mode: {n: median(s) for n, s in times.items() if s} for mode, times in packed_s.items()}
        points: dict[int, float] = {}
        for times in modes.values():
            for n, each_s in times.items():
                points[n] = min(each_s, points.get(n, each_s))
        if input_s:
            shared_s = median(input_s)
        else:
            looped = {n: each_s for n, each_s in modes.get(loop, {}).items() if n > 1}
            saved_s = sum(n * alone_s - each_s for n, each_s in looped.items())
            shared_s = saved_s / (sum(n - 1 for n in looped) or 1)
        return cls(
            model=model,
            batch=batch,
            device=device,
            separate_s=alone_s,
            shared_s=max(0.0, min(shared_s, alone_s, *points.values())),
            points=dict(sorted(points.items())),
            memory_mib={n: max(mib) for n, mib in sorted((memory_mib or {}).items()) if mib},
            switch_s=median(switch_s) if switch_s else 0.0,
            stackable=stackable,
        )

    @classmethod
    def parse(cls, value: Any, *, where: str, key: str = "costs") -> PackCosts:
        """Costs of their JSON form; `memory_mib` may also be {"base": MIB, "each": MIB}.

        Raises ConfigError naming the file, the model and the key that is wrong.
        """
        read = JsonReader(where)
        row = read.table(value, key, _KEYS)
        model = read.text(row.get("model"), f"{key}.model")
        batch = read.whole(row.get("batch"), f"{key}.batch")
        key = f"{key} ({model!r}, batch {batch})"
        separate_s = read.number(row.get("separate_s"), f"{key}.separate_s", "seconds", above_0=True)
        shared_s = read.number(row.get("shared_s", 0.0), f"{key}.shared_s", "seconds")
        points = read.counted(row.get("points", {}), f"{key}.points", "seconds")
        if shared_s > min([separate_s, *points.values()]):
            accepted = "at most what the shortest step takes, of which it is a part"
            read.refuse(f"{key}.shared_s", row["shared_s"], accepted)
        device = row.get("device", "")
        return cls(
            model=model,
            batch=batch,
            device=device if device == "" else read.text(device, f"{key}.device"),
            separate_s=separate_s,
            shared_s=shared_s,
            points=points,
            memory_mib=_memory(read, row.get("memory_mib", {}), f"{key}.memory_mib"),
            switch_s=read.number(row.get("switch_s", 0.0), f"{key}.switch_s", "seconds"),
            stackable=read.flag(row.get("stackable", False), f"{key}.stackable"),
        )

    def to_table(self) -> dict[str, Any]:
        """Their JSON form."""
        return {
            "model": self.model,
            "batch": self.batch,
            "device": self.device,
            "separate_s": self.separate_s,
            "shared_s": self.shared_s,
            "points": {str(n): each_s for n, each_s in sorted(self.points.items())},
            "memory_mib": {str(n): mib for n, mib in sorted(self.memory_mib.items())},
            "switch_s": self.switch_s,
            "stackable": self.stackable,
        }


def _memory(read: JsonReader, value: Any, key: str) -> dict[int, float]:
    if isinstance(value, Mapping) and ("base" in value or "each" in value):
        row = read.table(value, key, ("base", "each"))
        base = read.number(row.get("base", 0.0), f"{key}.base", "MiB")
        each = read.number(row.get("each"), f"{key}.each", "MiB", above_0=True)
        return {1: base + each, 2: base + 2 * each}
    return read.counted(value, key, "MiB")


def _on_line(points: Mapping[int, float], n: int) -> float:
    """The value at n on straight lines, never falling, through at least two points; flat before the first."""
    known = sorted(points)
    values = list(accumulate((points[x] for x in known), max))
    right = bisect_left(known, n)
    if right == 0 or (right < len(known) and known[right] == n):
        return values[right]
    right = min(right, len(known) - 1)
    a, b = known[right - 1], known[right]
    return values[right - 1] + (values[right] - values[right - 1]) * (n - a) / (b - a)
