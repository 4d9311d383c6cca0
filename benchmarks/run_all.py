"""Runs every benchmark, prints one Markdown table, writes all samples to benchmarks/results/.

    python benchmarks/run_all.py [--json] [--quick] [--only NAME]... [--output FILE]

Each runs in a process of its own, one after the other. Takes long; keep the machine quiet.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

from common import ROOT, Row, table

HERE = Path(__file__).parent
DEADLINES_S = {
    "marble_tables": 120,
    "replay_vs_simulate": 400,
    "decisions": 300,
    "monitoring": 120,
    "idle_agent": 120,
    "growth": 1800,
    "throughput": 900,
    "latency": 300,
    "hosts": 300,
    "resume_equality": 600,
    "resize": 1200,
    "suspend": 600,
    "marble_torch": 1200,
    "plans": 300,
    "burst_plans": 120,
    "burst_cluster": 900,
    "burst_executor": 900,
    "pack_plans": 600,
    "pack_steps": 1800,
    "packed_hyperband": 1800,
    "adapters": 1800,
    "vsw_plans": 300,
    "vsw_forecast": 1800,
    "vsw_cluster": 900,
    "vsw_steps": 900,
    "vsw_training": 900,
    "cpu_shares": 600,
    "sharing": 1800,
    "ps_live": 1800,
    "ps_simulated": 900,
    "simulator_scale": 900,
    "policies": 900,
    "strategies": 1800,
}
"""The benchmarks, in order, and the longest each may take."""

LIBRARIES = ("hpcsched", "click", "msgspec", "psutil", "rich", "SQLAlchemy", "nvidia-ml-py", "torch", "numpy")
QUIET = 0.5
"""A load average above this makes numbers doubtful."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Run all benchmarks.")
    parser.add_argument("--json", action="store_true", help="print everything as JSON instead of the table")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that it works, not how fast")
    parser.add_argument("--only", action="append", choices=list(DEADLINES_S), metavar="NAME", default=[])
    parser.add_argument("--output", type=Path, metavar="FILE", help="where to write the samples")
    options = parser.parse_args()
    page: dict[str, Any] = {
        "schema": 1,
        "quick": options.quick,
        "machine": machine(),
        "results": {},
        "rows": [],
    }
    failed = []
    for name in options.only or DEADLINES_S:
        print(f"{name} ...", file=sys.stderr, flush=True)
        try:
            found = _run(name, quick=options.quick)
        except (RuntimeError, ValueError, KeyError) as error:
            failed.append(name)
            page["rows"].append({"what": f"`{name}.py`", "goal": "", "measured": "failed", "ok": False})
            print(f"{name}: {error}", file=sys.stderr)
            continue
        page["results"][name] = found["results"]
        page["rows"] += found["rows"]
    output = options.output
    if output is None and not options.quick:
        output = HERE / "results" / f"{page['machine']['date'][:10]}-{_slug(page['machine'])}.json"
    if output:
        keep(page, output)
    if options.json:
        print(json.dumps(page))
    else:
        print(headline(page["machine"]) + "\n\n" + table([Row(**row) for row in page["rows"]]))
    return int(bool(failed))


def keep(page: dict[str, Any], output: Path) -> None:
    """Write all samples to a file, and say where."""
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(page) + "\n")
    print(f"samples in {output}", file=sys.stderr)


def _run(name: str, *, quick: bool) -> dict[str, Any]:
    command = [sys.executable, str(HERE / f"{name}.py"), "--json", *(["--quick"] if quick else [])]
    with tempfile.TemporaryFile() as output, subprocess.Popen(command, stdout=output, cwd=ROOT) as child:
        try:
            code = child.wait(DEADLINES_S[name])
        except subprocess.TimeoutExpired:
            child.terminate()
            try:
                child.wait(15)
            except subprocess.TimeoutExpired:
                child.kill()
            raise RuntimeError(f"not done after {DEADLINES_S[name]} s") from None
        if code:
            raise RuntimeError(f"exit code {code}")
        output.seek(0)
        page: dict[str, Any] = json.loads(output.read())
        return page


def machine() -> dict[str, Any]:
    """Where and with what this was measured."""
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
        "commit": _commit(),
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


def _slug(about: dict[str, Any]) -> str:
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


if __name__ == "__main__":
    sys.exit(main())
