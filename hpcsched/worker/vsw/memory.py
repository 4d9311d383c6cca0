"""What was too large for a device's memory, kept where the next attempt finds it."""

from __future__ import annotations

import json
from pathlib import Path

from hpcsched.worker.process.contract import say, write_atomically
from hpcsched.worker.vsw.clock import Kind

NAME = "too-large.json"


def remembered(folder: Path) -> set[Kind]:
    """The kinds of rounds for which some device of this job had too little memory."""
    try:
        return {(int(local), int(count)) for local, count in json.loads((folder / NAME).read_bytes())}
    except FileNotFoundError:
        return set()
    except (OSError, ValueError, TypeError) as error:
        say(f"{folder / NAME} cannot be read, and counts for nothing: {error}")
        return set()


def remember(folder: Path, kind: Kind) -> None:
    """Add one; where that cannot be written the next attempt finds out by itself."""
    kinds = sorted(remembered(folder) | {kind})
    try:
        write_atomically(folder / NAME, json.dumps(kinds).encode() + b"\n")
    except OSError as error:
        say(f"{folder / NAME} cannot be written: {error.strerror}")
