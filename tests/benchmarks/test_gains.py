"""What `gains.py` compares is compared fairly; what it finds is not tested."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from places import ROOT

from hpcsched.allocations.backfill import Queue
from hpcsched.allocations.cluster import Cluster

BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture(scope="module")
def bench() -> Iterator[SimpleNamespace]:
    """The modules; benchmarks are no package."""
    names = ("common", "run_all", "queues", "gains_ways", "gains")
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import gains
        import gains_ways
        import queues

        yield SimpleNamespace(gains=gains, ways=gains_ways, queues=queues)
    finally:
        sys.path.remove(str(BENCHMARKS))
        for name in names:
            sys.modules.pop(name, None)


def test_every_way_does_all_trainings_and_charges_what_they_need(bench):
    for trainings in (bench.ways.mixed(), bench.ways.many_small()):
        alone_h = sum(trainings.seconds(job) for job in trainings.jobs) / 3600
        for way in bench.gains.ways_of(trainings)[::2]:
            queue = Queue(Cluster(nodes=50, gpus=4, shards=2))
            queue.submit(*way.jobs)
            queue.run()
            samples = bench.gains.Samples()
            samples.add(queue, way, 0.0)
            assert len(way.results) == len(trainings.jobs)
            # Two on a GPU need less; a training on more GPUs than one needs more, never twice as much.
            assert 0.7 * alone_h < samples.gpu_hours[0] < 2 * alone_h, way.name
            assert samples.first_start == [0.0]
            assert 0 < samples.mean_result[0] <= samples.last_result[0]


def test_a_block_is_cut_into_allocations_that_follow_each_other(bench):
    trainings = bench.ways.mixed()
    way = bench.ways.blocks(trainings, bench.ways.Block(4, hours=1))
    *full, last = way.all_jobs
    assert len(full) >= 5
    assert all(3000 < life.runs_s <= life.limit_s == 3600 for life in full)
    assert last.follow is None
    whole = bench.ways.blocks(trainings, bench.ways.Block(4, hours=24))
    assert len(whole.all_jobs) == 1
    # What saving and loading at the ends of hours cost, and no more.
    assert whole.jobs[0].runs_s < sum(life.runs_s for life in way.all_jobs) < 1.2 * whole.jobs[0].runs_s


def test_limits_are_written_as_people_write_them(bench):
    for rule in bench.queues.LIMITS:
        cluster, jobs = bench.queues.background("drawn", 0.8, rule)
        assert all(job.limit_s >= job.runs_s and job.limit_s % 600 == 0 for job in jobs)
        assert sum(job.runs_s * cluster.gpus_of(job) for job in jobs) / bench.queues.WEEKS_S == pytest.approx(
            0.8 * cluster.nodes * cluster.gpus, rel=0.05
        )
