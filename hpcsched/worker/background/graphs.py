"""The chunks of a model as CUDA graphs: one launch each, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from hpcsched.compat import zip
from hpcsched.worker.background.rng_isolation import draws_so_far
from hpcsched.worker.cuda_graphs import capture

WARM_UPS = 3
"""Passes before a capture: libraries choose their kernels and make their work areas in the first ones."""

Tensors = tuple[torch.Tensor, ...]


class Call(Protocol):
    """Consecutive layers of a model; `chunks.Segment` is one."""

    inputs: Any
    outputs: Any

    def __call__(self, *tensors: torch.Tensor) -> Tensors: ...

    def modules(self) -> tuple[nn.Module, ...]: ...


@dataclass
class _Captured:
    """One chunk: its graphs, and the tensors in which they find and leave things."""

    inputs: Tensors
    parameters: Tensors
    outputs: Tensors
    forward: Any
    backward: Any = None
    given: Tensors = ()
    """Gradients of those outputs that have them."""
    wanted: tuple[int, ...] = ()
    """Which of inputs and parameters get gradients."""
    gradients: Sequence[torch.Tensor | None] = ()


class Graphs:
    """Captures the chunks of a model; `calls` are to be used in place of the chunks, in their order.

    A chunk that draws random numbers in a guest is left as it is: its draws must come from the guest's own
    generators. Raises RuntimeError when the device cannot capture the model.

    Args:
        example: the model's inputs.
        stream: where the chunks will be launched.
    """

    def __init__(self, chunks: Sequence[Call], example: Tensors, stream: Any) -> None:
        self._shapes = [(tensor.shape, tensor.dtype, tensor.device) for tensor in example]
        self._chunks = chunks
        self._drawing: set[int] = set()
        buffers = [buffer for chunk in chunks for module in chunk.modules() for buffer in module.buffers()]
        kept = [buffer.clone() for buffer in buffers]
        try:
            self._warm_up(example, stream)
            captured = self._capture(example, stream)
        finally:
            with torch.no_grad():  # passes that only warm up must leave nothing in running means
                for buffer, value in zip(buffers, kept, strict=True):
                    buffer.copy_(value)
        self.calls: tuple[Callable[..., Tensors], ...] = tuple(
            chunk if one is None else _replaying(one) for chunk, one in zip(chunks, captured, strict=True)
        )

    def fits(self, model: nn.Module, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether the graphs compute what the model would, for these inputs, now."""
        return (
            model.training
            and torch.is_grad_enabled()
            and not torch.is_autocast_enabled("cuda")
            and [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors] == self._shapes
        )

    def _run(self, example: Tensors, use: Callable[[int, Tensors], Tensors]) -> None:
        values: dict[Any, torch.Tensor] = {}
        for index, chunk in enumerate(self._chunks):
            inputs = tuple(
                example[value.index] if value.layer < 0 else values[value] for value in chunk.inputs
            )
            values |= zip(chunk.outputs, use(index, inputs), strict=True)

    def _warm_up(self, example: Tensors, stream: Any) -> None:
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                ends: list[torch.Tensor] = []

                def use(index: int, inputs: Tensors, ends: list[torch.Tensor] = ends) -> Tensors:
                    drawn = draws_so_far()
                    outputs = self._chunks[index](*inputs)
                    if draws_so_far() > drawn:
                        self._drawing.add(index)
                    ends[:] = [tensor for tensor in outputs if tensor.requires_grad]
                    return outputs

                self._run(example, use)
                parameters = [p for chunk in self._chunks for p in _parameters(chunk)]
                if ends and parameters:
                    torch.autograd.grad(
                        ends, parameters, [torch.ones_like(end) for end in ends], allow_unused=True
                    )
        stream.synchronize()

    def _capture(self, example: Tensors, stream: Any) -> list[_Captured | None]:
        pool = torch.cuda.graph_pool_handle()
        captured: list[_Captured | None] = []

        def use(index: int, inputs: Tensors) -> Tensors:
            chunk = self._chunks[index]
            static = tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in inputs)
            if index == 0 or any(one is None for one in captured):
                static = tuple(
                    tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in inputs
                )
            if index in self._drawing:
                captured.append(None)
                return chunk(*inputs)
            graph, outputs = capture(lambda: chunk(*static), stream, pool=pool)
            captured.append(_Captured(static, _parameters(chunk), outputs, graph))
            return tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in outputs)

        self._run(example, use)
        # Backward in the reverse order: so the pool's memory is used again as it will be in each step.
        for one in reversed(captured):
            if one is not None:
                _capture_backward(one, pool, stream)
        return captured


def _capture_backward(one: _Captured, pool: Any, stream: Any) -> None:
    ends = [tensor for tensor in one.outputs if tensor.requires_grad]
    sources = (*one.inputs, *one.parameters)
    one.wanted = tuple(index for index, tensor in enumerate(sources) if tensor.requires_grad)
    if not ends or not one.wanted:
        return
    one.given = tuple(torch.zeros_like(end) for end in ends)

    def gradients() -> Sequence[torch.Tensor | None]:
        return torch.autograd.grad(
            ends, [sources[index] for index in one.wanted], one.given, allow_unused=True
        )

    one.backward, one.gradients = capture(gradients, stream, pool=pool)


def _replaying(one: _Captured) -> Callable[..., Tensors]:
    def call(*inputs: torch.Tensor) -> Tensors:
        outputs: Tensors = _Replay.apply(one, len(inputs), *inputs, *one.parameters)  # type: ignore[no-untyped-call]
        return outputs

    return call


class _Replay(torch.autograd.Function):
    """Launches a chunk's graphs in place of its operators."""

    @staticmethod
    def forward(ctx: Any, one: _Captured, count: int, *tensors: torch.Tensor) -> Tensors:
        for static, given in zip(one.inputs, tensors[:count], strict=True):
            if static.data_ptr() != given.data_ptr():
                static.detach().copy_(given)
        one.forward.replay()
        ctx.one = one
        ctx.sources = len(tensors)
        outputs = tuple(tensor.detach() for tensor in one.outputs)
        ctx.mark_non_differentiable(
            *(made for made, tensor in zip(outputs, one.outputs, strict=True) if not tensor.requires_grad)
        )
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        one: _Captured = ctx.one
        came = [g for g, tensor in zip(gradients, one.outputs, strict=True) if tensor.requires_grad]
        for static, given in zip(one.given, came, strict=True):
            if given is None:
                static.zero_()
            else:
                static.copy_(given)
        one.backward.replay()
        made: list[torch.Tensor | None] = [None] * ctx.sources
        for index, gradient in zip(one.wanted, one.gradients, strict=True):
            # Copied: autograd may keep what it is given as a parameter's gradient, and the next pass would
            # write into it.
            made[index] = None if gradient is None else gradient.clone()
        return (None, None, *made)


def _parameters(chunk: Call) -> Tensors:
    found = (p for module in chunk.modules() for p in module.parameters() if p.requires_grad)
    return tuple({id(parameter): parameter for parameter in found}.values())
