"""What an engine is compared with: Optimus's allocation, and the best configurations there are."""

import random
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from budget import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import nnls

from hpcsched.planning.ps.model import NetworkLink, PsModel, even_seats, usage
from hpcsched.planning.ps.whatif.best import MIN_SHARE, best, best_fixed, fixed
from hpcsched.planning.ps.whatif.optimus import FIRST_NODES, Fit, fit, next_node, profiled, sampled
from profiles.ps.nearchus import CLUSTERS, WORKLOADS, workload

A, B = CLUSTERS["A"], CLUSTERS["B"]

PLAIN = PsModel(batch_cpu_s=12.0, parameter_bytes=100.0)


def efficiency(found, cluster):
    return sum(found.usage.cpu) / cluster.budget


def growth(fit, nodes):
    """The configurations of a training of at most `nodes` nodes, one after the other."""
    servers, workers = FIRST_NODES
    yield servers, workers
    while servers + workers < nodes and (node := next_node(fit, servers, workers)):
        servers, workers = servers + (node == "server"), workers + (node == "worker")
        yield servers, workers


def optimus_ends(name, cluster, **how):
    model, nodes = workload(name, cluster), int(cluster.budget / 5)
    *_, last = growth(profiled(model, sampled(nodes, **how), cluster.link), nodes)
    return fixed(model, *last, cluster.link)


# -- Optimus -------------------------------------------------------------------------------------------


@given(st.integers(0, 2**32), st.booleans())
def test_a_fit_of_exact_measurements_predicts_all_others(seed, weak):
    draw = random.Random(seed)
    truth = Fit(
        coefficients=tuple(draw.choice([0, draw.uniform(0.1, 9)]) for _ in range(5 - weak)), weak=weak
    )
    if not any(truth.coefficients):
        return
    sizes = sampled(20)
    found = fit([(p, w, truth.rate(p, w)) for p, w in sizes], weak=weak)
    for p, w in [(1, 1), (1, 19), (19, 1), (30, 30)]:
        assert found.rate(p, w) == pytest.approx(truth.rate(p, w), rel=1e-6)


@given(st.integers(0, 2**32))
def test_no_coefficient_is_negative_and_no_others_are_nearer(seed):
    draw = random.Random(seed)
    measured = [(draw.randint(1, 9), draw.randint(1, 9), draw.uniform(0.1, 5)) for _ in range(20)]
    found = fit(measured)
    assert min(found.coefficients) >= 0
    p, w, rate = np.array(measured).T
    terms = np.stack([1 / w, np.ones(20), w / p, w, p], axis=1)
    assert np.linalg.norm(terms @ found.coefficients - 1 / rate) == pytest.approx(nnls(terms, 1 / rate)[1])


def test_nothing_measured_is_refused():
    with pytest.raises(ValueError, match="no configuration"):
        fit([])


def test_where_all_is_zero_nothing_is_predicted_and_nothing_gained():
    nothing = Fit(coefficients=(0.0,) * 5)
    assert nothing.rate(1, 1) == 0
    assert next_node(nothing, 1, 2) is None


@pytest.mark.parametrize(
    ("coefficients", "expected"),
    [
        ((10, 0, 0, 0, 0), "worker"),  # computing only
        ((0, 0, 10, 0, 0), "server"),  # transferring only
        ((0, 5, 0, 0, 0), None),  # neither helps
        ((0, 0, 0, 1, 1), None),  # both harm
        ((6, 0, 0.1, 0, 0), "worker"),
        ((6, 0, 3, 0, 0), "server"),
    ],
)
def test_the_next_node_is_what_gains_more(coefficients, expected):
    assert next_node(Fit(coefficients=coefficients), 1, 2) == expected


def test_a_training_grows_by_one_node_at_a_time_from_one_server_and_two_workers():
    path = list(growth(Fit(coefficients=(6, 0, 0.5, 0, 0)), 12))
    assert path[0] == (1, 2)
    assert all(b[0] - a[0] + b[1] - a[1] == 1 and b[0] >= a[0] and b[1] >= a[1] for a, b in pairwise(path))
    assert sum(path[-1]) == 12
    assert path[-1][0] > 1


def test_growth_ends_where_more_would_be_slower():
    *_, last = growth(Fit(coefficients=(9, 0, 0, 1, 1)), 50)
    assert last == (1, 3)


@pytest.mark.parametrize("nodes", [2, 3, 7, 20, 60])
def test_sampled_configurations_differ_fit_and_are_no_more_unlike_than_said(nodes):
    sizes = sampled(nodes)
    assert 0 < len(set(sizes)) == len(sizes) <= 20
    assert len(sizes) == 20 or nodes < 20
    assert all(p + w <= nodes and max(p / w, w / p) <= 2 for p, w in sizes)
    assert max(p + w for p, w in sizes) == nodes
    assert nodes < 20 or any(w / p > 4 for p, w in sampled(nodes, most_unlike=nodes))


