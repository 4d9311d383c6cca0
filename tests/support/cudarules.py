"""A stand-in for CUDA with its rules for pinned memory: asynchronous copies, errors that stay, captures.

Tensors "on the GPU" are on the CPU in truth, and marked.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

MEMORY_ALLOCATION, ALREADY_REGISTERED, NOT_REGISTERED, CAPTURE_UNSUPPORTED = 2, 712, 713, 900
GLOBAL, RELAXED = 0, 2
GPU = 1
"""The GPU of all marked tensors; a new thread is on GPU 0."""


class RuledCuda:
    """What `hpcsched.worker.checkpoint.pinning.Cuda` offers, and what tests ask about it.

    `refuse_after`: so many registrations succeed. `on_register` is called in each. `on_other_streams` is work
    that streams have been asked to do, and that copies do not wait for.
    """

    def __init__(self, refuse_after: int = 10**9) -> None:
        self.refuse_after = refuse_after
        self.on_register: Callable[[], object] = lambda: None
        self.registered: dict[int, int] = {}
        self.contexts: set[int] = set()
        self.queue: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.most_queued = 0
        self.on_other_streams: list[Callable[[], object]] = []
        self.spoilt = False
        self._capturing: int | None = None
        self._threads = threading.local()
        self._storages: list[torch.UntypedStorage] = []
        self._lock = threading.RLock()

    # Of tests.

    def marked(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same tensor, on the GPU from now on."""
        self._storages.append(tensor.untyped_storage())
        return tensor

    def launch(self) -> None:
        """A kernel, in this thread; raises RuntimeError when a call before has left its error."""
        if error := self.get_last_error():
            raise RuntimeError(f"CUDA error {error}")

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """This thread captures a graph, in CUDA's usual mode."""
        self._capturing = threading.get_ident()
        yield
        self._capturing = None

    # Of Cuda.

    def has(self, tensor: torch.Tensor) -> bool:
        address = tensor.untyped_storage().data_ptr()
        return any(storage.data_ptr() == address for storage in self._storages)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        host = target if self.has(source) else source
        assert target.shape == source.shape and host.is_contiguous()
        pinned = self._share_pinned(host.data_ptr(), host.numel() * host.element_size())
        if 0 < pinned < 1:
            raise RuntimeError("CUDA error: invalid argument")  # from pinned memory into memory that is not
        with self._lock:
            self.queue.append((target, source))
            self.most_queued = max(self.most_queued, len(self.queue))
            if not pinned:
                self._run(len(self.queue))

    def event(self, device: torch.device) -> Any:
        return _Event(self, self.queue[-1:])

    def synchronize(self, device: torch.device) -> None:
        while self.on_other_streams:
            self.on_other_streams.pop(0)()
        with self._lock:
            self._run(len(self.queue))

    @contextlib.contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        former, self._threads.gpu = self._gpu, GPU
        yield
        self._threads.gpu = former

    def can_pin(self) -> bool:
        return True

    def host_register(self, address: int, size: int) -> int:
        self.on_register()
        self.contexts.add(self._gpu)
        if self._capturing is not None and getattr(self._threads, "mode", GLOBAL) != RELAXED:
            self.spoilt = True
            return self._fail(CAPTURE_UNSUPPORTED)
        if len(self.registered) >= self.refuse_after:
            return self._fail(MEMORY_ALLOCATION)
        if self._share_pinned(address, size):
            return self._fail(ALREADY_REGISTERED)
        self.registered[address] = size
        return 0

    def host_unregister(self, address: int) -> int:
        assert not self.queue, "copies are under way"
        return 0 if self.registered.pop(address, None) else self._fail(NOT_REGISTERED)

    def get_last_error(self) -> int:
        error, self._threads.error = getattr(self._threads, "error", 0), 0
        return int(error)

    def exchange_capture_mode(self, mode: int) -> int:
        former, self._threads.mode = getattr(self._threads, "mode", GLOBAL), mode
        return int(former)

    # Inside.

    @property
    def _gpu(self) -> int:
        return getattr(self._threads, "gpu", 0)

    def _fail(self, error: int) -> int:
        self._threads.error = error
        return error

    def _share_pinned(self, address: int, size: int) -> float:
        covered = sum(
            max(0, min(address + size, start + length) - max(address, start))
            for start, length in self.registered.items()
        )
        return covered / size

    def _run(self, count: int) -> None:
        with torch.no_grad():
            for target, source in self.queue[:count]:
                target.copy_(source)
        del self.queue[:count]


class _Event:
    """After the newest copy that was asked for."""

    def __init__(self, cuda: RuledCuda, last: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._cuda, self._last = cuda, last

    def synchronize(self) -> None:
        cuda = self._cuda
        cuda.contexts.add(cuda._gpu)
        with cuda._lock:
            for number, copy in enumerate(cuda.queue, start=1):
                if self._last and copy is self._last[0]:
                    cuda._run(number)
                    return
