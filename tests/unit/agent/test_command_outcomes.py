"""What users are told of commands, and which of them are let in."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hpcsched.agent.command_outcomes import command_outcome
from hpcsched.agent.inbox import Answer, Command
from hpcsched.agent.recovery import saved_steps
from hpcsched.core import events as ev
from hpcsched.core.model import JobSpec, Kind, Restart
from hpcsched.store.rundir import RunDir
from hpcsched.testing.builders import Driver, a_job, some_devices

PROGRAM = a_job("x", kind=Kind.COMMAND, command=("train",), retries=0)
TRAINER = a_job("x", kind=Kind.TRAINER, trainer="m:T")


def asked(driver: Driver, command: str, *targets: int, **keys: bool) -> tuple[list[ev.Event], Answer]:
    stand_ins = keys.pop("stand_ins", False)
    order = Command(command=command, targets=list(targets), **keys)
    return command_outcome(driver.machine, order, at=driver.now, cause="inbox:1", stand_ins=stand_ins)


@pytest.mark.parametrize(
    ("spec", "stand_ins", "taken"), [(PROGRAM, False, False), (PROGRAM, True, True), (TRAINER, False, True)]
)
def test_a_suspend_waits_only_for_who_is_known_to_become_ready(
    spec: JobSpec, stand_ins: bool, taken: bool
) -> None:
    events, answer = asked(Driver(spec), "suspend", 1, stand_ins=stand_ins)
    assert (bool(events), answer.done) == (taken, [taken])


def test_a_program_that_was_ready_once_is_waited_for() -> None:
    driver = Driver(PROGRAM)
    driver.runs("x")
    assert asked(driver, "suspend", 1)[0]
    driver.start_agent(6)
    assert driver.job("x").attempt == 2
    assert not driver.job("x").ready
    assert asked(driver, "suspend", 1)[0]


def test_what_comes_back_with_a_job_is_told_too() -> None:
    driver = Driver(PROGRAM, a_job("next", after=("x",)), a_job("last", after=("next",)))
    driver.exits("x", 1)
    _, alone = asked(driver, "retry", 3)
    assert alone.done == [False]
    assert alone.outcomes == ["waits for next, which is CANCELLED: retry that, and this one comes with it"]
    (event,), all_three = asked(driver, "retry", 1)
    assert all_three.ids == [1, 2, 3]
    assert all_three.outcomes == [
        "runs again from its beginning",
        "runs again with x",
        "runs again with next",
    ]
    driver.handle(event)
    assert driver.states() == ["STARTING", "PENDING", "PENDING"]


def test_a_job_begun_once_more_finds_nothing_that_an_agent_had_not_put_aside(tmp_path: Path) -> None:
    driver = Driver(PROGRAM)
    driver.saves("x", 40)
    driver.exits("x", 1, 40, 40)
    driver.retry("x", from_scratch=True)
    rundir = RunDir(tmp_path)
    rundir.job(1).mkdir(parents=True)
    (rundir.job(1) / "STATE.json").write_text('{"step": 40}')
    assert saved_steps(rundir, driver.machine) == {}, "the agent died before it had launched the attempt"
    (rundir.job(1) / "STATE.before.2.json").touch()
    assert saved_steps(rundir, driver.machine) == {1: 40}


@pytest.mark.parametrize(("alone", "hours", "left"), [(True, 0, False), (False, 0, True), (True, 9, True)])
def test_nobody_waits_for_what_a_job_that_is_over_has_left_in_memory(
    tmp_path: Path, alone: bool, hours: int, left: bool
) -> None:
    driver = Driver(PROGRAM)
    driver.runs("x")
    driver.exits("x", 0)
    driver.now += 3600.0 * hours
    driver.submit(a_job("later"))
    rundir = RunDir(tmp_path)
    rundir.job(1).mkdir(parents=True)
    (rundir.job(1) / "held.1").touch()
    assert saved_steps(rundir, driver.machine, alone=alone) == {}
    assert (rundir.job(1) / "held.1").exists() == left


def test_nobody_waits_for_what_a_job_that_was_suspended_before_its_first_step_has_left_in_memory(
    tmp_path: Path,
) -> None:
    driver = Driver(PROGRAM)
    driver.runs("x")
    driver.suspend("x")
    driver.exits("x", 75, 0, 0, held=True)
    assert driver.states() == ["SUSPENDED"]
    rundir = RunDir(tmp_path)
    rundir.job(1).mkdir(parents=True)
    (rundir.job(1) / "held.1").touch()
    assert saved_steps(rundir, driver.machine, alone=True) == {}
    assert not (rundir.job(1) / "held.1").exists()


def test_a_job_that_was_to_go_on_from_memory_begins_anew_where_nothing_came_to_disk(tmp_path: Path) -> None:
    driver = Driver(PROGRAM)
    driver.runs("x")
    driver.reports("x", 13)
    driver.suspend("x")
    driver.exits("x", 75, 13, 13, held=True)
    driver.resume("x")
    assert driver.states() == ["STARTING"] and driver.job("x").saved_step == 13
    rundir = RunDir(tmp_path)
    rundir.job(1).mkdir(parents=True)
    assert saved_steps(rundir, driver.machine, alone=False) == {}, "a node agent may still be writing it"
    found = saved_steps(rundir, driver.machine)
    assert found == {1: 0}
    started = {**driver.machine.decides_by, "devices": some_devices(1), "policy": "marble"}
    driver.tell(ev.AgentStarted, wall=2e9, saved_steps=found, **started)
    job = driver.job("x")
    assert (job.step, job.saved_step, job.repeated) == (0, None, 13)


def test_a_suspend_of_a_program_that_saves_by_itself_is_taken_and_says_what_it_costs() -> None:
    driver = Driver(replace(PROGRAM, restart=Restart()))
    assert asked(driver, "suspend", 1)[1].outcomes == [
        "is asked to save as soon as it is seen to save by itself"
    ]
    driver.tell(ev.WorkersSpawned, "x", processes=((100, 1),))
    driver.tell(ev.RestartSeen, "x", handles=False, step=500, saved_at=0.0)
    driver.now = 200.0
    driver.reports("x", 700)
    (_,), answer = asked(driver, "suspend", 1)
    assert answer.outcomes == [
        "is asked to save and leave; newest checkpoint of step 500, 3 min ago: 3 min of work is lost, "
        "unless it saves before it ends"
    ]
