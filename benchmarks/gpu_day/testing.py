"""Tests of the repository as a part of a day: each one's outcome, also of those before a test that hangs."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from common import ROOT

from gpu_day.found import Found, Refused
from gpu_day.tell_tests import FILE
from gpu_day.timing import run_program

NEEDS_MORE = (
    "needs two GPUs",
    "fewer than two MIG instances",
    "no whole GPU",
    "no MPS here",
    "could not import",
)
"""Why a test may be skipped on a machine that has a GPU: not because it sees none."""
HANGS_AFTER_S = 60


def run_tests(
    found: Found,
    name: str,
    tests: Sequence[str],
    *,
    within_s: float,
    warnings: str = "default",
    judged: bool = True,
    env: Mapping[str, str] | None = None,
) -> None:
    """Run them by pytest and note what became of each; `judged`: a failure is one of the part.

    Raises Refused where there is no pytest.
    """
    if missing := [name for name in ("pytest", "hypothesis") if find_spec(name) is None]:
        raise Refused(f"there is no {' and no '.join(missing)} here")
    with tempfile.TemporaryDirectory(prefix="gpu-day-") as folder:
        lines = Path(folder) / "tests"
        lines.touch()
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "gpu_day.tell_tests"]
        command += ["-W", warnings, "-o", f"faulthandler_timeout={HANGS_AFTER_S}", f"--basetemp={folder}/tmp"]
        command += ["--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml")]
        command += [word if word.startswith("-") or "/" not in word else str(ROOT / word) for word in tests]
        code: int | None = None
        try:
            environ = {**os.environ, FILE: str(lines), **(env or {})}
            code, _ = run_program(command, within_s=within_s, env=environ)
        finally:
            _note(found, name, lines, code, judged)


def _note(found: Found, name: str, lines: Path, code: int | None, judged: bool) -> None:
    told = [json.loads(line) for line in lines.read_text().splitlines()]
    ended = [one for one in told if "outcome" in one]
    names = {one["test"] for one in ended}
    begun = [one["test"] for one in told if "began" in one and one["test"] not in names]
    counts = Counter(one["outcome"] for one in ended)
    found.number(**{f"{name}_tests": ended, f"{name}_counts": dict(counts), f"{name}_exit_code": code})
    wrong = [_short(one) for one in ended if one["outcome"] in ("failed", "error")]
    wrong += [f"{test}: did not end" for test in begun]
    # 5: all of them were skipped while they were collected, which is as it should be without a GPU only.
    good = code in ((0, 5) if found.cpu else (0,)) and not wrong
    judged = judged and not (found.cpu and good and not counts["passed"])  # none could run
    said = "; ".join(wrong) or (f"{counts['passed']} passed" if good else f"exit code {code}")
    found.check(f"{name}: tests", "all pass", said[:1500], good if judged else None)
    skipped = [one for one in ended if one["outcome"] == "skipped"]
    others = [_short(one) for one in skipped if not any(why in one["why"] for why in NEEDS_MORE)]
    if found.cpu:
        others = []
    said = "; ".join(others) or f"{len(skipped)} skipped"
    found.check(
        f"{name}: skipped", "only what this machine cannot do", said[:1500], not others if judged else None
    )


def _short(one: dict[str, Any]) -> str:
    first = (one["why"].strip().splitlines() or [""])[0]
    return f"{one['test'].rpartition('/')[2]}: {first[:200]}"
