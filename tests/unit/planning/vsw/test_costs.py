"""The performance model: what it takes from measurements, and what it refuses to guess."""

import json
from itertools import pairwise
from math import log

import pytest
from hypothesis import given
from hypothesis import strategies as st
from places import ROOT

from hpcsched.errors import ConfigError
from hpcsched.planning.vsw.costs import (
    MIB,
    AllReduceCost,
    AllReduceCosts,
    BatchTimes,
    GpuCosts,
    Times,
    Unknown,
    VswCosts,
    fit_line,
    iteration_s,
    sync_method,
    travelled,
)
from hpcsched.planning.vsw.profile import VswProfile
from hpcsched.planning.vsw.whatif import jabas_files

SHIPPED = ROOT / "profiles" / "vsw" / "resnet50-v100-p100.json"


def times(compute_s, data_s=0.0):
    return Times(data_s=data_s, forward_s=compute_s / 4, backward_s=compute_s * 3 / 4)


def speed(local_batch, by_count, most=None):
    return BatchTimes(local_batch=local_batch, times={n: times(s) for n, s in by_count.items()}, most=most)


def compute_s(found):
    return found.forward_s + found.backward_s


# -- workers at once -----------------------------------------------------------------------------------


def test_measured_counts_are_as_measured():
    own = speed(32, {1: 0.1, 2: 0.17, 4: 0.3})
    assert own.at(2) == times(0.17)
    assert own.at(4) == times(0.3)


def test_between_measured_counts_throughput_rises_with_the_logarithm():
    own = speed(32, {1: 0.1, 4: 4 / 14}, most=6)  # 10 and 14 workers a second
    slope = 4 / log(4)
    assert compute_s(own.at(2)) == pytest.approx(2 / (10 + slope * log(2)))
    assert compute_s(own.at(6)) == pytest.approx(6 / (10 + slope * log(6)))
    assert own.at(2).forward_s / compute_s(own.at(2)) == pytest.approx(0.25)


def test_loading_grows_with_the_workers():
    own = BatchTimes(local_batch=8, times={1: times(0.1, 0.01), 4: times(0.3, 0.06)}, most=4)
    assert own.at(2).data_s == pytest.approx(0.03)


@given(st.lists(st.floats(0.01, 1), min_size=3, max_size=5))
def test_predicted_times_stay_between_those_of_fewer_and_of_more_workers(steps):
    counts = (1, 3, 6, 7, 12)
    measured = {n: sum(steps[: i + 1]) for i, n in enumerate(counts[: len(steps)])}
    own = speed(32, measured)
    found = [compute_s(own.at(n)) for n in range(1, own.usable + 1)]
    assert all(a <= b * (1 + 1e-9) for a, b in pairwise(found))


@pytest.mark.parametrize(
    ("by_count", "most", "n"),
    [
        ({1: 0.1}, None, 2),
        ({1: 0.1}, 4, 2),
        ({1: 0.1, 2: 0.2}, 4, 3),
        ({2: 0.2}, 4, 1),
        ({1: 0.1, 4: 0.3}, 5, 6),
        ({1: 0.1, 4: 0.3}, None, 5),
        ({1: 0.1, 3: 0.3}, 3, 0),
    ],
)
def test_what_was_not_measured_and_cannot_be_fitted_is_unknown(by_count, most, n):
    with pytest.raises(Unknown):
        speed(32, by_count, most).at(n)


def test_throughput_that_falls_is_not_extended_to_nothing():
    own = speed(32, {1: 0.1, 3: 1.5}, most=30)
    with pytest.raises(Unknown, match="falls too fast"):
        own.at(30)


# -- local batches -------------------------------------------------------------------------------------


def test_a_local_batch_between_two_lies_on_the_line():
    own = GpuCosts(speeds={32: speed(32, {1: 0.1, 2: 0.18}, 2), 64: speed(64, {1: 0.19}, 1)}, update_s=0.0)
    assert compute_s(own.speed(48).at(1)) == pytest.approx(0.145)
    read_s = {32: 0.01, 64: 0.05}
    own = GpuCosts(
        speeds={
            local: BatchTimes(
                local_batch=local, times={1: Times(data_s=data_s, forward_s=0.1, backward_s=0.2)}
            )
            for local, data_s in read_s.items()
        },
        update_s=0.0,
    )
    assert own.speed(40).at(1).data_s == pytest.approx(0.02)


