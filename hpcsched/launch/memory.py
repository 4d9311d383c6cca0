"""Main memory of jobs on this host: limits that hold, and why the kernel has ended a process.

A job's limit is a cgroup's where one can be made; else its processes are looked at once a second, and killed
when they have more. A job that takes memory faster than that may still meet the kernel's OOM killer.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hpcsched.core.needs import said_mib
from hpcsched.launch.cgroups import delegated_cgroup, own_cgroups
from hpcsched.launch.orphans import Process, marked, self_and_ancestors
from hpcsched.launch.proc import Stat, stat
from hpcsched.threads import started

PERIOD_S = 1.0
"""How often the memory of jobs is looked at (chosen): a look at 500 processes takes some milliseconds."""

RECENT_S = 15.0
"""Time before the end of a process in which the OOM killer has struck, for that to be its reason (chosen)."""

_PAGE_MIB = os.sysconf("SC_PAGE_SIZE") / 2**20
_FOLDER = re.compile(r"hpcsched-memory-(\d+)-(\d+)")
_ROLLUP = re.compile(rb"^(Pss|Pss_Anon|Pss_Shmem):\s+(\d{1,18}) kB", re.MULTILINE)
_OOM_KILLS = re.compile(r"^oom_kill (\d{1,18})$", re.MULTILINE)


def used_mib(pids: Iterable[int], limit_mib: float) -> float:
    """The memory of processes together: exact where it may exceed the limit, else at most what is returned.

    What they share counts once (PSS), and files that are only mapped do not: the kernel can drop those. That
    is slow for large processes, so it is only asked where the sum of their resident sets (RSS) is too much.
    """
    resident = {pid: mib for pid in pids if (mib := _resident_mib(pid)) is not None}
    if sum(resident.values()) <= limit_mib:
        return sum(resident.values())
    return sum(mib if (own := _own_mib(pid)) is None else own for pid, mib in resident.items())


def _resident_mib(pid: int) -> float | None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/statm").read_bytes().split()[1]) * _PAGE_MIB
    return None


def _own_mib(pid: int) -> float | None:
    """None: the kernel does not say."""
    try:
        found = {key: int(kib) / 1024 for key, kib in _ROLLUP.findall(_head(f"/proc/{pid}/smaps_rollup"))}
    except OSError:
        return None
    if b"Pss_Anon" in found:
        return found[b"Pss_Anon"] + found.get(b"Pss_Shmem", 0.0)
    return found.get(b"Pss")


def _head(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:  # noqa: PTH123
        return file.read(2**14)


def trees(leaders: Iterable[int], stats: dict[int, Stat]) -> set[int]:
    """These processes, the members of their process groups, and all that descend from any of them."""
    found = set(leaders)
    found |= {pid for pid, seen in stats.items() if seen.group in found}
    children: dict[int, list[int]] = {}
    for pid, seen in stats.items():
        children.setdefault(seen.parent, []).append(pid)
    line = list(found)
    for pid in line:
        new = [child for child in children.get(pid, ()) if child not in found]
        found.update(new)
        line += new
    return found & stats.keys()


def all_processes() -> dict[int, Stat]:
    """All processes of this host that are not zombies."""
    names = (name for name in os.listdir("/proc") if name.isdecimal())  # noqa: PTH208
    found = {int(name): stat(int(name)) for name in names}
    return {pid: seen for pid, seen in found.items() if seen is not None and seen.state not in "ZX"}


@dataclass(slots=True)
class _Held:
    """A job's processes on this host."""

    limit_mib: float
    groups: dict[Process, Path | None] = field(default_factory=dict)
    """Its leaders, each with its cgroup, or None if it is watched."""
    over: str = ""
    marks: list[Mapping[str, str]] = field(default_factory=list)
    """Variables by which its processes are known; of one that has left its parents nothing else says whose it
    is."""


