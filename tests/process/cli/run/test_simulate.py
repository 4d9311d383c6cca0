"""What other policies would have done with a real run: read while it goes on, and when it is over."""

from __future__ import annotations

import json
from typing import Any

from livebench import FOREVER, Bench, job


def results(bench: Bench, *words: object) -> list[dict[str, Any]]:
    done = bench("simulate", "--run", *words, "--json")
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)["results"]
    return found


def test_what_if_of_a_run_that_goes_on_and_of_one_that_is_over(bench: Bench) -> None:
    profile = {"model": "m", "device": "x", "throughput": {"1": 100.0, "2": 180.0}, "start_s": 5.0}
    (bench.folder / "p.json").write_text(json.dumps({"schema": 1, "profiles": [profile]}))
    work: dict[str, Any] = {"model": "m", "replay": True}
    jobs = bench.set_of(
        job("a", **work, steps=8000),
        job("b", **work, steps=5000),
        job("endless", **work, steps=100 * FOREVER, after=["a", "b"]),
    )
    agent = bench.start(jobs, "--devices", "replay:3@40", "--profiles", "p.json", "-q")
    bench.ready("endless")
    was, marble, planner = results(bench, bench.dir, "--policy", "marble,planner")
    assert was["label"] == "so far" and was["jobs_completed"] == 2
    assert marble["jobs_completed"] == planner["jobs_completed"] == 3
    assert marble["jobs"][0]["gpu_hours"] > 0
    assert bench("cancel", "endless").returncode == 0
    agent.wait()

    was, marble = results(bench)  # the run of HPCSCHED_DIR, under its own policy
    assert (was["label"], was["jobs_total"], marble["jobs_total"]) == ("as it was", 3, 2)
    # How near a run comes to its simulation is measured in benchmarks/; a busy machine may stand for 3 s.
    ends = [[one["end_s"] for one in result["jobs"][:2]] for result in (was, marble)]
    for real, simulated in zip(*ends, strict=True):
        assert simulated <= real <= 1.01 * simulated + 40 * 3.0