def test_of_a_local_batch_between_two_no_more_fit_than_of_the_larger() -> None:
    own = GpuCosts(speeds={32: speed(32, {1: 0.1, 2: 0.18}, 2), 64: speed(64, {1: 0.19}, 1)}, update_s=0.0)
    assert own.speed(48).usable == 1  # two may not fit
    assert own.speed(32).usable == 2


@pytest.mark.parametrize("local_batch", [16, 65])
def test_a_local_batch_outside_what_was_measured_is_unknown(local_batch):
    own = GpuCosts(speeds={32: speed(32, {1: 0.1}), 64: speed(64, {1: 0.19})}, update_s=0.0)
    with pytest.raises(Unknown, match="32 to 64 were"):
        own.speed(local_batch)


# -- all-reduce ----------------------------------------------------------------------------------------


def test_a_line_is_found_again():
    line = AllReduceCost(per_byte_s=1e-9, latency_s=0.002)
    points = [(travelled(size, 4), line.all_reduce_s(size, 4)) for size in (1e5, 1e6, 1e7, 1e8)]
    found = fit_line(points)
    assert found.per_byte_s == pytest.approx(1e-9)
    assert found.latency_s == pytest.approx(0.002)


def test_small_messages_count_as_much_as_large_ones():
    # A large one that is 20 % off must not bend what is known of small ones.
    found = fit_line([(1e3, 0.001), (2e3, 0.001), (1e8, 1.2), (1.1e8, 0.9)])
    assert found.latency_s == pytest.approx(0.001, rel=0.02)


@pytest.mark.parametrize(
    ("points", "line"),
    [
        ([(1e6, 0.5)], AllReduceCost(per_byte_s=5e-7, latency_s=0.0)),
        ([(1e6, 1.0), (2e6, 4.0)], AllReduceCost(per_byte_s=1.2e-6, latency_s=0.0)),
        ([(1e6, 2.0), (2e6, 1.0)], AllReduceCost(per_byte_s=0.0, latency_s=1.2)),
    ],
)
def test_no_part_of_a_line_is_negative(points, line):
    found = fit_line(points)
    assert found.per_byte_s == pytest.approx(line.per_byte_s)
    assert found.latency_s == pytest.approx(line.latency_s)


def test_without_points_there_is_no_line():
    with pytest.raises(ValueError, match="no all-reduce"):
        fit_line([])


# -- a step --------------------------------------------------------------------------------------------

LINES = {
    "within": AllReduceCost(per_byte_s=1e-9, latency_s=0.001),
    "between": AllReduceCost(per_byte_s=4e-9, latency_s=0.002),
}
GPU = GpuCosts(
    speeds={
        8: BatchTimes(
            local_batch=8,
            times={
                1: Times(data_s=0.01, forward_s=0.02, backward_s=0.03),
                2: Times(data_s=0.02, forward_s=0.03, backward_s=0.05),
            },
        )
    },
    update_s=0.010,
    copy_s=0.004,
    buffers_s=0.001,
)
COSTS = VswCosts(gpus={"g": GPU}, buckets=(3_000_000, 1_000_000), network=AllReduceCosts(**LINES))


def step_s(**changes):
    settings = {
        "local_batch": 8,
        "workers": 1,
        "at_once": 1,
        "gpus": 1,
        "one_host": True,
        "sync": "sequential",
    }
    return iteration_s(COSTS, "g", **{**settings, **changes})


def test_one_worker_alone_computes_and_updates():
    assert step_s() == pytest.approx(0.06 + 0.010 + 0.001)


def test_two_at_once_copy_the_weights_once():
    assert step_s(workers=2, at_once=2) == pytest.approx(0.10 + 0.014 + 0.002)


def test_the_last_round_has_what_is_left():
    assert step_s(workers=5, at_once=2) == pytest.approx(2 * 0.10 + 0.06 + 0.014 + 0.002)


def test_fewer_workers_than_at_once_are_as_many_as_there_are():
    assert step_s(workers=1, at_once=2) == step_s(workers=1, at_once=1)


def test_a_short_all_reduce_hides_behind_the_last_backward_but_for_its_last_bucket():
    last_s = 0.001 + 1e-9 * 1_000_000 * 2 * 3 / 4
    assert step_s(gpus=4) == pytest.approx(step_s() + last_s)


