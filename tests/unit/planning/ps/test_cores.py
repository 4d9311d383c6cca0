"""Which process gets which cores: never more than is free, whole cores alone, in one NUMA node if any."""

from __future__ import annotations

from collections import Counter
from math import floor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcsched.planning.ps.cores import lay_out, stretches

HUNDREDTHS = st.integers(1, 350)
FREE = st.dictionaries(st.integers(0, 40), st.integers(0, 100), min_size=1, max_size=9)
NODES = st.dictionaries(st.integers(0, 40), st.integers(0, 3))


def cut(sizes: list[int], most: int) -> list[int]:
    """The sizes that fit into `most` together, the last one cut to what is left; none is 0."""
    kept: list[int] = []
    for size in sizes:
        if rest := min(size, most - sum(kept)):
            kept.append(rest)
    return kept


@given(sizes=st.lists(HUNDREDTHS, max_size=12), free=FREE, numa=NODES)
def test_each_gets_its_share_and_no_core_more_than_is_free(
    sizes: list[int], free: dict[int, int], numa: dict[int, int]
) -> None:
    kept = cut(sizes, sum(free.values()))
    shares, capacity = [size / 100 for size in kept], {core: part / 100 for core, part in free.items()}
    laid = stretches(shares, capacity, numa)
    assert [round(100 * sum(parts.values())) for parts in laid] == kept
    on = Counter[int]()
    for parts in laid:
        assert all(part > 0 for part in parts.values())
        on.update({core: round(100 * part) for core, part in parts.items()})
    assert all(on[core] <= free.get(core, 0) for core in on)
    assert lay_out(shares, capacity, numa) == [tuple(sorted(parts)) for parts in laid]


@given(sizes=st.lists(HUNDREDTHS, max_size=12), nodes=st.integers(1, 3), cores=st.integers(1, 6))
def test_whole_parts_have_cores_of_their_own_and_only_what_fits_in_no_node_lies_over_two(
    sizes: list[int], nodes: int, cores: int
) -> None:
    numa = {core: core % nodes for core in range(nodes * cores)}
    kept = cut(sizes, 100 * len(numa))
    laid = stretches([size / 100 for size in kept], dict.fromkeys(numa, 1.0), numa)
    used = Counter(core for parts in laid for core in parts)
    nodes_of = [{numa[core] for core in parts} for parts in laid]
    for size, parts, seen in zip(kept, laid, nodes_of, strict=True):
        if len(seen) == 1:
            assert sum(used[core] == 1 and part == 1 for core, part in parts.items()) >= floor(size / 100)
    if nodes == 1:
        assert all(len(seen) <= 1 for seen in nodes_of)
    # First fit: where one lies over two nodes, no node has room for it beside those that are at home there.
    home = Counter[int]()
    for size, seen in zip(kept, nodes_of, strict=True):
        if len(seen) == 1:
            home[min(seen)] += size
    for size, seen in zip(kept, nodes_of, strict=True):
        if len(seen) > 1:
            assert all(home[node] + size > 100 * cores for node in range(nodes))


def test_whole_parts_first_then_fractions_together() -> None:
    four = dict.fromkeys(range(4), 1.0)
    assert lay_out([1.5, 1.5, 0.5, 0.5], four, {}) == [(0, 2), (1, 2), (3,), (3,)]
    assert lay_out([0.3, 2.0, 0.3], four, {}) == [(2,), (0, 1), (2,)]
    assert lay_out([1.4, 1.4, 0.6, 0.6], four, {}) == [
        (0, 2),
        (1, 3),
        (2,),
        (3,),
    ]  # the largest fraction first


def test_a_fraction_without_room_on_one_core_goes_on_with_the_next() -> None:
    assert stretches([0.6, 0.6, 0.6], {0: 1, 1: 1}, {}) == [{0: 0.6}, {1: 0.6}, {0: 0.4, 1: 0.2}]
    assert lay_out([0.5], {0: 0.1, 1: 0.3, 2: 0.3}, {}) == [(1, 2)]  # over as few as can be


def test_a_core_of_which_little_is_left_is_taken_before_a_whole_one() -> None:
    assert lay_out([0.25], {0: 1.0, 1: 0.25, 2: 0.5}, {}) == [(1,)]
    assert lay_out([1.0, 0.4], {3: 0.5, 8: 1.0}, {}) == [(8,), (3,)]


def test_processes_stay_in_a_numa_node() -> None:
    numa = {0: 0, 1: 0, 2: 1, 3: 1}
    free = dict.fromkeys(numa, 1.0)
    assert lay_out([1.5, 1.25, 0.5], free, numa) == [(0, 1), (2, 3), (1,)]
    assert lay_out([1.5, 1.5, 1.0], free, numa) == [(0, 1), (2, 3), (1, 3)]  # the last one fits in none


def test_over_as_few_nodes_as_can_be() -> None:
    numa = {0: 0, 1: 1, 2: 1, 3: 2}
    assert lay_out([2.5], dict.fromkeys(numa, 1.0) | {0: 0.5}, numa) == [(1, 2, 3)]


def test_nothing_to_lay_out() -> None:
    assert lay_out([], {}, {}) == []


@pytest.mark.parametrize(
    ("shares", "free", "said"),
    [
        ([0.5, 0.6], {0: 1.0}, "1.1 cores are wanted, 1 are free"),
        ([1.0], {}, "1 cores are wanted, 0 are free"),
        ([0.5], {0: 0.499}, "0.5 cores are wanted, 0.49 are free"),
        ([0.0], {0: 1.0}, "share of 0 cores"),
        ([-1.0], {0: 1.0}, "share of -1 cores"),
        ([0.255], {0: 1.0}, "multiple of 0.01"),
        ([0.5], {0: 1.5}, "1.5 of core 0 is free"),
        ([0.5], {0: -0.1}, "-0.1 of core 0 is free"),
    ],
)
def test_what_cannot_be_is_refused(shares: list[float], free: dict[int, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        lay_out(shares, free, {})
