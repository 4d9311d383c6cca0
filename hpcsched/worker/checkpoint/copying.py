"""Copies between tensors and shared memory, by several threads, each with what is to be done behind it.

Not by torch's own: an OpenMP thread that does not get its core in time makes all others wait, at the end of
each of many small operations. Threads that take the next piece when they are through with one do not wait.
"""

from __future__ import annotations

import contextlib
import ctypes
import queue
import threading
from collections.abc import Callable, Iterable
from functools import partial

import torch

from hpcsched.worker.checkpoint.layout import Copies
from hpcsched.worker.checkpoint.pinning import Cuda, Event

_MOST_THREADS = 16
"""The most threads that copy (chosen): no more are needed to use all of a memory's speed."""


def copy_all(cuda: Cuda, batches: Iterable[tuple[Copies, Callable[[], object]]]) -> None:
    """Make all these copies, of contiguous tensors, a batch at a time; returns when all has been done.

    What comes with a batch is called, in some thread, as soon as all of the batch has arrived. Where no other
    thread is to be had, this one does all of it.
    """
    work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
    failed: list[BaseException] = []
    helpers: list[threading.Thread] = []
    with contextlib.suppress(RuntimeError):  # the limit of processes is reached, or the interpreter ends
        for _ in range(min(torch.get_num_threads(), _MOST_THREADS) - 1):
            helper = threading.Thread(target=_help, args=(work, failed), name="copies", daemon=True)
            helper.start()
            helpers.append(helper)
    try:
        for copies, then in batches:
            work.put(_begin(cuda, copies, then))
        with contextlib.suppress(queue.Empty):
            while do := work.get_nowait():
                do()
    finally:
        for _ in helpers:
            work.put(None)
        for helper in helpers:
            helper.join()
    if failed:
        raise failed[0]


def _help(work: queue.SimpleQueue[Callable[[], object] | None], failed: list[BaseException]) -> None:
    while do := work.get():
        try:
            do()
        except BaseException as error:
            failed.append(error)


def _begin(cuda: Cuda, copies: Copies, then: Callable[[], object]) -> Callable[[], object]:
    """Begin these copies as far as they are a GPU's, whose streams are this thread's; returns the rest."""
    host: Copies = []
    devices = {}
    for target, source in copies:
        found = [tensor.device for tensor in (target, source) if cuda.has(tensor)]
        if found:
            cuda.copy(target, source)
            devices.update(dict.fromkeys(found))
        elif target.is_cpu and source.is_cpu:
            host.append((target, source))
        else:  # of a kind of device that we do not know
            target.copy_(source)
    return partial(_finish, cuda, host, [(device, cuda.event(device)) for device in devices], then)


def _finish(
    cuda: Cuda, copies: Copies, events: list[tuple[torch.device, Event]], then: Callable[[], object]
) -> None:
    for target, source in copies:
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.numel() * source.element_size())
    for device, event in events:
        with cuda.on(device):
            event.synchronize()
    then()
