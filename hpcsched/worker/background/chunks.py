"""A model cut into consecutive chunks, with a gate before each, forward and backward.

Small chunks keep what is launched at a time short: the device does not preempt, and a background job's graph
that has begun runs to its end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from hpcsched.compat import pairwise, zip
from hpcsched.errors import ConfigError
from hpcsched.worker.background.graphs import Graphs
from hpcsched.worker.background.lane import StreamLane
from hpcsched.worker.layers.graph import Layer, Value, capture_inputs, trace
from hpcsched.worker.process import rng
from hpcsched.worker.process.contract import say
from hpcsched.worker.session.trainer import Parts, to_device

CHUNKS = 16
"""Into how many chunks a model is cut, at most."""

LOSS, WHOLE = "loss", "whole"
"""Keys of the piece between the model's forward and its backward pass, and of a step that is one piece."""

Loss = Callable[[nn.Module, Any], torch.Tensor]


class Segment:
    """Consecutive layers: called with the tensors of `inputs`, returns those of `outputs`."""

    def __init__(self, layers: Sequence[Layer], outputs: tuple[Value, ...]) -> None:
        self.layers, self.outputs = tuple(layers), outputs
        own = {layer.id for layer in layers}
        read = [value for layer in layers for value in layer.inputs if value.layer not in own]
        self.inputs: tuple[Value, ...] = tuple(dict.fromkeys(read))

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = dict(zip(self.inputs, tensors, strict=True))
        for layer in self.layers:
            made = layer.module(*(values[value] for value in layer.inputs))
            values |= {Value(layer.id, index): tensor for index, tensor in enumerate(made)}
        return tuple(values[value] for value in self.outputs)

    def modules(self) -> tuple[nn.Module, ...]:
        """What computes it."""
        return tuple(layer.module for layer in self.layers)


def segments_of(model: nn.Module, example: tuple[torch.Tensor, ...], most: int) -> tuple[Segment, ...]:
    """The model as at most `most` segments, about as many layers in each.

    Raises ConfigError when it cannot be traced.
    """
    layers = trace(model, example).layers
    number = min(most, len(layers))
    cuts = [index * len(layers) // number for index in range(number + 1)]
    groups = [layers[start:end] for start, end in pairwise(cuts)]
    last = Value(len(layers) - 1, 0)
    segments = []
    for at, group in enumerate(groups):
        own = {layer.id for layer in group}
        read_later = [
            v for later in groups[at + 1 :] for layer in later for v in layer.inputs if v.layer in own
        ]
        if last.layer in own:
            read_later.append(last)
        segments.append(Segment(group, tuple(dict.fromkeys(read_later))))
    return tuple(segments)


class Chunked:
    """Stands for a model in a call of its loss; computes the same, chunk by chunk through a lane's gate.

    Everything but the call is the model's. Raises ConfigError for a model that cannot be traced.

    Args:
        example: inputs as they will come.
        graphs: launch each chunk as a CUDA graph, while the inputs are like `example`.
    """

    def __init__(
        self,
        model: nn.Module,
        example: tuple[torch.Tensor, ...],
        lane: StreamLane,
        *,
        most: int = CHUNKS,
        graphs: bool = False,
    ) -> None:
        self._model, self._lane = model, lane
        self._segments = segments_of(model, example, most)
        self._graphs: Graphs | None = None
        if graphs:
            try:
                self._graphs = Graphs(self._segments, example, lane.stream)
            except RuntimeError as error:
                say(f"this model is launched without CUDA graphs: {str(error).splitlines()[0]}")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    @property
    def chunks(self) -> int:
        """How many there are."""
        return len(self._segments)

    def __call__(self, *tensors: Any, **options: Any) -> Any:
        lane, last = self._lane, len(self._segments) - 1
        if options or not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
            lane.piece(WHOLE)
            return self._model(*tensors, **options)
        calls: Sequence[Callable[..., tuple[torch.Tensor, ...]]] = self._segments
        if self._graphs is not None and self._graphs.fits(self._model, tensors):
            calls = self._graphs.calls
        values = {Value(-1, index): tensor for index, tensor in enumerate(tensors)}
        for index, (segment, call) in enumerate(zip(self._segments, calls, strict=True)):
            inputs = tuple(values[value] for value in segment.inputs)
            if index:
                _on_backward(inputs, lane, ("backward", index - 1))
            lane.piece(("forward", index))
            values |= zip(segment.outputs, call(*inputs), strict=True)
        (result,) = (values[value] for value in self._segments[last].outputs)
        _on_backward((result,), lane, ("backward", last))
        lane.piece(LOSS)
        return result


def _on_backward(tensors: Sequence[torch.Tensor], lane: StreamLane, key: object) -> None:
    """Have the piece `key` begin once the gradient of one of these tensors is there.

    Of the first, as those that other chunks read too have theirs only later. By hooks, as functions of our
    own in between would make views, which must not be changed in place.
    """
    wanted = [tensor for tensor in tensors if tensor.requires_grad]
    if wanted and torch.is_grad_enabled():
        torch.autograd.graph.register_multi_grad_hook(wanted, lambda _: lane.piece(key), mode="any")


def chunked_loss(parts: Parts, samples: int, lane: StreamLane, device: torch.device, *, graphs: bool) -> Loss:
    """The losses of a training, the model's part of them chunk by chunk; a batch has so many samples.

    A model that cannot be cut is one piece, from one loss to the next. To be called while no other thread
    uses
    torch: tracing a model changes how all modules are called. Moves the model to the device.
    """
    whole, stand_in = parts.loss, None
    drawn = rng.capture(device)  # what is tried out here must not change what the training draws
    try:
        batch = to_device(parts.batch([index % parts.size for index in range(samples)]), device)
        parts.model.to(device).train()
        stand_in = Chunked(parts.model, capture_inputs(whole, parts.model, batch), lane, graphs=graphs)
    except ConfigError as error:
        say(f"this model is launched as one chunk: {error}")
    rng.restore(drawn, device)

    def through_the_lane(model: nn.Module, batch: Any) -> torch.Tensor:
        if not model.training:
            lane.between()  # an evaluation takes its time, and nobody may be there any more
            return whole(model, batch)
        if stand_in is None:
            lane.piece(WHOLE)
            return whole(model, batch)
        in_its_place: Any = stand_in
        return whole(in_its_place, batch)

    return through_the_lane
