"""`python -m hpcsched.worker.zygote`: has imported torch, and forks workers that need not do it again.

It serves one launcher, its parent, over a socket. What it forks becomes the launcher's child: it is forked
by a process in between, whose end lets it pass to the nearest ancestor that takes orphans. That is the
launcher, while it awaits the answer. A worker begins only once its launcher, having the answer, permits it:
whoever has given up waiting starts another in its place, and there must never be two.

Nothing here may run an operator or ask for a GPU before the fork: threads and contexts do not survive it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import shutil
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import field
from typing import NoReturn

from hpcsched.compat import dataclass
from hpcsched.contract import variables
from hpcsched.contract.zygote import READY, Request, encode_answer
from hpcsched.worker.gpu import device_files_open, driver_in_use
from hpcsched.worker.process import memory
from hpcsched.worker.process.forked import (
    MOST_BYTES,
    MOST_DESCRIPTORS,
    NO_USE,
    Task,
    become,
    die_with_parent,
    wait_for_task,
)
from hpcsched.worker.process.startup import end_quickly, fewer_collections

PRELOADED = (
    "numpy",
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "torch.optim",
    "torch.utils.data",
    "hpcsched.worker.session.session",
    "hpcsched.worker.ddp.strategy",
    "hpcsched.worker.burst.strategy",
    "hpcsched.worker.packing.host.host",
)

HUNG_AFTER = 0.4
"""The part of the launcher's patience after which a forked process that has not yet become what it is asked
to be counts as hung: two may hang before the launcher goes without."""

REFILL_AFTER_S = 2.0
"""How long after a launch a standby is made: at first the machine belongs to the launched, and to the
training that grows by it. Launches in quick succession put it off."""

LOOK_AT_MEMORY_EVERY_S = 10.0

NEEDED_BYTES = 2 << 30
"""Where less memory is to be had no standby is kept."""


class _Become(BaseException):
    """Leaves the server, in a forked process, towards its task."""

    def __init__(self, task: Task) -> None:
        self.task = task


@dataclass(slots=True, eq=False)
class _Child:
    """A forked process that waits for its task, and its parent, which is ours (`between`)."""

    pid: int
    between: int
    line: socket.socket
    answer_within_s: float
    warmed: bool = False

    def assign(self, data: bytes, descriptors: Sequence[int]) -> bool:
        """Have it take the task; False if it does not, or not in time."""
        self.line.settimeout(self.answer_within_s)
        try:
            socket.send_fds(self.line, [data], descriptors)
            answer = self.line.recv(1)
        except OSError:
            return False
        return answer == b"+"

    def let_go(self) -> None:
        """It is over, or from now on the launcher's."""
        self.line.close()
        _end(self.between)

    def end(self) -> None:
        """It does not do."""
        # Killed before its parent, which clears it away: it is to be nobody else's child.
        with contextlib.suppress(ProcessLookupError):
            descriptor = os.pidfd_open(self.pid)
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            select.select([descriptor], [], [], self.answer_within_s)
            os.close(descriptor)
        self.let_go()


