"""The user's runs, one small file for each: `status --all` finds them from any host with this home."""

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
"""How long a run is kept whose whole filesystem is not there: on this host it may just not be mounted."""


class Registered(msgspec.Struct, kw_only=True):
    """A run, where it lies, and since when it (or its newest life) is known: Unix time."""

    schema: int = 1
    id: str
    dir: str
    at: float


def folder(environ: Mapping[str, str] | None = None) -> Path:
    """Where the files lie: in the user's state directory (XDG)."""
    env = os.environ if environ is None else environ
    state = env.get("XDG_STATE_HOME", "")
    base = (
        Path(state) if state.startswith("/") else Path(env.get("HOME") or "~").expanduser() / ".local/state"
    )
    return base / "hpcsched" / "runs"


def register(run_id: str, directory: Path, *, environ: Mapping[str, str] | None = None) -> str | None:
    """Remember a run; None, or one line on why that did not work: no reason for the run to fail."""
    entry = Registered(id=run_id, dir=str(directory.absolute()), at=time.time())
    try:
        where = folder(environ)
        where.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(where / f"{run_id}.json", msgspec.json.encode(entry))
    except (OSError, StoreError, RuntimeError) as error:  # RuntimeError: a user without a home
        return f"`status --all` will not list this run: {error}"
    return None


def runs(*, environ: Mapping[str, str] | None = None) -> list[Registered]:
    """The user's runs that are still there, newest first; forgets those that have been removed."""
    found: dict[str, Registered] = {}
    try:
        files = list(folder(environ).glob("*.json"))
    except (OSError, RuntimeError):
        return []
    for path in files:
        try:
            entry = decode_file(path, Registered, most_bytes=SMALL_BYTES)
        except (OSError, BadInput):
            continue  # somebody else's, a newer version's, or just removed
        if not _there(entry):
            with contextlib.suppress(OSError):
                if _gone(entry):
                    path.unlink()
        elif entry.dir not in found or found[entry.dir].at < entry.at:
            found[entry.dir] = entry
    return sorted(found.values(), key=lambda entry: -entry.at)


def _there(entry: Registered) -> bool:
    """Whether the run's directory is there, and no other run has taken it."""
    root = Path(entry.dir)
    record = RunDir(root).read_record()
    return root.is_dir() and (record is None or record.id == entry.id)


def _gone(entry: Registered) -> bool:
    """Whether a run that is not there was removed; else its filesystem may not be mounted on this host."""
    return Path(entry.dir).parent.is_dir() or time.time() - entry.at > FORGET_AFTER_S
