"""Which processes of an attempt catch a signal: one that asks them to save would only end the others.

A signal goes to the program, not to what stands around it: a shell, `env` or `srun` that does not catch it is
left alone, a launcher that would end its ranks too. What a program has started itself (loaders, ranks of its
own) is for the program to tell. A shell with a trap is the program only if none below it catches the signal.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise

from hpcsched.core.processes import launcher_of
from hpcsched.launch.orphans import Process
from hpcsched.launch.proc import stat

_AROUND = frozenset(
    {"uv", "uvx", "tini", "dumb-init", "catatonit", "pid1", "apptainer", "singularity", "starter"}
    | {"prted", "orted", "hydra_pmi_proxy", "pmi_proxy"}
)
"""Programs that catch signals only to pass them on, or to end what they have started."""

_SHELLS = frozenset(
    {"sh", "ash", "bash", "busybox", "csh", "dash", "fish", "ksh", "ksh93", "mksh", "tcsh", "zsh"}
)

_NOBODY_TRAPS = signal.SIGVTALRM
"""For `trap ... EXIT` bash catches this one and all others that end it; then it dies without a word to its
programs."""

_LAUNCHER_MODULES = ("torch.distributed.", "accelerate.commands.", "deepspeed.launcher")

_STATUS_BYTES, _COMMAND_BYTES = 1 << 20, 4096
"""The line of a process's groups alone, before that of its signals, may have 65,536 numbers."""
_CAUGHT = re.compile(rb"^SigCgt:\s*([0-9a-fA-F]+)", re.MULTILINE)


def catches(pid: int, sig: signal.Signals) -> bool:
    """Whether a process has a handler for a signal; False for one that has ended, or is not ours to see.

    Raises OSError if that cannot be read.
    """
    status = _read(f"/proc/{pid}/status", _STATUS_BYTES)
    found = _CAUGHT.search(status)
    if status and not found:
        raise OSError(f"/proc/{pid}/status does not say which signals are caught")
    return found is not None and bool(int(found[1], 16) >> (sig - 1) & 1)


def catchers(leaders: Iterable[Process], sig: signal.Signals) -> list[Process]:
    """The processes that are to get `sig`: from each leader downwards the first that catch it.

    Any thread may ask. /proc is listed only where a leader does not catch it itself. Raises OSError if they
    cannot be seen, as where no descriptor is left.
    """
    found, searched = list[Process](), list[int]()
    for pid, start_ticks in leaders:
        seen = stat(pid)
        if seen is None or seen.start_ticks != start_ticks or seen.state in "ZX":
            continue
        if catches(pid, sig) and _is_program(_command(pid)):
            found.append((pid, start_ticks))
        else:
            searched.append(pid)
    return found + _below(searched, sig) if searched else found


def send(processes: Iterable[Process], sig: signal.Signals) -> None:
    """Send a signal to these very processes; those that have ended meanwhile are passed over."""
    for pid, start_ticks in processes:
        with contextlib.suppress(OSError):  # ended, or no descriptor left, not even to see who it is
            descriptor = os.pidfd_open(pid)
            try:
                seen = stat(pid)
                if seen and seen.start_ticks == start_ticks:
                    signal.pidfd_send_signal(descriptor, sig)
            finally:
                os.close(descriptor)


def _below(leaders: Collection[int], sig: signal.Signals) -> list[Process]:
    """The same among what these have started; what has lost its parent is found by its process group."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdecimal()]  # noqa: PTH208
    seen = {pid: found for pid in pids if (found := stat(pid))}
    children = defaultdict[int, list[int]](list)
    for pid, process in seen.items():
        children[process.parent].append(pid)
    started = set[int](leaders)  # a list of processes is never of one moment, and may have circles
    todo = [child for leader in leaders for child in children[leader]]
    for pid in (below := list(todo)):
        below += children[pid] if pid not in started else []
        started.add(pid)
    lost = {pid for pid, process in seen.items() if process.group in leaders} - started
    todo += [pid for pid in lost if seen[pid].parent not in lost]
    told, shells, met = list[Process](), list[Process](), set[int]()
    todo += leaders
    while todo:
        pid = todo.pop()
        if pid in met or pid not in seen:
            continue
        met.add(pid)
        if seen[pid].state not in "ZX" and catches(pid, sig):
            if _is_program(command := _command(pid)):
                told.append((pid, seen[pid].start_ticks))
                continue
            if _is_shell(command) and not catches(pid, _NOBODY_TRAPS):
                shells.append((pid, seen[pid].start_ticks))
        todo += children[pid]
    # What a shell has forked is one too, until it begins its program.
    forked = {child for pid, _ in shells for child in children[pid]}
    return sorted(told or [shell for shell in shells if shell[0] not in forked])


def _is_program(command: Sequence[str]) -> bool:
    return not (_stands_around(command) or _is_shell(command))


def _is_shell(command: Sequence[str]) -> bool:
    return bool(command) and command[0].rpartition("/")[2].removeprefix("-") in _SHELLS


def _stands_around(command: Sequence[str]) -> bool:
    """Whether a command is a launcher, or another program that only passes signals on or ends its own."""
    words = tuple(command)
    if launcher_of(words):
        return True
    if words and re.fullmatch(r"python[\d.]*|pt_main_thread", words[0].rpartition("/")[2]):
        # `torchrun` is a Python script: its interpreter comes first. `-m` may stand after other options.
        rest = words[1:]
        if any(a == "-m" and b.startswith(_LAUNCHER_MODULES) for a, b in pairwise(rest)):
            return True
        words = tuple(word for word in rest if not word.startswith("-"))
        return bool(words) and launcher_of(words) is not None
    return bool(words) and words[0].rpartition("/")[2] in _AROUND


def _command(pid: int) -> list[str]:
    return [os.fsdecode(word) for word in _read(f"/proc/{pid}/cmdline", _COMMAND_BYTES).split(b"\0")]


def _read(path: str, most_bytes: int) -> bytes:
    """The file's beginning; empty if its process has ended, or is not ours to see."""
    try:
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123
            return file.read(most_bytes)
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return b""
