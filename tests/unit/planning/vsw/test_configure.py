"""Which workers run where, and on which GPUs: against trying everything."""

from itertools import combinations, product
from math import inf, log

import pytest
from budget import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcsched.planning.vsw.configure import (
    ClusterGpu,
    GpuShare,
    NoConfiguration,
    configure,
    scale,
    worker_count,
)
from hpcsched.planning.vsw.costs import (
    MIB,
    AllReduceCost,
    AllReduceCosts,
    BatchTimes,
    GpuCosts,
    Times,
    Unknown,
    VswCosts,
    iteration_s,
)

LOCAL = (16, 32)


def speed(local_batch, sample_s, most, gain=0.15):
    """Throughput rises with the logarithm of the workers."""
    times = {}
    for n in {1, most}:
        taken_s = sample_s * local_batch * n / (1 + gain * log(n))
        times[n] = Times(data_s=0.1 * taken_s, forward_s=0.3 * taken_s, backward_s=0.6 * taken_s)
    return BatchTimes(local_batch=local_batch, times=times, most=most)


def gpu_costs(sample_s, most=2, **settings):
    speeds = {size: speed(size, sample_s, most) for size in LOCAL}
    return GpuCosts(speeds=speeds, **{"update_s": 0.004, "copy_s": 0.002, **settings})


def network(within=(1e-10, 0.001), between=(4e-10, 0.003)):
    lines = [AllReduceCost(per_byte_s=slope, latency_s=latency) for slope, latency in (within, between)]
    return AllReduceCosts(within=lines[0], between=lines[1])


COSTS = VswCosts(
    gpus={"fast": gpu_costs(0.001, most=4), "slow": gpu_costs(0.003)},
    buckets=(25 * MIB, 9 * MIB),
    network=network(),
)
FOUR = [ClusterGpu(kind="fast", host="a")] * 2 + [ClusterGpu(kind="slow", host="b")] * 2


def step_s(costs, gpus, made):
    """The predicted step of a configuration, GPU by GPU."""
    used = [(gpu, share) for gpu, share in zip(gpus, made.shares, strict=True) if share]
    one_host = len({gpu.host for gpu, _ in used}) == 1
    return max(
        iteration_s(
            costs,
            gpu.kind,
            local_batch=made.local_batch,
            workers=share.workers,
            at_once=share.at_once,
            gpus=len(used),
            one_host=one_host,
            sync=made.sync,
        )
        for gpu, share in used
    )


def best_rate(
    costs, gpus, global_batch, *, accumulation=(0, 1000), even=True, sync="sequential", at_once=None
):
    """Most samples a second over all ways to run the batch on all of these GPUs; 0: there is none."""
    one_host = len({gpu.host for gpu in gpus}) == 1
    best = 0.0
    for local_batch in LOCAL:
        workers = worker_count(global_batch, local_batch, even=even)
        for split in product(range(1, workers + 1), repeat=len(gpus)):
            if sum(split) != workers:
                continue
            slowest_s = 0.0
            for gpu, many in zip(gpus, split, strict=True):
                ways = []
                for n in range(1, many + 1) if at_once is None else [min(at_once, many)]:
                    if (
                        not accumulation[0]
                        <= GpuShare(workers=many, at_once=n).accumulation
                        <= accumulation[1]
                    ):
                        continue
                    try:
                        ways.append(
                            iteration_s(
                                costs,
                                gpu.kind,
                                local_batch=local_batch,
                                workers=many,
                                at_once=n,
                                gpus=len(gpus),
                                one_host=one_host,
                                sync=sync,
                            )
                        )
                    except Unknown:
                        continue
                slowest_s = max(slowest_s, min(ways, default=inf))
            best = max(best, workers * local_batch / slowest_s)
    return best


SECONDS = st.floats(0.0005, 0.005)
LINE = st.tuples(st.floats(1e-11, 1e-9), st.floats(0, 0.005))


