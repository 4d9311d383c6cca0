"""Bubblewrap: a folder with another system's files as the root, and the host's devices, processes and /tmp.

The root is put together entry by entry, on a file system in memory, so that folders of the job can be shown
under their own paths although the image is read-only. `bwrap` stays as the parent of the program and dies of
signals instead of passing them on; its exit code is the program's.
"""

from __future__ import annotations

import os
from pathlib import Path

from hpcsched.errors import LaunchError
from hpcsched.launch.containers.base import Inside, Outside

MOST_ENTRIES = 256
"""In the root folder of an image (chosen): a folder of data sets is none."""

_USUAL_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_OF_THE_HOST = ("dev", "proc", "sys", "tmp")


class Bubblewrap:
    """`bwrap`: a folder."""

    programs = ("bwrap",)
    passes_signals = False

    def start(self, inside: Inside, program: str) -> Outside:
        """See `base.Runtime`."""
        argv = [program, *_root(Path(inside.container.image))]
        argv += ["--dev-bind", "/dev", "/dev", "--bind", "/proc", "/proc", "--ro-bind", "/sys", "/sys"]
        argv += ["--bind", "/tmp", "/tmp"]
        for outside, at, mode in inside.mounts:
            argv += ["--ro-bind" if mode == "ro" else "--bind", outside, at]
        argv += inside.container.options
        # In memory as it is, what a program writes there would be lost in silence.
        argv += ["--remount-ro", "/", "--chdir", inside.cwd, "--", *inside.argv]
        path = inside.env["PATH"] if "PATH" in inside.told else _USUAL_PATH
        return Outside(argv=tuple(argv), env={**inside.env, "PATH": path})


def _root(image: Path) -> list[str]:
    """The arguments that make the root of an image's entries. Raises LaunchError."""
    try:
        with os.scandir(image) as found:
            entries = sorted(
                (entry for entry, _ in zip(found, range(MOST_ENTRIES + 1), strict=False)),
                key=lambda entry: entry.name,
            )
    except OSError as error:
        raise LaunchError(f"container {image}: {error.strerror}", transient=False) from error
    if len(entries) > MOST_ENTRIES or not any(entry.name in ("usr", "bin") for entry in entries):
        raise LaunchError(f"container {image}: no root folder of a system", transient=False)
    arguments = []
    for entry in entries:
        if entry.name in _OF_THE_HOST:
            continue
        if entry.is_symlink():
            arguments += ["--symlink", os.readlink(entry.path), f"/{entry.name}"]  # noqa: PTH115
        else:
            arguments += ["--ro-bind", entry.path, f"/{entry.name}"]
    return arguments
