"""What hpcsched gains, waiting included: from `sbatch` to the last result, and GPU-hours charged (simulated).

    python benchmarks/gains.py [--quick] [--moments 20] [--output FILE [--go-on]] [--tables FILE]

Sets of trainings (`gains_ways.py`) come into a queue (`queues.py`) at many moments of four weeks. Each way to
have them done is tried at each of these moments: an `sbatch` each, arrays, shards, blocks with hpcsched. The
queue is `hpcsched.allocations.backfill`, held against a real Slurm by `queue_check.py`; hpcsched's simulator
tells what happens in a block. The same numbers on each machine. About half an hour on two cores.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import Pool
from pathlib import Path
from typing import Any

from common import percentile
from gains_ways import ME, SETS, Block, Set, Way, blocks, each
from machine import machine
from queues import DAY, HOUR, SOURCES, background

from hpcsched.allocations.backfill import Queue, Settings

HERE = Path(__file__).parent
LOADS = {
    "Philly, one cluster": (0.5, 0.65, 0.8),
    "Philly, four clusters": (0.8, 0.9),
    "drawn": (0.65, 0.8),
}
"""Shares of all GPU-hours that others' jobs ask for: nearly no waiting, some, much."""
FIRST_DAY, LAST_DAY = 3.0, 22.0
CAP = 8
"""GPUs that one user may have at a time, where a table does not say otherwise."""
ONE = ("Philly, one cluster", 0.65)
"""Where the assumptions are changed one by one."""
HEAD = ("how", "first start", "mean time to a result", "last result", "GPU-hours")


@dataclass(frozen=True)
class Scene:
    """A queue: whose jobs, how busy, how they write limits, and the cap on my GPUs (0: none)."""

    source: str
    load: float
    limits: str = "rounded"
    cap: int = CAP

    @property
    def key(self) -> str:
        more = f", limits: {self.limits}" * (self.limits != "rounded")
        cap = "" if self.cap == CAP else f", cap {self.cap}" if self.cap else ", no cap"
        return f"{self.source}, load {self.load:g}{more}{cap}"


@dataclass
class Samples:
    """Of one way in one scene, in hours: one number for each moment."""

    first_start: list[float] = field(default_factory=list)
    mean_result: list[float] = field(default_factory=list)
    last_result: list[float] = field(default_factory=list)
    gpu_hours: list[float] = field(default_factory=list)

    def add(self, queue: Queue, way: Way, came_s: float) -> None:
        ran = [queue.ran[job.name] for job in way.all_jobs]
        ends = [queue.ran[name].start_s + into_s - came_s for name, into_s in way.results]
        self.first_start.append((min(one.start_s for one in ran) - came_s) / HOUR)
        self.mean_result.append(sum(ends) / len(ends) / HOUR)
        self.last_result.append(max(ends) / HOUR)
        charged = sum(queue.cluster.gpus_of(one.job) * (one.end_s - one.start_s) for one in ran)
        self.gpu_hours.append(charged / HOUR)


def ways_of(trainings: Set) -> list[Way]:
    """What is compared in every scene."""
    found = [each(trainings), each(trainings, "array"), each(trainings, "array %4")]
    found += [each(trainings, "shard")] if trainings.shared else [each(trainings, "best")]
    asked = [
        Block(4), Block(4, policy="marble"), Block(4, hours=24), Block(4, nodes=2), Block(4, count=2),
        Block(1, count=4), Block(1, count=8), Block(1, count=8, hours=1),
    ]  # fmt: skip
    if trainings.shared:
        asked += [Block(4, shared=True), Block(1, count=8, shared=True)]
    return [*found, *(blocks(trainings, block) for block in asked)]


def limits_of(trainings: Set) -> list[Way]:
    """The same block with other time limits."""
    return [blocks(trainings, Block(4, hours=hours)) for hours in (1, 2, 4, 8, 24)]


def few_of(trainings: Set) -> list[Way]:
    """What is compared where an assumption is changed."""
    return [
        each(trainings),
        *(
            blocks(trainings, block)
            for block in (Block(4), Block(4, nodes=2), Block(1, count=4), Block(1, count=8))
        ),
    ]


