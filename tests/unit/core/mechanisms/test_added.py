"""A mechanism in one file and a registration: jobs that need one of a few licences, and no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpcsched import mechanisms
from hpcsched.contract.seats import Seat
from hpcsched.core import events as ev
from hpcsched.core.jobs import Job, Target
from hpcsched.core.machine import Machine
from hpcsched.core.mechanisms import registry
from hpcsched.core.mechanisms.base import Handlers, Mechanism
from hpcsched.core.model import JobSpec, JobState
from hpcsched.core.parts import Parts
from hpcsched.core.reasons import Reason, Why
from hpcsched.errors import ConfigError
from hpcsched.policy import around, make_policy
from hpcsched.store import journal
from hpcsched.store.replay import NotInstalled, replay
from hpcsched.testing.builders import Driver, a_job, some_devices
from hpcsched.testing.invariants import check


class Licences(Mechanism):
    """Leases on licences: a job that needs one holds it while it runs."""

    name = "licences"
    role = "licensed"
    on_gpus = False
    profiled = teaches = False

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self.holders: set[int] = set()
        self._parts = parts

    @staticmethod
    def rule(policy: object) -> int:
        """How many licences there are."""
        return 2

    def needed_by(self, spec: JobSpec) -> bool:
        return spec.strategy["kind"] == "licensed"

    def waits(self, job: Job) -> bool:
        return self.needed_by(job.spec)

    def waiting_reason(self, job: Job) -> Reason:
        return Reason(Why.ADDED, {"words": "waits for a licence"})

    def hold(self, job: Job, target: Target) -> None:
        self.holders.add(job.id)

    def release(self, job: Job) -> None:
        self.holders.remove(job.id)

    def saving(self) -> Iterator[Job]:
        return (self._parts.run.jobs[job_id] for job_id in self.holders)

    def decide(self) -> None:
        limit = self._parts.decisions.rule(self.name)
        waiting = [*self.queue.walk(lambda need, nodes, uneven: limit is not None)]
        for job_id in waiting[: limit - len(self.holders)]:
            job = self._parts.run.jobs[job_id]
            self._parts.out.note(job, Reason(Why.ADDED, {"words": "has a licence"}))
            seats = (Seat(server=False, share=1.0, host="n1"),)
            self._parts.attempts.launch(job, Target((), "licensed", self._parts.run.now, seats=seats))


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_made_by", dict(registry._made_by))
    monkeypatch.setattr(around, "_rules", dict(around._rules))
    mechanisms.add(Licences)


def licensed(name: str, **rest: Any) -> JobSpec:
    return a_job(name, strategy={"kind": "licensed"}, **rest)


def test_its_jobs_wait_run_save_and_end_beside_those_on_gpus(added: None) -> None:
    driver = Driver(*(licensed(f"l{i}") for i in range(3)), a_job("g", gpus=6), gpus=6)
    assert driver.states() == ["STARTING", "STARTING", "PENDING", "STARTING"]
    assert str(driver.machine.waiting_reason(driver.job("l2"))) == "waits for a licence"
    driver.runs("l0", "l1", "g")
    driver.exits("l0", 0)
    assert driver.job("l2").state is JobState.STARTING
    driver.tell(ev.SuspendRequested, "l1")
    driver.leaves("l1", 50)
    assert driver.job("l1").state is JobState.SUSPENDED
    assert driver.machine.mechanism(Licences).holders == {3}
    again = Machine(make_policy)
    for event in driver.events:
        again.handle(event)
        check(again)
    assert again.mechanism(Licences).holders == {3}


def test_it_counts_before_the_allocation_ends(added: None) -> None:
    driver = Driver(licensed("l"), gpus=1, deadline=1000.0)
    driver.runs("l")
    alone = driver.machine.deadline.margin_s()
    driver.submit(licensed("m"))
    assert driver.machine.deadline.margin_s() > alone


def test_a_name_that_is_taken_and_what_is_no_mechanism_are_refused(added: None) -> None:
    with pytest.raises(ValueError, match="there is a mechanism 'licences' already"):
        mechanisms.add(Licences)
    with pytest.raises(ValueError, match="does not inherit"):
        mechanisms.add(dict)  # type: ignore[arg-type]


def test_what_would_replace_a_part_of_the_core_is_refused(added: None) -> None:
    class Nameless(Mechanism):
        role = "nameless"

    class Keeps(Mechanism):
        name, role = "keeps", "keeps"

        def hold(self, job: Job, target: Target) -> None:
            pass

    class Mute(Mechanism):
        name = "mute"

        def waits(self, job: Job) -> bool:
            return False

    class Again(Licences):
        name = "licences again"

    class Packs(Licences):
        name, role = "packs of another kind", "packed"

    class Cancelling(Licences):
        name, role = "cancelling", "cancelling"

        def handlers(self) -> Handlers:
            return {ev.CancelRequested: lambda event: None}

    for kind, why in (
        *((Nameless, "no `name`"), (Keeps, "'keeps' has no `release`"), (Mute, "no `waiting_reason`")),
        *((Again, "role 'licensed'"), (Packs, "role 'packed'")),
    ):
        with pytest.raises(ValueError, match=why):
            mechanisms.add(kind)
    mechanisms.add(Cancelling)
    with pytest.raises(ValueError, match="Cancelling handles what is handled already: CancelRequested"):
        Machine(make_policy)


def test_an_entry_point_that_cannot_be_loaded_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        name, value = "licences", "site.licences:Licences"

        def load(self) -> object:
            raise ImportError("no module named site.licences")

    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [Broken()])
    mechanisms.load.cache_clear()
    with pytest.raises(ConfigError, match=r"site\.licences:Licences cannot be loaded: no module named"):
        mechanisms.load()
    monkeypatch.undo()
    mechanisms.load.cache_clear()
    mechanisms.load()


def test_the_core_works_without_any_mechanism_but_gpus_of_ones_own() -> None:
    machine = Machine(make_policy, mechanisms=())
    machine.handle(ev.AgentStarted(at=0.0, wall=1e9, devices=some_devices(2), policy="marble"))
    actions = machine.handle(ev.JobsSubmitted(at=1.0, first_id=1, jobs=(a_job("a"), a_job("b"))))
    assert [type(action).__name__ for action in actions] == ["Launch", "Launch"]
    about = {"job_id": 1, "attempt": 1}
    machine.handle(ev.WorkersSpawned(at=2.0, **about, processes=((7, 1),)))
    machine.handle(ev.WorkersReady(at=3.0, **about))
    machine.handle(ev.DeviceLost(at=4.0, gpu=1, why="gone"))
    machine.handle(ev.WorkersExited(at=5.0, **about, code=0))
    assert [job.state for job in machine.run.jobs.values()] == [JobState.COMPLETED, JobState.STARTING]
    machine.handle(ev.DrainRequested(at=6.0, cause="SIGTERM"))
    machine.handle(ev.WorkersExited(at=7.0, job_id=2, attempt=1, code=143))
    assert machine.stopped


def test_a_journal_that_needs_one_that_is_not_here_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    needs = ev.AgentStarted(at=0.0, wall=1e9, devices=(), policy="marble", mechanisms=("licences",))
    path.write_bytes(journal.encode(1, needs))
    with pytest.raises(NotInstalled, match=r"record 1 .* that adds the mechanism 'licences'"):
        replay(path, make_policy)
