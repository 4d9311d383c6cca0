"""Checkpoints that are whole or not there: a file each, checked by a checksum, the newest few kept.

`step-000000000042.pt` is written by `torch.save`; `step-000000000042.json` beside it says how long
it is and what its CRC-32 is. Both get their names only once they are durable, the `.pt` last.

A model that no rank has whole is saved by all of them into a folder, `step-000000000042.dcp`, by
`hpcsched.worker.checkpoint.sharded`; `record.json` in there says how long its files are.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch

from hpcsched.errors import StoreError
from hpcsched.ownership import make_private
from hpcsched.patience import patiently
from hpcsched.worker.process.contract import private, say, sync_folder
from hpcsched.worker.process.storable import storable

SHARDED = ".dcp"
RECORD = "record.json"

LEFT_FOR_S = 86400.0
"""A temporary file of another host, untouched for so long, was left by a process that died."""


class CheckpointStore:
    """The checkpoints of one job in one folder, of which the newest `keep` stay.

    One process saves, and a keeper may save older states meanwhile; any may read. The folder is made at the
    first save.
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int = 2) -> None:
        self.folder = Path(folder)
        self.keep = max(1, keep)

    def save(self, state: Mapping[str, Any]) -> Path:
        """Make `state` durable as the checkpoint of its `step`; returns its path.

        Older checkpoints beyond `keep` go only after that. Raises StoreError, and leaves nothing of
        it behind, when it cannot be written or holds something that could not be read back.
        """
        state = storable(state)
        path = self.folder / f"step-{state['step']:012d}.pt"
        try:
            if patiently(path.exists) and not damage(path):
                return path  # the same step of the same job: nothing new in it
            patiently(lambda: self._write(path, state))
        except OSError as error:
            raise StoreError(f"{path}: cannot be written: {error.strerror or error}") from error
        self.prune(self.keep)
        return path

    def _write(self, path: Path, state: Mapping[str, Any]) -> None:
        """Write it, from the beginning; what an error leaves behind goes."""
        temporary = temporary_of(path, os.getpid())
        record_file = path.with_suffix(".json")
        record_temporary = temporary_of(record_file, os.getpid())
        try:
            make_private(self.folder)
            with open(temporary, "wb", opener=private) as raw:
                file = _ChecksummingFile(raw)
                torch.save(state, cast(IO[bytes], file))
                file.sync()
            record = {"schema": 1, "bytes": file.size, "crc32": file.crc32}
            record |= {key: state[key] for key in ("step", "samples") if key in state}
            with open(record_temporary, "wb", opener=private) as raw:
                raw.write(json.dumps(record).encode())
                raw.flush()
                os.fsync(raw.fileno())
            record_temporary.replace(record_file)
            sync_folder(self.folder)
            temporary.replace(path)
            sync_folder(self.folder)
        except OSError:
            for left in (temporary, record_temporary):
                with contextlib.suppress(OSError):
                    left.unlink(missing_ok=True)
            raise

    def save_beside(self, name: str, state: Mapping[str, Any]) -> None:
        """Write a file of this name, which no checkpoint has, whole or not at all. Raises StoreError."""
        path = self.folder / name
        temporary = temporary_of(path, os.getpid())
        try:
            make_private(self.folder)
            with open(temporary, "wb", opener=private) as file:
                torch.save(storable(state), file)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            sync_folder(self.folder)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise StoreError(f"{path}: cannot be written: {error.strerror or error}") from error

    def newest(self) -> Path | None:
        """The newest checkpoint that is whole, or None; one warning for each damaged one passed over."""
        for path in self._files():
            why = damage(path)
            if why is None:
                return path
            say(f"checkpoint {path} is damaged ({why}); trying an older one")
        return None

    def newest_step(self) -> int | None:
        """The step of the newest checkpoint of the right length, or None; no content is read."""
        for path in self._files():
            if damage(path, quick=True) is None:
                return int(path.stem.removeprefix("step-"))
        return None

    def prune(self, keep: int, *, thorough: bool = False) -> None:
        """Delete all but the newest `keep` (at least 1) good ones.

        What was found damaged stays: its owner may know better. `thorough` checks the content of those
        that stay, not only their length: for when the newest was not written a moment ago.
        """
        kept = 0
        for path in self._files():
            if kept >= max(1, keep):
                with contextlib.suppress(OSError):
                    _delete(path)
            elif damage(path, quick=not thorough) is None:
                kept += 1

    def quarantine_newer(self, good: Path | None) -> None:
        """Rename the damaged files newer than `good`: they must not count as checkpoints any more."""
        for path in self._files():
            if good is not None and path <= good:
                break
            if damage(path) is not None:  # else a keeper has finished it meanwhile
                set_damaged_aside(path)

    def clear_leftovers(self) -> None:
        """Remove the temporary files of processes that died while they saved.

        A keeper may be at it still, on this host or on another: of another only what is very old goes.
        """
        left = patiently(lambda: [*self.folder.glob(".step-*.tmp"), *self.folder.glob(".best.*.tmp")])
        for path in left:
            if not _in_use(path):
                with contextlib.suppress(OSError):  # or the next attempt does it
                    if path.is_dir():
                        shutil.rmtree(path, ignore_errors=True)
                    else:
                        path.unlink(missing_ok=True)

    def set_aside(self, name: str) -> None:
        """Move all checkpoints into a sub-folder: a job that starts over must not mix with them."""
        files = self._files()
        if not files:
            return
        aside = self.folder / name
        aside.mkdir(mode=0o700, exist_ok=True)
        for path in files:
            for file in (path, path.with_suffix(".json")):
                if file.exists():
                    file.replace(aside / file.name)
        say(f"this job starts over; its former checkpoints are now in {aside}")

    def _files(self) -> list[Path]:
        """Newest first. Raises OSError."""
        try:
            found = patiently(lambda: list(self.folder.iterdir()))
        except FileNotFoundError:
            return []
        names = (path for path in found if path.name.startswith("step-"))
        return sorted((path for path in names if path.suffix in (".pt", SHARDED)), reverse=True)


