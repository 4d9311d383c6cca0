"""What suspending and resuming costs by size of the state: benchmarks/suspend.py."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import ROOT

from gpu_day.found import Found, Refused
from gpu_day.timing import run_program


def run(found: Found) -> None:
    """Its rows are checks, its samples are numbers."""
    program = ROOT / "benchmarks" / "suspend.py"
    if not program.exists():
        raise Refused("there is no benchmarks/suspend.py")
    command = [
        sys.executable,
        str(program),
        *(["--quick"] if found.cpu else ["--cuda", "--gigabytes", "1,4,10"]),
    ]
    with tempfile.TemporaryDirectory(prefix="gpu-day-") as folder:
        file = Path(folder) / "suspend.json"
        command += ["--budget-s", f"{max(5.0, found.left_s - 10):.0f}", "--json", str(file)]
        code: int | None = None
        try:
            code, _ = run_program(command, within_s=found.left_s - 2)
        finally:
            note_page(found, file, judged=not found.cpu)
    found.check("benchmarks/suspend.py", "exit code 0", code, code == 0)


def note_page(found: Found, file: Path, *, judged: bool = True) -> dict[str, Any]:
    """What a benchmark has written: its samples as numbers, its lines as checks, `judged` or not."""
    try:
        page: dict[str, Any] = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}
    found.number(**page.get("results", {key: page[key] for key in page if key != "rows"}))
    for row in page.get("rows", ()):
        found.check(row["what"], row["goal"], row["measured"], row["ok"] if judged else None)
    return page
