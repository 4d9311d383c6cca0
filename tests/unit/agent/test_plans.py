"""A plan that cannot be made costs the plan, not the run."""

from __future__ import annotations

from hpcsched.agent.plans import made_plan
from hpcsched.policy.planner.planner import Planner
from hpcsched.testing.builders import Driver, a_job, a_profile


def test_a_fault_in_a_planner_is_told_and_its_fallback_taken(monkeypatch):
    driver = Driver(a_job("a"), gpus=2, profiles=[a_profile("a", [1.0, 1.9])], policy="planner")
    said: list[str] = []
    assert made_plan(driver.machine, 3.0, said.append).plan.order == (1,) and not said
    monkeypatch.setattr(Planner, "plan", lambda self, view: 1 / 0)
    made = made_plan(driver.machine, 4.0, said.append)
    assert said == [
        "no plan could be made (ZeroDivisionError: division by zero); going on without one for now"
    ]
    driver.handle(made)
    assert made.at == 4.0 and driver.job("a").state.active
