"""Copies between tensors and shared memory, by several threads, each with what is to be done behind it.

Not by torch's own: an OpenMP thread that does not get its core in time makes all others wait, at the end of
each of many small operations. Threads that take the next piece when they are through with one do not wait.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from hpcsched.worker.checkpoint.layout import Copies
from hpcsched.worker.checkpoint.pinning import Cuda, Event

_MOST_THREADS = 16
"""The most threads that copy (chosen): no more are needed to use all of a memory's speed."""


def copy_all(cuda: Cuda, batches: Iterable[tuple[Copies, Callable[[], object]]]) -> None:
    """Make all these copies, of contiguous tensors, a batch at a time; returns when all has been done.

    What comes with a batch is called, in some thread, as soon as all of the batch has arrived; where no
    thread is to be had it may be called a second time, with the same bytes.
    """
    with ThreadPoolExecutor(min(torch.get_num_threads(), _MOST_THREADS)) as pool:
        done = []
        for copies, then in batches:
            host: Copies = []
            devices = {}
            for target, source in copies:
                found = [tensor.device for tensor in (target, source) if cuda.has(tensor)]
                if found:  # begun here, whose streams they are
                    cuda.copy(target, source)
                    devices.update(dict.fromkeys(found))
                elif target.is_cpu and source.is_cpu:
                    host.append((target, source))
                else:  # of a kind of device that we do not know
                    target.copy_(source)
            events = [(device, cuda.event(device)) for device in devices]
            finish = partial(_finish, cuda, host, events, then)
            try:
                done.append(pool.submit(finish))
            except RuntimeError:  # the limit of processes is reached, or the interpreter is about to end
                finish()
        for each in done:
            each.result()


def _finish(
    cuda: Cuda, copies: Copies, events: list[tuple[torch.device, Event]], then: Callable[[], object]
) -> None:
    for target, source in copies:
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.numel() * source.element_size())
    for device, event in events:
        with cuda.on(device):
            event.synchronize()
    then()