@dataclass(slots=True)
class Server:
    """Forks what the launcher asks for, and keeps up to `most` processes that wait to be asked.

    `patience_s`: how long the launcher awaits an answer. `rooms`: sets of cores for those that wait, in turn;
    none: the cores that this process has.
    """

    launcher: socket.socket
    most: int
    patience_s: float
    rooms: Sequence[frozenset[int]] = ()
    _waiting: list[_Child] = field(default_factory=list)
    _in_hand: Sequence[int] = ()
    _refill_at: float = 0.0
    _made: int = 0

    def serve(self) -> None:
        """Until the launcher has gone. Raises _Become in processes that have got a task."""
        self.launcher.send(READY)
        self._refill_at = time.monotonic() + REFILL_AFTER_S
        while True:
            heard = self._listen()
            for child in [child for child in self._waiting if child.line.fileno() in heard]:
                self._hear(child)
            if self.launcher.fileno() in heard:
                data, self._in_hand, _, _ = socket.recv_fds(self.launcher, MOST_BYTES, MOST_DESCRIPTORS)
                if not data:
                    return
                answer = self._launch(data)
                self._put_down()
                self.launcher.send(encode_answer(answer))
                self._refill_at = time.monotonic() + REFILL_AFTER_S
            elif self._short and time.monotonic() >= self._refill_at:
                self._refill()

    @property
    def _short(self) -> bool:
        return len(self._waiting) < self.most and all(child.warmed for child in self._waiting)

    def _listen(self) -> set[int]:
        poll = select.poll()
        for line in (self.launcher, *(child.line for child in self._waiting)):
            poll.register(line, select.POLLIN)
        left_s = max(0.0, self._refill_at - time.monotonic())
        return {descriptor for descriptor, _ in poll.poll(left_s * 1000 if self._short else None)}

    def _hear(self, child: _Child) -> None:
        """A standby is warm, or it has ended."""
        with contextlib.suppress(OSError):
            if said := child.line.recv(1):
                if said == NO_USE:
                    self.most = 0  # another one would do the same
                else:
                    child.warmed = True
                return
        self._waiting.remove(child)
        child.let_go()
        self._refill_at = time.monotonic() + LOOK_AT_MEMORY_EVERY_S

    def _refill(self) -> None:
        if memory.available() < NEEDED_BYTES:
            self._refill_at = time.monotonic() + LOOK_AT_MEMORY_EVERY_S
            return
        room = self.rooms[self._made % len(self.rooms)] if self.rooms else None
        self._made += 1
        self._waiting.append(self._fork(warm_up=True, room=room))
        self._refill_at = time.monotonic()

    def _launch(self, data: bytes) -> int | None:
        """The pid of who has taken the task, now the launcher's child; None if nobody has."""
        hurry = Request.decode(data).hurry
        for child in (self._standby() if hurry else None, None):
            child = child or self._fork(warm_up=False)
            if child.assign(data, self._in_hand):
                child.let_go()
                return child.pid
            child.end()
        return None

    def _standby(self) -> _Child | None:
        for child in self._waiting:
            if child.warmed:
                self._waiting.remove(child)
                return child
        return None

    def _fork(self, *, warm_up: bool, room: frozenset[int] | None = None) -> _Child:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        reader, writer = os.pipe()
        zygote = os.getpid()
        between = os.fork()
        if between == 0:
            try:
                # What it has forked may have to be killed, and is then to leave nothing behind.
                signal.signal(signal.SIGCHLD, signal.SIG_IGN)
                die_with_parent(zygote)
                parent = os.getpid()
                pid = os.fork()
                if pid:
                    os.write(writer, pid.to_bytes(8, "little"))
                    self._close()
                    for descriptor in (ours.detach(), theirs.detach(), reader, writer):
                        os.close(descriptor)
                    _stand_between()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                die_with_parent(parent)
                os.close(reader)
                os.close(writer)
                ours.close()
                self._close()
                task = wait_for_task(theirs, warm_up=warm_up, room=room)
            except BaseException:
                os._exit(1)
            raise _Become(task)
        os.close(writer)
        theirs.close()
        pid = int.from_bytes(os.read(reader, 8), "little")
        os.close(reader)
        return _Child(pid, between, ours, HUNG_AFTER * self.patience_s)

    def _close(self) -> None:
        """Close the lines that a forked process has no business with."""
        self.launcher.close()
        for child in self._waiting:
            child.line.close()
        self._put_down()

    def _put_down(self) -> None:
        for descriptor in self._in_hand:
            os.close(descriptor)
        self._in_hand = ()


def _stand_between() -> NoReturn:
    """Do nothing, until killed: be somebody's parent. As a small program, for its end must be quick."""
    program = shutil.which("sleep")
    if program:
        with contextlib.suppress(OSError):
            os.execv(program, ["sleep", str(2**31 - 1)])
    while True:
        signal.pause()


def safe_to_fork() -> bool:
    """Whether nothing that was imported has begun to use a GPU: no context survives a fork."""
    import torch

    if device_files_open() or driver_in_use() or torch.cuda.is_initialized():
        return False
    child = os.fork()
    if child == 0:
        os._exit(int(torch.cuda._is_in_bad_fork()))
    return os.waitpid(child, 0)[1] == 0


def _end(pid: int) -> None:
    """Kill a child of ours and clear it away."""
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def main(arguments: Sequence[str]) -> Task | None:
    """Serve to the end; in a process forked to do something else: what that is.

    `arguments`: how many standbys to keep, how long the launcher awaits an answer in seconds, and the sets of
    cores for standbys, each as numbers with commas between. `variables.ZYGOTE_FD`: the descriptor of the line
    to the launcher.
    """
    end_quickly()
    die_with_parent(os.getppid())
    most, patience_s, *rooms = arguments
    with fewer_collections():
        for name in PRELOADED:
            importlib.import_module(name)
    if not safe_to_fork():
        return None
    gc.collect()
    gc.freeze()  # else each collection in a worker would copy what it shares with the others
    line = socket.socket(fileno=int(os.environ[variables.ZYGOTE_FD]))
    line.set_inheritable(False)
    cores = [frozenset(map(int, room.split(","))) for room in rooms]
    server = Server(line, int(most), float(patience_s), cores)
    try:
        server.serve()
    except _Become as end:
        return end.task
    except OSError:  # the launcher has gone in the middle of something
        pass
    return None


if __name__ == "__main__":
    task = main(sys.argv[1:])
    if task is not None:
        become(task)
