"""The registry of the user's runs, a small file for each: for `status --all` on any host with this home."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from hpcsched.contract.codec import SMALL_BYTES
from hpcsched.decoding import decode_file
from hpcsched.errors import BadInput, StoreError
from hpcsched.store.files import write_atomically
from hpcsched.store.rundir import RunDir

FORGET_AFTER_S = 30 * 86400.0
"""Time that a run is kept whose file system is missing (chosen): it may not be mounted on this host."""


class RegisteredRun(msgspec.Struct, kw_only=True):
    """A run, its directory, and the Unix time at which it (or its newest life) was registered."""

    schema: int = 1
    id: str
    dir: str
    at: float


def folder(environ: Mapping[str, str] | None = None) -> Path:
    """The folder of the registry, in the user's state directory (XDG)."""
    env = os.environ if environ is None else environ
    state = env.get("XDG_STATE_HOME", "")
    base = (
        Path(state) if state.startswith("/") else Path(env.get("HOME") or "~").expanduser() / ".local/state"
    )
    return base / "hpcsched" / "runs"


def register(run_id: str, directory: Path, *, environ: Mapping[str, str] | None = None) -> str | None:
    """Register a run; returns None, or one line if that failed, which is no reason for the run to fail."""
    entry = RegisteredRun(id=run_id, dir=str(directory.absolute()), at=time.time())
    try:
        where = folder(environ)
        where.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(where / f"{run_id}.json", msgspec.json.encode(entry))
    except (OSError, StoreError, RuntimeError) as error:  # RuntimeError: a user without a home
        return f"`status --all` will not list this run: {error}"
    return None


def runs(*, environ: Mapping[str, str] | None = None) -> list[RegisteredRun]:
    """The user's runs that still exist, newest first; entries of removed ones are deleted."""
    found: dict[str, RegisteredRun] = {}
    try:
        files = list(folder(environ).glob("*.json"))
    except (OSError, RuntimeError):
        return []
    for path in files:
        try:
            entry = decode_file(path, RegisteredRun, most_bytes=SMALL_BYTES)
        except (OSError, BadInput):
            continue  # somebody else's, a newer version's, or just removed
        if not _there(entry):
            with contextlib.suppress(OSError):
                if _gone(entry):
                    path.unlink()
        elif entry.dir not in found or found[entry.dir].at < entry.at:
            found[entry.dir] = entry
    return sorted(found.values(), key=lambda entry: -entry.at)


def find(run_id: str, *, environ: Mapping[str, str] | None = None) -> RegisteredRun | None:
    """What is registered of a run; None: nothing."""
    try:
        return decode_file(folder(environ) / f"{run_id}.json", RegisteredRun, most_bytes=SMALL_BYTES)
    except (OSError, RuntimeError, BadInput):
        return None


def forget(run_id: str, *, environ: Mapping[str, str] | None = None) -> None:
    """Take a run out of the registry, if that can be done."""
    with contextlib.suppress(OSError, RuntimeError):
        (folder(environ) / f"{run_id}.json").unlink(missing_ok=True)


def _there(entry: RegisteredRun) -> bool:
    """Whether the run's directory is there, and no other run has taken it."""
    root = Path(entry.dir)
    record = RunDir(root).read_record()
    return root.is_dir() and (record is None or record.id == entry.id)


def _gone(entry: RegisteredRun) -> bool:
    """Whether a run that is not there was removed; else its filesystem may not be mounted on this host."""
    return Path(entry.dir).parent.is_dir() or time.time() - entry.at > FORGET_AFTER_S
