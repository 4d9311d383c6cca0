"""Packing plans: which members share which device, and what that is predicted to gain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpcsched.errors import ConfigError, HpcschedError
from hpcsched.planning.packing.admission import peak_mib
from hpcsched.planning.packing.problem import PackProblem
from hpcsched.planning.packing.search import dealt, makespan_s
from hpcsched.planning.packing.speeds import Pack
from hpcsched.planning.packing.strategies import STRATEGIES, Packs


class NoPackPlan(HpcschedError):
    """A member fits on no device; the text says which, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedPack:
    """One pack: its device, and what is predicted of it.

    `step_s`: for as many samples as its largest batch has, while all its members train. `time_s`: until all
    are done. `separate_s`: the same members one after another. `memory_mib`: the peak; None: not known.
    """

    device: int
    members: Pack
    step_s: float
    time_s: float
    separate_s: float
    memory_mib: float | None = None

    @property
    def gain(self) -> float:
        """The share of time saved over one after another (Eq. 3)."""
        return 1 - self.time_s / self.separate_s


@dataclass(frozen=True, slots=True, kw_only=True)
class PackPlan:
    """Packs, those of one device in the order in which they run, one after another.

    `time_s`: until all are done. `separate_s`: the same with every member alone. `strategies`: the same by
    each strategy that was tried, by name. `notes`: what a reader should know.
    """

    strategy: str
    devices: int
    packs: tuple[PlannedPack, ...]
    time_s: float
    separate_s: float
    strategies: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def to_table(self) -> dict[str, Any]:
        """Its JSON form."""
        return {
            "schema": 1,
            "strategy": self.strategy,
            "feasible": True,
            "devices": self.devices,
            "packs": [
                {
                    "device": pack.device,
                    "members": [member.name for member in pack.members],
                    "step_s": pack.step_s,
                    "time_s": pack.time_s,
                    "separate_s": pack.separate_s,
                    "memory_mib": pack.memory_mib,
                    "gain": pack.gain,
                }
                for pack in self.packs
            ],
            "time_s": self.time_s,
            "separate_s": self.separate_s,
            "strategies": dict(self.strategies),
            "notes": list(self.notes),
        }


def plan(problem: PackProblem, strategy: str = "auto", *, compare: bool = True) -> PackPlan:
    """The packs that a strategy chooses, dealt to the devices.

    Args:
        problem: members and devices.
        strategy: one of `STRATEGIES`, or `auto`: the best predicted of all but `run`, which tries what was
            not measured.
        compare: the plan also says what every other strategy would take.

    Raises ConfigError for an unknown strategy and for members without costs, NoPackPlan if a member is too
    large for a device.
    """
    if strategy not in ("auto", *STRATEGIES):
        accepted = ", ".join(("auto", *STRATEGIES))
        raise ConfigError(where="plan", key="strategy", got=repr(strategy), accepted=accepted)
    for member in problem.members:
        problem.speeds.kind(member)
        if why := problem.limits.refusal({member.key: 1}, problem.speeds):
            raise NoPackPlan(f"member {member.name!r} fits on no device: {why}")
    wanted = [name for name in STRATEGIES if compare or strategy in ("auto", name) or name == "off"]
    choices = {name: STRATEGIES[name](problem) for name in wanted}
    times_s = {name: _time_s(problem, packs) for name, packs in choices.items()}
    best = min((name for name in times_s if name != "run"), key=lambda name: times_s[name])
    name = best if strategy == "auto" else strategy
    packs = _placed(problem, choices[name])
    return PackPlan(
        strategy=name,
        devices=problem.devices,
        packs=packs,
        time_s=times_s[name],
        separate_s=times_s["off"],
        strategies=times_s,
        notes=_notes(problem, packs),
    )


def _time_s(problem: PackProblem, packs: Packs) -> float:
    speeds = problem.speeds
    return makespan_s([speeds.time_s(speeds.shape(pack)) for pack in packs], problem.devices)


def _placed(problem: PackProblem, packs: Packs) -> tuple[PlannedPack, ...]:
    """By device, and on each the longest first."""
    speeds = problem.speeds
    shapes = [speeds.shape(pack) for pack in packs]
    devices = dealt([speeds.time_s(shape) for shape in shapes], problem.devices)
    found = []
    for pack, shape, device in zip(packs, shapes, devices, strict=True):
        groups = Counter(member.key for member in pack)
        found.append(
            PlannedPack(
                device=device,
                members=pack,
                step_s=speeds.pace_s(groups) * max(key.batch for key in groups),
                time_s=speeds.time_s(shape),
                separate_s=speeds.separate_s(shape),
                memory_mib=peak_mib(groups, speeds),
            )
        )
    return tuple(sorted(found, key=lambda pack: (pack.device, -pack.time_s)))


def _notes(problem: PackProblem, packs: Sequence[PlannedPack]) -> tuple[str, ...]:
    most = Counter[Any]()
    for pack in packs:
        for key, n in Counter(member.key for member in pack.members).items():
            most[key] = max(most[key], n)
    notes = []
    for key, n in sorted(most.items()):
        costs = problem.speeds.costs[key]
        if n > (known := max(costs.points, default=1)):
            what = f"{key.model} with batch {key.batch}"
            notes.append(f"{what}: measured with at most {known} in a pack, the time of {n} is extrapolated")
    if problem.limits.capacity_mib is not None:
        for key in sorted({m.key for m in problem.members}):
            if not problem.speeds.costs[key].memory_mib and len(problem.members) > 1:
                what = f"{key.model} with batch {key.batch}"
                notes.append(f"{what}: its memory was not measured, so it is not packed")
    return tuple(notes)
