"""How long each layer takes by itself, forward and backward, for several numbers of samples on one device.

Every layer gets the very inputs that it has in the model, cut off from what made them, so that its own
backward pass can be measured. On a GPU a layer's passes are captured as CUDA graphs and replayed between
events, where that works: what is measured is the device, not how fast Python launches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import field

import torch

from hpcsched.compat import dataclass, zip
from hpcsched.errors import ConfigError
from hpcsched.planning.burst import graph as profiles
from hpcsched.worker.cuda_graphs import capture
from hpcsched.worker.layers.graph import Layer, Layers, Value
from hpcsched.worker.layers.times import LayerTimes

LEAST, MOST = 5, 100
"""Measured runs of a layer at a batch."""
WARMUP = 2
"""Runs before those: the first ones choose algorithms and get memory."""
REPLAYED_S = 0.001
"""Short passes are replayed so often in a row that it takes about this long."""

Tensors = tuple[torch.Tensor, ...]
Inputs = Callable[[int], Tensors]
"""The model's inputs for so many samples, on the device."""


@dataclass(kw_only=True)
class MeasuredLayers:
    """What was found so far.

    Attributes:
        times: of all layers at all batches that worked; None before the first one did.
        left_out: the batches that did not, with the reason.
        eager: how many pairs of layer and batch could not be captured as CUDA graphs; their times hold the
            time it takes to launch what they do.
        peak_mib: the most memory of a GPU that was used.
    """

    times: LayerTimes | None = None
    left_out: dict[int, str] = field(default_factory=dict)
    eager: int = 0
    peak_mib: float | None = None


def measure(
    layers: Layers,
    inputs: Inputs,
    batches: Sequence[int],
    *,
    model: str,
    device: str,
    seconds: float = 0.05,
    watch: Callable[[int, Layer], None] = lambda batch, layer: None,
) -> Iterator[MeasuredLayers]:
    """Time all layers in their present mode at each of `batches`, ascending; what there is after each.

    `seconds` is what the measured runs of a layer at a batch may take; at least 5 runs are made. `watch` is
    told before each. A batch that fails is left out; with it the larger ones, if it did not fit into memory.
    Raises ConfigError when none worked. Parameters, buffers and gradients stay as they are.
    """
    found = MeasuredLayers()
    for batch in sorted(set(batches)):
        times = found.times
        try:
            given = inputs(batch)
            if times is None:
                layers_of, input_bytes = describe(layers, given)
                times = LayerTimes(layers_of, model=model, device=device, input_bytes=input_bytes)
            found.eager += _measure_batch(layers, given, times, seconds, watch)
            found.times = times
            if given[0].is_cuda:
                found.peak_mib = torch.cuda.max_memory_allocated(given[0].device) / 2**20
        except (RuntimeError, ValueError, MemoryError) as error:
            if times is not None:
                times.drop(batch)
            found.left_out[batch] = _why(error)
            if _no_memory(error):
                found.left_out.update((n, "a smaller batch did not fit") for n in batches if n > batch)
                break
        yield found
    if found.times is None:
        raise ConfigError(
            where=f"model {model}",
            key="batches",
            got="; ".join(f"{batch}: {why}" for batch, why in found.left_out.items()),
            accepted="at least one batch that can be trained on this device",
        )


def describe(layers: Layers, inputs: Tensors) -> tuple[list[profiles.ProfiledLayer], int]:
    """What a layer profile says of each layer besides times, and the bytes of one sample's input.

    A parameter that several layers use counts for the first; one that is not trained counts for none.
    """
    samples = len(inputs[0])
    counted: set[torch.nn.Parameter] = set()
    found = []
    for layer, _, outputs in _walk(layers, inputs):
        own = {p for p in layer.module.parameters() if p.requires_grad} - counted
        counted |= own
        found.append(
            profiles.ProfiledLayer(
                id=layer.id,
                name=layer.name,
                prev=layer.prev,
                parameter_bytes=_bytes(own),
                activation_bytes=_bytes(outputs) // samples,
                forward_us={},
                backward_us={},
            )
        )
    return found, _bytes(inputs) // samples


def _measure_batch(
    layers: Layers,
    inputs: Tensors,
    times: LayerTimes,
    seconds: float,
    watch: Callable[[int, Layer], None],
) -> int:
    """Time all layers on these inputs; returns how many could not be captured."""
    batch, eager = len(inputs[0]), 0
    for layer, given, _ in _walk(layers, inputs):
        watch(batch, layer)
        with _unchanged(layer.module):
            found: Iterator[tuple[float, float]] | None = None
            if not inputs[0].is_cuda:
                found = _on_cpu(layer, given)
            elif (found := _captured(layer, given)) is None:
                eager += 1
                found = _on_gpu(layer, given)
            for _ in range(WARMUP):
                next(found)
            began, runs = time.perf_counter(), 0
            while runs < LEAST or (runs < MOST and time.perf_counter() - began < seconds):
                forward_s, backward_s = next(found)
                times.add(layer.id, batch, forward_s * 1e6, backward_s * 1e6)
                runs += 1
            found.close()  # type: ignore[attr-defined]
    return eager


