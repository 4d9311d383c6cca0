"""The stream workers of one device: as many copies of a model, each on a stream of its own, and one set of
weights (JABAS, section 4).

The paper gives every worker weights and gradients of its own, adds the gradients up in a main worker, and
copies the new weights to the others. Here the workers' models share the parameters themselves, so that their
gradients add up where they are made and there is nothing to copy; only buffers (batch norm's statistics) are
each worker's own. One thread starts the work of all: a GPU is told in advance what to do, Python has one
interpreter lock, and random numbers and sums come in the same order every time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from itertools import cycle, islice
from typing import Any

import torch

from hpcsched.compat import zip
from hpcsched.worker.packing.batches import tensors_within

MOST_STREAMS = 32
"""torch has no more of a priority; workers beyond share them. Each on which matrices are multiplied keeps a
work area of cuBLAS to the end of the process, 8 MiB and on Hopper 32 MiB large."""

Loss = Callable[[torch.nn.Module, Any], torch.Tensor]


class StreamWorkers:
    """Computes local batches at the same time, as one backward pass.

    Args:
        model: on its device; it is the main worker's.
        loss: of (model, batch), the losses of the samples.
        device: where they compute; on a CPU they take turns.
    """

    def __init__(self, model: torch.nn.Module, loss: Loss, device: torch.device) -> None:
        self._loss = loss
        self._device = device
        self._models = [model]
        self._streams: list[torch.cuda.Stream] = []
        if device.type == "cuda" and hasattr(
            torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch"
        ):
            # Gradients of all streams are added up on one of them, as it is meant to be.
            torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self._models)

    def have(self, count: int) -> str:
        """Be `count` workers from now on; between two steps, without a restart.

        Returns why there are fewer now: the model cannot be copied. Else nothing. Raises OutOfMemoryError if
        a copy finds no room.
        """
        main, why = self._models[0], ""
        while len(self._models) < count and not why:
            shared: dict[int, Any] = {id(parameter): parameter for parameter in main.parameters()}
            try:
                self._models.append(copy.deepcopy(main, shared))
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # a model may hold anything
                why = (str(error) or type(error).__name__).splitlines()[0]
        del self._models[max(1, count) :]
        if self._device.type == "cuda":
            while len(self._streams) < min(MOST_STREAMS, len(self._models)):
                self._streams.append(torch.cuda.Stream(self._device))
        return why

    def begin(self) -> None:
        """Before a step: all workers begin with the main worker's buffers."""
        main = list(self._models[0].buffers())
        with torch.no_grad():
            for model in self._models[1:]:
                for own, buffer in zip(model.buffers(), main, strict=True):
                    own.copy_(buffer)

    def forward(self, batches: Sequence[Any]) -> list[torch.Tensor]:
        """The losses of these local batches, one batch for each worker, at the same time."""
        if len(batches) == 1 or self._device.type != "cuda":
            return [self._loss(model, batch) for model, batch in zip(self._models, batches, strict=False)]
        now = torch.cuda.current_stream(self._device)
        losses, streams = [], list(islice(cycle(self._streams), len(batches)))
        for model, stream, batch in zip(self._models, streams, batches, strict=False):
            stream.wait_stream(now)
            with torch.cuda.stream(stream):
                losses.append(self._loss(model, batch))
            _keep(batch, stream)
        for stream, loss in zip(streams, losses, strict=True):
            now.wait_stream(stream)
            loss.record_stream(now)
        return losses


def _keep(batch: Any, stream: torch.cuda.Stream) -> None:
    """Have the memory of a batch not used again before this stream is done with it."""
    for tensor in tensors_within(batch):
        if tensor.is_cuda:
            tensor.record_stream(stream)
