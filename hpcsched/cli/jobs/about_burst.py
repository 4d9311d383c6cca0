"""By which plan a burst job trains, in words: what its alternatives take, predicted and measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hpcsched.contract import files
from hpcsched.core.jobs import Job
from hpcsched.store.rundir import RunDir


def as_it_is(rundir: RunDir, job: Job) -> list[str]:
    """Which plan is kept, and what a step takes by each, as the job has written it; nothing for others."""
    if job.spec.strategy["kind"] != "burst":
        return []
    try:
        page = json.loads((rundir.job(job.id) / files.PLAN).read_bytes())
        compared = [_words(each) for each in page.get("compared", ())]
    except (OSError, ValueError, RecursionError, AttributeError, KeyError, TypeError):
        return []  # not written yet
    if not compared:
        return []
    return [f"trains by: {page.get('kept')}, the fastest as measured", *compared]


def _words(found: Mapping[str, Any]) -> str:
    name, predicted = found["name"], f"predicted {found['predicted_s'] * 1e3:.3g} ms"
    if found.get("refused"):
        return f"{name}: not tried, {found['refused']} ({predicted})"
    if found.get("measured_s") is None:
        return f"{name}: not tried ({predicted})"
    return f"{name}: {found['measured_s'] * 1e3:.3g} ms a step ({predicted})"
