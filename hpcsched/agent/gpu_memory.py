"""The memory of GPUs is free before they are given on: the driver is asked until it is, or time is up.

A process that was killed ends a while after its leader: DataLoader workers that have the GPU open, a context
of many GiB that the driver takes apart. Whoever started there meanwhile would run out of memory.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

from hpcsched.agent.clock import RunClock
from hpcsched.core.model import Device
from hpcsched.core.transitions.deadline import Deadline
from hpcsched.threads import started

FREE_WITHIN_S = 10.0
"""Time after which a GPU is given on all the same (chosen): a driver frees memory within seconds, and a
process that hangs in the kernel may never end."""

FAST_POLL_S, FAST_POLL_FOR_S, POLL_S = 0.002, 0.2, 0.02
"""How often the driver is asked, at first and then (chosen): a promotion waits for it."""

IDLE_FRACTION = 0.8
"""The least share of the time in which it is not asked, so that the agent goes on beside it (chosen)."""


def time_to_wait_s(deadline: Deadline, clock: RunClock) -> float:
    """The most real seconds to wait for memory: fewer when all jobs save soon, none in a drain, in which
    nobody gets a GPU."""
    left_s = (deadline.saving_begins() - clock.now()) / clock.speed
    return 0.0 if deadline.draining else min(FREE_WITHIN_S, left_s)


@dataclass(slots=True, eq=False)
class _Wait:
    """One that waits, for these GPUs and for what was killed.

    `left`: how many of those processes have not ended. `busy`: the GPUs that are not known to be free.
    """

    gpus: dict[int, Device]
    left: Callable[[], int]
    since: float
    busy: tuple[int, ...]
    over: bool = False


class GpuMemory:
    """Asks whether GPUs can be given on, in a thread of its own while somebody waits.

    A GPU that was given on with memory in use is not waited for again until it has been seen free: somebody
    else has it, or the driver hangs, and each job would pay for that.

    Args:
        free: `Devices.free`.
        tell: takes a line that people should see.
        used_mib: the memory that is used on a GPU, in MiB, by its number; None: not known.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        free: Callable[[Device], bool | None],
        *,
        tell: Callable[[str], object],
        used_mib: Callable[[int], float | None] = lambda gpu: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._free, self._tell, self._used_mib, self._clock = free, tell, used_mib, clock
        self._lock = threading.Lock()
        self._waits: dict[Hashable, _Wait] = {}
        self._in_use: set[int] = set()
        """GPUs that were given on with memory in use."""
        self._thread: threading.Thread | None = None
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def fileno(self) -> int:
        """Readable once somebody's GPUs have become free, until `heard`."""
        return self._fd

    def heard(self) -> None:
        """Have `fileno` be readable no more."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)

    def free(
        self, who: Hashable, devices: Iterable[Device], left: Callable[[], int], *, within_s: float
    ) -> bool:
        """Whether `who` may give these devices on; to be called again until it is so. Never blocks.

        `devices` may become fewer: those that somebody else has got meanwhile, or that were lost, are waited
        for no more. Those without memory of their own (CPU slots, simulated GPUs) are given on at once.
        `left`: how many processes have not ended that were killed. `within_s`: seconds since the first call
        after which they are given on anyway; it may become less.
        """
        gpus = {device.index: device for device in devices if device.memory_mib is not None}
        wait = self._waits.get(who)
        if wait is None:
            if not gpus or within_s <= 0:
                return True
            self._begin(who, _Wait(gpus, left, self._clock(), tuple(gpus)))
            return False
        if gpus.keys() < wait.gpus.keys():
            wait.gpus = gpus
        late = self._clock() - wait.since >= within_s
        if not (wait.over or late):
            return False
        with self._lock:
            del self._waits[who]
        if not wait.over and within_s > 0 and wait.gpus:
            self._tell(self._given_on(wait))
        return True

    def forget(self, who: Hashable) -> None:
        """Have `who` wait no more, if it does: it will not ask again."""
        with self._lock:
            self._waits.pop(who, None)

    def close(self) -> None:
        """Ask no more. A thread that hangs in the driver is left behind."""
        with self._lock:
            self._waits.clear()
            fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _given_on(self, wait: _Wait) -> str:
        """Note what is given on in use, and say so."""
        left, said = wait.left(), []
        for gpu in wait.gpus:
            used = self._used_mib(gpu)
            in_use = " (memory in use)" if used is None else f" ({used:.0f} MiB in use)"
            said.append(f"GPU {gpu}{in_use if gpu in wait.busy else ''}")
        self._in_use.update(wait.busy)
        after_s = self._clock() - wait.since
        return (
            f"{', '.join(said)} given on after {after_s:.0f} s; killed processes that have not ended: {left}"
        )

    # --- the thread -------------------------------------------------------------------------

    def _begin(self, who: Hashable, wait: _Wait) -> None:
        with self._lock:
            self._waits[who] = wait
            if self._thread is None or not self._thread.is_alive():
                with contextlib.suppress(OSError):  # nobody asks: they are given on when the time is up
                    self._thread = started(self._ask, "gpu-memory")

    def _ask(self) -> None:
        while True:
            with self._lock:
                waits = [wait for wait in self._waits.values() if not wait.over]
                if not waits:
                    self._thread = None
                    return
            began = time.monotonic()
            free = [wait for wait in waits if self._is_free(wait)]
            took_s = time.monotonic() - began
            for wait in free:
                wait.over = True
            with self._lock:
                if free and self._fd >= 0:
                    os.eventfd_write(self._fd, 1)
            young = any(self._clock() - wait.since < FAST_POLL_FOR_S for wait in waits)
            period_s = FAST_POLL_S if young else POLL_S
            time.sleep(max(period_s, took_s * IDLE_FRACTION / (1 - IDLE_FRACTION)))

    def _is_free(self, wait: _Wait) -> bool:
        busy = {gpu for gpu, device in wait.gpus.items() if self._free(device) is False}
        self._in_use -= wait.gpus.keys() - busy
        wait.busy = tuple(sorted(busy - self._in_use))
        return not wait.busy and not wait.left()
