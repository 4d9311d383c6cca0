"""An event that cannot be handled is voided, on record: the run goes on, now and in every replay."""

from __future__ import annotations

import pytest

from hpcsched.agent.recorder import Recorder
from hpcsched.core import events as ev
from hpcsched.core.machine import Machine
from hpcsched.core.reasons import Why
from hpcsched.core.transitions.reports import Reports
from hpcsched.errors import HpcschedError, StoreError
from hpcsched.policy import make_policy
from hpcsched.store.journal import Journal
from hpcsched.store.replay import replay, voided
from hpcsched.testing.builders import Driver, a_job, a_profile, state_of


@pytest.fixture
def path(tmp_path):
    return tmp_path / "journal.jsonl"


@pytest.fixture
def run(path):
    """A recorder whose run has a job "a" under way, and its machine."""
    driver = Driver(a_job("a", "m"), profiles=[a_profile("m", [1])])
    driver.runs("a")
    machine = Machine(make_policy)
    recorder = Recorder(machine, Journal(path))
    assert len(list(recorder.take(driver.events))) == len(driver.events)
    return recorder, machine


def poison(at: float = 50.0, first_id: int = 2) -> ev.JobsSubmitted:
    """Jobs that no admission would let in: the policy divides by their number of hosts."""
    return ev.JobsSubmitted(at=at, first_id=first_id, jobs=(a_job("bad", "x", nodes=0),), cause="inbox:17")


def test_a_poisonous_event_is_voided_and_what_came_with_it_stands(run, path):
    recorder, machine = run
    seen = ev.CheckpointSaved(at=60.0, job_id=1, attempt=1, step=7)
    taken = [event for event, _ in recorder.take([poison(), seen])]
    assert taken[0] is seen
    assert isinstance(taken[1], ev.EventVoided)
    assert (taken[1].kind, taken[1].error.split(":")[0]) == ("JobsSubmitted", "ZeroDivisionError")
    assert list(machine.run.by_name) == ["a"]
    assert machine.run.jobs[1].saved_step == 7
    again = replay(path, make_policy)
    assert state_of(again.machine) == state_of(machine)
    assert again.commands == {"17"}  # it is not tried again
    assert voided(path) == {taken[1].record}


def test_the_run_goes_on_after_it(run, path):
    recorder, machine = run
    list(recorder.take([poison()]))
    good = ev.JobsSubmitted(at=51.0, first_id=2, jobs=(a_job("b", "m"),))
    list(recorder.take([good, poison(52.0, 3)]))
    assert list(machine.run.by_name) == ["a", "b"]
    assert state_of(replay(path, make_policy).machine) == state_of(machine)


def test_news_of_an_attempt_that_cannot_be_handled_cost_its_job_the_attempt(run, path, monkeypatch):
    recorder, machine = run
    handle = Reports._workers_exited
    broken = {"yes": True}

    def exited(self: Reports, event: ev.WorkersExited) -> None:
        if broken["yes"]:
            raise IndexError("its news")
        handle(self, event)

    monkeypatch.setattr(Reports, "_workers_exited", exited)
    reports = machine._handlers[ev.WorkersExited].__self__
    machine._handlers[ev.WorkersExited] = lambda event: exited(reports, event)
    list(recorder.take([ev.WorkersExited(at=70.0, job_id=1, attempt=1, code=0)]))
    job = machine.run.jobs[1]
    assert job.attempts[0].ended == "lost"
    assert Why.VOIDED in [note.reason.why for note in job.story]
    assert "IndexError: its news" in next(str(n.reason) for n in job.story if n.reason.why is Why.VOIDED)


def test_a_life_that_cannot_begin_says_so_and_is_no_obstacle_to_the_next(run, path):
    recorder, machine = run
    before = state_of(machine)
    with pytest.raises(HpcschedError, match="cannot be taken up: ConfigError"):
        list(recorder.take([ev.AgentStarted(at=80.0, wall=1.0, devices=(), policy="none such")]))
    assert state_of(replay(path, make_policy).machine) == {**before, "now": 80.0}


def test_a_contradiction_that_is_not_voided_names_the_way_out(run, path):
    found = replay(path, make_policy)
    writer = Journal(path, length=found.length, records=found.records)
    writer.append([ev.CancelRequested(at=90.0, job_id=77)])
    with pytest.raises(StoreError, match="journal repair"):
        replay(path, make_policy)
