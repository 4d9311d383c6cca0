"""Orphans: workers that outlived their agent. They are found by variables that only they have, and ended.

Their parent is init, so they cannot be waited for: pidfds tell when they have ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterable, Mapping

from hpcsched.contract import variables
from hpcsched.launch.proc import environment, stat, wait_ended

Process = tuple[int, int]
"""(pid, start time in clock ticks since boot)."""

MARKS = frozenset({variables.RUN_ID, variables.JOB_ID, variables.ATTEMPT})
"""Variables that all processes of an attempt have, in whatever session and process group."""

KILLED_WITHIN_S = 5.0
"""Time that a process may take to end after SIGKILL, e.g. in the middle of a large write (chosen)."""


def find_orphans(run_id: str, known: Iterable[Process], *, by: str = variables.RUN_ID) -> list[Process]:
    """Live processes of this user on this host that were started for the run, in order of pid.

    These are the ones of `known` that are still the same process, and all with the variable `by` = `run_id`
    in the environment that they were started with: an agent can die between a spawn and its record. Never
    this process or one of its ancestors. `by`: another variable, where the run's id is not known.
    """
    expected = dict(known)
    entry = os.fsencode(f"{by}={run_id}")
    return _ours(lambda pid, start: expected.get(pid) == start or entry in environment(pid))


def kill_marked(marks: Mapping[str, str]) -> list[Process]:
    """Kill the live processes of this user on this host that were started with all variables of `marks`, and
    return them.

    A launcher that was killed leaves its ranks behind in sessions of their own, and a program that leaves its
    helpers (TensorBoard, wandb). Does not wait for their end.
    """
    found = _ours(lambda pid, start: _has_marks(pid, marks))
    targets = _Targets(found)
    try:
        targets.send(signal.SIGKILL)
    finally:
        targets.close()
    return found


def marked(pids: Iterable[int], marks: Mapping[str, str]) -> set[int]:
    """Those of these processes that were started with all variables of `marks`, as far as we may see that."""
    found = set[int]()
    for pid in pids:
        with contextlib.suppress(OSError):
            if _has_marks(pid, marks):
                found.add(pid)
    return found


def _has_marks(pid: int, marks: Mapping[str, str]) -> bool:
    entries = {os.fsencode(f"{name}={value}") for name, value in marks.items()}
    return bool(entries) and entries <= set(environment(pid))


def _ours(wanted: Callable[[int, int], bool]) -> list[Process]:
    """Live processes of this user that `wanted` accepts; never this one or one of its ancestors."""
    spared = self_and_ancestors()
    found = []
    for name in os.listdir("/proc"):  # noqa: PTH208 - names are all that is needed
        if not name.isdecimal() or (pid := int(name)) in spared:
            continue
        with contextlib.suppress(OSError):  # gone meanwhile, or not ours to look into
            seen = stat(pid)
            if seen is None or seen.state in "ZX" or os.stat(f"/proc/{pid}").st_uid != os.getuid():  # noqa: PTH116
                continue
            if wanted(pid, seen.start_ticks):
                found.append((pid, seen.start_ticks))
    return sorted(found)


def end_processes(
    processes: Iterable[Process], grace_s: float, *, killed: list[Process] | None = None
) -> list[Process]:
    """End processes and the process groups they lead; returns those that could not be ended.

    SIGTERM, up to `grace_s` seconds to leave, then SIGKILL and up to KILLED_WITHIN_S. Those that SIGKILL had
    to be sent to are added to `killed`.
    """
    targets = _Targets(processes)
    try:
        targets.send(signal.SIGTERM)
        targets.send(signal.SIGCONT)  # a stopped process would see the SIGTERM only when continued
        targets.wait(grace_s)
        if killed is not None:
            killed += targets.left()
        targets.send(signal.SIGKILL)
        targets.wait(KILLED_WITHIN_S)
        return targets.left()
    finally:
        targets.close()


def wait_for_end(processes: Iterable[Process], within_s: float) -> list[Process]:
    """Wait until processes have ended, at most `within_s` seconds; returns those that have not."""
    targets = _Targets(processes)
    try:
        targets.wait(within_s)
        return targets.left()
    finally:
        targets.close()


class _Targets:
    """Processes held by pidfd. Their start times are checked after that, so none can be mistaken."""

    def __init__(self, processes: Iterable[Process]) -> None:
        self._fds: dict[int, Process] = {}
        self._unheld: list[Process] = []
        for pid, start_ticks in dict.fromkeys(processes):
            try:
                fd = os.pidfd_open(pid)
            except ProcessLookupError:
                continue
            except OSError:  # no descriptor left
                self._unheld.append((pid, start_ticks))
                continue
            seen = stat(pid)
            if seen is None or seen.start_ticks != start_ticks:
                os.close(fd)
            else:
                self._fds[fd] = (pid, start_ticks)

    def send(self, sig: signal.Signals) -> None:
        """Send a signal to the groups that targets lead, and to each target outside of them."""
        self.wait(0)
        groups = {pid: seen.group for pid, _ in self._fds.values() if (seen := stat(pid)) is not None}
        leaders = {pid for pid, group in groups.items() if pid == group}
        for pid in leaders:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, sig)
        for fd, (pid, _) in self._fds.items():
            if groups.get(pid) not in leaders:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    signal.pidfd_send_signal(fd, sig)

    def wait(self, timeout_s: float) -> None:
        """Wait until all have ended or the time is over, and drop those that have ended."""
        for fd in wait_ended(self._fds, timeout_s):
            del self._fds[fd]
            os.close(fd)

    def left(self) -> list[Process]:
        return sorted([*self._fds.values(), *self._unheld])

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()


def self_and_ancestors() -> set[int]:
    """This process and those above it; a process whose parent has ended becomes the child of one of them."""
    pids, pid = set[int](), os.getpid()
    while pid > 0 and pid not in pids:
        pids.add(pid)
        seen = stat(pid)
        pid = 0 if seen is None else seen.parent
    return pids