class _ChecksummingFile:
    """What torch.save writes to: counts bytes and computes the CRC-32 on the way.

    torch's zip writer turns an exception in the middle into one of its own, or aborts: so the first
    error is kept, the rest of the writes go nowhere, and `sync` raises it.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._error: OSError | None = None
        self.size = 0
        self.crc32 = 0

    def write(self, data: bytes) -> int:
        if self._error is None:
            try:
                self._file.write(data)
            except OSError as error:
                self._error = error
        self.crc32 = zlib.crc32(data, self.crc32)
        self.size += len(data)
        return len(data)

    def flush(self) -> None:
        """torch.save calls this; the real one is `sync`."""

    def sync(self) -> None:
        if self._error is not None:
            raise self._error
        self._file.flush()
        os.fsync(self._file.fileno())


def temporary_of(path: Path, pid: int) -> Path:
    """Under which name a process writes what is to become `path`."""
    return path.with_name(f".{path.name}.{os.uname().nodename}.{pid}.tmp")


def set_damaged_aside(path: Path) -> None:
    """Rename it: it must not count as a checkpoint any more, but its owner may know better."""
    aside = path.with_name(path.name + ".damaged")
    shutil.rmtree(aside, ignore_errors=True)  # a folder cannot be renamed over another one
    path.replace(aside)


def _delete(path: Path) -> None:
    if path.suffix == SHARDED:
        # Renamed first: what is left of it, if we die half-way, is known as litter.
        shutil.rmtree(path.replace(temporary_of(path, os.getpid())))
    else:
        path.unlink()
        path.with_suffix(".json").unlink()


def record_of(path: Path) -> Path:
    """The file that says how long a checkpoint is."""
    return path / RECORD if path.suffix == SHARDED else path.with_suffix(".json")


def damage(path: Path, *, quick: bool = False) -> str | None:
    """What is wrong with a checkpoint, or None; `quick` looks at lengths only, as always in sharded ones.

    A file system that answers nothing for a moment is waited for.
    """
    crc32 = None
    try:
        record = json.loads(patiently(record_of(path).read_bytes))
        if path.suffix == SHARDED:
            sizes = {path / name: int(size) for name, size in record["files"].items()}
        else:
            sizes, crc32 = {path: int(record["bytes"])}, int(record["crc32"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return "its checksum file is missing or unreadable"
    try:
        for file, size in sizes.items():
            if (found := patiently(file.stat).st_size) != size:
                return f"{found} bytes instead of {size}"
        if crc32 is not None and not quick and patiently(lambda: _crc32(path)) != crc32:
            return "its checksum does not match"
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    return None


def _in_use(temporary: Path) -> bool:
    """Whether somebody may still be writing it."""
    # .step-N.pt.HOST.PID.tmp, where HOST may have dots; a name without a host counts as of this one.
    writer, _, pid = temporary.name.removesuffix(".tmp").rpartition(".")
    host = ".".join(writer.split(".")[3:])
    if host in ("", os.uname().nodename):
        return _lives(pid)
    try:
        return time.time() - temporary.stat().st_mtime < LEFT_FOR_S
    except OSError:  # it is being given its name, or cleared away
        return True


def _lives(pid: str) -> bool:
    """Whether another process of ours on this host has this id."""
    try:
        os.kill(int(pid), 0)
    except (OSError, ValueError):
        return False
    return int(pid) != os.getpid()


def _crc32(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            value = zlib.crc32(block, value)
    return value


def first_line(error: Exception) -> str:
    """Of what an exception says."""
    return (str(error) or type(error).__name__).splitlines()[0]