def test_a_long_all_reduce_is_waited_for():
    most_s, last_s = (0.002 + 4e-9 * size * 2 * 7 / 8 for size in (3e6, 1e6))
    # 23 ms for the first bucket are hidden behind 30 ms of backward; times ten they are not.
    assert step_s(gpus=8, one_host=False) == pytest.approx(0.06 + last_s + 0.011)
    slow = VswCosts(gpus=COSTS.gpus, buckets=(30_000_000, 1_000_000), network=COSTS.network)
    most_s = 0.002 + 4e-9 * 30e6 * 2 * 7 / 8
    found = iteration_s(
        slow, "g", local_batch=8, workers=1, at_once=1, gpus=8, one_host=False, sync="sequential"
    )
    assert found == pytest.approx(0.01 + 0.02 + most_s + last_s + 0.011)


def test_only_the_last_round_overlaps_with_communication():
    assert step_s(workers=3, gpus=4) - step_s(workers=2, gpus=4) == pytest.approx(0.06)


def test_overlapped_synchronisation_waits_for_the_last_buckets_share():
    assert step_s(sync="overlap") == pytest.approx(0.06 + 0.010 / 4 + 0.001)


@pytest.mark.parametrize(("sizes", "method"), [((13, 13), "sequential"), ((12, 13), "overlap")])
def test_large_buckets_are_synchronised_after_one_another(sizes, method):
    assert sync_method([size * MIB for size in sizes]) == method


# -- files ---------------------------------------------------------------------------------------------


def test_the_shipped_profile_comes_back_from_its_json():
    table = json.loads(SHIPPED.read_text())
    assert VswProfile.parse(table, where="x").to_table() == table


def test_the_shipped_profile_has_the_authors_model():
    profile = VswProfile.parse(json.loads(SHIPPED.read_text()), where="x")
    v100, p100 = (profile.costs.gpus[f"Tesla {name}-PCIE-16GB"] for name in ("V100", "P100"))
    # 3 workers 1.14x and 4 workers 1.12x as fast as one, by the slopes that the authors' model has.
    for own, most, slope in ((v100, 3, 0.124), (p100, 4, 0.078)):
        one = own.speeds[32].at(1)
        gain = most * compute_s(one) / compute_s(own.speeds[32].at(most))
        assert gain - 1 == pytest.approx(slope * log(most), abs=0.02)
    assert len(profile.cluster) == 8
    assert profile.local_batches == [32, 64, 96, 128, 160]


def test_held_out_iterations_are_predicted():
    # The middle of three measured counts, from the other two.
    costs = VswProfile.parse(json.loads(SHIPPED.read_text()), where="x").costs
    measured = costs.gpus["Tesla P100-PCIE-16GB"].speeds[32]
    fitted = BatchTimes(local_batch=32, times={n: measured.times[n] for n in (1, 4)}, most=4)
    assert fitted.at(2).total_s == pytest.approx(measured.at(2).total_s, rel=0.05)


@pytest.mark.parametrize(
    ("path", "value", "key"),
    [
        (("schema",), 2, "schema"),
        (("model",), "", "model"),
        (("costs",), None, "costs"),
        (("costs", "gpus"), {}, "costs.gpus"),
        (("costs", "buckets"), [0], "costs.buckets"),
        (("costs", "network", "within", "latency_s"), -1, "costs.network.within.latency_s"),
        (("cluster", 0, "kind"), "none", "cluster[0].kind"),
        (("cluster", 0, "gpus"), 10**6, "cluster[0].gpus"),
        (("global_batch",), [8, 4], "global_batch"),
        (("surprise",), 1, ""),
    ],
)
def test_a_wrong_profile_is_refused_by_key(path, value, key):
    table = json.loads(SHIPPED.read_text())
    place = table
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = value
    with pytest.raises(ConfigError) as error:
        VswProfile.parse(table, where="f.json")
    assert (error.value.where, error.value.key) == ("f.json", key)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"times": {}}, "times"),
        ({"times": {"0": {"forward_s": 1, "backward_s": 1}}}, "times"),
        ({"times": {"1": {"forward_s": 0, "backward_s": 1}}}, "times.1.forward_s"),
        ({"most": -1}, "most"),
        ({"local_batch": 1.5}, "local_batch"),
    ],
)
def test_a_wrong_speed_is_refused_by_key(change, key):
    table = json.loads(SHIPPED.read_text())
    kind = next(iter(table["costs"]["gpus"]))
    table["costs"]["gpus"][kind]["speeds"][0].update(change)
    with pytest.raises(ConfigError) as error:
        VswProfile.parse(table, where="f.json")
    assert error.value.key == f"costs.gpus.{kind}.speeds[0].{key}"


