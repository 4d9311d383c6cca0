"""Bubblewrap: a folder with another system's files as the root, and the host's devices, processes and /tmp.

The root is put together entry by entry, on a file system in memory, so that folders of the job can be shown
under their own paths although the image is read-only; and so is each folder of the image in which one is
shown that the image does not have. `bwrap` stays as the parent of the program and dies of signals instead of
passing them on; its exit code is the program's.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path, PurePosixPath

from hpcsched.errors import LaunchError
from hpcsched.launch.containers.base import Inside, Outside

MOST_ENTRIES = 256
"""In a folder that is put together (chosen): a root folder is none of data sets."""

_USUAL_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_ROOT = PurePosixPath("/")
_OF_THE_HOST = frozenset(_ROOT / name for name in ("dev", "proc", "sys", "tmp"))
_MOST_LINKS = 40
"""As the kernel follows them."""


class Bubblewrap:
    """`bwrap`: a folder."""

    programs = ("bwrap",)
    passes_signals = False

    def start(self, inside: Inside, program: str) -> Outside:
        """See `base.Runtime`."""
        image, mounts, places = Path(inside.container.image), list[str](), list[PurePosixPath]()
        for outside, at, mode in inside.mounts:
            places.append(_place(image, at, {*_OF_THE_HOST, *places}))
            mounts += ["--ro-bind" if mode == "ro" else "--bind", outside, str(places[-1])]
        argv = [program, *_shown(image, _ROOT, _lacking(image, places))]
        argv += ["--dev-bind", "/dev", "/dev", "--bind", "/proc", "/proc", "--ro-bind", "/sys", "/sys"]
        argv += ["--bind", "/tmp", "/tmp", *mounts, *inside.container.options]  # nosec B108 # the program's
        # In memory as it is, what a program writes there would be lost in silence.
        argv += ["--remount-ro", "/", "--chdir", inside.cwd, "--", *inside.argv]
        path = inside.env["PATH"] if "PATH" in inside.told else _USUAL_PATH
        return Outside(argv=tuple(argv), env={**inside.env, "PATH": path})


def _place(image: Path, at: str, taken: Collection[PurePosixPath]) -> PurePosixPath:
    """Where something is mounted, without the links that the image has on the way: `bwrap` would follow them
    out of the root. What is in `taken` is not the image's."""
    place, left, links = _ROOT, [*reversed(PurePosixPath(at).parts[1:])], 0
    while left and place not in taken:
        word = left.pop()
        if word == "..":
            place = place.parent
        elif links < _MOST_LINKS and (entry := _in(image, place / word)).is_symlink():
            link, links = entry.readlink(), links + 1
            place = _ROOT if link.is_absolute() else place
            left += [part for part in reversed(link.parts) if part != "/"]
        else:
            place /= word
    return place.joinpath(*reversed(left))


def _lacking(image: Path, places: Sequence[PurePosixPath]) -> set[PurePosixPath]:
    """The folders of an image in which it lacks one of these places, so that one has to be made there."""
    found, taken = set[PurePosixPath](), set(_OF_THE_HOST)
    for place in places:
        if not _in(image, place).exists() and taken.isdisjoint(place.parents):
            found.update(above for above in place.parents if _in(image, above).is_dir())
        taken.add(place)
    return found


def _shown(image: Path, folder: PurePosixPath, lacking: Collection[PurePosixPath]) -> list[str]:
    """The arguments that show a folder of an image, entry by entry. Raises LaunchError."""
    try:
        with os.scandir(_in(image, folder)) as found:
            entries = sorted(
                (entry for entry, _ in zip(found, range(MOST_ENTRIES + 1), strict=False)),
                key=lambda entry: entry.name,
            )
    except OSError as error:
        raise LaunchError(f"container {_in(image, folder)}: {error.strerror}", transient=False) from error
    if folder == _ROOT and not any(entry.name in ("usr", "bin") for entry in entries):
        raise LaunchError(f"container {image}: no root folder of a system", transient=False)
    if len(entries) > MOST_ENTRIES:
        most = f"more than {MOST_ENTRIES} entries: nothing can be mounted there that it does not have"
        raise LaunchError(f"container {_in(image, folder)}: {most}", transient=False)
    arguments = []
    for entry in entries:
        place = folder / entry.name
        if place in _OF_THE_HOST:
            continue
        if entry.is_symlink():
            arguments += ["--symlink", os.readlink(entry.path), str(place)]  # noqa: PTH115
        elif place in lacking:
            arguments += ["--dir", str(place), *_shown(image, place, lacking)]
        else:
            arguments += ["--ro-bind", entry.path, str(place)]
    return arguments


def _in(image: Path, place: PurePosixPath) -> Path:
    return image.joinpath(*place.parts[1:])
