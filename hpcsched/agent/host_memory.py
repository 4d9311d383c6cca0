"""The main memory of this host that jobs may have: what there is, at most what a cgroup or Slurm allows."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from hpcsched.decoding import read_file
from hpcsched.errors import BadInput
from hpcsched.launch.cgroups import own_cgroups

_MOST_BYTES = 2**16


def host_memory_mib(environ: Mapping[str, str] = os.environ, root: Path = Path("/")) -> float | None:
    """MiB of main memory for this process and what it starts; None where nobody says.

    The least of the machine's memory, the limits (memory.max) of our cgroups, and SLURM_MEM_PER_NODE.
    """
    limits = []
    if found := re.search(r"^MemTotal:\s+(\d{1,15}) kB$", _text(root / "proc/meminfo"), re.MULTILINE):
        limits.append(int(found[1]) / 1024)
    for folder in own_cgroups(root):
        said = _text(folder / "memory.max").strip()
        if re.fullmatch(r"[0-9]{1,20}", said):
            limits.append(int(said) / 2**20)
    granted = environ.get("SLURM_MEM_PER_NODE", "")
    if re.fullmatch(r"[0-9]{1,12}", granted) and int(granted):  # in megabytes; 0: all of the host's
        limits.append(float(granted))
    return min(limits, default=None)


def _text(path: Path) -> str:
    try:
        return read_file(path, most_bytes=_MOST_BYTES).decode("ascii", "replace")
    except (OSError, BadInput):
        return ""
