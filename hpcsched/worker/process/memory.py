"""Memory of this process: how much it may still take, and what it keeps. Standard library only."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

KEPT_BYTES = 512 * 2**20
"""Memory that is freed at the end of the heap and kept for what is needed next, at most (chosen)."""

_LARGEST_FROM_HEAP = 32 * 2**20
"""What is larger has pages of its own each time; all versions of glibc take so much."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Of malloc.h."""


def keep_freed_memory() -> bool:
    """Have malloc keep what is freed, for this process and those it forks; whether it does now.

    A training step frees on a CPU what the next one needs again. glibc gives it back to the kernel and asks
    for it anew, thousands of pages a step, as it happens to lie: the same training takes up to 40 % longer in
    one process than in another (`benchmarks/strategies.md`). Who has set malloc's variables has chosen.
    """
    chosen = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")
    if any(name in os.environ for name in chosen) or "malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST_FROM_HEAP) and mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES))


def admits(needed: int, available: int) -> bool:
    """Whether so many more bytes may be taken for good: half of what is available stays for others."""
    return needed <= available // 2


@contextlib.contextmanager
def alone_on_host(patience_s: float) -> Iterator[bool]:
    """Exclude this host's other processes that take memory for good; False when they take too long.

    The lock is on a folder that every Linux host has: it leaves nothing behind, and ends with its holder.
    """
    deadline = time.monotonic() + patience_s
    try:
        folder = os.open("/dev/shm", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)  # nosec B108 # a lock
    except OSError:
        yield False
        return
    try:
        while not (alone := _locked(folder)) and time.monotonic() < deadline:
            time.sleep(0.01)
        try:
            yield alone
        finally:
            if alone:  # said, as a process forked meanwhile shares the descriptor, and the lock with it
                fcntl.flock(folder, fcntl.LOCK_UN)
    finally:
        os.close(folder)


def _locked(folder: int) -> bool:
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def available(root: Path = Path("/")) -> int:
    """Bytes that can still be had, by the account of this host and of all control groups around us."""
    rooms = [
        1024 * int(line.split()[1])
        for line in _lines(root / "proc/meminfo")
        if line.startswith("MemAvailable:")
    ]
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mount, files = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        group = mount / path.lstrip("/")
        for folder in (group, *group.parents):  # a limit may be set on any level
            rooms += _room_in(folder, *files)
            if folder == mount:
                break
    return max(0, min(rooms, default=0))


def _room_in(group: Path, limit: str, usage: str, cache: str) -> list[int]:
    """What a control group has left, if it has a limit; files cached and not in use make room when needed."""
    numbers = [line for name in (limit, usage) for line in _lines(group / name)]
    if len(numbers) != 2 or not all(number.isdecimal() for number in numbers):
        return []  # "max", or no such group in our view of the tree
    cached = [line.split()[1] for line in _lines(group / "memory.stat") if line.startswith(f"{cache} ")]
    return [int(numbers[0]) - int(numbers[1]) + sum(map(int, cached))]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
