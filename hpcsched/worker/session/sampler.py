"""Which samples a step trains on: a stream that does not depend on how many ranks share it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]


class Sampler:
    """An endless stream of sample indices: one seeded permutation of the dataset after the other.

    Stretch number e of `size` indices is epoch e and holds each sample exactly once. A batch may
    reach from one epoch into the next. The state is (seed, position in the stream), nothing else,
    so any sequence of batch sizes and rank counts walks the same stream.

    Args:
        size: samples in the dataset, at least 1.
        seed: any integer.
    """

    def __init__(self, size: int, seed: int = 0) -> None:
        if size < 1:
            raise ValueError(f"a dataset of {size} samples cannot be sampled")
        self.size = size
        self.seed = seed
        self._epochs: dict[int, Indices] = {}

    def batch(self, position: int, count: int) -> Indices:
        """The `count` indices of the stream from `position` on; int64, shape [count]."""
        parts = []
        while count > 0:
            epoch, offset = divmod(position, self.size)
            part = self._epoch(epoch)[offset : offset + count]
            parts.append(part)
            position += len(part)
            count -= len(part)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def state(self, position: int) -> dict[str, Any]:
        """What a checkpoint keeps, all whole numbers."""
        return {"seed": self.seed, "size": self.size, "position": position}

    def _epoch(self, number: int) -> Indices:
        if number not in self._epochs:
            # A batch touches two epochs at most times; older ones never come back.
            self._epochs = {n: order for n, order in self._epochs.items() if n == number - 1}
            # RandomState, unlike Generator, promises the same stream in every version of numpy.
            seed = self.seed % 2**64
            words = [seed & 0xFFFFFFFF, seed >> 32, number & 0xFFFFFFFF]
            self._epochs[number] = np.random.RandomState(words).permutation(self.size).astype(np.int64)
        return self._epochs[number]


def share(batch: Any, rank: int, world_size: int) -> Any:
    """The contiguous slice of a global batch (a sequence) that is `rank`'s; sizes differ by at most one."""
    count = len(batch)
    return batch[rank * count // world_size : (rank + 1) * count // world_size]
