"""Captures that are refused leave no trace, by the rules that CUDA and torch have for captures."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
from budget import slow
from capturerules import INVALID, UNJOINED, WAITED, CaptureRules, torch

from hpcsched.worker.cuda_graphs import capture

pytestmark = pytest.mark.torch


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> CaptureRules:
    return CaptureRules(monkeypatch)


def as_before(cuda: CaptureRules, *, drawn: int = 0, held: int = 0) -> None:
    """All that a program does next works."""
    gc.collect()
    assert cuda.here is cuda.main
    assert all(stream.capture is None for stream in cuda.streams)
    assert cuda.held == held
    cuda.wait()
    cuda.empty_cache()
    cuda.allocate()
    assert cuda.draw() == drawn + 4
    assert int(cuda.generator.get_state()) == drawn + 4


def test_a_capture_gives_the_graph_and_what_the_work_returned(cuda: CaptureRules) -> None:
    stream = cuda.stream()
    graph, made = capture(lambda: (cuda.here, cuda.here.capture is not None), stream)
    assert made == (stream, True)
    graph.replay()
    assert graph.replays == 1
    as_before(cuda, held=1)
    del graph
    assert cuda.held == 0


def test_the_stand_in_is_left_as_torch_leaves_it_when_it_captures_by_itself(cuda: CaptureRules) -> None:
    """Else the tests here could not fail."""
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match=INVALID), torch.cuda.graph(graph, stream=cuda.stream()):
        cuda.wait()
    assert (cuda.here.name, cuda.held) == ("s1", 1)
    for act, why in ((cuda.empty_cache, "INTERNAL ASSERT"), (cuda.draw, "Offset increment outside")):
        with pytest.raises(RuntimeError, match=why):
            act()
    del graph
    gc.collect()
    with pytest.raises(AssertionError, match="a graph that is no more"):
        cuda.allocate()


def fork(cuda: CaptureRules) -> None:
    cuda.stream().wait_stream(cuda.here)


def waits(cuda: CaptureRules) -> None:
    fork(cuda)
    cuda.wait()


def goes_on_after_that(cuda: CaptureRules) -> None:
    with pytest.raises(RuntimeError, match=WAITED):
        cuda.wait()


def finds_no_memory_in_a_branch(cuda: CaptureRules) -> None:
    fork(cuda)
    raise torch.OutOfMemoryError("CUDA out of memory")


def is_interrupted(cuda: CaptureRules) -> None:
    fork(cuda)
    raise KeyboardInterrupt


def leaves_another_stream_behind(cuda: CaptureRules) -> None:
    cuda.go(cuda.stream())


def reads_a_generator(cuda: CaptureRules) -> None:
    cuda.generator.get_state()


@pytest.mark.parametrize(
    ("work", "raised", "why"),
    [
        (waits, RuntimeError, WAITED),
        (goes_on_after_that, RuntimeError, INVALID),
        (fork, RuntimeError, UNJOINED),
        (finds_no_memory_in_a_branch, torch.OutOfMemoryError, "CUDA out of memory"),
        (is_interrupted, KeyboardInterrupt, None),
        (leaves_another_stream_behind, RuntimeError, "on the same stream"),
        (reads_a_generator, RuntimeError, "during CUDA graph capture"),
    ],
)
@pytest.mark.parametrize("shared", [slow(False), True])
def test_a_refused_capture_says_why_and_leaves_no_trace(
    cuda: CaptureRules, work: Callable[[CaptureRules], None], raised: Any, why: str | None, shared: bool
) -> None:
    pool = torch.cuda.graph_pool_handle() if shared else None
    cuda.draw()
    with pytest.raises(raised, match=why):
        capture(lambda: work(cuda), cuda.stream(), pool=pool)
    as_before(cuda, drawn=4)


def test_a_capture_that_cannot_begin_leaves_no_trace(cuda: CaptureRules) -> None:
    with pytest.raises(RuntimeError, match="non-default stream"):
        capture(lambda: None, cuda.main)
    as_before(cuda)


def test_a_graph_for_which_there_is_no_memory_leaves_no_trace(cuda: CaptureRules) -> None:
    cuda.cannot_instantiate = torch.OutOfMemoryError("CUDA error: out of memory")
    with pytest.raises(torch.OutOfMemoryError):
        capture(lambda: None, cuda.stream())
    as_before(cuda)


def test_other_graphs_are_none_the_worse_for_it(cuda: CaptureRules) -> None:
    before, _ = capture(lambda: None, cuda.stream())
    with pytest.raises(RuntimeError, match=WAITED):
        capture(lambda: waits(cuda), cuda.stream(), pool=before.pool())
    after, _ = capture(lambda: None, cuda.stream())
    before.replay()
    after.replay()
    as_before(cuda, held=2)


def test_what_draws_in_a_capture_moves_nobodys_generator(cuda: CaptureRules) -> None:
    cuda.draw()
    graph, _ = capture(cuda.draw, cuda.stream())
    graph.replay()
    as_before(cuda, drawn=4, held=1)


def test_a_torch_before_2_8_calls_the_end_of_an_allocation_otherwise(
    cuda: CaptureRules, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        torch._C, "_cuda_endAllocateCurrentStreamToPool", torch._C._cuda_endAllocateToPool, raising=False
    )
    monkeypatch.delattr(torch._C, "_cuda_endAllocateToPool")
    with pytest.raises(RuntimeError, match=WAITED):
        capture(lambda: waits(cuda), cuda.stream())
    as_before(cuda)
