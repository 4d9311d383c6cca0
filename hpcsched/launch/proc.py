"""The identity of a process: a pid is used again, a pid with its start time is not."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass

_TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Stat:
    """From /proc/<pid>/stat: state letter, parent, process group, start time in clock ticks since boot."""

    state: str
    parent: int
    group: int
    start_ticks: int


def stat(pid: int) -> Stat | None:
    """The entry of a process in /proc; None if there is no such process (a zombie is one) that we may see."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:  # noqa: PTH123 - on the path of every launch
            text = file.read(1024)
    except (FileNotFoundError, ProcessLookupError, PermissionError):  # the last where /proc has hidepid=1
        return None
    # The name in parentheses may itself hold spaces and parentheses; fields are counted after the last one.
    fields = text[text.rindex(b")") + 2 :].split()
    return Stat(fields[0].decode(), int(fields[1]), int(fields[2]), int(fields[19]))


def start_ticks(pid: int) -> int:
    """The start time of a process, in clock ticks since boot; 0: it is gone."""
    seen = stat(pid)
    return seen.start_ticks if seen else 0


def clock_ticks() -> int:
    """The time, as start times are counted: in clock ticks since boot."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // _TICK_NS


class StartTimes:
    """The start times of children, without a look into /proc: that costs as much as starting one."""

    def __init__(self) -> None:
        self._agree: bool | None = None
        """Whether `clock_ticks` and /proc have said the same so far; None: not compared yet."""

    def of(self, pid: int, *, since: int) -> int:
        """The `start_ticks` of a child that was started a moment ago, after `clock_ticks` said `since`."""
        now = clock_ticks()
        if now == since and self._agree:
            return now
        seen = start_ticks(pid)
        if seen and now == since and self._agree is not False:
            self._agree = seen == now
        return seen


def environment(pid: int) -> list[bytes]:
    """The entries NAME=value that a process was started with; OSError if it is gone or not ours to look into.

    A process in the middle of an exec shows none for some microseconds: it is looked at again, for at most
    50 ms. One that has no memory of its own (a kernel thread, a zombie) shows none at all.
    """
    for _ in range(50):
        if (found := _read(pid, "environ")) or _read(pid, "cmdline") or not _has_program(pid):
            return [entry for entry in found.split(b"\0") if entry]
        time.sleep(0.001)
    return []


def _read(pid: int, name: str) -> bytes:
    with open(f"/proc/{pid}/{name}", "rb") as file:  # noqa: PTH123
        return file.read()


def _has_program(pid: int) -> bool:
    try:
        return bool(os.readlink(f"/proc/{pid}/exe"))  # noqa: PTH115
    except OSError:
        return False


def group_exists(group: int) -> bool:
    """Whether a process group has processes, zombies too, that we could signal."""
    try:
        os.killpg(group, 0)
    except OSError:
        return False
    return True


def signal_followers(leader: int, sig: signal.Signals) -> None:
    """Send a signal to the processes of a group, but not to its leader, which must not have been reaped."""
    for name in os.listdir("/proc"):  # noqa: PTH208 - names are all that is needed
        if name.isdecimal() and int(name) != leader and (seen := stat(int(name))) and seen.group == leader:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(int(name), sig)


def living(groups: Collection[int], processes: Iterable[tuple[int, int]]) -> int:
    """How many processes live, zombies not, in these process groups, and of these (pid, start time)."""
    alone = dict(processes)
    pids = os.listdir("/proc") if groups else map(str, alone)  # noqa: PTH208 - names are all that is needed
    found = [(int(name), stat(int(name))) for name in pids if name.isdecimal()]
    return sum(
        seen.state not in "ZX" and (seen.group in groups or alone.get(pid) == seen.start_ticks)
        for pid, seen in found
        if seen is not None
    )


def wait_ended(pidfds: Iterable[int], timeout_s: float) -> set[int]:
    """The pidfds whose processes have ended, once all have or `timeout_s` is over."""
    poll, left, ended = select.poll(), set(pidfds), set[int]()
    for fd in left:
        poll.register(fd, select.POLLIN)
    deadline = time.monotonic() + timeout_s
    while left:
        ready = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
        if not ready:
            break
        for fd, _ in ready:
            poll.unregister(fd)
            left.discard(fd)
            ended.add(fd)
    return ended
