"""Plans for the policies that make some; a fault in one costs the plan, not the run."""

from __future__ import annotations

from collections.abc import Callable

from hpcsched.agent.recorder import said
from hpcsched.core.events import PlanMade
from hpcsched.core.machine import Machine


def made_plan(machine: Machine, now: float, tell: Callable[[str], None]) -> PlanMade:
    """The plan of the machine's policy from here on, or its fallback where that fails, which is told."""
    try:
        plan = machine.make_plan()
    except Exception as error:
        tell(f"no plan could be made ({said(error)}); going on without one for now")
        plan = machine.make_plan(fallback=True)
    return PlanMade(at=now, plan=plan)
