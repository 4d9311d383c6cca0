"""Chunks as CUDA graphs, by the rules that CUDA and torch have for captures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from capturerules import CaptureRules, torch
from torch import nn

from hpcsched.worker.background.graphs import Graphs
from hpcsched.worker.layers.graph import Value

pytestmark = pytest.mark.torch


class Chunk:
    """The layer `number` of a chain."""

    def __init__(self, number: int, act: Callable[[], object] = lambda: None) -> None:
        self.inputs, self.outputs = (Value(number - 1, 0),), (Value(number, 0),)
        self.layer, self.act = nn.Linear(4, 4), act

    def __call__(self, *tensors: Any) -> tuple[Any, ...]:
        self.act()
        return (self.layer(*tensors),)

    def modules(self) -> tuple[nn.Module, ...]:
        return (self.layer,)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> CaptureRules:
    return CaptureRules(monkeypatch)


def test_every_chunk_is_two_graphs_in_one_pool(cuda: CaptureRules) -> None:
    graphs = Graphs([Chunk(0), Chunk(1)], (torch.ones(2, 4, requires_grad=True),), cuda.stream())
    assert (len(graphs.calls), list(cuda.pools.values())) == (2, [4])
    assert cuda.here is cuda.main


def test_a_chunk_that_cannot_be_captured_leaves_the_foreground_as_it_was(cuda: CaptureRules) -> None:
    """The generator and the allocator are those of the process, so the foreground's too."""

    def wait() -> None:
        if torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize()

    cuda.draw()
    with pytest.raises(RuntimeError, match="when stream is capturing"):
        Graphs([Chunk(0), Chunk(1, wait)], (torch.ones(2, 4),), cuda.stream())
    assert cuda.draw() == 8, "the foreground's next dropout"
    assert (cuda.here, cuda.held) == (cuda.main, 0)
    cuda.empty_cache()
    cuda.allocate()