KINDS: dict[str, Callable[[Set], list[Way]]] = {"all": ways_of, "limits": limits_of, "few": few_of}
Task = tuple[Scene, str, str, tuple[float, ...]]


def allowed(way: Way, cap: int) -> bool:
    """Whether no batch job of it is larger than the cap: it would wait for ever."""
    return not cap or all(job.gpus * job.nodes <= cap for job in way.all_jobs)


def play(task: Task) -> tuple[Task, dict[str, Samples], float]:
    """One set, each way at each moment, in one scene."""
    scene, which, kind, moments = task
    begun = time.process_time()
    cluster, others = background(scene.source, scene.load, scene.limits)
    queue = Queue(cluster)
    queue.submit(*others)
    ways = [way for way in KINDS[kind](SETS[which]()) if allowed(way, scene.cap)]
    found = {way.name: Samples() for way in ways}
    for moment_s in moments:
        queue.run(until=moment_s)
        for way in ways:
            tried = queue.copy()
            tried.settings = replace(Settings(), gpus_per_user=scene.cap, capped=frozenset({ME}))
            tried.submit(*(replace(job, submit_s=moment_s) for job in way.jobs))
            tried.run(done=[job.name for job in way.all_jobs])
            found[way.name].add(tried, way, moment_s)
    return task, found, time.process_time() - begun


def tasks(count: int, quick: bool) -> list[Task]:
    apart = (LAST_DAY - FIRST_DAY) * DAY / count
    # Not a whole number of days apart, so that each hour of the day comes.
    moments = tuple(FIRST_DAY * DAY + n * apart for n in range(count))
    scenes = [Scene(source, load) for source in SOURCES for load in LOADS[source]]
    if quick:
        return [(Scene("drawn", 0.65), which, "few", moments) for which in SETS]
    changed = [
        Scene(*ONE, limits="tight"),
        Scene(*ONE, limits="a day"),
        Scene(*ONE, cap=0),
        Scene(*ONE, cap=4),
    ]
    found = [(scene, which, "all", moments) for scene in scenes for which in SETS]
    found += [(scene, which, "few", moments) for scene in changed for which in SETS]
    found += [
        (Scene(source, LOADS[source][1]), which, "limits", moments) for source in SOURCES for which in SETS
    ]
    return sorted(found, key=lambda task: task[0].load)


# --- tables -----------------------------------------------------------------------------------------

ByWay = dict[str, dict[str, list[float]]]
"""Of one set in one scene: by way and by what is measured, hours for each moment."""
PLAIN, SHORT = (
    "an `sbatch` each, 1 GPU",
    {"all": "", "few": " where an assumption is changed", "limits": " by time limit"},
)


def key_of(task: Task) -> str:
    """What a task's samples stand under."""
    scene, which, kind, _ = task
    return f"{which}; {scene.key}; {kind}"


def words(samples: dict[str, list[float]], plain: dict[str, list[float]] | None) -> list[str]:
    """A line of a table: medians, and quartiles of the last result."""
    quarter, half, three = (percentile(samples["last_result"], share) for share in (0.25, 0.5, 0.75))
    line = [
        f"{percentile(samples['first_start'], 0.5):.1f} h",
        f"{percentile(samples['mean_result'], 0.5):.1f} h",
        f"{half:.1f} h ({quarter:.1f}-{three:.1f})",
        f"{percentile(samples['gpu_hours'], 0.5):.0f}",
    ]
    if plain is not None:
        pairs = list(zip(samples["last_result"], plain["last_result"], strict=True))
        line.append(f"{sum(mine < theirs for mine, theirs in pairs)} of {len(pairs)}")
    return line


