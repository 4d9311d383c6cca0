"""Faults of the disk and of the agent's process, in the calls that the agent makes of the system.

The calls are the real ones, on a real folder; some of them fail, and at one of them the process dies. What
was not synchronised is lost when the node dies.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

from hpcsched.patience import PASSING


class Died(BaseException):
    """The agent's process is killed by SIGKILL at this point."""


CALLS = ("write", "fsync", "fdatasync", "ftruncate", "replace", "rename", "unlink", "mkdir", "open", "link")
LOOKS = ("stat", "lstat", "scandir", "listdir")


class Disk:
    """The calls to the file system within `root`.

    After `dies` every call raises Died, as nothing is done any more that is not done yet. `kill_at_call`:
    the number of the call at which it dies, before or after it is done; of a write a part may be done.
    `failing`: the number of an error that each call fails with (EIO, ESTALE), or each that writes (ENOSPC,
    EDQUOT).
    `no_more_files`: nothing new can be made, as there are too many files; what is there can be written.
    """

    def __init__(self, root: Path, random: Random) -> None:
        self._root, self._random = str(root.resolve()), random
        self._own: dict[str, Callable[..., Any]] = {}
        self._synced: dict[int, int] = {}
        """Bytes that are on the disk for good, by inode."""
        self.living, self.dead = False, False
        self.calls = 0
        self.kill_at_call: int | None = None
        self.failing, self.no_more_files = 0, False
        self._others = 0

    @contextmanager
    def not_the_agent(self) -> Iterator[None]:
        """Within this, calls are those of others, whom nothing happens to."""
        self._others += 1
        try:
            yield
        finally:
            self._others -= 1

    @contextmanager
    def instead_of_os(self) -> Iterator[None]:
        """Within this, the agent's calls go through this disk."""
        with ExitStack() as stack:
            for name in (*CALLS, *LOOKS):
                self._own[name] = getattr(os, name)
                stack.enter_context(mock.patch.object(os, name, self._call(name)))
            yield

    def dies(self) -> None:
        """The agent's process, if there is one, is dead from now on."""
        if self.living:
            self.dead, self.kill_at_call = True, None
            raise Died

    def _call(self, name: str) -> Callable[..., Any]:
        own = self._own[name]

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._others or not self.living:
                return own(*args, **kwargs)
            if self.dead:
                raise Died
            if self.failing in PASSING and self._is_here(name, args):
                raise OSError(self.failing, os.strerror(self.failing), *args[:1])
            if name in LOOKS or (name == "open" and not args[1] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)):
                return own(*args, **kwargs)
            self.calls += 1
            if self.kill_at_call is not None and self.calls >= self.kill_at_call:
                if self._random.random() < 0.5:
                    if name == "write":
                        own(args[0], bytes(args[1])[: self._random.randrange(len(args[1]) + 1)])
                    else:
                        own(*args, **kwargs)
                self.dies()
            # What was written has its blocks.
            full = self.failing and name not in ("unlink", "ftruncate", "fsync", "fdatasync")
            if full and self._is_here(name, args):
                raise OSError(self.failing, os.strerror(self.failing))
            makes = name == "mkdir" or (name == "open" and bool(args[1] & os.O_CREAT))
            if self.no_more_files and makes and self._is_here(name, args) and not Path(args[0]).exists():
                raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
            done = own(*args, **kwargs)
            if name in ("fsync", "fdatasync"):
                about = os.fstat(args[0])
                self._synced[about.st_ino] = about.st_size
            elif name == "ftruncate":
                inode = os.fstat(args[0]).st_ino
                self._synced[inode] = min(self._synced.get(inode, 0), args[1])
            return done

        return call

    def _is_here(self, name: str, args: tuple[Any, ...]) -> bool:
        if not args:
            return False
        if isinstance(args[0], int):
            try:
                return str(Path(f"/proc/self/fd/{args[0]}").readlink()).startswith(self._root)
            except OSError:
                return False
        return os.fsdecode(args[0]).startswith(self._root)

    def node_dies(self, journal: Path) -> None:
        """What of the journal was not synchronised is lost, or a part of it."""
        with self.not_the_agent():
            try:
                about = journal.stat()
            except OSError:
                return
            kept = self._synced.get(about.st_ino, 0)
            if kept < about.st_size:
                os.truncate(journal, self._random.randint(kept, about.st_size))
