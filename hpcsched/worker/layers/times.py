"""From measured times to a layer profile: medians, nothing else. No torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

from hpcsched.planning.burst.graph import Fact, LayerProfile, ProfiledLayer


class LayerTimes:
    """The times of `layers` (whose own times are ignored), as they come in, by layer and batch."""

    def __init__(self, layers: Sequence[ProfiledLayer], *, model: str, device: str, input_bytes: int) -> None:
        self._layers = tuple(layers)
        self._model, self._device = model, device
        self._input_bytes = input_bytes
        self._launch_us: dict[int, float] = {}
        self._times: dict[int, dict[int, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))

    def add(self, layer: int, batch: int, forward_us: float, backward_us: float) -> None:
        """One run of a layer, given by its id, on so many samples."""
        self._times[batch][layer].append((forward_us, backward_us))

    def launched(self, layer: int, launch_us: float) -> None:
        """What it takes to launch a layer, given by its id; of several batches the least counts."""
        self._launch_us[layer] = round(min(launch_us, self._launch_us.get(layer, launch_us)), 3)

    def drop(self, batch: int) -> None:
        """Forget what was measured with this batch."""
        self._times.pop(batch, None)

    @property
    def batches(self) -> tuple[int, ...]:
        """Those that every layer was measured with, ascending."""
        return tuple(sorted(n for n, found in self._times.items() if len(found) == len(self._layers)))

    def profile(self, note: str = "", conditions: Mapping[str, Fact] | None = None) -> LayerProfile:
        """Medians at those batches. Raises ValueError where there is none."""
        if not self.batches:
            raise ValueError("no batch was measured with every layer")
        return LayerProfile(
            model=self._model,
            device=self._device,
            source="measured",
            note=note,
            input_bytes=self._input_bytes,
            conditions=conditions or {},
            layers=tuple(
                replace(
                    layer,
                    forward_us=self._medians(layer.id, 0),
                    backward_us=self._medians(layer.id, 1),
                    launch_us=self._launch_us.get(layer.id, 0.0),
                )
                for layer in self._layers
            ),
        )

    def _medians(self, layer: int, which: int) -> dict[int, float]:
        """To the nanosecond: what is beyond is noise."""
        return {n: round(median(t[which] for t in self._times[n][layer]), 3) for n in self.batches}
