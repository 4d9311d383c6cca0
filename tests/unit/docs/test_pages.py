"""What pages show of the code (reasons, states, rooms) is written by a program, and is up to date."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
from histories import AnythingGoes
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from hpcsched.core.actions import Action
from hpcsched.core.events import Event
from hpcsched.core.machine import Machine
from hpcsched.core.model import Ended, JobState
from hpcsched.core.reasons import Why

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def pages() -> ModuleType:
    sys.path.insert(0, str(ROOT / "docs/tools"))
    import pages

    sys.path.remove(str(ROOT / "docs/tools"))
    return pages


def test_pages_and_pictures_are_as_the_code_is(pages: ModuleType) -> None:
    assert pages.out_of_date() == [], "`make pages` writes them anew"


def test_a_reason_in_no_group_is_told(pages: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    title, group = next(iter(pages.reasons.GROUPS.items()))
    monkeypatch.setitem(pages.reasons.GROUPS, title, {w: t for w, t in group.items() if w is not Why.PLAN})
    with pytest.raises(SystemExit, match="Plan"):
        pages.reasons.tables()


def test_sentences_name_their_facts(pages: ModuleType) -> None:
    for why in Why:
        assert not re.search(r"[{}]", pages.reasons.sentence(why))
    assert pages.reasons.sentence(Why.FIXED) == "the job asks for N GPUs"


def test_a_phase_of_attempts_that_the_core_does_not_have_is_told(
    pages: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(pages.states.PHASES, "starting", (("no_such_field",), ""))
    with pytest.raises(SystemExit, match="no_such_field"):
        pages.states.table_of_attempts()


def test_pictures_show_each_state_and_each_end(pages: ModuleType) -> None:
    jobs, attempts = pages.states.picture_of_jobs(), pages.states.picture_of_attempts()
    assert all(f">{state}</text>" in jobs for state in JobState)
    assert all(ended in attempts for ended in Ended)


def test_the_plan_shows_a_circle(pages: ModuleType) -> None:
    few, up = pages.rooms.downward({"a": {"b": 3}, "b": {"a": 1, "c": 1}, "c": {}})
    assert few == {"a": {"b"}, "b": {"c"}, "c": set()}
    assert up == [("b", "a")]


@pytest.mark.long
def test_attempts_do_in_random_histories_what_is_drawn(
    pages: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    states, handle = pages.states, Machine.handle
    seen: set[tuple[str, str, str]] = set()

    def watched(machine: Machine, event: Event) -> list[Action]:
        before = {job.id: (states.phase(job), job.attempt) for job in machine.run.active.values()}
        actions = handle(machine, event)
        for job_id, (phase, number) in before.items():
            job = machine.run.jobs[job_id]
            seen.add((type(event).__name__, phase, job.attempts[number - 1].ended or states.phase(job)))
        return actions

    monkeypatch.setattr(Machine, "handle", watched)
    few = settings(
        max_examples=60, stateful_step_count=50, phases=[Phase.generate], derandomize=True, database=None
    )
    run_state_machine_as_test(AnythingGoes, settings=few)
    ends = {(phase, end) for end, (phases, *_) in states.ENDS.items() for phase in phases}
    drawn = {w for w in seen if w[1:] in ends or w[2] in states.may_become(w[1], w[0])}
    assert seen - drawn == set()
    assert len({way[1:] for way in seen}) > 8
