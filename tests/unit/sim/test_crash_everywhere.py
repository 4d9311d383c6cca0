"""The agent's node may die after any record of the journal, or in the middle of writing one."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from budget import share, slow

from hpcsched.core import events as ev
from hpcsched.core.mechanisms.background.mechanism import Background
from hpcsched.core.model import Ended, JobState, Kind
from hpcsched.core.needs import Needs
from hpcsched.policy import make_policy
from hpcsched.store.replay import replay
from hpcsched.testing.builders import a_job, a_profile, state_of
from hpcsched.testing.simulation import Rehearsal, Scene

PROFILES = (
    a_profile("short", [2, 3, 4, 3.5], start_s=5.0, suspend_s=4.0, resume_s=3.0),
    a_profile("wide", [1, 2, 3, 4, 5], start_s=10.0, suspend_s=8.0, resume_s=6.0),
)
EVERY = {"checkpoint_every_s": 13.0}


class Everybody(Random):
    """Has all attempts adopted that can be."""

    def random(self):
        return 0.0


EVERYBODY = Everybody()


def command(kind, at, job_id):
    return kind(at=at, job_id=job_id)


CONTENDED = Scene(
    jobs=(
        a_job("a", "short", 200, **EVERY),
        a_job("b", "wide", 600, **EVERY),
        a_job("c", "short", 300, after=("a",), **EVERY),
        a_job("d", "wide", 400, gpus=(2, 3), submit_at=60.1, **EVERY),
        a_job("e", "short", 900, **EVERY),
        a_job("f", "short", 100, after=("e",), **EVERY),
        a_job("g", "short", 100, gpus=5, **EVERY),
    ),
    profiles=PROFILES,
    gpus=6,
    options={"promote": "always"},
    commands=(
        command(ev.SuspendRequested, 20.0, 2),
        command(ev.HoldRequested, 5.0, 7),
        command(ev.CancelRequested, 90.0, 5),
        command(ev.ResumeRequested, 120.0, 2),
        command(ev.ReleaseRequested, 130.0, 7),
    ),
)
ONE_BY_ONE = Scene(
    jobs=tuple(a_job(f"x{i}", "wide", 300, **EVERY) for i in range(4)),
    profiles=PROFILES,
    gpus=4,
    policy="exclusive",
    commands=(command(ev.CancelRequested, 70.0, 3),),
)
PLANNED = replace(CONTENDED, policy="planner", options={"budget": 5})
IN_PLACE = replace(
    CONTENDED,
    jobs=tuple(replace(job, kind=Kind.COMMAND) for job in CONTENDED.jobs),
    profiles=tuple(replace(profile, grow_s=2.0, shrink_s=1.0) for profile in PROFILES),
    policy="equal",
    options={"resize": "always"},
)
BEHIND = {"background": True, "gpus": 1, **EVERY}
SHARED = Scene(
    jobs=(
        a_job("a", "short", 150, gpus=2, **EVERY),
        a_job("b", "short", 120, gpus=2, submit_at=20.0, max_foreground_slowdown=0.0, **EVERY),
        a_job("behind", "wide", 60, **BEHIND),
        a_job("behind-cancelled", "short", 4000, **BEHIND),
        a_job("behind-after", "short", 50, after=("a",), **BEHIND),
        a_job("after-behind", "short", 40, after=("behind",), **EVERY),
    ),
    profiles=PROFILES,
    gpus=3,
    commands=(
        command(ev.SuspendRequested, 38.0, 3),
        command(ev.ResumeRequested, 55.0, 3),
        command(ev.CancelRequested, 75.0, 4),
    ),
)
SIDE_BY_SIDE = Scene(
    jobs=(
        *(a_job(f"part-{i}", "busy", 300, gpus=1, needs=Needs(share=0.0), **EVERY) for i in range(4)),
        a_job("half", "busy", 200, gpus=1, needs=Needs(share=0.5), submit_at=40.0, **EVERY),
        a_job("whole", "wide", 100, gpus=2, submit_at=70.0, **EVERY),
    ),
    profiles=(
        replace(a_profile("busy", [3.0], start_s=5.0, suspend_s=4.0, resume_s=3.0), busy={1: 0.3}),
        *PROFILES,
    ),
    gpus=2,
    commands=(
        command(ev.SuspendRequested, 45.0, 3),
        command(ev.ResumeRequested, 60.0, 3),
        command(ev.CancelRequested, 80.0, 4),
    ),
)
SCENES = {
    "contended": CONTENDED,
    "one-by-one": ONE_BY_ONE,
    "planned": PLANNED,
    "in-place": IN_PLACE,
    "shared": SHARED,
    "side-by-side": SIDE_BY_SIDE,
}


LONG = ("planned", "in-place")


@pytest.fixture(scope="module", params=[slow(name) if name in LONG else name for name in SCENES])
def rehearsal(request, tmp_path_factory):
    return Rehearsal(SCENES[request.param], tmp_path_factory.mktemp("run"))


def test_without_a_crash_no_step_is_done_twice(rehearsal):
    assert rehearsal.machine.run.finished
    assert rehearsal.records > 30
    kinds = {job.state for job in rehearsal.machine.run.jobs.values()}
    assert kinds == {JobState.COMPLETED, JobState.CANCELLED}
    for job in rehearsal.machine.run.jobs.values():
        assert job.repeated == 0


@pytest.mark.slow
def test_the_scene_in_place_is_cut_in_the_middle_of_resizes(tmp_path):
    """Both ways, with other things wanted meanwhile; and the journal alone leads to the same state."""
    rehearsal = Rehearsal(IN_PLACE, tmp_path)
    ends = [attempt for job in rehearsal.machine.run.jobs.values() for attempt in job.attempts]
    resized = [(a, b) for a, b in pairwise(ends) if a.ended is Ended.RESIZED]
    assert {len(a.gpus) < len(b.gpus) for a, b in resized} == {True, False}
    assert state_of(replay(tmp_path / "whole.jsonl", make_policy).machine) == state_of(rehearsal.machine)
    under_way = 0
    for records in range(rehearsal.records):
        before, _ = rehearsal.crash(records, torn=False)
        under_way += any(job.resizing for job in before.run.active.values())
    assert under_way > 10


@pytest.mark.parametrize("torn", [False, True], ids=["between records", "in a record"])
@pytest.mark.long
def test_a_crash_at_every_record(rehearsal, torn):
    """Same ends; nothing acknowledged is lost; only steps since the newest checkpoint are done again.

    That no job is launched while it runs, and the steps add up, the simulation and the invariants check.
    """
    expected = {job.spec.name: job.state for job in rehearsal.machine.run.jobs.values()}
    again = 0
    cuts = range(rehearsal.records + (not torn))
    for records in (tried := share(cuts)):
        before, end = rehearsal.crash(records, torn=torn)
        assert {job.spec.name: job.state for job in end.run.jobs.values()} == expected, records
        for job_id, job in before.run.jobs.items():
            after = end.run.jobs[job_id]
            if job.state.final:
                assert (after.state, after.ended_s, after.step) == (job.state, job.ended_s, job.step)
            if job.wanted == "cancel":
                assert after.state is JobState.CANCELLED
            at_risk = 0
            if job.state.active and job.wanted != "cancel":
                at_risk = max(0, job.step - rehearsal.saved[records + torn].get(job_id, 0))
            assert after.repeated == at_risk, (records, job.spec.name)
            again += after.repeated
            if after.state is JobState.COMPLETED:
                assert after.step == job.spec.steps
    assert again > 0 or len(tried) < len(cuts)


@pytest.mark.parametrize("torn", [False, True], ids=["between records", "in a record"])
@pytest.mark.long
def test_the_agent_alone_dies_at_every_record(rehearsal, torn):
    """Attempts that are adopted repeat nothing, jobs whose processes may live wait, and all come to their
    ends. That nobody runs twice, and no GPU is held twice, the simulation and the invariants check."""
    expected = {job.spec.name: job.state for job in rehearsal.machine.run.jobs.values()}
    adopted = unsure = 0
    cuts = range(rehearsal.records + (not torn))
    for records in (tried := share(cuts)):
        before, end = rehearsal.crash(records, torn=torn, takes_over=Random(records))
        started = rehearsal.started
        assert {job.spec.name: job.state for job in end.run.jobs.values()} == expected, records
        assert state_of(rehearsal.replayed()) == state_of(end), records
        for job_id in started.adopted:
            job, after = before.run.jobs[job_id], end.run.jobs[job_id]
            attempt = after.attempts[job.attempt - 1]
            assert after.repeated == job.repeated, (records, job.spec.name)
            assert (attempt.start_s, attempt.gpus) == (job.current.start_s, job.current.gpus)
            assert attempt.ended is not Ended.LOST and attempt.end_s >= started.at
        for job_id, until in started.unsure.items():
            number = before.run.jobs[job_id].attempt
            assert end.run.jobs[job_id].attempts[number - 1].end_s == started.at
            assert all(one.start_s >= until for one in end.run.jobs[job_id].attempts[number:])
        adopted, unsure = adopted + len(started.adopted), unsure + len(started.unsure)
    assert (adopted > 0 and unsure > 0) or len(tried) < len(cuts)


def test_agents_that_die_one_after_the_other_repeat_nothing_of_what_is_adopted(tmp_path):
    rehearsal = Rehearsal(ONE_BY_ONE, tmp_path)
    for lives in (2, 3, 4):
        before, end = rehearsal.crash(rehearsal.records * lives // 5, torn=False, takes_over=EVERYBODY)
        assert rehearsal.started.adopted == before.adoptable()
        assert end.run.finished and len(end.run.lives) == lives
        rehearsal.keep_crash()
    assert [job.repeated for job in end.run.jobs.values()] == [0, 0, 0, 0]
    assert sum(len(job.attempts) for job in end.run.jobs.values()) == 3 + (end.run.jobs[3].attempt > 0)


def test_a_held_job_is_still_held_after_a_crash(tmp_path):
    """Hold and suspend are kept; without a release the jobs stay where they are."""
    scene = Scene(
        jobs=(a_job("a", "wide", 500, **EVERY), a_job("b", "short", 500, gpus=4)),
        profiles=PROFILES,
        gpus=4,
        commands=(command(ev.HoldRequested, 1.0, 2), command(ev.SuspendRequested, 30.0, 1)),
    )
    rehearsal = Rehearsal(scene, tmp_path)
    for records in range(rehearsal.records):
        _, end = rehearsal.crash(records, torn=False)
        assert end.run.jobs[2].state is JobState.HELD
        assert end.run.jobs[1].state in (JobState.SUSPENDED, JobState.HELD)
        assert not end.run.active


@pytest.mark.slow
@pytest.mark.long
def test_the_shared_scene_is_cut_while_guests_run_and_leave(tmp_path):
    """And the journal alone leads to the same state."""
    rehearsal = Rehearsal(SHARED, tmp_path)
    assert state_of(replay(tmp_path / "whole.jsonl", make_policy).machine) == state_of(rehearsal.machine)
    alone = beside = leaving = 0
    for records in range(rehearsal.records):
        before, end = rehearsal.crash(records, torn=False)
        guests = [before.run.jobs[job_id] for job_id in before.mechanism(Background).lanes.guests]
        shared = [job for job in guests if job.gpus[0] in before.own.holder]
        alone, beside = alone + (len(shared) < len(guests)), beside + bool(shared)
        leaving += any(job.state is JobState.SUSPENDING for job in guests)
        assert end.run.finished
    assert min(alone, beside, leaving) > 0


def test_a_crash_after_a_crash_after_a_crash(tmp_path):
    rehearsal = Rehearsal(ONE_BY_ONE, tmp_path)
    for lives in (2, 3, 4):
        _, end = rehearsal.crash(rehearsal.records * lives // 5, torn=True)
        assert end.run.finished
        assert len(end.run.lives) == lives
        rehearsal.keep_crash()
    # x2 is cancelled, after the others' first checkpoints and before its turn.
    assert [str(job.state) for job in end.run.jobs.values()] == ["COMPLETED"] * 2 + ["CANCELLED", "COMPLETED"]
