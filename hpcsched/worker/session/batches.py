"""Which samples a rank computes, and what their losses come to: the same for every strategy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

import torch

from hpcsched.worker.session.sampler import Sampler
from hpcsched.worker.session.state import TrainingState
from hpcsched.worker.session.trainer import Place

T = TypeVar("T")


def places_of(sampler: Sampler, position: int, share: range) -> list[Place]:
    """The samples at the places `share` of the global batch that begins at `position` of the stream."""
    indices = sampler.batch(position + share.start, len(share)).tolist()
    return list(enumerate(indices, position + share.start))


def coming_places(training: TrainingState, share: range) -> Iterator[list[Place]]:
    """The samples at these places of each coming step's global batch, to the end of the training."""
    position = training.samples
    for _ in range(training.step, training.last_step()):
        yield places_of(training.sampler, position, share)
        position += training.global_batch


def in_micro_batches(part: list[T], most: int | None) -> Iterator[list[T]]:
    """A part of a batch, at most so many samples at a time; None: all at once."""
    size = most or len(part)
    return (part[start : start + size] for start in range(0, len(part), size))


def summed(losses: torch.Tensor, samples: int) -> torch.Tensor:
    """The sum of the losses of some samples, shape [], of one loss a sample or of their mean.

    Raises ValueError for losses of other shapes.
    """
    if losses.ndim > 1 or (losses.ndim == 1 and len(losses) != samples):
        raise ValueError(
            f"losses of shape {list(losses.shape)} for {samples} samples; expected one loss a sample "
            "(shape [samples]), or their mean (shape [])"
        )
    return losses.sum() if losses.ndim else losses * samples
