"""Epochs of a loop of the user's own: which are left, and what is added up in one, also over a suspend."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from hpcsched.worker.ranks.process_group import Peers
from hpcsched.worker.session.state import TrainingState
from hpcsched.worker.session.sums import EpochSums, Value


class Epoch:
    """A pass over the data, or what is left of it after a resume: iterate over it as over `Session.steps`.

    `number` counts from 0; `until` is the step with which it ends.
    """

    def __init__(
        self,
        number: int,
        until: int,
        *,
        sums: EpochSums,
        peers: Peers,
        steps: Callable[[int], Iterator[torch.Tensor]],
    ) -> None:
        self.number, self.until = number, until
        self._sums, self._peers, self._steps = sums, peers, steps
        self._samples = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        for indices in self._steps(self.until):
            self._samples = len(indices)
            yield indices

    def mean(self, **values: Value) -> None:
        """Add to the epoch's means: values that are means over this rank's samples of the step, such as what
        `Session.backward` returns. Tensors stay on their device."""
        for name, value in values.items():
            self._sums.add(name, value * self._samples, self._samples)

    def sum(self, **values: Value) -> None:
        """Add to the epoch's sums: values of this rank's samples, such as how many were right."""
        for name, value in values.items():
            self._sums.add(name, value, 0.0)

    def results(self) -> dict[str, float]:
        """The means and sums by name, over all samples of the epoch and all ranks, also those before a
        suspend. All ranks call this."""
        totals = self._sums.totals(self._peers)
        return {name: value / weight if weight else value for name, (value, weight) in totals.items()}


def epochs_left(training: TrainingState, last: int, make: Callable[[int, int], Epoch]) -> Iterator[Epoch]:
    """The epochs up to the step `last`, from the one that is under way; `make(number, until)` makes each.

    Raises RuntimeError for a loop that does not come to the end of one: the same one would come again.
    """
    while training.step < last and not training.stopped:
        number = _under_way(training)
        until = min(training.steps_for(number + 1), last)
        yield make(number, until)
        if training.step < until and not training.stopped:
            raise RuntimeError(
                f"epoch {number}: left after step {training.step} of {until}; iterate over it to its end, "
                "or call Session.stop() to end the training"
            )


def _under_way(training: TrainingState) -> int:
    number = training.step * training.step_samples // training.sampler.size
    while training.steps_for(number + 1) <= training.step:
        number += 1
    while training.steps_for(number) > training.step:
        number -= 1
    return number
