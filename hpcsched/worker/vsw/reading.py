"""Local batches in the order in which a rank computes them, where that order changes while it trains."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from hpcsched.worker.session.trainer import Parts, Place, read

Pieces = Iterator[Sequence[Place]]


class BatchReader:
    """Reads a dataset's local batches; what was read ahead for another plan is passed over.

    Processes that read ahead stay: to start them anew at every change would cost more than what they read in
    vain, two local batches each.

    Args:
        parts: of the training.
        device: where batches go.
        step: of the training, now: seeds what the reading processes draw.
    """

    def __init__(self, parts: Parts, device: torch.device, step: Callable[[], int]) -> None:
        self._parts = parts
        self._device = device
        self._step = step
        self._aim = 0
        self._source: Pieces = iter(())
        self._ahead: deque[int] = deque()
        self._batches: Iterator[Any] | None = None

    def aim(self, pieces: Pieces) -> None:
        """Read these from now on."""
        self._aim += 1
        self._source = pieces

    def next(self) -> Any:
        """The next local batch. Raises StopIteration after the last one."""
        anew = self._batches is None
        while True:
            if self._batches is None:
                self._ahead.clear()
                self._batches = read(
                    self._parts,
                    self._pieces(),
                    device=self._device,
                    loaders=self._parts.loaders,
                    step=self._step(),
                )
            try:
                batch = next(self._batches)
            except StopIteration:
                # It may have come to the end of another plan before it was told of this one.
                self._batches = None
                if anew:
                    raise
                anew = True
                continue
            if self._ahead.popleft() == self._aim:
                return batch

    def _pieces(self) -> Pieces:
        while (piece := next(self._source, None)) is not None:
            self._ahead.append(self._aim)
            yield piece
