"""How long an agent with nothing to do stays."""

from __future__ import annotations

from math import inf
from types import SimpleNamespace
from typing import Any

import pytest

from hpcsched.agent.staying import Staying


class Place:
    def __init__(self, most_s: float | None) -> None:
        self.now, self.said = 100.0, list[str]()
        self.snapshot: Any = SimpleNamespace(idle=None)
        self.staying = Staying(most_s, self.snapshot, tell=self.said.append, clock=lambda: self.now)


def test_who_is_not_asked_to_leaves_at_once_and_without_a_word() -> None:
    place = Place(None)
    assert not place.staying.stays() and place.said == [] and place.snapshot.idle is None


def test_it_stays_for_its_time_from_when_it_had_nothing_to_do() -> None:
    place = Place(60.0)
    assert place.staying.stays() and place.staying.idle
    assert place.snapshot.idle.until is not None and "for 60 s at most" in place.said[0]
    place.now += 59
    assert place.staying.stays() and len(place.said) == 1
    place.staying.busy()
    assert place.snapshot.idle is None and not place.staying.idle
    place.now += 1000
    assert place.staying.stays()
    place.now += 60
    assert not place.staying.stays() and "nothing has come that can run for 60 s" in place.said[-1]


@pytest.mark.parametrize("after_s", [1.0, 1e9])
def test_without_a_limit_it_stays(after_s: float) -> None:
    place = Place(inf)
    assert place.staying.stays() and place.snapshot.idle.until is None
    place.now += after_s
    assert place.staying.stays() and "until `hpcsched drain`" in place.said[0]
