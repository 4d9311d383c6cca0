"""By which plan a burst job trains, in words: what its alternatives take, predicted and measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hpcsched.contract import files
from hpcsched.core.jobs import Job
from hpcsched.store.rundir import RunDir


def compared(rundir: RunDir, job: Job) -> dict[str, Any] | None:
    """The plans that the job has compared and which it has kept, as it has written it; None: no such job, or
    nothing yet."""
    if job.spec.strategy["kind"] != "burst":
        return None
    try:
        page = json.loads((rundir.job(job.id) / files.PLAN).read_bytes())
        found = {"kept": page["kept"], "compared": page["compared"]}
        as_it_is(found)
    except (OSError, ValueError, RecursionError, AttributeError, KeyError, TypeError):
        return None
    return found


def as_it_is(found: Mapping[str, Any] | None) -> list[str]:
    """Which plan a job trains by, and what a step takes by each, from what `compared` gave."""
    if found is None:
        return []
    plans = [_words(each) for each in found["compared"]]
    return [f"trains by: {found['kept']}, the fastest as measured", *plans]


def _words(found: Mapping[str, Any]) -> str:
    name, predicted = found["name"], f"predicted {found['predicted_s'] * 1e3:.3g} ms"
    if found.get("refused"):
        return f"{name}: not tried, {found['refused']} ({predicted})"
    if found.get("measured_s") is None:
        return f"{name}: not tried ({predicted})"
    return f"{name}: {found['measured_s'] * 1e3:.3g} ms a step ({predicted})"
