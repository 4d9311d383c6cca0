"""Where, with what and on which commit benchmarks were run: all results carry it."""

from __future__ import annotations

import datetime
import os
import platform
import re
import subprocess
import tempfile
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

LIBRARIES = ("hpcsched", "click", "msgspec", "psutil", "rich", "SQLAlchemy", "nvidia-ml-py", "torch", "numpy")
QUIET = 0.5
"""A load average above this makes numbers doubtful."""


@cache
def machine() -> dict[str, Any]:
    """Where and with what this was measured; as it was when that was asked for first."""
    cpu = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    memory = re.search(r"^MemTotal:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": cpu[1] if cpu else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_mib": int(memory[1]) // 1024 if memory else None,
        "gpus": _gpus(),
        "kernel": platform.release(),
        "temporary_folder": _filesystem(tempfile.gettempdir()),
        "load_before": os.getloadavg()[0],
        "python": platform.python_version(),
        "libraries": {name: _version(name) for name in LIBRARIES},
        "commit": (commit := _commit()),
        "dirty": None if commit is None else commit.endswith("-dirty"),
    }


def headline(about: dict[str, Any]) -> str:
    """One paragraph on where the numbers come from."""
    gpus = ", ".join(about["gpus"]) or "no GPU"
    libraries = ", ".join(f"{name} {version}" for name, version in about["libraries"].items() if version)
    text = (
        f"Measured {about['date'][:10]} on {about['cores']} cores of {about['cpu']}, "
        f"{about['memory_mib'] // 1024} GiB, {gpus}; Linux {about['kernel']}, run directories on "
        f"{about['temporary_folder']}; Python {about['python']}, {libraries}; "
        f"commit {about['commit'] or 'unknown'}."
    )
    if about["load_before"] > QUIET:
        text += f"\n\n**The machine was not quiet: load {about['load_before']:.2f} at the start.**"
    return text


def slug(about: dict[str, Any]) -> str:
    """The kind of host, for a file name: its GPUs if it has any, else its CPU."""
    gpus = about["gpus"]
    kind = f"{len(gpus)}x-{gpus[0]}" if gpus else f"{about['cores']}x-{about['cpu']}"
    return re.sub(r"[^a-z0-9]+", "-", kind.lower()).strip("-")


def _gpus() -> list[str]:
    from hpcsched.devices.nvml import NvmlDevices

    devices = NvmlDevices("here")
    names = [device.kind for device in devices.inventory()]
    devices.close()
    return names


def _filesystem(folder: str) -> str:
    """The type of the filesystem that holds a folder: an fsync costs nothing on tmpfs."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    holding = [m for m in mounts if f"{folder}/".startswith(f"{m[1].rstrip('/')}/")]
    return max(holding, key=lambda m: len(m[1]))[2] if holding else "unknown"


def _version(library: str) -> str | None:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