@st.composite
def clusters(draw, most_gpus=4):
    kinds = draw(st.integers(1, 3))
    gpus = {
        f"k{kind}": GpuCosts(
            speeds={
                size: speed(size, draw(SECONDS), draw(st.integers(1, 4)), draw(st.floats(0, 0.3)))
                for size in LOCAL
            },
            update_s=draw(st.floats(0, 0.01)),
            copy_s=draw(st.floats(0, 0.01)),
            buffers_s=draw(st.sampled_from([0.0, 0.005])),
        )
        for kind in range(kinds)
    }
    sizes = draw(st.lists(st.integers(1, 30).map(lambda mib: mib * MIB), min_size=1, max_size=3))
    costs = VswCosts(gpus=gpus, buckets=tuple(sizes), network=network(draw(LINE), draw(LINE)))
    where = st.builds(ClusterGpu, kind=st.sampled_from(sorted(gpus)), host=st.sampled_from("abc"))
    return costs, draw(st.lists(where, min_size=1, max_size=most_gpus))


# -- one set of GPUs -----------------------------------------------------------------------------------


@settings(max_examples=examples(60))
@given(
    cluster=clusters(most_gpus=3),
    global_batch=st.sampled_from([16, 50, 64, 100, 130]),
    accumulation=st.sampled_from([(0, 1000), (0, 0), (0, 2), (1, 3)]),
    even=st.booleans(),
    sync=st.sampled_from(["sequential", "overlap"]),
    at_once=st.sampled_from([None, None, 1, 2]),
)
def test_it_equals_trying_everything(cluster, global_batch, accumulation, even, sync, at_once):
    costs, gpus = cluster
    options = {"accumulation": accumulation, "even": even, "sync": sync, "at_once": at_once}
    expected = best_rate(costs, gpus, global_batch, **options)
    try:
        made = configure(costs, gpus, global_batch, local_batches=LOCAL, **options)
    except NoConfiguration:
        # Pinned to more at once than fit on some GPU is refused altogether.
        fits = min(own.speeds[size].most for own in costs.gpus.values() for size in LOCAL)
        assert expected == 0 or (at_once or 0) > fits
        return
    assert made.iter_s == pytest.approx(step_s(costs, gpus, made))
    assert made.global_batch == made.local_batch * sum(share.workers for share in made.shares)
    assert not even or made.global_batch // made.local_batch % 2 == 0
    assert all(accumulation[0] <= share.accumulation <= accumulation[1] for share in made.shares)
    if at_once is None or at_once <= min(
        own.speeds[size].most for own in costs.gpus.values() for size in LOCAL
    ):
        assert made.samples_s == pytest.approx(expected)


def test_a_fast_gpu_gets_more_workers():
    made = configure(COSTS, FOUR, 512, local_batches=[16])
    fast, slow = made.shares[0], made.shares[2]
    assert 2 * slow.workers < fast.workers < 5 * slow.workers
    assert fast.at_once > 1


def test_the_global_batch_is_rounded_to_an_even_number_of_workers():
    assert configure(COSTS, FOUR, 100, local_batches=[16]).global_batch == 96
    assert configure(COSTS, FOUR, 115, local_batches=[16], even=False).global_batch == 112
    assert configure(COSTS, FOUR[:1], 1, local_batches=[16]).global_batch == 32


def test_the_local_batch_with_most_samples_a_second_is_taken():
    rates = {size: configure(COSTS, FOUR, 512, local_batches=[size]).samples_s for size in LOCAL}
    made = configure(COSTS, FOUR, 512, local_batches=LOCAL)
    assert made.samples_s == max(rates.values()) == rates[made.local_batch]


def test_a_batch_too_small_for_all_gpus_runs_on_the_best_of_them():
    made = configure(COSTS, FOUR, 32, local_batches=[16], every_gpu=False)
    assert made.shares == (GpuShare(workers=1, at_once=1), GpuShare(workers=1, at_once=1), None, None)
    assert made.iter_s == pytest.approx(step_s(COSTS, FOUR, made))


def test_so_many_at_once_as_asked_even_if_others_are_faster():
    slower = {16: speed(16, 0.001, 2, gain=-0.2)}
    costs = VswCosts(gpus={"g": GpuCosts(speeds=slower, update_s=0.0)}, buckets=(MIB,), network=network())
    gpus = [ClusterGpu(kind="g", host="a"), ClusterGpu(kind="g", host="a")]
    assert configure(costs, gpus, 128, local_batches=[16]).shares == (GpuShare(workers=4, at_once=1),) * 2
    made = configure(costs, gpus, 128, local_batches=[16], at_once=2)
    assert made.shares == (GpuShare(workers=4, at_once=2),) * 2
    assert made.iter_s == pytest.approx(step_s(costs, gpus, made))
    made = configure(costs, gpus, 32, local_batches=[16], at_once=2)
    assert made.shares == (GpuShare(workers=1, at_once=1),) * 2


