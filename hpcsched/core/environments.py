"""The Python environments that jobs name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonEnvironment:
    """The Python environment that a job names: by its interpreter, or as a virtual or a conda environment.

    `name` is a path, or (`python`, `conda`) a name that is looked up where the job starts.
    """

    kind: Literal["python", "venv", "conda"]
    name: str
