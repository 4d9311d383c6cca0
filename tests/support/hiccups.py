"""A file system that reports an error for some calls, as that of a network does for some seconds."""

from __future__ import annotations

import contextlib
import errno
import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hpcsched import patience

CALLS = (
    "stat",
    "lstat",
    "scandir",
    "listdir",
    "open",
    "write",
    "unlink",
    "replace",
    "rename",
    "mkdir",
    "fsync",
    "statvfs",
)


class Hiccups:
    """The file system below `root`: some calls fail. It is asked again at once."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._root, self.left, self.number, self._after = str(root), 0, errno.EIO, 0
        monkeypatch.setattr(patience, "AGAIN_S", 0.0)
        for name in CALLS:
            monkeypatch.setattr(os, name, self._call(getattr(os, name)))
        monkeypatch.setattr(io, "open", self._call(io.open))

    def fails(self, calls: int, number: int = errno.EIO, *, after: int = 0) -> None:
        """So many calls fail from now on, or after the next ones."""
        self.left, self.number, self._after = calls, number, after

    @contextlib.contextmanager
    def none(self) -> Iterator[None]:
        """Within this, no call fails or counts."""
        left, self.left = self.left, 0
        try:
            yield
        finally:
            self.left = left

    def _call(self, own: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **keys: Any) -> Any:
            if self.left and self._is_here(args[0] if args else "."):
                if self._after:
                    self._after -= 1
                    return own(*args, **keys)
                self.left -= 1
                raise OSError(self.number, os.strerror(self.number), str(args[0]))
            return own(*args, **keys)

        return call

    def _is_here(self, where: Any) -> bool:
        path = str(Path(f"/proc/self/fd/{where}").readlink()) if isinstance(where, int) else os.fspath(where)
        return path.startswith(self._root)
