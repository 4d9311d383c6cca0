"""A disk that is full."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk(where: Path, *options: str) -> Iterator[None]:
    """A file system of its own in a folder; skips the test where that is not allowed."""
    where.mkdir(mode=0o700, exist_ok=True)
    argv = ["mount", "-t", "tmpfs", "-o", ",".join(["mode=700", *options]), "tmpfs", str(where)]
    if subprocess.run(argv, capture_output=True, check=False).returncode:
        pytest.skip("may not mount file systems")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(where)], check=True)


def fill(folder: Path) -> Path:
    """Leave no room in a file system; returns the file to remove."""
    path = folder / "ballast"
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 512)
    return path


def one_line(text: str) -> str:
    assert text.count("\n") == 1, text
    return text
