"""Programs that save by themselves, simulated: what they had not saved is lost, and no policy gives a job a
count that it may not have."""

from __future__ import annotations

import pytest
from budget import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcsched.core import events as ev
from hpcsched.core.actions import Launch, Resize
from hpcsched.core.model import JobState, Kind, Restart
from hpcsched.core.reasons import Why
from hpcsched.sim.engine import Simulation
from hpcsched.testing.builders import a_job, a_profile
from hpcsched.testing.invariants import check

POLICIES = [
    ("marble", {}),
    ("marble", {"promote": "always"}),
    ("exclusive", {}),
    ("equal", {}),
    ("equal", {"resize": "always"}),
    ("optimus", {"interval": 60.0}),
    ("planner", {"budget": 20}),
    ("planner", {"goal": "makespan", "budget": 5}),
]
RATES = a_profile("m", [1.0, 1.9, 2.7, 3.4, 4.0, 4.5, 4.9, 5.2], start_s=3.0, suspend_s=2.0, resume_s=3.0)
IN_PLACE = a_profile("p", [1.0, 1.9, 2.7, 3.4, 4.0, 4.5, 4.9, 5.2], start_s=3.0, grow_s=0.1, shrink_s=0.1)
RESTARTS = [Restart(), Restart(batch="scales"), Restart(batch="kept", accumulation=2)]


def a_saver(name, restart=RESTARTS[0], **rest):
    return a_job(name, "m", kind=Kind.COMMAND, command=("train",), restart=restart, **rest)


@st.composite
def some_jobs(draw):
    jobs = []
    for i in range(draw(st.integers(2, 6))):
        multiple = draw(st.sampled_from([1, 1, 2, 3, 4]))
        most = draw(st.sampled_from([None, multiple, 2 * multiple]))
        rest = {
            "gpus": (multiple, most),
            "gpus_multiple": multiple,
            "steps": draw(st.integers(20, 600)),
            "submit_at": draw(st.floats(0, 200)),
            "checkpoint_every_s": draw(st.sampled_from([10.0, 50.0, 600.0])),
        }
        if draw(st.booleans()):
            jobs.append(a_saver(f"j{i}", draw(st.sampled_from(RESTARTS)), **rest))
        else:
            model = draw(st.sampled_from(["m", "p"]))
            jobs.append(a_job(f"j{i}", model, kind=Kind.TRAINER, trainer="m:T", **rest))
    return jobs


class Watch:
    """Fails at the first launch or resize of a job on a count that it may not have."""

    def __init__(self):
        self.began = {}

    def __call__(self, event, actions, machine):
        check(machine)
        if isinstance(event, (ev.RestartSeen, ev.WorkersExited)):
            job = machine.run.jobs[event.job_id]
            if job.saved_step is not None:
                attempt = job.attempts[event.attempt - 1]
                self.began.setdefault(job.id, len(attempt.gpus) // job.spec.nodes)
        for action in actions:
            if isinstance(action, (Launch, Resize)):
                self._allowed(machine.run.jobs[action.job_id], action)

    def _allowed(self, job, action):
        gpus, spec = len(action.gpus) // job.spec.nodes, job.spec
        assert gpus % spec.gpus_multiple == 0 and gpus >= spec.gpus_min
        first = self.began.get(job.id)
        if spec.restart is None or spec.restart.batch == "scales" or first is None:
            return
        if spec.restart.batch == "fixed":
            assert gpus == first, f"job {job.id} goes from {first} to {gpus} GPUs"
        else:
            assert first * spec.restart.accumulation % gpus == 0


@pytest.mark.parametrize(("policy", "options"), POLICIES, ids=str)
@settings(max_examples=examples(40))
@given(jobs=some_jobs(), hosts=st.sampled_from([1, 1, 2]), gpus=st.integers(4, 8), known=st.booleans())
def test_no_policy_gives_a_job_a_count_that_it_may_not_have(policy, options, jobs, hosts, gpus, known):
    truth = [RATES, IN_PLACE]
    about = {"policy": policy, "options": options, "watch": Watch(), "truth": None if known else truth}
    machine = Simulation(jobs, truth if known else [], gpus=gpus, nodes=hosts, **about).run()
    assert {job.state for job in machine.run.jobs.values()} == {JobState.COMPLETED}


def test_what_was_not_saved_is_lost():
    job = a_saver("a", gpus=1, steps=300, checkpoint_every_s=50.0)
    happenings = [ev.SuspendRequested(at=130.0, job_id=1), ev.ResumeRequested(at=140.0, job_id=1)]
    machine = Simulation([job], [RATES], gpus=1, happenings=happenings).run()
    done = machine.run.jobs[1]
    # Steps begin at 3 s; 100 are saved at 103 s, and 127 are done at 130 s.
    assert [(a.from_step, a.to_step) for a in done.attempts] == [(0, 127), (100, 300)]
    assert (done.steps_repeated, done.state) == (27, JobState.COMPLETED)
    assert done.ended_s == 140.0 + 3.0 + 200.0
    assert Why.NOT_SAVED in [note.reason.why for note in done.story]


def test_it_is_promoted_when_it_has_just_saved():
    jobs = [
        a_job("first", "m", gpus=6, steps=450),  # leaves 2 of the 8 until 103 s
        a_saver(
            "a", Restart(batch="scales"), gpus=(1, 8), steps=500, checkpoint_every_s=110.0, submit_at=1.0
        ),
    ]
    machine = Simulation(jobs, [RATES], gpus=8).run()
    job = machine.run.jobs[2]
    assert [len(a.gpus) for a in job.attempts] == [2, 8]
    assert job.attempts[0].end_s == pytest.approx(1.0 + 3.0 + 110.0 + 2.0)
    assert job.steps_repeated == 0
    refusal = next(note.reason for note in job.story if note.reason.why is Why.DOES_NOT_PAY)
    assert "5 s of suspend and resume and 102 s of work not saved exceed" in str(refusal)