ROW = {
    "model": "m",
    "gpu_type": "g",
    "lbs": 8,
    "num_models": 1,
    "data_time": 1.0,
    "fwd_time": 2.0,
    "bwd_time": 3.0,
}
ROW |= {"update_time": 4.0, "copy_time": 0.01, "bn_sync_time": 6.0}
SERVER = {"type": "g", "number": 2, "intra_network_bandwidth": 1e9, "inter_network_bandwidth": 2e9}


def published_files(**changes):
    files = {
        "computation": {"a": ROW, "b": {**ROW, "num_models": 3, "copy_time": 4.0, "fwd_time": 5.0}},
        "memory": {"m": {"gpu_type": "g", "lbs": 8, "max_num_models": 3}},
        "within": {"intra.txt": "1.0,3.0\n2.0,5.0\n"},
        "between": {"inter.txt": "1.0,4.0\n\n2.0,7.0\n"},
        "buckets": {"k": {"bucket_size_distribution": [1.5, 2]}},
        "cluster": {"c": {"n1": SERVER, "n2": SERVER}},
        "job": {},
    }
    return jabas_files.Published(**{**files, **changes})


def test_the_authors_files_become_a_profile():
    profile = jabas_files.parse(published_files(), where="x")
    assert profile.model == "m"
    assert [(gpu.kind, gpu.host) for gpu in profile.cluster] == [("g", "n1")] * 2 + [("g", "n2")] * 2
    own = profile.costs.gpus["g"]
    assert own.speeds[8].times[1] == Times(data_s=0.001, forward_s=0.002, backward_s=0.003)
    assert (own.speeds[8].most, own.update_s, own.copy_s, own.buffers_s) == (3, 0.004, 0.002, 0.006)
    assert profile.costs.buckets == (3 * MIB // 2, 2 * MIB)


def test_an_ideal_time_becomes_the_bytes_that_a_ring_sends():
    # Ideal: 4(N-1)/N bytes for each byte at full bandwidth. One more ideal ms takes 2 ms within a host.
    network = jabas_files.parse(published_files(), where="x").costs.network
    size, gpus = 1e6, 4
    ideal_ms = size * 4 * (gpus - 1) / gpus / 1e9 * 1e3
    assert network.within.all_reduce_s(size, gpus) == pytest.approx((1 + 2 * ideal_ms) / 1e3)
    ideal_ms /= 2  # twice the bandwidth between hosts
    assert network.between.all_reduce_s(size, gpus) == pytest.approx((1 + 3 * ideal_ms) / 1e3)


def test_the_jobs_servers_and_bounds_count():
    job = {"batch_size_lower_bound": 4, "batch_size_upper_bound": 8, "available_servers": ["n2"]}
    profile = jabas_files.parse(published_files(job={"j": job}, between={}), where="x")
    assert {gpu.host for gpu in profile.cluster} == {"n2"}
    assert profile.global_batch == (4, 8)


@pytest.mark.parametrize(
    ("changes", "where", "key"),
    [
        ({"computation": {}}, "x", ""),
        ({"computation": {"a": {**ROW, "fwd_time": 0}}}, "a", ""),
        ({"computation": {"a": {**ROW, "data_time": float("nan")}}}, "a", "data_time"),
        ({"computation": {"a": {**ROW, "lbs": "8"}}}, "a", "lbs"),
        ({"computation": {"a": ROW, "b": {**ROW, "model": "other"}}}, "x", ""),
        ({"memory": {"m": {}}}, "m", "gpu_type"),
        ({"within": {}}, "x", ""),
        ({"between": {}}, "x", ""),
        ({"within": {"intra.txt": "1.0\n"}}, "intra.txt", "line 1"),
        ({"within": {"intra.txt": "\n"}}, "intra.txt", ""),
        ({"buckets": {}}, "x", ""),
        ({"buckets": {"k": {"bucket_size_distribution": []}}}, "k", "bucket_size_distribution"),
        ({"cluster": {}}, "x", ""),
        ({"cluster": {"c": {"n1": {**SERVER, "type": "other"}}}}, "c", "n1.type"),
        ({"job": {"j": {"available_servers": ["n3"]}}}, "j", "available_servers"),
        (
            {"job": {"j": {"batch_size_lower_bound": 8, "batch_size_upper_bound": 4}}},
            "j",
            "batch_size_lower_bound",
        ),
    ],
)
def test_wrong_files_of_the_authors_are_refused_by_name(changes, where, key):
    with pytest.raises(ConfigError) as error:
        jabas_files.parse(published_files(**changes), where="x")
    assert (error.value.where, error.value.key) == (where, key)
