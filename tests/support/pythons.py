"""Which other Pythons tests can use: those in PATH, those of pyenv, and those that somebody names."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

TRIED = range(9, 15)
NAMED = "HPCSCHED_TEST_PYTHONS"
"""Interpreters with torch, separated by colons: `make old-env` makes the oldest and says how to name it."""


def oldest() -> Path | None:
    """The oldest of Python 3.9 and later that is here and runs (a shim may lead nowhere)."""
    root = os.environ.get("PYENV_ROOT", str(Path("~/.pyenv").expanduser()))
    for minor in TRIED:
        found = shutil.which(f"python3.{minor}")
        others = sorted(Path(root, "versions").glob(f"3.{minor}.*/bin/python"))
        for path in [*([Path(found)] if found else []), *others]:
            if (
                subprocess.run([path, "-c", "import ensurepip"], capture_output=True, timeout=60).returncode
                == 0
            ):
                return path
    return None


def named() -> list[Path]:
    return [Path(word) for word in os.environ.get(NAMED, "").split(":") if word]
