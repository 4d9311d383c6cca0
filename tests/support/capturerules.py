"""A stand-in for CUDA and torch around captures of graphs, with the rules that torch's sources have.

Of torch 2.4 to 2.12 (`CUDAGraph.cpp`, `CUDACachingAllocator.cpp`, `CUDAGeneratorImpl.cpp`):

- what waits for the device invalidates a capture; to end one that is invalid, or whose branches have not come
  back, takes the streams out of it and raises;
- `capture_end` that raises leaves the allocator's entry, the pool's count and the generator's mark behind;
- memory cannot be given back to the device while the allocator has an entry, and each allocation looks at
  the graph of each entry, whether it lives or not;
- a generator's state cannot be read or set inside a capture, nor drawn from outside of one while marked;
- a graph marks, and is replayed with, the state that the default generator had in its capture.

Nothing is computed here, and nothing held back: operations on tensors of the CPU are done in a capture too.
"""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass, field
from typing import Any

import pytest

torch = pytest.importorskip("torch")

INVALID = "CUDA error: operation failed due to a previous error during capture"
WAITED = "CUDA error: operation not permitted when stream is capturing"
UNJOINED = "CUDA error: capturing stream has unjoined work"
MARKED = "Offset increment outside graph capture encountered unexpectedly."


@dataclass
class State:
    """What a generator points to."""

    offset: int = 0
    capturing: bool = False


@dataclass(eq=False)
class Capture:
    origin: Stream
    valid: bool = True
    unjoined: set[Stream] = field(default_factory=set)


class Stream:
    device_index = 0

    def __init__(self, cuda: CaptureRules, name: str) -> None:
        self.cuda, self.name, self.device = cuda, name, torch.device("cuda", 0)
        self.capture: Capture | None = None

    def wait_stream(self, other: Stream) -> None:
        if other.capture is not None and self.capture is None:
            self.capture = other.capture
            self.capture.unjoined.add(self)
        elif self.capture is not None:
            self.capture.unjoined.discard(other)

    def synchronize(self) -> None:
        self.cuda.wait(self)


class Generator:
    def __init__(self, cuda: CaptureRules, state: State) -> None:
        self.cuda, self.state = cuda, state

    def get_state(self) -> Any:
        self.cuda.not_in_a_capture("CUDAGeneratorImpl::current_seed")
        return torch.tensor([self.state.offset])

    def set_state(self, state: Any) -> None:
        self.cuda.not_in_a_capture("CUDAGeneratorImpl::set_state")
        self.state.offset = int(state)

    def graphsafe_get_state(self) -> Generator:
        return Generator(self.cuda, self.state)

    def graphsafe_set_state(self, other: Generator) -> None:
        self.state = other.state

    def clone_state(self) -> Generator:
        return Generator(self.cuda, State(self.state.offset))


class CUDAGraph:
    def __init__(self, cuda: CaptureRules) -> None:
        self.cuda, self.stream, self.ended, self.replays = cuda, cuda.here, False, 0

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global", **_: Any) -> None:
        cuda = self.cuda
        self.state = cuda.generator.state
        self.state.capturing = True
        if cuda.here is cuda.main:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
        self.mempool = pool or cuda.new_pool()
        if self.mempool in cuda.underway:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        cuda.underway[self.mempool] = cuda.pinning[self.mempool] = weakref.ref(self)
        cuda.pools[self.mempool] = cuda.pools.get(self.mempool, 0) + 1
        self.stream = cuda.here
        self.stream.capture = Capture(self.stream)

    def capture_end(self) -> None:
        cuda = self.cuda
        if cuda.here is not self.stream:
            raise RuntimeError("Capture must end on the same stream it began on.")
        if (capture := self.stream.capture) is None:
            raise RuntimeError("CUDA error: operation not permitted")
        for stream in cuda.streams:
            if stream.capture is capture:
                stream.capture = None
        if not capture.valid:
            raise RuntimeError(INVALID)
        if capture.unjoined:
            raise RuntimeError(UNJOINED)
        del cuda.underway[self.mempool], cuda.pinning[self.mempool]
        self.state.capturing = False
        self.ended = True
        if cuda.cannot_instantiate is not None:
            raise cuda.cannot_instantiate

    def replay(self) -> None:
        assert self.ended
        if self.state.capturing:
            raise RuntimeError(MARKED)
        self.replays += 1

    def pool(self) -> Any:
        if not self.ended:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
        return self.mempool

    def reset(self) -> None:
        if self.ended:
            self.cuda.release(0, self.mempool)
            self.ended = False

    def __del__(self) -> None:
        self.reset()


