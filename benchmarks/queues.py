"""What else waits in a batch system's queue, for `gains.py`: a trace, and a queue that is drawn by a seed.

The trace has no time limits. People ask for more than they need, and for round numbers: `LIMITS` has a model
of that, and two others to see how much hangs on it.
"""

from __future__ import annotations

import csv
import gzip
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

from hpcsched.allocations.cluster import BatchJob, Cluster

TRACE = Path(__file__).with_name("data") / "philly-4-clusters.csv.gz"
HOUR = 3600.0
DAY = 24 * HOUR
WEEKS_S = 28 * DAY
GPUS = 4
"""GPUs of a node: as many HPC systems have."""
ROUND_S = tuple(hours * HOUR for hours in (0.5, 1, 2, 4, 8, 12, 24, 48, 72, 168))
"""The limits that people write down."""


def round_up(seconds: float) -> float:
    return next((limit for limit in ROUND_S if limit >= seconds), math.ceil(seconds / DAY) * DAY)


def _rounded(draw: Random, runs_s: float) -> float:
    return round_up(runs_s * 5 ** draw.random())


def _tight(draw: Random, runs_s: float) -> float:
    return math.ceil(runs_s * 1.2 / 600) * 600.0


def _a_day(draw: Random, runs_s: float) -> float:
    return max(DAY, math.ceil(runs_s / DAY) * DAY)


LIMITS = {"rounded": _rounded, "tight": _tight, "a day": _a_day}
"""`rounded`: 1 to 5 times what is needed (log-uniform), rounded up to half an hour, 1, 2, 4, 8, 12 hours,
1, 2, 3, 7 days. `tight`: a fifth more. `a day`: all ask for a day, or as many as they need."""

Raw = tuple[float, float, int]
"""Seconds of coming and of running, and GPUs."""


def philly(clusters: Sequence[str]) -> list[Raw]:
    """Jobs of these virtual clusters of the trace."""
    with gzip.open(TRACE, "rt", newline="") as file:
        return [
            (float(row["submit_s"]), float(row["duration_s"]), int(row["gpus"]))
            for row in csv.DictReader(file)
            if row["vc"] in clusters
        ]


def drawn(seed: int, count: int = 8000) -> list[Raw]:
    """Four weeks, made up: nights and weekends are quiet, most jobs small, a few long and wide."""
    draw = Random(seed)
    jobs = []
    while len(jobs) < count:
        at = draw.uniform(0, WEEKS_S)
        day, hour = int(at / DAY) % 7, at / HOUR % 24
        busy = (0.4 if day >= 5 else 1.0) * (1.0 if 8 <= hour < 20 else 0.35)
        if draw.random() > busy:
            continue
        gpus = draw.choices((1, 2, 4, 8, 16), (70, 10, 14, 4, 2))[0]
        jobs.append((at, min(4 * DAY, max(60.0, draw.lognormvariate(math.log(1.2 * HOUR), 1.6))), gpus))
    return sorted(jobs)


SOURCES: dict[str, Callable[[], list[Raw]]] = {
    "Philly, one cluster": lambda: philly(["6c71a0"]),
    "Philly, four clusters": lambda: philly(["6c71a0", "0e4a51", "ee9e8c", "7f04ca"]),
    "drawn": lambda: drawn(1),
}


def background(source: str, load: float, limits: str = "rounded") -> tuple[Cluster, list[BatchJob]]:
    """A cluster that the jobs keep so busy (0..1 of all GPU-hours of the four weeks), and the jobs."""
    draw, raw = Random(1), SOURCES[source]()
    cluster = Cluster(nodes=nodes_for(raw, load), gpus=GPUS, shards=2)
    jobs = []
    for number, (at, runs_s, gpus) in enumerate(raw):
        nodes = -(-gpus // GPUS)
        limit_s = LIMITS[limits](draw, runs_s)
        if nodes <= cluster.nodes:
            jobs.append(
                BatchJob(
                    name=f"other{number}", submit_s=at, limit_s=limit_s, runs_s=runs_s,
                    gpus=-(-gpus // nodes), nodes=nodes, user="others",
                )
            )  # fmt: skip
    return cluster, jobs


def nodes_for(raw: Sequence[Raw], load: float) -> int:
    work = sum(runs_s * gpus for _, runs_s, gpus in raw)
    return max(8, round(work / WEEKS_S / load / GPUS))
