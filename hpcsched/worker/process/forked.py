"""What a process forked by the zygote becomes: as if it had been started from nothing, but for the time."""

from __future__ import annotations

import ctypes
import importlib
import os
import runpy
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from types import ModuleType, TracebackType
from typing import NoReturn

from hpcsched.compat import dataclass, zip
from hpcsched.contract.visibility import CUDA
from hpcsched.contract.zygote import Request
from hpcsched.worker.gpu import device_files_open, driver_in_use
from hpcsched.worker.process.startup import run_to_the_end

MOST_BYTES = 1 << 20
"""Of a request: the environment of a worker."""

MOST_DESCRIPTORS = 8

NO_USE = b"x"
"""What a standby says that has begun to use CUDA's driver: too early for the GPUs of its task."""

_PR_SET_PDEATHSIG = 1


@dataclass(slots=True)
class Task:
    """What a forked process is to become: the request, and its descriptors.

    `hurry`: worth a standby.
    """

    argv: list[str]
    env: dict[str, str]
    cwd: str
    cores: list[int] | None
    inherited: list[str]
    hurry: bool
    descriptors: list[int]

    @property
    def permit(self) -> int:
        return self.descriptors[1]

    @classmethod
    def received(cls, data: bytes, descriptors: Sequence[int]) -> Task:
        said = Request.decode(data)
        return cls(
            argv=list(said.argv),
            env=dict(said.env),
            cwd=said.cwd,
            cores=None if said.cores is None else list(said.cores),
            inherited=list(said.inherited),
            hurry=said.hurry,
            descriptors=list(descriptors),
        )


def wait_for_task(line: socket.socket, *, warm_up: bool, room: frozenset[int] | None) -> Task:
    """In a forked process: be asked, and be what is asked for, up to the beginning."""
    if room:
        os.sched_setaffinity(0, room)
    if warm_up:
        knows_gpus = CUDA.variable in os.environ
        warm(fully=knows_gpus)
        if not knows_gpus and (driver_in_use() or device_files_open()):
            line.send(NO_USE)
            os._exit(0)
        line.send(b"w")
    data, descriptors, _, _ = socket.recv_fds(line, MOST_BYTES, MOST_DESCRIPTORS)
    if not data:
        os._exit(0)
    task = Task.received(data, descriptors)
    _prepare(task)
    _live_without_parent()
    line.send(b"+")
    line.close()
    if not os.read(task.permit, 1):  # the launcher has given up on us, or has gone
        os._exit(0)
    os.close(task.permit)
    return task


def _prepare(task: Task) -> None:
    """Take on all that a process started from nothing would have been given."""
    os.setsid()
    output, _, *others = task.descriptors
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(nowhere)
    os.close(output)
    os.chdir(task.cwd)
    if task.cores is not None:
        for thread in os.listdir("/proc/self/task"):  # noqa: PTH208 - names are all that is needed
            os.sched_setaffinity(int(thread), task.cores)
    for name, descriptor in zip(task.inherited, others, strict=True):
        os.set_inheritable(descriptor, True)
        task.env[name] = str(descriptor)
    os.environ.clear()
    os.environ.update(task.env)
    time.tzset()


def warm(*, fully: bool) -> None:
    """Pay for what the first steps of a training cost once: threads, kernels, imports.

    With as many threads as the environment says, like the task: pools of theirs are made here. `fully`: it
    may touch the driver of GPUs, as a backward pass and an optimizer's step do wherever the model is.
    """
    import torch

    for optimizer in (torch.optim.SGD, torch.optim.AdamW):
        model = torch.nn.Sequential(
            torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(144, 4)
        )
        stepper = optimizer(model.parameters(), lr=0.1)
        with torch.set_grad_enabled(fully):
            loss = torch.nn.functional.cross_entropy(model(torch.ones(8, 1, 8, 8)), torch.zeros(8).long())
        if fully:
            loss.backward()  # type: ignore[no-untyped-call]
            stepper.step()


def become(task: Task) -> None:
    """Run the task's program as `python -m` would have, in this process."""
    import numpy as np
    import torch

    sys.argv = task.argv[1:2]
    sys.orig_argv = list(task.argv)  # novermin
    if not getattr(sys.flags, "safe_path", False):  # from Python 3.11 on
        if _hides_something(task.cwd):
            _start_from_nothing(task)
        sys.path[0] = task.cwd
    importlib.invalidate_caches()
    tempfile.tempdir = None
    # All that was forked here has these in common, and no two processes started from nothing have. (Python's
    # own generator sees to itself.)
    np.random.seed()
    torch.default_generator.seed()
    sys.modules["__main__"] = ModuleType("__main__")
    run_to_the_end(lambda: _run(task.argv[2]))


def _run(module: str) -> int:
    try:
        runpy._run_module_as_main(module)  # type: ignore[attr-defined]
    except SystemExit:
        raise
    except BaseException as error:
        error.__traceback__ = _from_runpy(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


def _from_runpy(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without what only a forked process has."""
    while trace and trace.tb_frame.f_code.co_filename != runpy._run_module_as_main.__code__.co_filename:  # type: ignore[attr-defined]
        trace = trace.tb_next
    return trace


def _hides_something(directory: str) -> bool:
    """Whether a module in there goes before one of the same name that is imported already."""
    suffixes = tuple(importlib.machinery.all_suffixes())
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                name = entry.name.partition(".")[0]
                found = sys.modules.get(name)
                if found is None or not (entry.name.endswith(suffixes) or _is_package(entry)):
                    continue
                home = os.path.dirname(getattr(found, "__file__", None) or "")  # noqa: PTH120
                if home and not os.path.samefile(entry.path if entry.is_dir() else directory, home):  # noqa: PTH121
                    return True
    except OSError:
        return True
    return False


def _is_package(entry: os.DirEntry[str]) -> bool:
    return entry.is_dir() and os.path.exists(os.path.join(entry.path, "__init__.py"))  # noqa: PTH110, PTH118


def _start_from_nothing(task: Task) -> NoReturn:
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores
        signal.signal(number, signal.SIG_DFL)
    os.execve(task.argv[0], task.argv, task.env)


_libc = ctypes.CDLL(None)


def die_with_parent(parent: int) -> None:
    """From now on be killed when the parent, which is `parent`, ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # it has died before
        os._exit(1)


def _live_without_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0)
