"""Real runs under faults: a few schedules that are always the same, and as many as fit into some minutes."""

from __future__ import annotations

import pytest

from tests.chaos.planted import Fault
from tests.chaos.real.campaign import play, unplayed
from tests.chaos.real.ledgers import Line, lost
from tests.chaos.real.planted import BUGS
from tests.chaos.real.schedule import FLAVOURS, drawn
from tests.chaos.real.weights import ROOT


@pytest.mark.parametrize("seed", [19, pytest.param(33, marks=pytest.mark.slow)])
def test_agents_are_killed_and_the_run_comes_to_its_end(seed: int) -> None:
    schedule = drawn(seed, "programs")
    assert any(fault.kind == "kill agent" for fault in schedule.faults)
    assert play(seed, "programs") == [], str(schedule)


def test_a_seed_is_a_schedule() -> None:
    for flavour in FLAVOURS:
        one, other = drawn(7, flavour), drawn(7, flavour)
        assert str(one) == str(other) and one.flavour == flavour
        assert unplayed(one).violations == []
        assert all(
            len(smaller.faults) + len(smaller.jobs) < len(one.faults) + len(one.jobs)
            for smaller in one.smaller()
        )


def test_who_has_not_begun_has_lost_nothing_and_hides_nothing() -> None:
    lines = [Line("a", 1, 10, "begin", 0, 1.0), Line("a", 1, 10, "saved", 30, 2.0)]
    lines += [Line("a", 1, 10, "step", 40, 2.5), Line("b", 2, 11, "fail", 116, 3.0)]
    lines += [Line("c", 3, 12, "begin", 30, 4.0), Line("c", 3, 12, "saved", 40, 5.0)]
    assert lost(lines) == (9, 10)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_bugs_to_plant_are_in_the_code_as_it_is(bug: Fault) -> None:
    assert bug.planted((ROOT / "hpcsched" / bug.file).read_text())


@pytest.mark.slow
def test_as_many_as_fit_into_five_minutes(pytestconfig: pytest.Config) -> None:
    if pytestconfig.getoption("--part"):
        pytest.skip("real runs differ each time, and a part is always the same")
    from tests.chaos.real.__main__ import main

    assert main(["--seconds", "300", "--first", "5000"]) == 0
