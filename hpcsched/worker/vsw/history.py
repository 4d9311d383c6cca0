"""How a training's batches went: a line of JSON for each decision, for people to look at."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from hpcsched.worker.process.contract import private, say

NAME = "batches.jsonl"


class History:
    """Writes lines to a file beside a job's record; where that cannot be done the training goes on.

    What was lost in a crash stays in there: a later line with an earlier step takes its place.
    """

    def __init__(self, folder: Path | None) -> None:
        self._path = folder / NAME if folder else None

    def add(self, facts: dict[str, Any]) -> None:
        """Add a line."""
        if self._path is None:
            return
        line = json.dumps({"t": round(time.time(), 3), **facts}).encode() + b"\n"
        try:
            descriptor = private(str(self._path), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            try:
                os.write(descriptor, line)
            finally:
                os.close(descriptor)
        except OSError as error:
            say(f"{self._path} cannot be written: {error.strerror}")
            self._path = None