def _walk(layers: Layers, inputs: Tensors) -> Iterator[tuple[Layer, Tensors, Tensors]]:
    """Each layer with what it is given in the model, as leaves of their own, and what it returns."""
    last = {value: layer.id for layer in layers.layers for value in layer.inputs}
    made = {Value(-1, i): tensor for i, tensor in enumerate(inputs)}
    for layer in layers.layers:
        given = tuple(
            made[value].detach().requires_grad_(made[value].requires_grad) for value in layer.inputs
        )
        with _unchanged(layer.module):
            outputs = layer.module(*given)
        made.update(
            (Value(layer.id, i), tensor.detach().requires_grad_(tensor.requires_grad))
            for i, tensor in enumerate(outputs)
        )
        made = {value: tensor for value, tensor in made.items() if last.get(value, 0) > layer.id}
        outputs = tuple(tensor.detach() for tensor in outputs)
        yield layer, given, outputs


def _on_cpu(layer: Layer, given: Tensors) -> Iterator[tuple[float, float]]:
    """Seconds of the forward and of the backward pass, again and again."""
    while True:
        began = time.perf_counter()
        outputs = layer.module(*given)
        forward_s = time.perf_counter() - began
        backward = _backward(layer, given, outputs)
        began = time.perf_counter()
        backward()
        backward_s = time.perf_counter() - began
        del outputs, backward
        yield forward_s, backward_s


def _on_gpu(layer: Layer, given: Tensors) -> Iterator[tuple[float, float]]:
    """The same on a GPU, launched from Python."""
    begin, middle, start, end = (torch.cuda.Event(enable_timing=True) for _ in range(4))
    while True:
        begin.record()
        outputs = layer.module(*given)
        middle.record()
        backward = _backward(layer, given, outputs)
        start.record()
        backward()
        end.record()
        end.synchronize()
        del outputs, backward
        yield begin.elapsed_time(middle) / 1e3, start.elapsed_time(end) / 1e3


def _captured(layer: Layer, given: Tensors) -> Iterator[tuple[float, float]] | None:
    """The same, replayed as CUDA graphs; None for a layer that cannot be captured."""
    stream, now = torch.cuda.Stream(), torch.cuda.current_stream()
    try:
        stream.wait_stream(now)
        with torch.cuda.stream(stream):
            for _ in range(WARMUP):
                _backward(layer, given, layer.module(*given))()
        now.wait_stream(stream)
        forward, outputs = capture(lambda: layer.module(*given), stream)
        backward, gradients = capture(_backward(layer, given, outputs), stream, pool=forward.pool())
    except RuntimeError as error:
        if _no_memory(error):
            raise
        torch.cuda.synchronize()
        return None

    def replays() -> Iterator[tuple[float, float]]:
        kept = (outputs, gradients)  # the graphs write there
        times = [1, 1]
        while kept:
            took = [_replay(graph, count) for graph, count in zip((forward, backward), times, strict=True)]
            # Enough of them in a row that starting them does not count.
            times = [min(20, max(1, round(REPLAYED_S / max(s, 1e-9)))) for s in took]
            yield took[0], took[1]

    return replays()


def _replay(graph: torch.cuda.CUDAGraph, count: int) -> float:
    """Seconds of one replay, of so many in a row."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / count


def _backward(layer: Layer, given: Tensors, outputs: Tensors) -> Callable[[], Tensors]:
    """What runs the backward pass for gradients of one; it leaves no gradient behind."""
    ends = tuple(tensor for tensor in outputs if tensor.requires_grad)
    wanted = [t for t in (*given, *layer.module.parameters()) if t.requires_grad]
    ones = tuple(torch.ones_like(tensor) for tensor in ends)
    if not (ends and wanted):
        return lambda: ()
    return lambda: torch.autograd.grad(ends, wanted, ones, allow_unused=True)


@contextmanager
def _unchanged(module: torch.nn.Module) -> Iterator[None]:
    """Running it leaves no trace in its buffers."""
    before = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        for buffer, value in before:
            buffer.copy_(value)


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _no_memory(error: Exception) -> bool:
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "allocate memory" in str(error)


def _why(error: Exception) -> str:
    return "out of memory" if _no_memory(error) else (str(error).strip() or repr(error)).splitlines()[0][:200]
