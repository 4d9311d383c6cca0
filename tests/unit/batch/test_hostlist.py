"""Slurm's host lists and counts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcsched.batch.hostlist import MAX_HOSTS, expand, expand_counts
from hpcsched.batch.slurm_steps import hosts_of
from hpcsched.errors import MOST_SHOWN, BatchError


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("", ""),
        ("  ", ""),
        ("node1", "node1"),
        ("node[1-3,7]", "node1 node2 node3 node7"),
        ("gpu-a0[01-03]", "gpu-a001 gpu-a002 gpu-a003"),
        ("n[8-11]", "n8 n9 n10 n11"),
        ("n[08-11]", "n08 n09 n10 n11"),
        ("n[098-101]", "n098 n099 n100 n101"),
        ("r[1-2]n[1-2]", "r1n1 r1n2 r2n1 r2n2"),
        ("r[1-2]n[01,3]s,login", "r1n01s r1n3s r2n01s r2n3s login"),
        ("a,b[1-2],c", "a b1 b2 c"),
        ("a[1-2].cluster.org", "a1.cluster.org a2.cluster.org"),
        ("[1-2]", "1 2"),
        ("a,a", "a a"),
    ],
)
def test_lists(text: str, hosts: str) -> None:
    assert expand(text) == tuple(hosts.split())


NONSENSE = [
    "a[1",
    "a]",
    "a]1[",
    "a[3-1]",
    "a[]",
    "a[1,]",
    "a[x]",
    "a[1--2]",
    "a[[1]]",
    "a b",
    ",",
    "a,",
    "a,,b",
]
NONSENSE += ["a[٣]", "a[1-٣]", f"a[1-{MAX_HOSTS + 1}]", "a[0-999999999999999999]", "a[1-" + "9" * 40 + "]"]
NONSENSE += ["r[1-1000]n[1-1000]", "[1-9999][1-9999][1-9999]", f"a[1-{MAX_HOSTS}],b"]


@pytest.mark.parametrize("text", NONSENSE)
def test_nonsense_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(ValueError) as caught:
        expand(text)
    assert len(str(caught.value).splitlines()) == 1


def test_the_longest_list() -> None:
    assert len(expand(f"a[1-{MAX_HOSTS}]")) == MAX_HOSTS


NAMES = st.from_regex(r"[a-z][a-z0-9.-]{0,6}", fullmatch=True)


@pytest.mark.long
@given(st.lists(NAMES, min_size=1))
def test_plain_names_come_back(names: list[str]) -> None:
    assert expand(",".join(names)) == tuple(names)


@pytest.mark.long
@given(NAMES, st.integers(0, 5000), st.integers(0, 60), st.integers(1, 5), st.sampled_from(["", "-ib", "x"]))
def test_ranges(name: str, low: int, more: int, width: int, suffix: str) -> None:
    start = str(low).zfill(width)
    expected = [f"{name}{str(n).zfill(len(start))}{suffix}" for n in range(low, low + more + 1)]
    assert expand(f"{name}[{start}-{low + more}]{suffix}") == tuple(expected)


@given(st.text(alphabet="ab1-,[] 0", max_size=20))
def test_anything_is_a_list_or_a_value_error(text: str) -> None:
    try:
        hosts = expand(text)
    except ValueError:
        return
    assert all(host and not set(host) & set("[], ") for host in hosts)


@pytest.mark.parametrize(
    ("text", "counts"), [("", ()), ("4", (4,)), ("4(x2),3", (4, 4, 3)), ("2,1", (2, 1)), ("12(x1)", (12,))]
)
def test_counts(text: str, counts: tuple[int, ...]) -> None:
    assert expand_counts(text) == counts


@pytest.mark.parametrize("text", ["x", "4(x)", "4(x2", "4,,3", "-1", "4(x999999999)"])
def test_nonsense_counts(text: str) -> None:
    with pytest.raises(ValueError):
        expand_counts(text)


def test_a_list_of_any_length_is_one_short_line() -> None:
    with pytest.raises(BatchError, match="SLURM_JOB_NODELIST") as caught:
        hosts_of({"SLURM_JOB_NODELIST": f"[{'9' * 5000}]"})
    assert len(str(caught.value)) < 2 * MOST_SHOWN
