"""Cores are given out so that pinned jobs share none while there are enough."""

from __future__ import annotations

from hpcsched.launch.core_sets import CoreSets


def test_pinned_jobs_share_no_core_while_there_are_enough():
    cores = CoreSets(range(8))
    first, second = cores.take(4), cores.take(4)
    assert first | second == set(range(8))
    third = cores.take(2)
    assert len(third) == 2  # shared, as there are no more
    cores.give_back(first)
    assert cores.take(4) - first == set() or third & first


def test_cores_near_the_gpu_come_first():
    cores = CoreSets(range(8))
    assert cores.take(2, near={6, 7}) == {6, 7}
    assert cores.take(3, near={6, 7}) == {0, 1, 2}
    assert cores.take(2) == {3, 4}


def test_who_wants_more_than_there_are_gets_all():
    assert CoreSets(range(2)).take(5) == {0, 1}