@pytest.mark.parametrize(
    ("name", "paper"),
    [("MobileNet", 82), ("DenseNet-201", 86), ("NasNetLarge", 63), ("ResNet-50", 43), ("Inception-V3", 21)],
)
def test_optimus_on_cluster_a_is_as_efficient_as_in_the_paper(name, paper):
    found = optimus_ends(name, A)
    assert 100 * efficiency(found, A) == pytest.approx(paper, abs=1)
    assert found.usage.net[0] > 0.9
    worst = {"NasNetLarge", "ResNet-50", "Inception-V3"}
    assert (best_fixed(workload(name, A), A.budget, A.link).usage.rate > 1.3 * found.usage.rate) is (
        name in worst
    )


@pytest.mark.parametrize("name", WORKLOADS)
def test_optimus_on_cluster_b_is_about_as_fast_as_the_best(name):
    found, of_all = optimus_ends(name, B), best_fixed(workload(name, B), B.budget, B.link)
    assert found.usage.rate > 0.98 * of_all.usage.rate


def test_optimus_finds_what_a_link_carries_where_it_has_seen_it():
    model = workload("ResNet-50", A)
    seen = profiled(model, [(p, w) for p in (1, 2, 4) for w in range(1, 20 - p)], A.link)
    *_, last = growth(seen, 20)
    assert fixed(model, *last, A.link).usage.rate > 1.3 * optimus_ends("ResNet-50", A).usage.rate


# -- the best there are --------------------------------------------------------------------------------


def test_the_best_of_equal_nodes_is_found_by_trying_all_and_with_few_of_them():
    link = NetworkLink(bytes_s=20)
    model = replace(PLAIN, uneven=0.1, overlap=0.5)
    found = best_fixed(model, 50, link)
    rates = {
        (p, w): usage(model, even_seats(p, w, 5, 5), link).rate
        for p in range(1, 10)
        for w in range(1, 11 - p)
    }
    assert found.usage.rate == max(rates.values()) == rates[found.servers, found.workers]
    assert [(s.server, s.share) for s in found.seats] == [(True, 5)] * found.servers + [
        (False, 5)
    ] * found.workers
    capped = replace(PLAIN, weak=True, staleness=1, overlap=1.0)
    assert best_fixed(capped, 50, NetworkLink(bytes_s=1e9)).servers == 1
    # One link is full with 5 workers of 12 / 5 s, however many there are, and two nodes are too much for one.
    fits = best_fixed(replace(capped, parameter_bytes=24.0), 35, NetworkLink(bytes_s=50))
    assert (fits.servers, fits.workers) == (1, 5)


@pytest.mark.parametrize("budget", [0, 5, 9.9])
def test_two_processes_are_the_least_of_equal_nodes(budget):
    with pytest.raises(ValueError, match="do not suffice"):
        best_fixed(PLAIN, budget)


def test_two_processes_are_the_least_of_free_shares():
    with pytest.raises(ValueError, match="do not suffice"):
        best(PLAIN, 1.9 * MIN_SHARE)
    assert best(PLAIN, 2 * MIN_SHARE).usage.rate > 0


def test_the_best_split_gives_each_what_it_needs():
    model = replace(PLAIN, update_cpu_s=3.0)
    found = best(model, 10, most_servers=1, most_workers=1)
    # 12 / w + 3 / s is least where w / s is the root of 4
    assert found.seats[0].share == pytest.approx(10 / 3, rel=0.01)
    assert found.usage.rate == pytest.approx(1 / (12 / (20 / 3) + 3 / (10 / 3)), rel=1e-6)


def test_the_server_with_the_largest_tensor_gets_more():
    model = replace(PLAIN, update_cpu_s=30.0, uneven=0.5)
    first, second, _ = best(model, 10, NetworkLink(bytes_s=10), most_servers=2, most_workers=1).seats
    assert first.share == pytest.approx(3 * second.share, rel=0.1)


@settings(max_examples=examples(20))
@given(
    st.floats(0.5, 40),
    st.floats(0, 0.05),
    st.floats(0, 0.05),
    st.floats(0, 0.5),
    st.sampled_from([0, 1]),
    st.floats(1, 300),
)
def test_no_other_split_or_number_is_faster(budget, serial, byte_cpu_s, uneven, staleness, bytes_s):
    model = replace(
        PLAIN, serial=serial, byte_cpu_s=byte_cpu_s, uneven=uneven, staleness=staleness, overlap=0.3
    )
    link = NetworkLink(bytes_s=bytes_s)
    found = best(model, budget, link, most_servers=3, most_workers=4)
    assert sum(seat.share for seat in found.seats) == pytest.approx(budget)
    assert min(seat.share for seat in found.seats) >= MIN_SHARE * (1 - 1e-9)
    for servers in range(1, 4):
        for workers in range(1, 5):
            for part in (0.02, 0.1, 0.3, 0.5, 0.7):
                own = even_seats(servers, workers, part * budget / servers, (1 - part) * budget / workers)
                if min(seat.share for seat in own) >= MIN_SHARE:
                    assert usage(model, own, link).rate <= found.usage.rate * 1.001


@pytest.mark.parametrize(("name", "paper"), [("MobileNet", 1.183), ("ResNet-50", 1.199)])
@pytest.mark.long
def test_free_shares_gain_on_cluster_a_what_nearchus_gained_over_equal_ones(name, paper):
    model = workload(name, A)
    gain = best(model, A.budget, A.link).usage.rate / best_fixed(model, A.budget, A.link).usage.rate
    assert gain == pytest.approx(paper, abs=0.06)
