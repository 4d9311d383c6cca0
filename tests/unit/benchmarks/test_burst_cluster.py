"""What background jobs add to a cluster whose foreground job bursts (section 7.1), on simulated GPUs."""

import json
from math import inf

import pytest
from places import ROOT

from benchmarks.simulated.cluster import background_alone, collocated, partition
from hpcsched.planning.burst.costs import Interconnect
from hpcsched.planning.burst.graph import LayerProfile
from hpcsched.planning.burst.planner import plan

pytestmark = pytest.mark.slow

NVSWITCH = Interconnect(bandwidth_bytes_s=600e9, latency_s=1e-5)
VGG = ROOT / "profiles" / "layers" / "vgg16-a100.json"


@pytest.fixture(scope="module")
def vgg():
    return LayerProfile.parse(json.loads(VGG.read_text()), where="vgg16")


@pytest.fixture(scope="module")
def beside(vgg):
    """A plan that uses 1 to 8 GPUs, with a background job on each."""
    return collocated(vgg, planned(vgg, 8, 2.0), 4)


def planned(profile, gpus, limit=inf):
    return plan(profile, gpus=gpus, global_batch=32, network=NVSWITCH, amplification=limit)


def test_a_background_job_alone_runs_at_about_its_measured_speed(vgg):
    measured_us = sum(layer.forward_at(4) + layer.backward_at(4) for layer in vgg.layers)
    assert background_alone(vgg, 4) == pytest.approx(4e6 / measured_us, rel=0.1)


def test_gpus_that_a_burst_plan_frees_do_background_work_at_little_cost_to_the_foreground(vgg, beside):
    burst = planned(vgg, 8, 2.0)
    assert beside.foreground >= 0.95 * 32e6 / burst.iter_us
    assert beside.background >= 0.1 * 8 * background_alone(vgg, 4)
    assert beside.total > 1.15 * 32e6 / burst.data_parallel_us


@pytest.mark.slow
def test_without_feedback_there_is_more_background_work_and_a_slower_foreground(vgg, beside):
    free = collocated(vgg, planned(vgg, 8, 2.0), 4, threshold=None)
    assert free.background > beside.background
    assert free.foreground < beside.foreground


def test_no_static_partition_has_as_fast_a_foreground(vgg, beside):
    for gpus in (1, 2, 4):
        part = partition(vgg, planned(vgg, gpus), 8, 4)
        assert part.foreground < beside.foreground
        assert part.background == pytest.approx((8 - gpus) * background_alone(vgg, 4))
