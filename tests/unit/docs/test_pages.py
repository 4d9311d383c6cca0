"""What pages show of the code (reasons, states, rooms) is written by a program, and is up to date."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

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
    assert pages.reasons.sentence(Why.FIXED) == "the job asks for GPUS GPUs"


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
