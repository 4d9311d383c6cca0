"""A policy that now and then asks for what cannot be: what a machine says to that is recorded too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hpcsched.contract.seats import Seat
from hpcsched.core.mechanisms.background.view import LaneDecision, LaneView, SetPace, Share, Yield
from hpcsched.core.mechanisms.cpu.view import CoresDecision, CoresView, Reseat, StartOnCores
from hpcsched.core.mechanisms.packing.view import PackDecision, PackView, Part, Ride
from hpcsched.core.model import Role
from hpcsched.core.reasons import Reason, Why
from hpcsched.core.view import Decision, Policy, Preempt, Resize, Start, View
from hpcsched.policy import make_policy
from hpcsched.policy.around import with_rules
from hpcsched.policy.background import FillLanes
from hpcsched.policy.cpu.allocation import AllotCores
from hpcsched.policy.marble import Marble
from hpcsched.policy.packing import FillPacks

_REASON = Reason(Why.EXCLUSIVE, {"gpus": 1})


class Impossible(Marble):
    """MARBLE, but for one kind of decision, which is wrong whenever there is one to be had."""

    name = "impossible"
    work_conserving = False
    acts_when_full = True

    def __init__(self, *, what: str) -> None:
        super().__init__()
        self._what = what
        with_rules(self)
        self.rules = {**self.rules, **dict.fromkeys(("background", "packing", "cpu"), self)}

    def decide(self, view: View) -> list[Decision]:
        right = super().decide(view)
        match self._what, right:
            case "start twice", [Start() as start, *_]:
                return [start, start]
            case "start on many", [Start() as start, *_]:
                return [replace(start, gpus=99)]
            case "start nowhere", [Start() as start, *_]:
                return [replace(start, hosts=())]
        for job in view.running:
            if self._what == "preempt twice" and job.settled:
                return [Preempt(job=job, reason=_REASON), Preempt(job=job, reason=_REASON)]
            if self._what == "resize":
                hosts = tuple(view.hosts_of(job))
                return [Resize(job=job, gpus=99, hosts=hosts, role=Role.PRIMARY, reason=_REASON)]
        return right

    def share(self, view: LaneView) -> list[LaneDecision]:
        guests = [view.jobs[job_id] for job_id in view.lanes.guests]
        for job in guests:
            if self._what == "pace":
                return [SetPace(job=job, share=2.0)]
            if self._what == "share":
                return [Share(job=job, gpu=0, reason=_REASON)]
            if self._what == "yield twice":
                return [Yield(job=job, reason=_REASON), Yield(job=job, reason=_REASON)]
        return FillLanes().share(view)

    def ride(self, view: PackView) -> list[PackDecision]:
        for job_id in view.packs.gpu_of:
            if self._what == "ride twice":
                return [Ride(job=view.jobs[job_id], gpu=0, reason=_REASON)]
        for holder in view.holders.values():
            if self._what == "part from nobody":
                return [Part(job=holder, reason=_REASON)]
        return FillPacks().ride(view)

    def allot(self, view: CoresView) -> list[CoresDecision]:
        right = AllotCores().allot(view)
        match self._what, right:
            case "no such host", [StartOnCores() as start, *_]:
                return [replace(start, host="nowhere")]
            case "no grant", [StartOnCores() as start, *_]:
                return [replace(start, grant={})]
            case "cores of others", [StartOnCores() as start, *_]:
                return [replace(start, grant={99: sum(start.grant.values())})]
        for job in view.running:
            seats, grant = job.current.seats, view.of[job.id].grant
            other: tuple[Seat, ...] = tuple(replace(seat, server=not seat.server) for seat in seats)
            wrong = {"other ranks": (seats, (1, 0)), "other kinds": (other, tuple(range(len(seats))))}
            if self._what in wrong and job.settled:
                told, keep = wrong[self._what]
                return [
                    Reseat(job=job, seats=told, keep=keep, grant=grant, memory=None, reason=_REASON),
                ]
        return right


WAYS = (
    *(
        "start twice",
        "start on many",
        "start nowhere",
        "preempt twice",
        "resize",
        "pace",
        "share",
        "yield twice",
    ),
    *("ride twice", "part from nobody", "no such host", "no grant", "cores of others", "other ranks"),
    "other kinds",
)


def any_policy(name: str, options: Mapping[str, Any]) -> Policy:
    """An ordinary policy, or that one."""
    return Impossible(**options) if name == "impossible" else make_policy(name, options)
