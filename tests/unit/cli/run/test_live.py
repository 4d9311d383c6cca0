"""What a run says while it goes on: each launch with the reason for its GPUs, under every policy."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from hpcsched.cli.run.live import STUCK, Narrator, sentences
from hpcsched.core import events as ev
from hpcsched.core.actions import Action, Launch
from hpcsched.core.machine import Machine
from hpcsched.core.model import Kind, Restart
from hpcsched.core.reasons import Why
from hpcsched.policy import POLICIES
from hpcsched.sim.engine import Simulation
from hpcsched.testing.builders import Driver, a_job, a_profile

PROFILES = (
    a_profile("line", [10.0, 20.0, 30.0, 40.0], start_s=1.0, suspend_s=1.0),
    a_profile("flat", [10.0, 15.0, 15.5, 15.6], start_s=1.0, suspend_s=1.0),
)

LAUNCHES = {
    "marble": {Why.OPTIMAL, Why.LEFT_OVER, Why.PROMOTED, Why.FIXED},
    "exclusive": {Why.EXCLUSIVE},
    "planner": {Why.PLANNED, Why.GROWN, Why.SHRUNK},
    "equal": {Why.EQUAL_SHARE, Why.RESIZED},
    "optimus": {Why.MARGINAL_GAIN, Why.RESIZED},
}


def launches(policy: str) -> list[tuple[str, Why, str]]:
    """Of each launch in a simulated run: the line said of it, and the newest note of the job's story then."""
    found: list[tuple[str, Why, str]] = []

    def watch(event: ev.Event, actions: Sequence[Action], machine: Machine) -> None:
        said = sentences(machine, event, actions)
        for action in actions:
            if isinstance(action, Launch):
                job = machine.run.jobs[action.job_id]
                (line,) = [line for line in said if line.startswith(f"job {job.id} (") and " on GPU" in line]
                about = [note.reason for note in job.story if note.reason.why not in OTHER]
                found.append((line, about[-1].why, str(about[-1])))

    jobs = [
        a_job("a", "flat", 20_000),
        a_job("b", "line", 9000),
        a_job("c", "line", 3000, submit_at=50.0),
        a_job("d", "flat", 3000, submit_at=60.0, gpus=1),
        a_job("e", "line", 30_000, submit_at=200.0),
    ]
    options = {"interval": 60.0} if policy == "optimus" else {}
    Simulation(jobs, PROFILES, gpus=4, policy=policy, options=options, watch=watch).run()
    return found


OTHER = frozenset({Why.SUBMITTED, Why.SAVED, Why.LEARNED})
"""What may stand between the reason and the launch."""


@pytest.mark.parametrize("policy", POLICIES)
def test_each_launch_is_told_with_its_reason(policy: str) -> None:
    found = launches(policy)
    assert {why for _, why, _ in found} >= LAUNCHES[policy]
    for line, _, reason in found:
        assert line.endswith(f": {reason}")


def test_what_was_learnt_is_no_reason_for_a_launch() -> None:
    driver = Driver(a_job("x", "new", 90_000, gpus=(1, 2)), gpus=2)
    driver.runs("x")
    driver.trains("x", 5.0)
    assert driver.job("x").story[-1].reason.why is Why.LEARNED
    actions = driver.exits("x", 1)
    assert any(isinstance(action, Launch) for action in actions)
    _, launched = sentences(driver.machine, driver.events[-1], actions)
    assert " is the fastest count of new (5 steps/s" in launched and "samples" not in launched


def test_what_is_no_event_is_told_with_the_time_of_the_loop_and_not_of_the_last_event(
    capsys: pytest.CaptureFixture[str],
) -> None:
    driver = Driver(a_job("x", "line", 90, gpus=1))
    narrator = Narrator(driver.machine)
    narrator.tick(100.0)
    narrator.message("GPU 0 was lost: Xid 79")
    assert capsys.readouterr().err == "[   1:40] GPU 0 was lost: Xid 79\n"


