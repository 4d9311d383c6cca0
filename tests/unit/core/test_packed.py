"""Jobs that are over, packed: what comes out is what went in, and a run goes on as if they were not."""

from __future__ import annotations

import contextlib
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from impossible import any_policy
from recorded import read

from hpcsched.core.jobs import Job, Saves, Target, Trained, Traits
from hpcsched.core.machine import Machine
from hpcsched.core.model import (
    Array,
    Attempt,
    Container,
    Ended,
    JobSpec,
    JobState,
    Kind,
    Restart,
    Role,
    SeatedAttempt,
    Training,
    Usage,
)
from hpcsched.core.needs import Needs
from hpcsched.core.packed import Jobs
from hpcsched.core.reasons import Note, Reason, Why
from hpcsched.errors import InvalidTransition
from hpcsched.testing.builders import Driver, a_job, a_profile

STORED = Path(__file__).parents[2] / "data" / "journals"


def same(one: Any, other: Any) -> bool:
    """Equal in every field, of the same types."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Job | Attempt):
        return all(same(getattr(one, part.name), getattr(other, part.name)) for part in fields(one))
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def of_all_kinds(job_id: int) -> Job:
    """A job in which no field is as usual."""
    why = Reason(Why.EXITED, {"code": 1, "detail": ": lost", "nested": {"a": [1, 2.5, None]}})
    attempts = (
        Attempt(
            number=1,
            gpus=(0, 3),
            role=Role.PRIMARY,
            start_s=0.1,
            end_s=7.5,
            ended=Ended.RESIZED,
            to_step=3,
            guests=(4,),
        ),
        SeatedAttempt(
            number=2,
            gpus=(),
            role=Role.CORES,
            start_s=8.0,
            why=why,
            usage=Usage(rate=1.5, cpu=(0.5,), net=(0.25,), samples=3, stable=True),
        ),
    )
    return Job(
        id=job_id,
        spec=JobSpec(
            name=f"job-{job_id}",
            kind=Kind.COMMAND,
            model="m",
            command=("train", "--lr", "0.1", "ü"),
            args={"lr": 0.1, "layers": [1, 2], "of": {"deep": True}},
            steps=10,
            training=Training(epochs=1.5, continues="other"),
            after=("other",),
            env={"A": "b"},
            restart=Restart(checkpoints=("c-*",), saved_codes=(3,)),
            container=Container(image="i.sif", mounts=(("/a", "/b", "ro"),)),
            needs=Needs(time_s=60.0),
            array=Array(name="sweep", index=3, at_once=4),
            strategy={"kind": "vsw", "workers": 3},
        ),
        submit_s=1.0,
        state=JobState.FAILED,
        unmet=1,
        held=True,
        gpus=(3,),
        role=Role.SECONDARY,
        target=Target((1,), "primary", 2.0, why=why, host="n1", grant={0: 50}),
        becoming=Target((2,), "primary", 2.0),
        ready=True,
        in_place=True,
        traits=Traits(most_gpus=2, saves=Saves(at=3.0), trained=(Trained(1, 1, 2.0, 3, 4.0),), losses=1),
        wanted="cancel",
        attempt=2,
        attempts=attempts,
        processes=((1, 2), (3, 4)),
        timers={"grace": 9.0},
        step=5,
        reports=True,
        saved_step=4,
        rate=2.5,
        suspensions=1,
        failures=3,
        exit=1,
        started_s=0.1,
        ended_s=9.0,
        metrics={"loss": 0.5, "none": None},
        reason=why,
        story=(Note(1.0, Reason(Why.SUBMITTED)), Note(9.0, why)),
    )


def packed(*jobs: Job) -> Jobs:
    found = Jobs()
    for job in jobs:
        found.add(job)
    found.pack()
    return found


def test_every_field_comes_out_as_it_went_in() -> None:
    usual, unusual = Job(id=0, spec=of_all_kinds(1).spec, submit_s=0.0), of_all_kinds(1)
    names = {part.name for part in fields(Job)} - {"spec"}
    assert not [name for name in names if getattr(usual, name) == getattr(unusual, name)]
    jobs = packed(*(of_all_kinds(number) for number in (1, 2, 3)))
    for copy in jobs.values():
        assert same(copy, of_all_kinds(copy.id))
    assert same(jobs[2], of_all_kinds(2))


@pytest.mark.long
@pytest.mark.parametrize("group", ["core", "live", "scenes"])
def test_those_of_recorded_runs_too(group: str) -> None:
    found = 0
    for journal in read(STORED / f"{group}.gz"):
        one, other = Machine(any_policy), Machine(any_policy)
        for event in journal.decoded():
            for machine in (one, other):
                with contextlib.suppress(InvalidTransition):  # some are recorded of decisions that cannot be
                    machine.handle(event)
        over = [job.id for job in one.run.jobs.values() if job.state.final]
        one.run.jobs.pack()
        found += len(one.run.jobs._ids())
        assert len(one.run.jobs._ids()) == len(over)
        assert all(map(same, one.run.jobs.values(), other.run.jobs.values()))
    assert found > 20


def test_it_is_a_dict_with_all_of_them_in_order() -> None:
    jobs = packed(of_all_kinds(2), of_all_kinds(1))
    jobs.add(left := Job(id=3, spec=of_all_kinds(3).spec, submit_s=0.0))
    assert list(jobs) == list(jobs.keys()) == [1, 2, 3]
    assert [job.id for job in jobs.values()] == [job_id for job_id, _ in jobs.items()] == [1, 2, 3]
    assert len(jobs) == len(jobs.values()) == 3 and jobs.last_id == 3
    assert 1 in jobs and 3 in jobs and 4 not in jobs
    assert jobs.get(4) is None and jobs.get(3) is left
    with pytest.raises(KeyError):
        jobs[4]
    assert jobs.left() == [left]
    assert [job.id for job in jobs.in_state(JobState.FAILED)] == [1, 2]
    assert [job.id for job in jobs.since(9.0)] == [1, 2, 3] and [job.id for job in jobs.since(9.1)] == [3]
    assert jobs.counts() == {JobState.FAILED: 2, JobState.PENDING: 1}


def test_a_change_of_one_that_was_asked_for_stays() -> None:
    jobs = packed(of_all_kinds(1), of_all_kinds(2))
    jobs[1].unmet = 7
    assert jobs[1].unmet == 7 and jobs.counts() == {JobState.FAILED: 2}
    jobs.pack()
    assert [job.unmet for job in jobs.values()] == [7, 1]
    jobs[1].state = JobState.PENDING  # as after a retry
    jobs.pack()
    assert jobs.left() == [jobs[1]] and jobs.counts() == {JobState.FAILED: 1, JobState.PENDING: 1}


def test_whether_one_is_over_is_known_without_unpacking_it() -> None:
    jobs = packed(of_all_kinds(1), of_all_kinds(2))
    assert jobs.is_over(1) and jobs._ids() == [1, 2]
    jobs[2].state = JobState.PENDING  # as after a retry
    assert not jobs.is_over(2)


def test_of_many_only_so_many_are_packed_at_once() -> None:
    jobs = Jobs()
    for number in range(1, 6):
        jobs.add(of_all_kinds(number))
    jobs.pack(at_most=2)
    assert jobs._ids() == [1, 2]
    jobs.pack()
    assert len(jobs._ids()) == 5
    jobs.unpack()
    assert not jobs._ids() and same(jobs[4], of_all_kinds(4))


def test_an_id_far_from_the_others_takes_no_room() -> None:
    jobs = packed(of_all_kinds(1), of_all_kinds(10**12))
    assert jobs._ids() == [1] and list(jobs) == [1, 10**12] and same(jobs[10**12], of_all_kinds(10**12))


def test_what_cannot_be_packed_stays_as_it_is() -> None:
    odd = of_all_kinds(1)
    odd.reason = Reason(Why.ADDED, {"words": lambda: None})
    jobs = packed(odd, of_all_kinds(2))
    assert jobs[1] is odd and jobs._ids() == [2]


def test_many_alike_take_little() -> None:
    driver = Driver(profiles=(a_profile("m", [1, 2]),), gpus=2)
    for number in range(40):
        driver.submit(a_job(f"job-{number}", "m", gpus=1))
        driver.runs(f"job-{number}")
        driver.exits(f"job-{number}", 0)
    jobs = driver.machine.run.jobs
    jobs.pack()
    assert sum(map(len, jobs._packed)) < 40 * 200


def test_a_job_that_is_run_again_is_no_longer_packed() -> None:
    driver = Driver(
        a_job("a", "m", gpus=1), a_job("b", "m", after=("a",)), profiles=(a_profile("m", [1, 2]),)
    )
    driver.runs("a")
    jobs = driver.machine.run.jobs
    while not jobs[1].state.final:
        driver.exits("a", 1)
        if not jobs[1].state.final:
            driver.runs("a")
    jobs.pack()
    assert [str(job.state) for job in jobs.values()] == ["FAILED", "CANCELLED"]
    assert len(jobs._ids()) == 2
    driver.retry("a")
    assert [str(job.state) for job in jobs.values()] == ["STARTING", "PENDING"]
    jobs.pack()
    driver.runs("a")
    driver.exits("a", 0)
    jobs.pack()
    assert jobs.counts() == {JobState.COMPLETED: 1, JobState.STARTING: 1}


def test_jobs_that_are_kept_as_bytes_are_read_when_they_are_asked_for() -> None:
    jobs, read = Jobs(), list[bytes]()
    one = of_all_kinds(7)

    def reads(data: bytes) -> Job:
        read.append(data)
        return of_all_kinds(int(data))

    jobs.keep([(7, one.state, 8.5, b"7"), (9, JobState.COMPLETED, 2.0, b"9")], reads, most=9)
    jobs.add(of_all_kinds(10))
    assert not read and len(jobs) == 3 and list(jobs) == [7, 9, 10] and jobs.last_id == 10
    assert jobs.counts()[JobState.COMPLETED] >= 1 and 9 in jobs and not read
    assert [kept[0] for kept in jobs.kept()] == [7, 9]
    assert same(jobs.look(7), one) and jobs.look(7) is not jobs.look(7)
    assert jobs[7] is jobs[7] and list(jobs.kept()) == [(9, JobState.COMPLETED, 2.0, b"9")]
    assert next(job.id for job in jobs.since(3.0)) == 7
    before = len(read)
    jobs.unpack()
    assert not [*jobs.kept()] and len(read) == before + 1
    jobs.pack()
    assert same(jobs.look(7), one)
    for job_id in (0, -1, 2**40):
        with pytest.raises(ValueError, match="a job of id"):
            Jobs().keep([(job_id, JobState.COMPLETED, 2.0, b"9")], reads, most=100)


def test_what_was_all_over_before_is_not_gone_through(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = Jobs()
    ends = [(1, JobState.COMPLETED, 5.0, b"1"), (2, JobState.COMPLETED, 8.0, b"2")]
    jobs.keep(ends, lambda data: of_all_kinds(int(data)), most=2)
    assert [job.id for job in jobs.since(8.0)] == [2]
    monkeypatch.setattr(Jobs, "_ids", lambda self: pytest.fail("all of them"))
    assert list(jobs.since(8.1)) == []
