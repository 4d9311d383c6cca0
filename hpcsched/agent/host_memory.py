"""The main memory of this host that jobs may have: what there is, at most what a cgroup or Slurm allows."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from hpcsched.decoding import read_file
from hpcsched.errors import BadInput
from hpcsched.launch.cgroups import own_cgroup_v1, own_cgroups

_MOST_BYTES = 2**16

_GRANTED = (
    ("SLURM_MEM_PER_NODE", None),
    ("SLURM_MEM_PER_CPU", "SLURM_CPUS_ON_NODE"),
    ("SLURM_MEM_PER_GPU", "SLURM_GPUS_ON_NODE"),
)
"""Megabytes (0: all of the host's) that Slurm grants for each of so many; None: of one."""


def host_memory_mib(environ: Mapping[str, str] = os.environ, root: Path = Path("/")) -> float | None:
    """MiB of main memory for this process and what it starts; None where nobody says.

    The least of the machine's memory, the limits of our cgroups (v2 and v1), and what Slurm grants on a host.
    """
    limits = []
    if found := re.search(r"^MemTotal:\s+(\d{1,15}) kB$", _text(root / "proc/meminfo"), re.MULTILINE):
        limits.append(int(found[1]) / 1024)
    for folder in own_cgroups(root):
        said = _text(folder / "memory.max").strip()
        if re.fullmatch(r"[0-9]{1,20}", said):
            limits.append(int(said) / 2**20)
    v1 = own_cgroup_v1(root, "memory")
    stat = _text(v1 / "memory.stat") if v1 else ""
    if found := re.search(r"^hierarchical_memory_limit (\d{1,20})$", stat, re.MULTILINE):
        limits.append(int(found[1]) / 2**20)
    for each, of in _GRANTED:
        granted = _number(environ.get(each)) * (_number(environ.get(of)) if of else 1)
        limits += [float(granted)] if granted else []
    return min(limits, default=None)


def _number(text: str | None) -> int:
    return int(text) if text and re.fullmatch(r"[0-9]{1,12}", text) else 0


def _text(path: Path) -> str:
    try:
        return read_file(path, most_bytes=_MOST_BYTES).decode("ascii", "replace")
    except (OSError, BadInput):
        return ""
