"""Capturing CUDA graphs so that a capture that is refused leaves no trace (ADR 35)."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch

_T = TypeVar("_T")

_REFUSED: list[Any] = []
"""Graphs whose capture was refused live as long as the process: in newer torches (such as 2.11) the allocator
of pinned memory goes on asking them which streams are theirs, and nothing in Python tells it to stop."""


def capture(work: Callable[[], _T], stream: Any, *, pool: Any = None) -> tuple[Any, _T]:
    """A graph of what `work` launches on `stream`, none of which is done now; and what `work` returned.

    Inside, generators are not to be read or set. What draws from the device's default one, without a
    generator of its own, draws from a copy in the capture and in all replays: for everybody else that one
    stays where it was.

    Args:
        work: it is called once; streams that part from `stream` have to come back to it.
        stream: not the default one; as a rule, one on which the same work was done before.
        pool: of an earlier graph or of `torch.cuda.graph_pool_handle`, to share its memory.

    If `work` or the capture raises (it waits for the device, finds no memory, ...), that is raised, and
    streams, allocator and generators are as before, but for one thing: `pool` must not be used again.
    """
    torch.cuda.synchronize(stream.device)
    torch.cuda.empty_cache()
    pool = pool or torch.cuda.graph_pool_handle()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        device = torch.cuda.current_device()
        generator = torch.cuda.default_generators[device]
        usual = generator.graphsafe_get_state()
        # What a graph has been captured with is marked as capturing, for good if the capture is refused.
        generator.graphsafe_set_state(usual.clone_state())
        try:
            # In this thread only: what another one allocates in the meantime is none of our business.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            made = work()
            graph.capture_end()
        except BaseException:
            _abandon(graph, stream, device, pool)
            raise
        finally:
            generator.graphsafe_set_state(usual)
    return graph, made


def _abandon(graph: Any, stream: Any, device: int, pool: Any) -> None:
    """Do what `capture_end` does, as far as it has not been done."""
    with torch.cuda.stream(stream), warnings.catch_warnings(), contextlib.suppress(RuntimeError):
        warnings.simplefilter("ignore")  # "the graph is empty"; what it raises is what has gone wrong before
        graph.capture_end()
    try:
        _end_allocate(device, pool)
    except RuntimeError:  # it was over, or had not begun: what there is of the pool is the graph's
        pass
    else:
        torch._C._cuda_releasePool(device, pool)
    graph.reset()
    _REFUSED.append(graph)


def _end_allocate(device: int, pool: Any) -> None:
    binding: Any = torch._C
    # It was called otherwise up to torch 2.7.
    end = getattr(binding, "_cuda_endAllocateToPool", None) or binding._cuda_endAllocateCurrentStreamToPool
    end(device, pool)
