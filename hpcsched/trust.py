"""Trust in settings files that other users can write: they are used only after the user has accepted them.

A project's file is read from the working directory, whoever owns that, and may hold shell lines. An accepted
file is remembered by path and content, as direnv does it: after a change it has to be accepted again.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from hpcsched.accounts import name_of
from hpcsched.decoding import opened
from hpcsched.errors import BadInput, ConfigError
from hpcsched.patience import kind_of, patiently

MAX_BYTES = 1 << 20
"""The largest settings file (chosen)."""


def read(path: Path) -> tuple[bytes, str]:
    """A file's content, and the reason why others can change it; "" if only this user and root can.

    Raises ConfigError if it cannot be read.
    """
    try:
        content, facts, link, folder = patiently(partial(_content_and_facts, path))
    except BadInput as error:
        raise ConfigError(where=str(path), got="not a regular file", accepted="a readable file") from error
    except OSError as error:
        raise ConfigError(where=str(path), got=str(error.strerror), accepted="a readable file") from error
    if len(content) > MAX_BYTES:
        raise ConfigError(where=str(path), got="more than 1 MiB", accepted="a file of settings")
    ours = (os.geteuid(), 0)
    for what, found in (("it", facts), ("it", link), ("its directory", folder)):
        if found.st_uid not in ours:
            return content, f"{what} belongs to {name_of(found.st_uid)}"
    if facts.st_mode & stat.S_IWOTH:
        return content, "everybody may write it"
    if folder.st_mode & stat.S_IWOTH and not folder.st_mode & stat.S_ISVTX:
        return content, "everybody may replace it"
    return content, ""


def _content_and_facts(path: Path) -> tuple[bytes, os.stat_result, os.stat_result, os.stat_result]:
    with opened(path) as (file, facts):
        return file.read(MAX_BYTES + 1), facts, path.lstat(), path.parent.stat()


def accepted(path: Path, content: bytes, environ: Mapping[str, str]) -> bool:
    """Whether the user has accepted this file with this content."""
    return kind_of(_mark(path, content, environ)) is not None


def accept(path: Path, content: bytes, environ: Mapping[str, str]) -> None:
    """Remember that the user accepts this file with this content. Raises ConfigError if that fails."""
    mark = _mark(path, content, environ)
    try:
        mark.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        mark.touch(mode=0o600)
        mark.write_bytes(os.fsencode(path.resolve()) + b"\n")  # for people
    except OSError as error:
        raise ConfigError(
            where=str(mark), got=str(error.strerror), accepted="a file that can be written"
        ) from error


def _mark(path: Path, content: bytes, environ: Mapping[str, str]) -> Path:
    import hashlib  # most files are the user's own

    state = environ.get("XDG_STATE_HOME", "")
    base = Path(state) if state.startswith("/") else Path(environ.get("HOME") or "/") / ".local/state"
    name = hashlib.sha256(os.fsencode(path.resolve()) + b"\0" + content).hexdigest()
    return base / "hpcsched" / "trusted" / name