def tables(samples: dict[str, ByWay]) -> dict[str, dict[str, Any]]:
    """By name, the tables that the pages show."""
    made: dict[str, dict[str, Any]] = {}
    order = [key_of(task) for quick in (False, True) for task in tasks(1, quick)]
    samples = {key: samples[key] for key in sorted(samples, key=order.index)}
    for key, by_way in samples.items():
        which, scene, kind = key.split("; ")
        plain = by_way.get(PLAIN)
        head = [*HEAD, "sooner done than an `sbatch` each"] if plain else list(HEAD)
        rows = [[way, *words(hours, plain)] for way, hours in by_way.items()]
        made[f"{SETS[which]().name}, {scene}{SHORT[kind]}"] = {"head": head, "rows": rows}
    for which in SETS:
        for kind in KINDS:
            made |= {
                f"{SETS[which]().name}{SHORT[kind]}, {what}": table
                for what, table in summary(samples, which, kind)
            }
    return made


def short(scene: str) -> str:
    """A scene's name for the head of a wide table."""
    if kind := re.search("limits: .*|cap .*|no cap", scene):
        return kind[0]
    words = {"Philly, one cluster": "Philly 1", "Philly, four clusters": "Philly 4", "drawn": "drawn"}
    source, load = scene.split(", load ")
    return f"{words[source]}, {load}"


def summary(samples: dict[str, ByWay], which: str, kind: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Over all scenes of a set: medians of one measure, a line for each way."""
    scenes = {
        short(key.split("; ")[1]): by_way
        for key, by_way in samples.items()
        if key.split("; ")[::2] == [which, kind]
    }
    if not scenes:
        return
    for what in ("last_result", "mean_result", "gpu_hours"):
        unit = "" if what == "gpu_hours" else " h"
        digits = 0 if what == "gpu_hours" else 1
        ways = dict.fromkeys(way for by_way in scenes.values() for way in by_way)
        rows = [
            [way, *(told(by_way.get(way, {}).get(what, []), digits, unit) for by_way in scenes.values())]
            for way in ways
        ]
        yield what.replace("_", " "), {"head": ["how", *scenes], "rows": rows}


def told(hours: list[float], digits: int, unit: str) -> str:
    """The median; nothing if it was not tried there."""
    return f"{percentile(hours, 0.5):.{digits}f}{unit}" if hours else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description="What hpcsched gains, waiting included (simulated).")
    parser.add_argument("--json", action="store_true", help="print all samples")
    parser.add_argument("--quick", action="store_true", help="few moments of one queue: shows that it works")
    parser.add_argument("--moments", type=int, default=20, help="moments at which a set is submitted (20)")
    parser.add_argument("--workers", type=int, default=2, help="processes (2)")
    parser.add_argument("--output", type=Path, help="where to write the samples")
    parser.add_argument(
        "--go-on", action="store_true", help="only what the file of samples does not have yet"
    )
    parser.add_argument(
        "--tables", type=Path, metavar="FILE", help="only make the tables anew of such samples"
    )
    options = parser.parse_args()
    if options.tables:
        page = json.loads(options.tables.read_text())
        page["tables"] = tables(page["samples"])
        options.tables.write_text(json.dumps(page, separators=(",", ":")) + "\n")
        return
    target = options.output or HERE / "results" / f"{time.strftime('%Y-%m-%d')}-gains.json"
    todo = tasks(2 if options.quick else options.moments, options.quick)
    page: dict[str, Any] = {"schema": 1, "machine": machine(), "moments_s": list(todo[0][3]), "samples": {}}
    if options.go_on:
        page = json.loads(target.read_text())
        todo = [task for task in todo if key_of(task) not in page["samples"]]
    with Pool(options.workers) as pool:
        for task, by_way, took_s in pool.imap_unordered(play, todo):
            page["samples"][key_of(task)] = {
                way: {what: [round(hours, 2) for hours in all_] for what, all_ in asdict(one).items()}
                for way, one in by_way.items()
            }
            page["tables"] = tables(page["samples"])
            print(f"{len(page['samples'])} of {len(todo)}: {key_of(task)}: {took_s:.0f} s", file=sys.stderr)
            if not (options.json or options.quick):
                target.write_text(json.dumps(page, separators=(",", ":")) + "\n")
    if options.json:
        print(json.dumps(page))
    elif options.quick:
        for name, table in page["tables"].items():
            print(f"\n{name}\n", *(" | ".join(row) for row in [table["head"], *table["rows"]]), sep="\n")


if __name__ == "__main__":
    main()
