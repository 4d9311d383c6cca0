"""Equal shares and Optimus, whatever the jobs and the hosts, and whatever happens: the invariants hold."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from budget import examples
from histories import PROFILES, AnythingGoes
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from hpcsched.core import events as ev
from hpcsched.core.actions import Launch, MakePlan
from hpcsched.core.model import JobState
from hpcsched.policy.baselines.equal import shares
from hpcsched.sim.bounds import BoundJob, lower_bound_s
from hpcsched.sim.engine import Simulation
from hpcsched.testing.builders import Driver, a_job, a_profile
from hpcsched.testing.invariants import check

POLICIES = [
    ("equal", {"resize": "pays"}),
    ("equal", {"resize": "always"}),
    ("optimus", {}),
    ("optimus", {"interval": 40}),
]
costs = st.sampled_from([0.0, 0.0, 7.0, 25.0])
rates = st.lists(st.floats(0.5, 8.0), min_size=1, max_size=6)


@st.composite
def scenes(draw):
    """(jobs, profiles, hosts, GPUs on each): every job fits; some come later, some wait for earlier ones."""
    hosts, gpus = draw(st.sampled_from([1, 1, 2, 3])), draw(st.integers(1, 6))
    models = {
        name: a_profile(name, draw(rates), start_s=draw(costs), suspend_s=draw(costs), resume_s=draw(costs))
        for name in ("m1", "m2", "m3")
    }
    jobs = []
    for i in range(draw(st.integers(1, 8))):
        least = draw(st.sampled_from([1, 1, 1, draw(st.integers(1, gpus))]))
        jobs.append(
            a_job(
                f"j{i}",
                draw(st.sampled_from(sorted(models))),
                draw(st.integers(1, 800)),
                gpus=(least, draw(st.sampled_from([None, least, gpus, gpus + 2]))),
                nodes=draw(st.sampled_from([1, 1, hosts])),
                after=tuple({f"j{draw(st.integers(0, i - 1))}"}) if i and draw(st.booleans()) else (),
                submit_at=draw(st.sampled_from([0.0, 0.0, 30.0, 170.5])),
            )
        )
    return jobs, tuple(models.values()), hosts, gpus


@given(scenes(), st.sampled_from(POLICIES), st.sampled_from(["all", "all", "none", "some"]), st.booleans())
@settings(max_examples=examples(300))
@pytest.mark.long
def test_all_jobs_complete_by_the_rules_and_not_before_the_bound(scene, policy, known, stories):
    jobs, profiles, hosts, gpus = scene
    launches = Counter()

    def watch(event, actions, machine):
        check(machine)
        launches.update(action.job_id for action in actions if isinstance(action, Launch))
        assert sum(launches.values()) < 1000, "jobs are moved for ever"

    beliefs = {"all": profiles, "none": (), "some": profiles[:1]}[known]
    machine = Simulation(
        jobs,
        beliefs,
        gpus=gpus,
        nodes=hosts,
        policy=policy[0],
        options=policy[1],
        truth=None if known == "all" else profiles,
        stories=stories,
        watch=watch,
    ).run()
    assert {job.state for job in machine.run.jobs.values()} == {JobState.COMPLETED}
    for job in machine.run.jobs.values():
        least, most = job.limits(gpus)
        assert all(least <= len(a.gpus) // job.spec.nodes <= most for a in job.attempts)
    models = {p.model: p for p in profiles}
    index = {job.name: i for i, job in enumerate(jobs)}
    bound = lower_bound_s(
        [
            BoundJob(
                profile=models[job.model],
                steps=job.steps,
                submit_s=job.submit_at,
                gpus_min=job.gpus_min,
                gpus_max=job.gpus_max,
                nodes=job.nodes,
                after=tuple(index[name] for name in job.after),
            )
            for job in jobs
        ],
        gpus,
        hosts,
    )
    assert max(job.ended_s for job in machine.run.jobs.values()) >= bound * (1 - 1e-9)


@given(
    st.integers(1, 12),
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 12)), min_size=1, max_size=12),
)
@settings(deadline=None)
def test_shares_are_as_equal_as_can_be(gpus, limits):
    """Nobody could have one more by taking it from somebody who has two more than that."""
    specs = [a_job(f"j{i}", gpus=(least, max(least, most))) for i, (least, most) in enumerate(limits)]
    driver = Driver(*(replace(spec, gpus_min=min(spec.gpus_min, gpus)) for spec in specs), gpus=gpus)
    view = driver.machine.decisions.view()
    found = shares(view)
    assert sum(found.values()) <= gpus
    wants = {i: count for i, count in found.items() if count < view.limits(view.jobs[i])[1] and count}
    if wants:
        assert sum(found.values()) == gpus
        for j, count in found.items():
            spare = count > max(view.jobs[j].spec.gpus_min, 1)
            assert not spare or count <= min(wants.values()) + 1
    served = [job.id for job in view.jobs.values() if found.get(job.id)]
    for job in view.jobs.values():
        if not found.get(job.id):
            earlier = sum(view.jobs[i].spec.gpus_min for i in served if i < job.id)
            assert earlier + job.spec.gpus_min > gpus, "an earlier job could have had its least count"


class PlanningDriver(Driver):
    """Plans are made as soon as they are asked for."""

    def handle(self, event):
        actions = super().handle(event)
        for action in actions:
            if isinstance(action, MakePlan):
                self.handle(ev.PlanMade(at=self.now, plan=self.machine.make_plan()))
        return actions


class AnythingGoesHere(AnythingGoes):
    @initialize(
        policy=st.sampled_from(POLICIES),
        gpus=st.integers(1, 6),
        hosts=st.sampled_from([1, 1, 2, 3]),
        deadline=st.sampled_from([None, None, 50.0, 500.0]),
        joins=st.sampled_from([0, 0, 1, 4]),
    )
    def begin(self, policy, gpus, hosts, deadline, joins):
        name, options = policy
        self.driver = PlanningDriver(
            gpus=gpus,
            hosts=hosts,
            policy=name,
            profiles=PROFILES,
            deadline=deadline,
            reserve_s=20,
            **options,
        )
        self.final = {}
        self.another_joins(gpus * hosts, joins)


TestAnythingGoesHere = AnythingGoesHere.TestCase
TestAnythingGoesHere.settings = settings(max_examples=examples(150), stateful_step_count=50)


@pytest.mark.parametrize("policy", ["optimus", "planner", "marble", "equal", "exclusive"])
def test_without_stories_a_policy_hears_all_that_it_decides_by(policy):
    """A large simulation leaves out the progress of jobs that no decision depends on."""
    line = a_profile("line", [1.0, 2.0, 2.5, 2.8], start_s=5.0, suspend_s=5.0)
    jobs = [a_job(f"j{i}", "line", 300 * (i + 1), submit_at=70.0 * i) for i in range(4)]
    ends = [
        [
            job.ended_s
            for job in Simulation(jobs, (line,), gpus=4, policy=policy, options=options, stories=stories)
            .run()
            .run.jobs.values()
        ]
        for options in [{"interval": 100.0} if policy == "optimus" else {}]
        for stories in (True, False)
    ]
    assert ends[0] == ends[1]
