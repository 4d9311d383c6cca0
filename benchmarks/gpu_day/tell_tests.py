"""A plugin of pytest (`-p gpu_day.tell_tests`): a line of JSON for each test as soon as it has ended.

In the file that GPU_DAY_TESTS names: pytest itself writes a report at its end only, which may not come.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest  # who runs the tests imports this module too, where pytest may be missing

FILE = "GPU_DAY_TESTS"


def pytest_runtest_logstart(nodeid: str) -> None:
    _tell({"test": nodeid, "began": time.time()})


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        outcome = report.outcome if report.when == "call" or report.outcome == "skipped" else "error"
        why = ""
        if report.skipped and isinstance(report.longrepr, tuple):
            why = str(report.longrepr[2])
        elif report.failed:
            why = str(getattr(getattr(report.longrepr, "reprcrash", None), "message", report.longrepr))
        _tell({"test": report.nodeid, "outcome": outcome, "s": round(report.duration, 3), "why": why[:500]})


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.outcome != "passed":
        why = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)[-500:]
        outcome = "error" if report.failed else "skipped"
        _tell({"test": report.nodeid, "outcome": outcome, "s": 0.0, "why": why})


def _tell(line: dict[str, object]) -> None:
    with Path(os.environ[FILE]).open("a") as file:
        file.write(json.dumps(line) + "\n")
