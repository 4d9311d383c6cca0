"""Shares of CPU cores for programs that are not ours, without root: a duty cycle by signals, or a cgroup.

And where the cores are. Whatever is not there on a machine is found out, never assumed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

from hpcsched.launch.orphans import Process
from hpcsched.launch.proc import stat
from hpcsched.planning.ps.bucket import MAX_CREDIT_S, TokenBucket

TICK_S = 0.004
"""How often to look at what a running group has used."""
CENSUS_S = MAX_CREDIT_S
"""How often to look for new processes in the groups, which are charged with all that they have used by then.
More seldom, and a group would seem to have used nothing for longer than it may save up."""
CLOSE_S = 5.0
PERIOD_US = 100_000
"""A cgroup may use its share of each such period: the kernel's default."""
LEAST_SHARE = 0.01
"""The kernel grants no quota below 1 ms."""

_OURS = re.compile(r"hpcsched-(\d+)-(\d+)")
_INHERITED_TICK_S = 1 / os.sysconf("SC_CLK_TCK")

# What it reads last are the groups that may be stopped. At the end of its input, which comes when the writer
# is killed too, it lets them go on: to one that runs already that means nothing.
_WATCH = (
    "trap '' TERM INT HUP USR1 USR2; while read -r line; do last=$line; done; "
    '[ -z "$last" ] || kill -s CONT -- $last'
)


class DutyCycle:
    """Holds process groups to shares of CPU cores by SIGSTOP and SIGCONT; one thread for all of them.

    For programs of any kind; a training of ours rests by itself, as one that is stopped stalls its peers.
    Only what stays in the group is held. While a program is held it may miss a SIGTSTP, which SIGCONT
    discards: so `release` it before it is asked to save and leave. When this object is closed, or its process
    ends in whatever way, all go on.
    """

    def __init__(self) -> None:
        self._groups: dict[Process, _Group] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._watch: subprocess.Popen[bytes] | None = None
        self._census_at = 0.0

    def __enter__(self) -> DutyCycle:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def hold(self, process: Process, share: float) -> None:
        """Let the group that `process` leads use `share` cores' time at most; nothing if it has ended.

        Again for another share: what was used too much is still to be rested for. Raises ValueError for a
        share of 0 or less, or a process that leads no group of its own; OSError if none can be started.
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
                self._groups[process] = group
            self._changed.notify()

    def release(self, process: Process) -> None:
        """Let it go on as it likes; nothing if it is not held."""
        with self._changed:
            if group := self._groups.pop(process, None):
                group.resume()
                with contextlib.suppress(OSError):  # to let one more go on means nothing
                    self._tell(list(self._groups))
                self._changed.notify()

    def close(self) -> None:
        """Let all go on."""
        with self._changed:
            for group in self._groups.values():
                group.resume()
            self._groups.clear()
            self._changed.notify()
            thread, watch, self._watch = self._thread, self._watch, None
        if thread:
            thread.join(CLOSE_S)
        if watch:
            _end(watch)

    def _go(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="duty cycle", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                raise OSError(errno.EAGAIN, str(error)) from error
            self._thread = thread

    def _run(self) -> None:
        with self._changed:
            while self._groups:
                try:
                    wait_s = self._tick()
                except OSError:  # no descriptor is free: rather too much than stopped for good
                    for group in self._groups.values():
                        group.resume()
                    wait_s = CENSUS_S
                self._changed.wait(wait_s)
            self._thread = None

    def _tick(self) -> float:
        """Stop and continue whoever is to be; returns when to look again."""
        if time.monotonic() >= self._census_at:
            self._take_census()
        wait_s = CENSUS_S
        for group in self._groups.values():
            owed_s = group.bucket.owed_s(time.monotonic(), group.used_s())
            if owed_s > 0:
                group.stop()  # again too: somebody else may have let it go on
            else:
                group.resume()
            wait_s = min(wait_s, max(owed_s, TICK_S))
        return wait_s

    def _take_census(self) -> None:
        members = _members({group.number for group in self._groups.values()})
        for process, group in list(self._groups.items()):
            # A number is used again only when nobody is left in the group, and not so soon.
            if pids := members[group.number]:
                group.count(pids)
            else:
                del self._groups[process]
        self._census_at = time.monotonic() + CENSUS_S

    def _tell(self, processes: list[Process]) -> None:
        """Who is to go on if we die; before the first of them is stopped. Raises OSError."""
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
        self._own_s: dict[int, float] = {}
        self._inherited_s = self._lost_s = 0.0
        self.count(pids)
        self.bucket = TokenBucket(share, now, self._total_s())

    def used_s(self) -> float:
        """CPU seconds so far; who has ended counts as last seen until the members are counted again."""
        for pid in self._own_s:
            with contextlib.suppress(OSError):
                self._own_s[pid] = _cpu_s(pid)
        return self._total_s()

    def count(self, pids: list[int]) -> None:
        """These are its processes now. Who has ended left its time to its parent if that has waited."""
        before_s = self._total_s()
        self._own_s, self._inherited_s = {}, 0.0
        for pid in pids:
            with contextlib.suppress(OSError):
                self._own_s[pid] = _cpu_s(pid)
                self._inherited_s += _inherited_s(pid)
        fallen_s = before_s - self._total_s()
        if fallen_s > _INHERITED_TICK_S:  # less is rounding, and comes back
            self._lost_s += fallen_s

    def _total_s(self) -> float:
        return sum(self._own_s.values()) + self._inherited_s + self._lost_s

    def stop(self) -> None:
        self._stopped = True
        self._send(signal.SIGSTOP)

    def resume(self) -> None:
        if self._stopped:
            self._stopped = False
            self._send(signal.SIGCONT)

    def _send(self, sig: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.number, sig)


def _end(watch: subprocess.Popen[bytes]) -> None:
    assert watch.stdin
    with contextlib.suppress(BrokenPipeError):
        watch.stdin.write(b"\n")
    watch.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        watch.wait(CLOSE_S)


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


def _inherited_s(pid: int) -> float:
    """CPU seconds of the children it has waited for, and of theirs; in whole clock ticks."""
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2].split()
    return (int(fields[13]) + int(fields[14])) * _INHERITED_TICK_S


# -- cgroups -----------------------------------------------------------------------------------------------


def delegated_cgroup(root: Path = Path("/")) -> Path | None:
    """The cgroup v2 nearest to us in which we may make others with shares of CPU time; None if there is none.

    It is one of those that this process is in, may be written to, and has the cpu controller enabled for its
    children. `root`: where /proc and /sys are.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return None
    own = next((Path(line[3:]) for line in lines if line.startswith("0::")), None)
    mount = next((line.split() for line in mounts if " - cgroup2 " in line), None)
    if own is None or mount is None or not own.is_relative_to(mount[3]) or ".." in own.parts:
        return None
    top = root / mount[4].lstrip("/")
    here = top / own.relative_to(mount[3])
    for place in (here, *here.parents):
        with contextlib.suppress(OSError):
            enabled = (place / "cgroup.subtree_control").read_text().split()
            # To move a process is to write to the cgroup above both where it is and where it goes.
            if "cpu" in enabled and os.access(place, os.W_OK) and os.access(place / "cgroup.procs", os.W_OK):
                return place
        if place == top:
            break
    return None