class CaptureRules:
    """One device; puts itself in the place of `torch.cuda`."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.streams: list[Stream] = []
        self.main = self.here = self.stream()
        self.generator = Generator(self, State())
        self.underway: dict[Any, Any] = {}
        """Pools that the allocator gives memory of, with the graph that says for which streams."""
        self.pinning: dict[Any, Any] = {}
        """The same of the allocator of pinned memory: torch has nothing by which Python could end it."""
        self.pools: dict[Any, int] = {}
        """How many use each."""
        self.cannot_instantiate: Exception | None = None
        self._numbers = itertools.count(1)
        for name, instead in {
            "CUDAGraph": lambda: CUDAGraph(self),
            "Stream": lambda *_, **__: self.stream(),
            "current_stream": lambda *_: self.here,
            "set_stream": self.go,
            "stream": lambda stream: _On(self, stream),
            "synchronize": lambda *_: self.wait(self.here),
            "empty_cache": self.empty_cache,
            "graph_pool_handle": self.new_pool,
            "current_device": lambda: 0,
            "default_generators": (self.generator,),
            "is_current_stream_capturing": lambda: self.here.capture is not None,
        }.items():
            patch.setattr(torch.cuda, name, instead)
        patch.setattr(torch.cuda.graph, "default_capture_stream", None)
        patch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
        patch.setattr(torch._C, "_cuda_endAllocateToPool", self.end_allocate, raising=False)
        patch.setattr(torch._C, "_cuda_releasePool", self.release, raising=False)

    # -- what a program does -------------------------------------------------------------------------------

    def wait(self, stream: Stream | None = None) -> None:
        """Wait for the device, as `.item()` does."""
        capture = (stream or self.here).capture
        if capture is not None:
            told = WAITED if capture.valid else INVALID
            capture.valid = False
            raise RuntimeError(told)

    def draw(self) -> int:
        """Dropout; where in the sequence of numbers it is."""
        state, capturing = self.generator.state, self.here.capture is not None
        if capturing and not state.capturing:
            raise RuntimeError("Attempt to increase offset for a CUDA generator not in capture mode.")
        if state.capturing and not capturing:
            raise RuntimeError(MARKED)
        if not capturing:
            state.offset += 4
        return state.offset

    def allocate(self) -> None:
        """Memory of the device, and pinned memory."""
        for graph in (*self.underway.values(), *self.pinning.values()):
            assert graph() is not None, "the allocator asks a graph that is no more"

    def empty_cache(self) -> None:
        if self.underway:
            raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")

    # -- parts of torch ------------------------------------------------------------------------------------

    def stream(self) -> Stream:
        self.streams.append(Stream(self, f"s{len(self.streams)}"))
        return self.streams[-1]

    def go(self, stream: Stream) -> None:
        self.here = stream

    def new_pool(self) -> tuple[int, int]:
        return (0, next(self._numbers))

    def not_in_a_capture(self, what: str) -> None:
        if self.here.capture is not None:
            raise RuntimeError(f"Cannot call {what} during CUDA graph capture.")

    def end_allocate(self, device: int, pool: Any) -> None:
        if pool not in self.underway:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        del self.underway[pool]

    def release(self, device: int, pool: Any) -> None:
        self.pools[pool] -= 1
        assert self.pools[pool] >= 0

    @property
    def held(self) -> int:
        """How many uses of pools there are."""
        return sum(self.pools.values())


class _On:
    def __init__(self, cuda: CaptureRules, stream: Stream) -> None:
        self.cuda, self.stream = cuda, stream

    def __enter__(self) -> None:
        self.before, self.cuda.here = self.cuda.here, self.stream

    def __exit__(self, *_: object) -> None:
        self.cuda.here = self.before
