"""The key `container` of a job: an image, or a table."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from hpcsched.contract import schema
from hpcsched.contract.schema import many, one_of, option, text
from hpcsched.core.model import Container
from hpcsched.decoding import is_utf8

RUNTIMES = ("auto", "apptainer", "enroot", "pyxis", "bubblewrap")
_KNOW_NAMES = ("enroot", "pyxis")
"""Runtimes to which a word is the name of an image; to others it is that of a file or a folder."""

_NEW_SESSION = "--new-session"
"""Of bubblewrap. A program is found by the process group of what was started."""

_MOUNT = '"/outside", "/outside:/inside" or "/outside:/inside:ro"'


@dataclass(frozen=True, kw_only=True)
class _Table:
    """The container of a job as it is written."""

    image: str = option(text("an image file, a folder, an address or a name"))
    runtime: str = option(one_of(*RUNTIMES), "auto")
    mounts: Sequence[str] = option(many(text(""), f"a list of {_MOUNT}"), ())
    options: Sequence[str] = option(many(text(""), "a list of arguments for the runtime"), ())
    python: str = option(text("the Python that runs a trainer inside"), "python3")


def container_of(value: str | Mapping[str, Any], *, where: str, key: str, workdir: Path) -> Container:
    """The container that a job names; a relative path of an image is one in `workdir`. Raises ConfigError."""
    table = {"image": value} if isinstance(value, str) else value
    read = schema.read(_Table, table, where=where, prefix=f"{key}.", unknown="unknown key")
    for name, words in (("image", [read.image]), ("options", read.options), ("python", [read.python])):
        for word in words:
            if "\0" in word or not is_utf8(word) or (name != "options" and word.startswith("-")):
                schema.refuse(where, f"{key}.{name}", repr(word), "text that is no option of a command")
    if _NEW_SESSION in read.options:
        accepted = "none such: each process has a session of its own already, and hears no signal in another"
        schema.refuse(where, f"{key}.options", repr(_NEW_SESSION), accepted)
    mounts = tuple(_mount(word, where=where, key=f"{key}.mounts") for word in read.mounts)
    image = _image(read.image, read.runtime, workdir)
    return _container(image, read.runtime, mounts, tuple(read.options), read.python)


@lru_cache(maxsize=256)
def _container(
    image: str,
    runtime: str,
    mounts: tuple[tuple[str, str, str], ...],
    options: tuple[str, ...],
    python: str,
) -> Container:
    """One object for all jobs that name the same."""
    return Container(image=image, runtime=runtime, mounts=mounts, options=options, python=python)


def _image(image: str, runtime: str, workdir: Path) -> str:
    """An image that is a file or a folder by the path from anywhere; addresses and names as they are."""
    if image.startswith("~/"):
        return os.path.expanduser(image)  # noqa: PTH111
    file = image.startswith((".", "/")) or image.endswith((".sif", ".sqsh", ".squashfs", ".img"))
    # REGISTRY#IMAGE: an address of theirs.
    name = ":" in image or (("/" not in image or "#" in image) and runtime in _KNOW_NAMES)
    return image if name and not file else str(workdir / image)


def _mount(word: str, *, where: str, key: str) -> tuple[str, str, str]:
    outside, _, rest = word.partition(":")
    inside, _, mode = rest.partition(":")
    inside, mode = inside or outside, mode or "rw"
    right = outside.startswith("/") and inside.startswith("/") and mode in ("ro", "rw")
    if not right or "\0" in word or not is_utf8(word):
        schema.refuse(where, key, repr(word), _MOUNT)
    return outside, inside, mode