def test_the_synchronisation_is_chosen_by_the_size_of_the_buckets():
    assert configure(COSTS, FOUR, 512, local_batches=LOCAL).sync == "sequential"
    small = VswCosts(gpus=COSTS.gpus, buckets=(MIB,) * 3, network=COSTS.network)
    assert configure(small, FOUR, 512, local_batches=LOCAL).sync == "overlap"
    with pytest.raises(ValueError, match="sometimes"):
        configure(COSTS, FOUR, 512, local_batches=LOCAL, sync="sometimes")


@pytest.mark.parametrize(
    ("gpus", "options", "why"),
    [
        ([], {}, "there is no GPU"),
        ([ClusterGpu(kind="odd", host="a")], {}, "nothing was measured on odd"),
        (FOUR, {"global_batch": 32}, "fewer workers than the 4 GPUs"),
        (FOUR, {"local_batches": []}, "there is no local batch to try"),
        (FOUR, {"local_batches": [8]}, "a local batch of 8 was not measured; 16 to 32 were on fast"),
        (FOUR, {"accumulation": (0, 1)}, "the groups reach 4..24 workers, 32 are asked"),
        (FOUR, {"accumulation": (40, 50)}, "32 workers, but the least accumulation makes 164 at least"),
        (FOUR, {"at_once": 3}, "3 workers at once on slow: 2 are known to fit"),
    ],
)
def test_what_cannot_be_run_is_told(gpus, options, why):
    settings = {"global_batch": 512, "local_batches": [16], **options}
    with pytest.raises(NoConfiguration) as error:
        configure(COSTS, gpus, settings.pop("global_batch"), **settings)
    assert why in str(error.value)


def test_no_worker_that_fits_is_told():
    full = gpu_costs(0.001)
    none = {16: BatchTimes(local_batch=16, times=full.speeds[16].times, most=0)}
    costs = VswCosts(gpus={"full": GpuCosts(speeds=none, update_s=0.0)}, buckets=(MIB,), network=network())
    with pytest.raises(NoConfiguration, match="no worker with a local batch of 16 fits into memory of full"):
        configure(costs, [ClusterGpu(kind="full", host="a")], 32, local_batches=[16])


# -- sets of GPUs --------------------------------------------------------------------------------------


def epoch_s(costs, gpus, trajectory, **options):
    try:
        return sum(
            samples / configure(costs, gpus, batch, local_batches=LOCAL, **options).samples_s
            for batch, samples in trajectory
        )
    except NoConfiguration:
        return inf


@pytest.mark.long
@settings(max_examples=examples(50))
@given(
    cluster=clusters(most_gpus=6),
    global_batch=st.sampled_from([32, 64, 100, 200, 500]),
    most=st.sampled_from([0, 2, 1000]),
    even=st.booleans(),
)
def test_sets_for_one_batch_equal_trying_all_sets(cluster, global_batch, most, even):
    costs, gpus = cluster
    trajectory = [(global_batch, 1000.0)]
    options = {"accumulation": (0, most), "even": even}
    best = {}
    for count in range(1, len(gpus) + 1):
        chosen = combinations(range(len(gpus)), count)
        best[count] = min(epoch_s(costs, [gpus[i] for i in each], trajectory, **options) for each in chosen)
    best = {count: found_s for count, found_s in best.items() if found_s < inf}
    try:
        scaled = scale(costs, gpus, trajectory, local_batches=LOCAL, **options)
    except NoConfiguration:
        assert not best
        return
    assert [each.count for each in scaled] == sorted(best)
    for each in scaled:
        assert len(set(each.gpus)) == each.count
        assert each.epoch_s == pytest.approx(best[each.count])
        assert each.epoch_s == pytest.approx(
            epoch_s(costs, [gpus[i] for i in each.gpus], trajectory, **options)
        )


