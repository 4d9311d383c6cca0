"""Schedules of faults over real runs: the command line, processes, disks and networks as they are."""

import sys
from pathlib import Path

_SUPPORT = str(Path(__file__).resolve().parents[2] / "support")
if _SUPPORT not in sys.path:  # as pytest has it from pyproject.toml
    sys.path.append(_SUPPORT)
