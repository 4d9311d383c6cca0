"""Where a layer is computed at present; what its batch norm and dropout need to know."""

from __future__ import annotations

from dataclasses import dataclass

from hpcsched.worker.burst.channels import Channels, Ranks


@dataclass(eq=False)
class LayerPlacement:
    """One layer's place in the plan, as this rank sees it.

    `ranks` compute the layer for global batches of `batch` samples; `places` are those of this rank's samples
    in the stream of all samples. With `local_norms` each rank's batch norms see its own samples only. Before
    the layer is called its `calls` are set to 0. While it is `looked_at`, for what it does to single samples,
    batch norm and dropout do nothing.
    """

    name: str
    seed: int
    wires: Channels
    ranks: Ranks = (0,)
    batch: int = 0
    places: range = range(0)
    local_norms: bool = False
    looked_at: bool = False
    calls: int = 0

    def next_call(self) -> int:
        """The number of this draw in the layer's forward pass."""
        self.calls += 1
        return self.calls
