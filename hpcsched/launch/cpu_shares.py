"""Shares of CPU cores for programs that are not ours, without root: by a cgroup, or a duty cycle of signals.

And the NUMA nodes of the cores.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

from hpcsched.launch.cgroups import delegated_cgroup
from hpcsched.launch.orphans import Process
from hpcsched.launch.proc import stat
from hpcsched.planning.ps.bucket import MAX_CREDIT_S, TokenBucket
from hpcsched.threads import started

CHECK_PERIOD_S = 0.004
"""The shortest time between two checks of the CPU time of a running group (chosen)."""

CENSUS_S = MAX_CREDIT_S
"""Time between two counts of the processes in the groups. New ones are charged with all that they have used;
with more time between, a group would seem to be idle for longer than it may save up."""

CLOSE_TIMEOUT_S = 5.0
"""Time that the thread and the watching shell may take to end (chosen)."""

CGROUP_PERIOD_US = 100_000
"""The period in which a cgroup may use its share (the kernel's default)."""

MIN_SHARE = 0.01
"""The smallest share of a cgroup, in cores: the kernel grants no quota below 1 ms."""

_OURS = re.compile(r"hpcsched-(\d+)-(\d+)")
_INHERITED_TICK_S = 1 / os.sysconf("SC_CLK_TCK")

# What it reads last are the groups that may be stopped. At the end of its input, which comes when the writer
# is killed too, it lets them go on: to one that runs already that means nothing.
# Twice, as a process that is being started may stop after the first (see `_Group.free`).
_WATCH = (
    "trap '' TERM INT HUP USR1 USR2; while read -r line; do last=$line; done; "
    '[ -z "$last" ] || { kill -s CONT -- $last; sleep 0.3; kill -s CONT -- $last; }'
)


class DutyCycle:
    """Holds process groups to shares of CPU cores by SIGSTOP and SIGCONT; one thread for all of them.

    For programs of any kind; a training of ours rests by itself, as a stopped one stalls its peers. Only
    processes that stay in the group are held. A program that is held may miss a SIGTSTP, which SIGCONT
    discards: so `release` it before it is asked to save and leave. All groups go on when this object is
    closed, or its process ends in whatever way.
    """

    def __init__(self) -> None:
        self._groups: dict[Process, _Group] = {}
        self._released: dict[Process, _Group] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._watch: subprocess.Popen[bytes] | None = None
        self._census_at = 0.0

    def __enter__(self) -> DutyCycle:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def hold(self, process: Process, share: float) -> None:
        """Hold the group that `process` leads to `share` cores of CPU time; nothing if it has ended.

        May be called again to change the share: time used beyond the old one is still paid back. Raises
        ValueError for a share of 0 or less, or a process that leads no group of its own; OSError if the
        thread or the shell cannot be started.
        """
        pid, start_ticks = process
        with self._changed:
            now = time.monotonic()
            if group := self._groups.get(process):
                group.bucket.change(share, now, group.used_s())
            elif (seen := stat(pid)) is not None and seen.start_ticks == start_ticks:
                if seen.group != pid or pid == os.getpgid(0):
                    raise ValueError(f"process {pid} leads no process group of its own")
                group = _Group(pid, _members({pid})[pid], share, now)
                self._tell([*self._groups, process])
                self._go()
                self._released.pop(process, None)
                self._groups[process] = group
            self._changed.notify()

    def release(self, process: Process) -> None:
        """Hold a group no longer; nothing if it is not held."""
        with self._changed:
            if group := self._groups.pop(process, None):
                group.resume()
                self._released[process] = group
                with contextlib.suppress(OSError):  # to let one more go on means nothing
                    self._tell(list(self._groups))
                self._changed.notify()

    def close(self) -> None:
        """Hold no group any longer, and end the thread."""
        with self._changed:
            for group in self._groups.values():
                group.resume()
            self._released |= self._groups
            self._groups.clear()
        if self._released:
            time.sleep(CENSUS_S)
        with self._changed:
            with contextlib.suppress(OSError):
                self._take_census()
            self._released.clear()
            self._changed.notify()
            thread, watch, self._watch = self._thread, self._watch, None
        if thread:
            thread.join(CLOSE_TIMEOUT_S)
        if watch:
            _end(watch)

    def _go(self) -> None:
        if self._thread is None:
            self._thread = started(self._run, "duty cycle")

    def _run(self) -> None:
        with self._changed:
            while self._groups or self._released:
                try:
                    wait_s = self._tick()
                except OSError:  # no descriptor is free: rather too much than stopped for good
                    for group in self._groups.values():
                        group.resume()
                    wait_s = CENSUS_S
                self._changed.wait(wait_s)
            self._thread = None

    def _tick(self) -> float:
        """Stop and continue the groups; returns the seconds until the next check."""
        if time.monotonic() >= self._census_at:
            self._take_census()
        wait_s = CENSUS_S
        for group in self._groups.values():
            owed_s = group.bucket.owed_s(time.monotonic(), group.used_s())
            if owed_s > 0:
                group.stop()  # again too: somebody else may have let it go on
            else:
                group.resume()
            wait_s = min(wait_s, max(owed_s, CHECK_PERIOD_S))
        return wait_s

    def _take_census(self) -> None:
        known = {**self._groups, **self._released}
        members = _members({group.number for group in known.values()})
        for process, group in known.items():
            # A number is used again only when nobody is left in the group, and not so soon.
            if pids := members[group.number]:
                group.count(pids)
                group.free()
            else:
                self._groups.pop(process, None)
                self._released.pop(process, None)
        self._census_at = time.monotonic() + CENSUS_S

    def _tell(self, processes: list[Process]) -> None:
        """Tell the shell which groups to continue if we die; before the first is stopped. Raises OSError."""
        if self._watch and self._watch.poll() is not None:
            _end(self._watch)
            self._watch = None
        if self._watch is None:
            self._watch = subprocess.Popen(
                ["/bin/sh", "-c", _WATCH],
                bufsize=0,
                cwd="/",
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        assert self._watch.stdin
        self._watch.stdin.write(" ".join(f"-{pid}" for pid, _ in processes).encode() + b"\n")


class _Group:
    """A process group, and the CPU time of all that are or were in it."""

    def __init__(self, number: int, pids: list[int], share: float, now: float) -> None:
        self.number = number
        self._stopped = False
        self._at_rest: list[int] = []
        self._own_s: dict[int, float] = {}
        self._inherited_s = self._lost_s = 0.0
        self.count(pids)
        self.bucket = TokenBucket(share, now, self._total_s())

    def used_s(self) -> float:
        """CPU seconds so far; ended processes count as last seen until the members are counted again."""
        for pid in self._own_s:
            with contextlib.suppress(OSError):
                self._own_s[pid] = _cpu_s(pid)
        return self._total_s()

    def count(self, pids: list[int]) -> None:
        """Set its processes. One that has ended left its CPU time to its parent, if that waited for it."""
        before_s = self._total_s()
        self._own_s, self._inherited_s, self._at_rest = {}, 0.0, []
        for pid in pids:
            with contextlib.suppress(OSError):
                self._own_s[pid] = _cpu_s(pid)
                at_rest, inherited_s = _state(pid)
                self._inherited_s += inherited_s
                if at_rest:
                    self._at_rest.append(pid)
        fallen_s = before_s - self._total_s()
        if fallen_s > _INHERITED_TICK_S:  # less is rounding, and comes back
            self._lost_s += fallen_s

    def _total_s(self) -> float:
        return sum(self._own_s.values()) + self._inherited_s + self._lost_s

    def stop(self) -> None:
        """Send SIGSTOP."""
        self._stopped = True
        self._send(signal.SIGSTOP)

    def resume(self) -> None:
        """Send SIGCONT if it was stopped."""
        if self._stopped:
            self._stopped = False
            self._send(signal.SIGCONT)

    def free(self) -> None:
        """Let those go on that were seen stopped when the group was not to be.

        SIGSTOP and SIGCONT may come while a process of the group forks: the new one then stops after SIGCONT
        (seen on Linux 6.18, within minutes for shells that start a program every few milliseconds), and all
        that wait for it use no CPU time, so that no further SIGCONT would ever come. To those alone: SIGCONT
        takes a pending SIGTSTP away, and of those that have just been forked that is no loss.
        """
        for pid in () if self._stopped else self._at_rest:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGCONT)

    def _send(self, sig: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.number, sig)


def _end(watch: subprocess.Popen[bytes]) -> None:
    assert watch.stdin
    with contextlib.suppress(BrokenPipeError):
        watch.stdin.write(b"\n")
    watch.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        watch.wait(CLOSE_TIMEOUT_S)


def _members(groups: set[int]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {group: [] for group in groups}
    for name in os.listdir("/proc"):  # noqa: PTH208 - names are all that is needed
        if name.isdecimal():
            with contextlib.suppress(OSError):  # it has ended meanwhile
                if (group := os.getpgid(int(name))) in groups:
                    found[group].append(int(name))
    return found


def _cpu_s(pid: int) -> float:
    """CPU seconds of a process, of all its threads, those that have ended too. Raises OSError if it is gone.

    The number of its clock is what clock_getcpuclockid(3) gives, which Python has not. It is exact, as
    /proc/<pid>/schedstat is for one thread, at a thirtieth of the price.
    """
    return time.clock_gettime(~pid << 3 | 2)


def _state(pid: int) -> tuple[bool, float]:
    """Whether it is stopped; CPU seconds of the children it has waited for, and of theirs, in whole ticks."""
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2].split()
    return fields[0] == b"T", (int(fields[13]) + int(fields[14])) * _INHERITED_TICK_S


# -- cgroups -----------------------------------------------------------------------------------------------


class CgroupShare:
    """A cgroup `name` in the delegated one `parent`; the kernel holds its processes to `share` cores.

    Raises ValueError for less than LEAST_SHARE, OSError for what the kernel refuses.
    """

    def __init__(self, parent: Path, name: str, share: float) -> None:
        self.path = parent / name
        self.path.mkdir(exist_ok=True)
        try:
            self.set(share)
        except BaseException:
            self.close()
            raise

    def set(self, share: float) -> None:
        """Set another share."""
        if not share >= MIN_SHARE:
            raise ValueError(f"a share of {share} cores; a cgroup can have {MIN_SHARE} or more")
        (self.path / "cpu.max").write_text(f"{round(share * CGROUP_PERIOD_US)} {CGROUP_PERIOD_US}\n")

    def add(self, pid: int) -> None:
        """Move a process here with all its threads; its later children are here too."""
        (self.path / "cgroup.procs").write_text(f"{pid}\n")

    def add_group(self, number: int) -> None:
        """Move all processes of a process group here, and those that they start meanwhile."""
        self.add(number)
        moved = {number}
        while new := set(_members({number})[number]) - moved:
            for pid in new:
                with contextlib.suppress(OSError):  # it has ended meanwhile
                    self.add(pid)
            moved |= new

    def close(self) -> None:
        """Remove the limit, and the cgroup too if it is empty."""
        with contextlib.suppress(OSError):
            (self.path / "cpu.max").write_text(f"max {CGROUP_PERIOD_US}\n")
            self.path.rmdir()


class CpuShares:
    """Holds programs to shares of CPU cores: by a cgroup of their own if one can be made, else by a duty
    cycle. `root`: the folder of /proc and /sys."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._parent = delegated_cgroup(root)
        self._cycle = DutyCycle()
        for left in self._parent.iterdir() if self._parent else ():
            if ours := _OURS.fullmatch(left.name):
                seen = stat(int(ours[1]))
                if seen is None or seen.start_ticks != int(ours[2]):  # of an agent that was killed
                    with contextlib.suppress(OSError):
                        left.rmdir()

    def hold(self, process: Process, share: float) -> Callable[[], object]:
        """Hold the process group that `process` leads to `share` cores; returns a function that releases it.

        The function may be called more than once. Raises OSError if it cannot be held.
        """
        pid, start_ticks = process
        if self._parent is not None:
            with contextlib.suppress(OSError, ValueError):  # what the kernel refuses is left to the other way
                group = CgroupShare(self._parent, f"hpcsched-{pid}-{start_ticks}", share)
                try:
                    group.add_group(pid)
                except BaseException:
                    group.close()
                    raise
                return group.close
        self._cycle.hold(process, share)
        return lambda: self._cycle.release(process)

    def close(self) -> None:
        """Release all groups of the duty cycle; cgroups stay."""
        self._cycle.close()


# -- NUMA --------------------------------------------------------------------------------------------------


def numa_nodes(root: Path = Path("/")) -> dict[int, int]:
    """The NUMA node of each core; 0 for each usable core where sysfs does not say."""
    nodes = dict.fromkeys(os.sched_getaffinity(0), 0)
    for file in (root / "sys/devices/system/node").glob("node[0-9]*/cpulist"):
        for part in filter(None, file.read_text().strip().split(",")):
            first, _, last = part.partition("-")
            cores = range(int(first), int(last or first) + 1)
            nodes.update(dict.fromkeys(cores, int(file.parent.name.removeprefix("node"))))
    return nodes
