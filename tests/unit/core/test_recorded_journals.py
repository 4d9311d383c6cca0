"""Journals of earlier code replay to equal actions, states and stories: see `recorded`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from impossible import any_policy
from recorded import Recorded, difference, picture, read, recorded, sections_of

from hpcsched.core.jobs import Job
from hpcsched.core.machine import Machine

STORED = Path(__file__).parents[2] / "data" / "journals"
GROUPS = sorted(path.stem for path in STORED.glob("*.gz"))

AGAIN = "what was meant to change is recorded by `python tests/support/record_journals.py again`"


@pytest.mark.long
@pytest.mark.parametrize("group", GROUPS)
def test_recorded_journals_replay_to_the_same(group: str) -> None:
    journals = list(read(STORED / f"{group}.gz"))
    found = [told for one in journals if (told := difference(one))]
    assert not found, "\n".join([f"{len(found)} of {len(journals)} differ; {AGAIN}", *found[:20]])


@pytest.mark.long
@pytest.mark.parametrize("group", GROUPS)
def test_they_do_where_the_jobs_that_are_over_are_packed_at_each_event(group: str) -> None:
    found = [told for one in read(STORED / f"{group}.gz") if (told := difference(one, packs=True))]
    assert not found, "\n".join(found[:20])


@pytest.fixture(scope="module")
def journal() -> Recorded:
    """One in which jobs are started, suspended and ended."""
    journals = read(STORED / "core.gz")
    return next(
        one for one in journals if {"SuspendRequested", "WorkersExited"} <= {k for k, _ in one.events}
    )


def test_they_are_many_and_of_all_kinds() -> None:
    assert sum(len(list(read(STORED / f"{group}.gz"))) for group in GROUPS) >= 300
    assert {"core", "live", "policy", "scenes", "sim"} <= set(GROUPS)


def test_what_is_read_is_what_was_recorded(journal: Recorded) -> None:
    again = recorded(journal.name, journal.events, stories=journal.stories, plans=journal.plans)
    assert again == journal


def test_another_action_is_seen(journal: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    def fewer(machine: Machine, event: object) -> list[object]:
        return handle(machine, event)[1:]  # type: ignore[arg-type]

    handle = Machine.handle
    monkeypatch.setattr(Machine, "handle", fewer)
    number = next(i for i, said in enumerate(journal.answers, 1) if said != "-")
    assert f"event {number} of" in difference(journal)
    assert "its actions are" in difference(journal)


def test_another_event_is_seen(journal: Recorded) -> None:
    number = next(i for i, (kind, _) in enumerate(journal.events) if kind == "WorkersExited")
    without = replace(
        journal,
        events=[*journal.events[:number], *journal.events[number + 1 :]],
        answers=[*journal.answers[:number], *journal.answers[number + 1 :]],
    )
    assert difference(without)


def test_another_state_is_seen_where_all_actions_are_the_same(
    journal: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Job, "note", lambda job, at, reason: None)
    assert "differ" in difference(journal)
    assert "stories" in difference(replace(journal, pictures=dict.fromkeys(journal.pictures, "")))


def test_an_event_that_breaks_the_machine_is_named(
    journal: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(machine: Machine, event: object) -> None:
        raise KeyError("lost")

    monkeypatch.setattr(Machine, "handle", breaks)
    assert "event 1 of" in difference(journal) and "KeyError" in difference(journal)


def test_a_machine_that_takes_over_goes_on_as_the_other_would(journal: Recorded) -> None:
    first, second = Machine(any_policy), Machine(any_policy)
    events = list(journal.decoded())
    for event in events[: len(events) // 2]:
        first.handle(event)
    second.become(first)
    for event in events[len(events) // 2 :]:
        second.handle(event)
    assert sections_of(second) == journal.sections | {"counts": sections_of(second)["counts"]}


def test_to_look_changes_nothing(journal: Recorded) -> None:
    machine = Machine(any_policy)
    for event in journal.decoded():
        machine.handle(event)
        assert picture(machine) == picture(machine)
