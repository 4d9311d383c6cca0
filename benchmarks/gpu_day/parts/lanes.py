"""Two trainings on one GPU: DeepPool's ladder, one call of lanes_gpu.py a network."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import ROOT

from gpu_day.found import Found
from gpu_day.timing import run_program

NETWORKS = (("vgg16", 2.0, 0.65), ("wrn101-2", 1.0, 0.5), ("inception-v3", 1.0, 1.0))
"""Each with the seconds of a measurement, and its part of the time that is left."""
SLOWDOWN, SHARE = 0.05, 0.40
LEAST_S = 20.0


def run(found: Found) -> None:
    """The most telling network first, with the most time."""
    for network, window_s, part in NETWORKS[:1] if found.cpu else NETWORKS:
        if found.left_s < LEAST_S:
            break
        with found.trying(network, "measured"):
            _ladder(found, network, window_s, (1.0 if found.cpu else part) * found.left_s - 5)


def _ladder(found: Found, network: str, window_s: float, within_s: float) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "lanes_gpu.py"), "--models", network]
    command += ["--budget-s", f"{within_s - 5:.0f}", "--window-s", f"{0.05 if found.cpu else window_s}"]
    with tempfile.TemporaryDirectory(prefix="gpu-day-") as folder:
        file = Path(folder) / "lanes.json"
        code: int | None = None
        try:
            words = ["--output", str(file), *(["--cpu"] if found.cpu else [])]
            code, _ = run_program([*command, *words], within_s=within_s)
        finally:
            if file.exists():
                _judge(found, network, json.loads(file.read_bytes())["outcomes"])
    found.check(f"{network}: lanes_gpu.py", "exit code 0", code, code == 0)


def _judge(found: Found, network: str, outcomes: list[dict[str, Any]]) -> None:
    found.number(**{network: outcomes})
    errors = [f"{one['stage']}: {one['error']}" for one in outcomes if one["error"]]
    late = [error for error in errors if "not reached in time" in error]
    wrong = [error for error in errors if error not in late]
    found.check(f"{network}: stages", "all work", "; ".join(wrong) or f"{len(late)} not reached", not wrong)
    facts: dict[str, Any] = next((one["facts"] for one in outcomes if one["stage"] == "correctness"), {})
    same = facts.get("same_bits_beside_a_background")
    found.check(f"{network}: foreground's bits beside a background", "the same", same, same is True)
    good = [one for one in outcomes if one["slowdown"] is not None and one["slowdown"] <= SLOWDOWN]
    best = max(good, key=lambda one: one["share"], default=None)
    said = "no stage keeps the foreground that fast"
    if best is not None:
        said = f"{best['stage']}: {best['slowdown']:+.1%}, {best['share']:.0%}"
    goal = f"foreground <= {SLOWDOWN:.0%} slower, background >= {SHARE:.0%}"
    found.speed(f"{network}: best stage", goal, said, best is not None and best["share"] >= SHARE)
