"""Pinned (page-locked) memory, which a GPU reads and writes by itself: copies are quicker, and asynchronous.

To pin takes longer than to copy, so it is done ahead, in a thread beside the training. CUDA's rules for that
(CUDA Runtime API, "Memory Management", "Stream Management", "Error Handling"):

- A failed call leaves its error behind for the thread that made it, and torch raises it at the thread's next
  kernel launch; `cudaGetLastError` takes it away.
- A new thread is on GPU 0, until it says otherwise; whatever it asks of CUDA there, even of another GPU's
  event, makes a context on GPU 0, of half a gigabyte.
- While a graph is captured anywhere in the process, a call like these spoils it, but for a thread in relaxed
  mode.
- A copy must not reach from pinned memory into memory that is not.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
from collections.abc import Iterator
from typing import Any, Protocol

import torch

from hpcsched.worker.checkpoint.layout import PIECE, bytes_of

PINNED_AT_ONCE = 16 * PIECE
"""Bytes that are pinned by one call (chosen: a save waits for no more than one of these)."""

_RELAXED = 2  # cudaStreamCaptureModeRelaxed


class Event(Protocol):
    """A point in what a GPU has been asked to do."""

    def synchronize(self) -> None:
        """Wait until the GPU has come that far."""


class Cuda:
    """The calls of CUDA that shared memory needs. Those with names of CUDA's return its error codes."""

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether it is on a GPU."""
        return tensor.is_cuda

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy, behind what the current stream has been asked to do before; returns before that is done."""
        target.copy_(source, non_blocking=True)

    def event(self, device: torch.device) -> Event:
        """What the current stream has been asked to do so far."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        return event

    def synchronize(self, device: torch.device) -> None:
        """Wait for what all streams have been asked to do so far."""
        torch.cuda.synchronize(device)

    def on(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """This thread's calls go to that GPU, inside of it."""
        return torch.cuda.device(device)

    def can_pin(self) -> bool:
        """Whether the calls below are to be had."""
        return self._runtime is not None

    def host_register(self, address: int, size: int) -> int:
        return int(self._runtime.cudaHostRegister(ctypes.c_void_p(address), ctypes.c_size_t(size), 0))

    def host_unregister(self, address: int) -> int:
        return int(self._runtime.cudaHostUnregister(ctypes.c_void_p(address)))

    def get_last_error(self) -> int:
        return int(self._runtime.cudaGetLastError())

    def exchange_capture_mode(self, mode: int) -> int:
        """Returns the thread's former mode."""
        exchanged = ctypes.c_int(mode)
        self._runtime.cudaThreadExchangeStreamCaptureMode(ctypes.byref(exchanged))
        return exchanged.value

    @functools.cached_property
    def _runtime(self) -> Any:
        """The CUDA runtime that torch itself uses; None where there is none, or it cannot be reached.

        `torch.cuda.cudart()` has neither `cudaGetLastError` nor capture modes (as in 2.11).
        """
        try:  # looked for by what torch has loaded already, whose own runtime is found behind it
            library = ctypes.CDLL("libc10_cuda.so", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
            return library if library.cudaThreadExchangeStreamCaptureMode else None
        except (OSError, AttributeError):
            return None


class Pins:
    """Which memory is pinned. The calls of one thread at a time."""

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self._pinned: dict[int, list[int]] = {}  # by slot: addresses

    @contextlib.contextmanager
    def pinning(self, device: torch.device) -> Iterator[None]:
        """To pin for this GPU, in this thread, inside of it."""
        with self._cuda.on(device):
            former = self._cuda.exchange_capture_mode(_RELAXED)
            try:
                yield
            finally:
                self._cuda.exchange_capture_mode(former)

    def pin(self, slot: int, memory: mmap.mmap) -> bool:
        """Pin the next bytes of a slot; False when it is all pinned, or cannot be."""
        addresses = self._pinned.setdefault(slot, [])
        offset = len(addresses) * PINNED_AT_ONCE
        if offset >= len(memory):
            return False
        address = bytes_of(memory).data_ptr() + offset
        if self._cuda.host_register(address, min(PINNED_AT_ONCE, len(memory) - offset)):
            self._cuda.get_last_error()  # or this thread's next kernel launch would raise it
            return False
        addresses.append(address)
        return True

    def unpin(self, slot: int) -> None:
        """No copy may be under way."""
        for address in self._pinned.pop(slot, ()):
            if self._cuda.host_unregister(address):
                self._cuda.get_last_error()