def test_it_is_said_once_when_only_jobs_are_left_that_wait_for_the_user(
    capsys: pytest.CaptureFixture[str],
) -> None:
    driver = Driver(
        a_job("x", "line", 90, gpus=1), a_job("y", "line", 90), a_job("z", "line", 9, after=("y",))
    )
    narrator = Narrator(driver.machine)

    def told(actions: Sequence[Action]) -> bool:
        narrator.event(driver.events[-1], actions)
        return STUCK in capsys.readouterr().err

    driver.runs("x")
    driver.runs("y")
    assert not told(driver.suspend("y"))
    assert not told(driver.leaves("y", 10))
    assert told(driver.exits("x", 0, step=90))
    assert not told(driver.hold("z"))
    assert not told(driver.resume("y"))
    driver.runs("y")
    assert told(driver.exits("y", 0, step=90))
    assert not told(driver.release("z"))


def test_a_change_in_place_is_told_when_it_begins_and_when_it_is_done() -> None:
    driver = Driver(a_job("a", "flat"), a_job("b", "line"), gpus=6, profiles=PROFILES, promote="always")
    driver.runs("a", "b", in_place=True)

    def told(actions: list[Action]) -> list[str]:
        return sentences(driver.machine, driver.events[-1], actions)

    gpus = ",".join(map(str, driver.job("b").gpus))
    done, begun = told(driver.exits("a", 0))
    assert done == "job 1 (a) completed"
    assert begun.startswith(f"job 2 (b) is to go on on GPUs {gpus},") and ": promoted from 2 to 4" in begun
    words = "resized in place from 2 to 4 GPUs at step 9; training stood still for 0.04 s"
    assert told(driver.resized("b", 9, stopped_s=0.041)) == [f"job 2 (b) {words}"]
    driver.now += 1.0
    assert told(driver.resized("b", 9, stopped_s=0.041)) == [], "nobody asked for that"


def test_what_a_dead_agent_and_a_drain_cost_is_told() -> None:
    driver = Driver(gpus=2)
    program = {"kind": Kind.COMMAND, "command": ("x",), "gpus": 1}
    driver.submit(a_job("a", **program), a_job("b", restart=Restart(), **program))
    for name in "ab":
        driver.tell(ev.WorkersSpawned, name, processes=(), host="n1")
    driver.tell(ev.RestartSeen, "b", handles=False)
    driver.now += 30.0

    def told(actions: list[Action]) -> list[str]:
        return sentences(driver.machine, driver.events[-1], actions)

    assert told(driver.drain()) == [
        "job 1 (a) is told to end (SIGTERM): it has not said that it can save",
        "job 2 (b) is asked to save; no checkpoint yet: 30 s of work is lost, unless it saves before it ends",
    ]
    assert told(driver.exits("a", 143))[0].endswith("signal 15 (SIGTERM); begins anew when the run goes on")
    driver.now += 1.0
    assert told(driver.start_agent(2))[0].startswith("job 2 (b): attempt 1 was lost")


def test_it_is_told_when_a_program_is_tried_again_that_fails_at_once() -> None:
    driver = Driver(a_job("a", "flat"), profiles=PROFILES)

    def told() -> str:
        actions = driver.exits("a", 2, detail="why", lasted_s=0.1)
        return sentences(driver.machine, driver.events[-1], actions)[0]

    assert told() == "job 1 (a) ended with exit code 2: why; starts again"
    assert told() == "job 1 (a) ended with exit code 2: why; starts again in 10 s"


def test_a_change_in_place_that_fails_is_told() -> None:
    driver = Driver(a_job("a", "flat"), a_job("b", "line"), gpus=6, profiles=PROFILES, promote="always")
    driver.runs("a", "b", in_place=True)
    driver.exits("a", 0)
    actions = driver.stays("b")
    failed, leaves = sentences(driver.machine, driver.events[-1], actions)
    assert failed == "job 2 (b) could not be resized in place: no memory"
    assert leaves == "job 2 (b) is asked to save to go on with 4 GPUs"
