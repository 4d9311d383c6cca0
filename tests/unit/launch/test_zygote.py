"""Which warm processes an interpreter has; those that fork are in `tests/process`."""

from __future__ import annotations

import pytest

from hpcsched.launch.spawn import ProcessStart
from hpcsched.launch.zygote import MAX_ZYGOTES, TRAINING, Zygote, Zygotes


def test_an_interpreter_that_imports_something_else_gets_new_ones() -> None:
    pools = Zygotes(standbys=0, core_sets=(), shielded=frozenset())
    first = pools.of("/p", 1)
    assert pools.of("/p", 1) is first
    assert pools.of("/p") is first, "without a stamp it is not known whether it does"
    second = pools.of("/p", 2)
    assert second is not first
    assert pools.of("/p", 2) is second


def test_the_environments_used_last_are_kept() -> None:
    pools = Zygotes(standbys=0, core_sets=(), shielded=frozenset())
    made = {python: pools.of(python) for python in map(str, range(MAX_ZYGOTES))}
    assert pools.of("0") is made["0"]
    pools.of("another")
    assert pools.of("0") is made["0"]
    assert pools.of("1") is not made["1"]


@pytest.mark.parametrize(
    ("begun_with", "task", "fits"),
    [
        ({}, {"CUDA_VISIBLE_DEVICES": "1"}, True),
        ({}, {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "-1"}, True),  # a job on CPU cores
        ({"CUDA_VISIBLE_DEVICES": "1"}, {"CUDA_VISIBLE_DEVICES": "1"}, True),
        ({"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}, False),
        ({"CUDA_VISIBLE_DEVICES": "0"}, {}, False),
        ({}, {"PYTHONPATH": "/other"}, False),
    ],
)
def test_a_task_is_for_a_zygote_that_has_not_read_anything_else(
    begun_with: dict[str, str], task: dict[str, str], fits: bool
) -> None:
    """What is read late may still come with the task, unless the zygote was given it."""
    zygote = Zygote("/p", standbys=0, core_sets=(), shielded=frozenset())
    zygote._early = begun_with
    start = ProcessStart(program="/p", argv=("/p", "-m", TRAINING), env=task, cwd="/", output=1)
    assert zygote._fits(start) is fits
