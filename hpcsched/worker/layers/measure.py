"""How long each layer takes by itself, forward and backward, for several numbers of samples on one device.

Every layer gets the very inputs that it has in the model, cut off from what made them, so that its own
backward pass can be measured. On a GPU a layer's passes are captured as CUDA graphs and replayed between
events, where that works: what is measured is the device, not how fast Python launches. There a layer is given
copies of its inputs in turn, which together are larger than the L2 cache: else it would find in there what in
a training comes from the memory.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import field
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from hpcsched.compat import dataclass, zip
from hpcsched.errors import ConfigError
from hpcsched.planning.burst import graph as profiles
from hpcsched.worker.cuda_graphs import capture
from hpcsched.worker.layers.conditions import sm_clock_mhz
from hpcsched.worker.layers.graph import Layer, Layers, Value
from hpcsched.worker.layers.times import LayerTimes

LEAST, MOST = 5, 100
"""Measured runs of a layer at a batch."""
WARMUP = 2
"""Runs before those: the first ones choose algorithms and get memory."""
REPLAYED_S = 0.001
"""Short passes are replayed so often in a row that it takes about this long."""
MOST_COPIES = 16
"""Of a layer's inputs. Very small ones stay in the cache all the same, as they do in a training."""
L2_BYTES = 2**26
"""The cache of a GPU whose torch does not say how large it is: more than most have."""

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
        sm_clock_mhz: the slowest clock of its processors at the end of a batch; None where it is not known.
    """

    times: LayerTimes | None = None
    left_out: dict[int, str] = field(default_factory=dict)
    eager: int = 0
    peak_mib: float | None = None
    sm_clock_mhz: int | None = None


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
                clocks = [found.sm_clock_mhz, sm_clock_mhz(given[0].device)]
                found.sm_clock_mhz = min((clock for clock in clocks if clock is not None), default=None)
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
                norms=sum(isinstance(part, _BatchNorm) for part in layer.module.modules()),
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
    stream = torch.cuda.Stream(inputs[0].device) if inputs[0].is_cuda else None
    for layer, given, _ in _walk(layers, inputs):
        watch(batch, layer)
        with _unchanged(layer.module):
            if stream is None:
                found = _on_cpu(layer, given)
            else:
                times.launched(layer.id, _launch_s(layer, given) * 1e6)
                captured = _in_graphs(layer, given, stream)
                eager += captured is None
                found = captured or _on_gpu(layer, _copies(given))
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


def _launch_s(layer: Layer, given: Tensors) -> float:
    """Seconds in which Python tells a GPU what a layer does, forward and backward: the least of some runs."""
    least = float("inf")
    for _ in range(WARMUP + LEAST):
        torch.cuda.synchronize()
        began = time.perf_counter()
        _backward(layer, given, layer.module(*given))()
        least = min(least, time.perf_counter() - began)
    return least


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


def _copies(given: Tensors) -> list[Tensors]:
    """These inputs and copies of them, as many as do not fit into the GPU's L2 cache together."""
    properties = torch.cuda.get_device_properties(given[0].device)
    cache = getattr(properties, "L2_cache_size", L2_BYTES)
    number = min(MOST_COPIES, 1 + cache // max(1, _bytes(given)))
    return [
        given,
        *(
            tuple(t.detach().clone().requires_grad_(t.requires_grad) for t in given)
            for _ in range(number - 1)
        ),
    ]


def _on_gpu(layer: Layer, copies: Sequence[Tensors]) -> Iterator[tuple[float, float]]:
    """The same on a GPU, launched from Python."""
    begin, middle, start, end = (torch.cuda.Event(enable_timing=True) for _ in range(4))
    for given in itertools.cycle(copies):
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


def _in_graphs(layer: Layer, given: Tensors, stream: Any) -> Iterator[tuple[float, float]] | None:
    """The same, replayed as CUDA graphs; None for a layer that cannot be captured.

    What does not fit into the memory once for each copy of the inputs is measured with one.
    """
    copies = _copies(given)
    if len(copies) > 1:
        try:
            return _captured(layer, copies, stream)
        except RuntimeError as error:
            if not _no_memory(error):
                raise
        copies = copies[:1]
        torch.cuda.empty_cache()
    return _captured(layer, copies, stream)


def _captured(layer: Layer, copies: Sequence[Tensors], stream: Any) -> Iterator[tuple[float, float]] | None:
    """The passes of all copies, one after the other, as one graph forward and one backward."""
    now = torch.cuda.current_stream()
    try:
        stream.wait_stream(now)
        with torch.cuda.stream(stream):
            for _ in range(WARMUP):
                _backward(layer, copies[0], layer.module(*copies[0]))()
        now.wait_stream(stream)
        forward, outputs = capture(lambda: [layer.module(*given) for given in copies], stream)
        # What the forward passes have kept has to stay: a replay would find something else in its place.
        runs = [_backward(layer, *each, keep=True) for each in zip(copies, outputs, strict=True)]
        backward: Any = None
        gradients: list[Tensors] = []
        if runs[0] is not _nothing:
            backward, gradients = capture(lambda: [run() for run in runs], stream, pool=forward.pool())
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
            yield took[0] / len(copies), took[1] / len(copies)

    return replays()


def _replay(graph: torch.cuda.CUDAGraph | None, count: int) -> float:
    """Seconds of one replay, of so many in a row; None: of a graph of nothing."""
    if graph is None:
        return 0.0
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / count


def _backward(layer: Layer, given: Tensors, outputs: Tensors, *, keep: bool = False) -> Callable[[], Tensors]:
    """What runs the backward pass for gradients of one; it leaves no gradient behind.

    `keep`: what the forward pass has kept for it is there afterwards too.
    """
    ends = tuple(tensor for tensor in outputs if tensor.requires_grad)
    wanted = [t for t in (*given, *layer.module.parameters()) if t.requires_grad]
    ones = tuple(torch.ones_like(tensor) for tensor in ends)
    if not (ends and wanted):
        return _nothing
    return lambda: torch.autograd.grad(ends, wanted, ones, retain_graph=keep, allow_unused=True)


def _nothing() -> Tensors:
    """The backward pass of what gets no gradient."""
    return ()


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