class CgroupShare:
    """A cgroup of this name in a delegated one; the kernel holds what is in it to `share` cores' time.

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
        """Another share from now on."""
        if not share >= LEAST_SHARE:
            raise ValueError(f"a share of {share} cores; a cgroup can have {LEAST_SHARE} or more")
        (self.path / "cpu.max").write_text(f"{round(share * PERIOD_US)} {PERIOD_US}\n")

    def add(self, pid: int) -> None:
        """Move a process here with all its threads; what it starts from now on is here as well."""
        (self.path / "cgroup.procs").write_text(f"{pid}\n")

    def add_group(self, number: int) -> None:
        """Move all processes of a group here, what they start meanwhile too."""
        self.add(number)
        moved = {number}
        while new := set(_members({number})[number]) - moved:
            for pid in new:
                with contextlib.suppress(OSError):  # it has ended meanwhile
                    self.add(pid)
            moved |= new

    def close(self) -> None:
        """Nothing is held any more; the cgroup goes if nobody is in it."""
        with contextlib.suppress(OSError):
            (self.path / "cpu.max").write_text(f"max {PERIOD_US}\n")
            self.path.rmdir()


class Shares:
    """Holds programs to shares of CPU cores: by a cgroup of their own where we may make one, else by a duty
    cycle."""

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
        """Let the group that `process` leads use so much from now on; returns what lets it go, which may be
        called again.

        Raises OSError if there is no way to.
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
        """Let go of all that the duty cycle holds; cgroups hold on by themselves."""
        self._cycle.close()


# -- NUMA --------------------------------------------------------------------------------------------------


def numa_nodes(root: Path = Path("/")) -> dict[int, int]:
    """On which NUMA node each core lies; on node 0 each that we may use, where the system does not say."""
    nodes = dict.fromkeys(os.sched_getaffinity(0), 0)
    for file in (root / "sys/devices/system/node").glob("node[0-9]*/cpulist"):
        for part in filter(None, file.read_text().strip().split(",")):
            first, _, last = part.partition("-")
            cores = range(int(first), int(last or first) + 1)
            nodes.update(dict.fromkeys(cores, int(file.parent.name.removeprefix("node"))))
    return nodes
