"""Whatever background jobs do, those in the foreground fare as if there were none."""

from __future__ import annotations

from dataclasses import asdict

import pytest
from budget import examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from hpcsched.core import events as ev
from hpcsched.core.actions import AttemptAction, SetTimer
from hpcsched.core.model import JobState
from hpcsched.testing.builders import Planned, a_job, a_profile

PROFILES = (
    a_profile("three", [4.0, 6.0, 7.0, 6.5], start_s=5.0, suspend_s=5.0),
    a_profile("four", [1.0, 2.0, 3.0, 4.0], start_s=5.0, suspend_s=5.0),
)
OPTIONS = {
    "marble": {"promote": "always"},
    "planner": {"budget": 5},
    "exclusive": {},
    "equal": {"resize": "always"},
    "optimus": {"interval": 100.0},
}
which = st.integers(0, 20)


def deeds(driver):
    """What was done to the jobs in the foreground, and when; jobs by name, as their numbers differ."""
    jobs, done = driver.machine.run.jobs, []
    for action in driver.actions:
        about = asdict(action) | {"cause": ""}
        if isinstance(action, AttemptAction):
            job = jobs[about.pop("job_id")]
        elif isinstance(action, SetTimer) and action.key[1]:
            job = jobs[action.key[1]]
            about["key"] = (action.key[0], action.key[2])
        else:
            job = None
        background = job.spec.background if job else about.get("key") == ("lanes", 0, 0)
        if not background:
            done.append((type(action).__name__, job and job.spec.name, about))
    return done


class Beside(RuleBasedStateMachine):
    """Two runs with the same foreground jobs and the same news of them; one has others behind them."""

    policy = "marble"

    @initialize(gpus=st.integers(1, 4), deadline=st.sampled_from([None, None, 400.0]))
    def begin(self, gpus, deadline):
        self.shared, self.alone = (
            Planned(
                gpus=gpus,
                policy=self.policy,
                profiles=PROFILES,
                deadline=deadline,
                reserve_s=20,
                **OPTIONS[self.policy],
            )
            for _ in range(2)
        )
        self.submitted = 0

    @invariant()
    def the_foreground_fares_the_same(self):
        if hasattr(self, "shared"):
            assert deeds(self.shared) == deeds(self.alone)

    def both(self, do):
        for run in (self.shared, self.alone):
            do(run)

    def active(self, *, background):
        jobs = self.shared.machine.run.active.values()
        return [job.spec.name for job in jobs if job.spec.background == background]

    @rule(seconds=st.sampled_from([0.1, 5.0, 40.0]))
    def time_passes(self, seconds):
        self.shared.now = self.alone.now = self.shared.now + seconds

    @rule(model=st.sampled_from(["three", "four", "unknown"]), slowdown=st.sampled_from([0.0, 0.05]))
    def a_foreground_job_comes(self, model, slowdown):
        self.submitted += 1
        spec = a_job(f"f{self.submitted}", model, 200, max_foreground_slowdown=slowdown)
        self.both(lambda run: run.submit(spec))

    @precondition(lambda self: self.active(background=False))
    @rule(number=which)
    def one_runs(self, number):
        names = self.active(background=False)
        self.both(lambda run: run.runs(names[number % len(names)]))

    @precondition(lambda self: self.active(background=False))
    @rule(number=which, steps=st.integers(1, 40))
    def one_reports(self, number, steps):
        names = self.active(background=False)
        name = names[number % len(names)]
        step = min(199, self.shared.job(name).step + steps)
        self.both(lambda run: run.reports(name, step))

    @precondition(lambda self: self.active(background=False))
    @rule(number=which)
    def one_ends(self, number):
        """It is done, or leaves as it was asked to."""
        names = self.active(background=False)
        name = names[number % len(names)]
        job = self.shared.job(name)
        if job.state is JobState.SUSPENDING:
            self.both(lambda run: run.leaves(name, job.step))
        else:
            self.both(lambda run: run.exits(name, 0, 200, 200))

    @precondition(lambda self: len(self.shared.machine.ledger.devices) > 1)
    @rule(gpu=st.integers(0, 3))
    def a_gpu_is_lost(self, gpu):
        self.both(lambda run: run.lose(gpu))

    @rule(count=st.integers(1, 3), model=st.sampled_from(["three", "four"]))
    def background_jobs_come(self, count, model):
        first = len(self.shared.machine.run.jobs)
        names = [f"b{first + i}" for i in range(count)]
        self.shared.submit(*(a_job(name, model, 200, gpus=1, background=True) for name in names))

    @precondition(lambda self: self.active(background=True))
    @rule(
        number=which, kind=st.sampled_from(["runs", "saves", "exits", "fails", "leaves", "cancel", "suspend"])
    )
    def something_happens_behind(self, number, kind):
        names = self.active(background=True)
        name = names[number % len(names)]
        job, run = self.shared.job(name), self.shared
        match kind:
            case "runs":
                run.runs(name)
            case "saves":
                run.saves(name, job.step)
            case "exits":
                run.exits(name, 0, 200, 200)
            case "fails":
                run.exits(name, 1)
            case "leaves":
                run.leaves(name, job.step)
            case "cancel":
                run.cancel(name)
            case "suspend":
                run.suspend(name)

    @rule()
    def the_lanes_are_looked_at(self):
        self.shared.tell(ev.TimerFired, key=("lanes", 0, 0))


@pytest.mark.long
@pytest.mark.parametrize("policy", OPTIONS)
def test_the_foreground_fares_as_if_there_were_no_background(policy):
    case = type(f"Beside_{policy}", (Beside,), {"policy": policy})
    run_state_machine_as_test(case, settings=settings(max_examples=examples(60), stateful_step_count=40))