class MemoryLimits:
    """Holds jobs to limits of main memory, all of a job's processes on this host together.

    `root`: the folder of /proc and /sys. Processes are killed from a thread, as soon as they are seen to have
    too much.
    """

    def __init__(self, root: Path = Path("/"), *, period_s: float = PERIOD_S) -> None:
        self._period_s = period_s
        self._parent = delegated_cgroup(root, "memory")
        self._held: dict[int, _Held] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        for left in self._parent.iterdir() if self._parent else ():
            if ours := _FOLDER.fullmatch(left.name):
                seen = stat(int(ours[1]))
                if seen is None or seen.start_ticks != int(ours[2]):  # of an agent that was killed
                    with contextlib.suppress(OSError):
                        left.rmdir()

    def hold(
        self,
        job_id: int,
        processes: Iterable[Process],
        limit_mib: float,
        *,
        cgroup: bool = True,
        marks: Mapping[str, str] | None = None,
    ) -> None:
        """Hold a job, with these leaders of process groups and what they start, to this limit. More processes
        of it share the limit. `cgroup` False: only watch them. `marks`: variables that they were started with
        and nobody else."""
        with self._changed:
            held = self._held.setdefault(job_id, _Held(limit_mib))
            held.limit_mib = limit_mib
            held.marks += [marks] if marks else []
            folder = next((folder for folder in held.groups.values() if folder), None)
            for process in processes:
                if cgroup and self._parent is not None and (folder or not held.groups):
                    folder = self._put(process, folder, limit_mib)
                held.groups[process] = folder if cgroup else None
            if self._thread is None and any(folder is None for folder in held.groups.values()):
                self._thread = started(self._run, "memory limits")

    def exceeded(self, job_id: int) -> str:
        """How a job has exceeded its limit, in words; "" if it has not."""
        with self._changed:
            held = self._held.get(job_id)
            if held is None:
                return ""
            for folder in set(filter(None, held.groups.values())):
                if not held.over and _oom_kills(folder / "memory.events"):
                    limit = said_mib(held.limit_mib)
                    held.over = f"the kernel ended it, as it wanted more than the {limit} that it may have"
            return held.over

    def release(self, job_id: int, processes: Iterable[Process]) -> None:
        """Hold these processes no longer: they have ended."""
        with self._changed:
            held = self._held.get(job_id)
            if held is None:
                return
            folders = {held.groups.pop(process, None) for process in processes} - set(held.groups.values())
            for folder in filter(None, folders):
                with contextlib.suppress(OSError):  # what is left in it is being killed
                    folder.rmdir()
            if not held.groups:
                del self._held[job_id]
            self._changed.notify()

    def close(self) -> None:
        """Watch no job any longer; cgroups stay."""
        with self._changed:
            self._held.clear()
            self._changed.notify()
            thread = self._thread
        if thread:
            thread.join(5.0)

    def _put(self, process: Process, folder: Path | None, limit_mib: float) -> Path | None:
        """The cgroup that a process was put into; None if that cannot be."""
        assert self._parent
        made = folder or self._parent / f"hpcsched-memory-{process[0]}-{process[1]}"
        try:
            if folder is None:
                made.mkdir(exist_ok=True)
                (made / "memory.max").write_text(f"{int(limit_mib * 2**20)}\n")
                with contextlib.suppress(OSError):
                    (made / "memory.swap.max").write_text("0\n")  # there is no such file without swap
                (made / "memory.oom.group").write_text("1\n")
            (made / "cgroup.procs").write_text(f"{process[0]}\n")
        except OSError:  # what the kernel refuses is watched
            if folder is None:
                with contextlib.suppress(OSError):
                    made.rmdir()
            return None
        return made

    def _run(self) -> None:
        with self._changed:
            while any(None in held.groups.values() for held in self._held.values()):
                self._look()
                self._changed.wait(self._period_s)
            self._thread = None

    def _look(self) -> None:
        """Kill the jobs that have too much."""
        # In a container this process may be below none that the first one of it is above.
        stats, above = all_processes(), self_and_ancestors() | {1}
        orphans = [pid for pid, seen in stats.items() if seen.parent in above]
        for held in self._held.values():
            leaders = {pid for pid, _ in held.groups}
            pids = trees(leaders.union(*(marked(orphans, marks) for marks in held.marks)), stats)
            if held.over or (used := used_mib(pids, held.limit_mib)) <= held.limit_mib:
                continue
            held.over = f"it used {said_mib(used)} of the {said_mib(held.limit_mib)} that it may have"
            for pid in pids:
                now = stat(pid)
                if now is not None and now.start_ticks == stats[pid].start_ticks:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, signal.SIGKILL)


class KernelOom:
    """Whether the kernel's OOM killer has struck lately, on this host or in our cgroups.

    `sample` is to be called about once a second. `clock` is monotonic, in seconds.
    """

    def __init__(self, root: Path = Path("/"), *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._files = [root / "proc/vmstat", *(folder / "memory.events" for folder in own_cgroups(root))]
        self._samples: deque[tuple[float, tuple[int, ...]]] = deque()
        self.sample()

    def sample(self) -> None:
        """Note how often it has struck so far, unless that was noted a moment ago."""
        now = self._clock()
        if self._samples and now - self._samples[-1][0] < PERIOD_S:
            return
        self._samples.append((now, self._counts()))
        while len(self._samples) > 1 and self._samples[1][0] <= now - RECENT_S:
            self._samples.popleft()

    def struck(self) -> bool:
        """Whether it has struck since the oldest sample that is recent."""
        return any(now > then for now, then in zip(self._counts(), self._samples[0][1], strict=True))

    def _counts(self) -> tuple[int, ...]:
        return tuple(_oom_kills(file) for file in self._files)


def _oom_kills(file: Path) -> int:
    """The number in a file such as memory.events or vmstat; 0 where it cannot be read."""
    with contextlib.suppress(OSError):
        if found := _OOM_KILLS.search(_head_of(file)):
            return int(found[1])
    return 0


def _head_of(file: Path) -> str:
    with file.open("rb") as opened:
        return opened.read(2**16).decode("ascii", "replace")