@pytest.mark.long
@pytest.mark.parametrize("within", [(1e-10, 0.001), (9e-10, 0.009)])
def test_one_set_trains_a_trajectory_of_several_batches(within):
    # The kinds can be ordered by speed whatever the batch: then the best of all sets is found.
    kinds = {
        name: gpu_costs(sample_s, most=3) for name, sample_s in (("a", 0.001), ("b", 0.002), ("c", 0.004))
    }
    costs = VswCosts(gpus=kinds, buckets=(25 * MIB, 9 * MIB), network=network(within))
    gpus = [ClusterGpu(kind=kind, host=host) for kind, host in ("bx", "ax", "cy", "bz", "az", "cy")]
    trajectory = [(64, 500.0), (200, 2000.0), (64, 500.0), (500, 1000.0)]
    scaled = scale(costs, gpus, trajectory, local_batches=LOCAL)
    assert [each.count for each in scaled] == [1, 2, 3, 4]  # the smallest batch has 4 workers
    for each in scaled:
        chosen = combinations(range(len(gpus)), each.count)
        best_s = min(epoch_s(costs, [gpus[i] for i in one], trajectory) for one in chosen)
        assert each.epoch_s == pytest.approx(best_s)
        assert epoch_s(costs, [gpus[i] for i in each.gpus], trajectory) == pytest.approx(best_s)


@settings(max_examples=examples(25))
@given(
    cluster=clusters(most_gpus=4), batches=st.lists(st.sampled_from([64, 100, 500]), min_size=2, max_size=3)
)
def test_the_epoch_on_a_set_is_what_its_configurations_take(cluster, batches):
    costs, gpus = cluster
    trajectory = [(batch, 100.0 * (i + 1)) for i, batch in enumerate(batches)]
    for each in scale(costs, gpus, trajectory, local_batches=LOCAL):
        assert each.epoch_s == pytest.approx(epoch_s(costs, [gpus[i] for i in each.gpus], trajectory))


def test_sets_are_packed_densely():
    gpus = [ClusterGpu(kind="fast", host=host) for host in "aabbbb"]
    scaled = scale(COSTS, gpus, [(512, 1000.0)], local_batches=LOCAL)
    hosts = {each.count: [gpus[i].host for i in each.gpus] for each in scaled}
    assert hosts[2] == ["a", "a"]
    assert hosts[3] == ["b", "b", "b"]
    assert hosts[5] == ["a", "b", "b", "b", "b"]


def test_a_set_is_spread_if_hosts_are_slower_inside_than_between():
    slow_inside = VswCosts(
        gpus=COSTS.gpus, buckets=COSTS.buckets, network=network((9e-9, 0.01), (1e-10, 0.001))
    )
    gpus = [ClusterGpu(kind="fast", host="a")] * 2 + [ClusterGpu(kind="slow", host="b")] * 2
    scaled = scale(slow_inside, gpus, [(128, 1000.0)], local_batches=LOCAL, least=2, most=2)
    assert [each.gpus for each in scaled] == [(0, 2)]


def test_a_set_whose_gpus_wait_for_the_network_nearly_all_the_time_is_still_one():
    slow = VswCosts(gpus=COSTS.gpus, buckets=COSTS.buckets, network=network((1e-7, 9.0), (1e-7, 9.0)))
    (found,) = scale(slow, FOUR, [(128, 1000.0)], local_batches=LOCAL, least=4)
    assert found.epoch_s == pytest.approx(epoch_s(slow, FOUR, [(128, 1000.0)]))


def test_only_the_sizes_asked_for_are_looked_at():
    scaled = scale(COSTS, FOUR, [(512, 1.0)], local_batches=LOCAL, least=2, most=3)
    assert [each.count for each in scaled] == [2, 3]


def test_a_least_accumulation_is_refused_for_sets():
    with pytest.raises(ValueError, match="least accumulation"):
        scale(COSTS, FOUR, [(512, 1.0)], local_batches=LOCAL, accumulation=(1, 5))


def test_no_set_is_told():
    with pytest.raises(NoConfiguration, match="no set of GPUs"):
        scale(COSTS, FOUR, [(64, 1.0)], local_batches=LOCAL, least=5)
    with pytest.raises(NoConfiguration, match="no set of GPUs can run every global batch of 64, 9999"):
        scale(COSTS, FOUR, [(64, 1.0), (9999, 1.0)], local_batches=LOCAL, accumulation=(0, 0))
