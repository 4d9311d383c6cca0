"""Which warm processes an interpreter has; those that fork are in `tests/process`."""

from __future__ import annotations

from hpcsched.launch.warm import MOST_ENVIRONMENTS, WarmPools


def test_an_interpreter_that_imports_something_else_gets_new_ones() -> None:
    pools = WarmPools(standbys=0, rooms=(), shielded=frozenset())
    first = pools.of("/p", 1)
    assert pools.of("/p", 1) is first
    assert pools.of("/p") is first, "without a stamp it is not known whether it does"
    second = pools.of("/p", 2)
    assert second is not first
    assert pools.of("/p", 2) is second


def test_the_environments_used_last_are_kept() -> None:
    pools = WarmPools(standbys=0, rooms=(), shielded=frozenset())
    made = {python: pools.of(python) for python in map(str, range(MOST_ENVIRONMENTS))}
    assert pools.of("0") is made["0"]
    pools.of("another")
    assert pools.of("0") is made["0"]
    assert pools.of("1") is not made["1"]
