"""A job set under two policies, GPU by GPU: what a queue in one allocation gains."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from svg import Picture

from hpcsched import jobfile
from hpcsched.cli.run.results import simulated
from hpcsched.report.drawing import PALETTE
from hpcsched.report.result import Result
from hpcsched.store.profiles import load_profiles

ROOT = Path(__file__).resolve().parents[2]
JOBS = "jobscripts/marble/set2.toml"
PROFILES = "profiles/marble-summit.json"
GPUS = 6
POLICIES = {
    "exclusive": "one training after the other, each on all GPUs",
    "marble": "by measured scalability",
}

_LEFT, _WIDTH, _ROW, _ABOVE = 60, 720, 18, 44


def picture() -> str:
    """The second job set of the MARBLE paper on its 6 GPUs, simulated from the paper's figures."""
    results = [_simulated(policy) for policy in POLICIES]
    span_s = max(result.makespan_s for result in results)
    height = len(results) * (_ABOVE + GPUS * _ROW) + 20
    drawn = Picture("A job set under two policies", _LEFT + _WIDTH + 20, height)
    top = 0
    for result, words in zip(results, POLICIES.values(), strict=True):
        top += _ABOVE
        title = f"{result.policy}: {words}; all done after {result.makespan_s:.0f} s"
        drawn.text(_LEFT, top - 12, title, size=13, bold=True, anchor="start")
        for gpu in range(GPUS):
            drawn.text(_LEFT - 8, top + gpu * _ROW + 13, f"GPU {gpu}", size=10, anchor="end")
        _draw(drawn, result, top, _WIDTH / span_s)
        top += GPUS * _ROW
    return str(drawn)


def _simulated(policy: str) -> Result:
    jobs = jobfile.load(ROOT / JOBS, workdir=ROOT).jobs
    return simulated(jobs, load_profiles(ROOT / PROFILES), gpus=GPUS, policy=policy, options={})


def _draw(drawn: Picture, result: Result, top: int, per_s: float) -> None:
    for job, colour in zip(result.jobs, PALETTE, strict=False):
        for attempt in job.attempts:
            if attempt.end_s is None or any(b != a + 1 for a, b in pairwise(attempt.gpus)):
                raise SystemExit(f"{JOBS}: job {job.name} cannot be drawn as one box")
            x, width = _LEFT + attempt.start_s * per_s, (attempt.end_s - attempt.start_s) * per_s
            y, height = top + attempt.gpus[0] * _ROW, len(attempt.gpus) * _ROW
            drawn.box(x, y, width, height, colour)
            drawn.text(x + width / 2, y + height / 2 + 4, job.name)
