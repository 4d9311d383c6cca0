"""Finds the plan of a training: pinned in the job file, or made from what is known of the layers' times."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

import torch

from hpcsched.contract import files
from hpcsched.errors import ConfigError
from hpcsched.planning.burst import planner
from hpcsched.planning.burst.costs import Interconnect, ModelCosts, Spot
from hpcsched.planning.burst.graph import LayerProfile
from hpcsched.planning.burst.plan import BurstPlan
from hpcsched.planning.burst.timeline import timeline
from hpcsched.worker.burst.channels import Channels
from hpcsched.worker.burst.compare import ALONE, PLANNED, SPREAD, VISIT, PlanTrial
from hpcsched.worker.burst.feedback import Timing, corrected, pays
from hpcsched.worker.process.contract import say, write_atomically

_PING_BYTES = 1 << 20
_PINGS = 5


@dataclass
class Chooser:
    """On rank 0: makes plans, keeps what it knows in the job's folder.

    Args:
        folder: the job's.
        gpus: ranks.
        global_batch: samples in a step.
        network: between the ranks.
        amplification: limit on each layer's GPU-seconds over those of one GPU.
        measure: measures the layers here; asked where there is no profile.
        profile_file: the profile the user named.
        shared_norms: batch norm is over the samples of all ranks of a layer.
        shape: the model's layers: name, and which others each reads.
        fits: raises ConfigError for a plan that the model cannot run by.
    """

    folder: Path
    gpus: int
    global_batch: int
    network: Interconnect
    amplification: float
    measure: Callable[[], LayerProfile]
    profile_file: Path | None = None
    shared_norms: bool = True
    shape: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    fits: Callable[[BurstPlan], object] = lambda plan: None
    profile: LayerProfile = field(init=False)

    def first(self) -> BurstPlan:
        """The plan to begin with.

        Raises ConfigError for a profile that cannot be read, NoBurstPlan when the limit allows none.
        """
        if self.profile_file is not None:
            self.profile = LayerProfile.parse(_read(self.profile_file), where=str(self.profile_file))
            if not self._is_of_model(self.profile):
                names = ", ".join(name for name, _ in self.shape[:5])
                got, accepted = "other layers than the model's", f"its {len(self.shape)}: {names}, ..."
                raise ConfigError(where=str(self.profile_file), key="layers", got=got, accepted=accepted)
        else:
            self.profile = self._kept() or self.measure()
        self._keep(files.LAYERS, self.profile.to_table())
        plan = self._plan()
        try:
            self.fits(plan)
        except ConfigError as error:
            return self._alike(error)
        return plan

    def alternatives(self, plan: BurstPlan) -> dict[str, BurstPlan]:
        """The plan and, as far as limit and model allow them, the plain ones: by name, each once."""
        most, *_, one = [*self._uniform()] * 2
        plain = {SPREAD: most, ALONE: one} if most.placement != one.placement else {ALONE: one}
        found = {name: each for name, each in plain.items() if self._runs(each)}
        if plan.placement not in [each.placement for each in plain.values()]:
            found[PLANNED] = plan
        return {name: found[name] for name in (SPREAD, PLANNED, ALONE) if name in found}

    def decided(self, trial: PlanTrial) -> None:
        """Let the user see what plans take, and which is kept."""
        times, plans = trial.times, trial.plans
        compared = [
            {
                "name": name,
                "predicted_s": self._time_us(plan) / 1e6,
                "measured_s": times.get(name),
                "refused": trial.refused.get(name),
            }
            for name, plan in plans.items()
        ]
        kept = plans[trial.now].to_table()
        self._keep(files.PLAN, {**kept, "kept": trial.now, "compared": compared})
        said = ", ".join(f"{name} {seconds * 1e3:.3g} ms" for name, seconds in times.items())
        say(f"{trial.now} is kept: a step takes {said}")

    def again(self, timings: list[Timing], now: BurstPlan, steps_left: int) -> BurstPlan | None:
        """Learn from what was measured; a plan that is worth being tried, if there is one."""
        if not timings:
            return None
        self.profile = corrected(self.profile, timings)
        self._keep(files.LAYERS, self.profile.to_table())
        try:
            new = self._plan()
            self.fits(new)
        except (planner.NoBurstPlan, ConfigError):
            return None
        now_s = self._time_us(now) / 1e6
        worth = pays(now_s, new.iter_us / 1e6, steps_left, VISIT * now_s)
        return new if worth and new.placement != now.placement else None

    def _kept(self) -> LayerProfile | None:
        """What the job's folder has, if it is about this model: that may have changed since."""
        path = self.folder / files.LAYERS
        if not path.exists():
            return None
        try:
            profile = LayerProfile.parse(_read(path), where=str(path))
        except ConfigError as error:
            say(f"{error}; the layers are measured anew")
            return None
        if not self._is_of_model(profile):
            say(f"{path} is about other layers than the model's; they are measured anew")
            return None
        return profile

    def _is_of_model(self, profile: LayerProfile) -> bool:
        return [(layer.name, layer.prev) for layer in profile.layers] == self.shape

    def _alike(self, why: ConfigError) -> BurstPlan:
        """All layers on the same ranks, as many as the limit and the model allow."""
        plan = next(filter(self._runs, self._uniform()), None)
        if plan is None:
            raise why
        say(f"{why}; all layers get {len(plan.layers[0].ranks)} of the {self.gpus} ranks instead")
        return plan

    def _uniform(self) -> Iterator[BurstPlan]:
        """Plans by which all layers have the same ranks, the most first, the first rank alone last."""
        return planner.uniform(self.profile, amplification=self.amplification, **self._how)

    def _runs(self, plan: BurstPlan) -> bool:
        """Whether the model can be run by it."""
        try:
            self.fits(plan)
        except ConfigError:
            return False
        return True

    def write(self, plan: BurstPlan) -> None:
        """Let the user see which plan is run."""
        self._keep(files.PLAN, plan.to_table())

    @property
    def _how(self) -> dict[str, Any]:
        """What plans of this training have in common."""
        return {
            "gpus": self.gpus,
            "global_batch": self.global_batch,
            "network": self.network,
            "uneven": self.gpus <= planner.MOST_UNEVEN,
            "shared_norms": self.shared_norms,
        }

    def _plan(self) -> BurstPlan:
        return planner.plan(self.profile, amplification=self.amplification, **self._how)

    def _time_us(self, plan: BurstPlan) -> float:
        """What a step by this plan takes, by what is known now."""
        costs = ModelCosts(self.profile, limit=inf, **self._how)
        counts = [int(count) for count in costs.counts]
        spots = {at.id: Spot(count=counts.index(len(at.ranks)), first=at.ranks[0]) for at in plan.layers}
        return timeline(costs, self.gpus, spots).iter_us

    def _keep(self, name: str, table: dict[str, Any]) -> None:
        try:
            write_atomically(self.folder / name, json.dumps(table, indent=1).encode())
        except OSError as error:
            say(f"{self.folder / name}: cannot be written: {error.strerror}")


def pinned(path: Path) -> BurstPlan:
    """The plan in a file. Raises ConfigError when there is none."""
    return BurstPlan.parse(_read(path), where=str(path))


def measure_network(wires: Channels) -> Interconnect:
    """What the wires between ranks 0 and 1 carry; all ranks may call this, two take part."""
    small, large = (torch.zeros(n, dtype=torch.uint8, device=wires.device) for n in (1, _PING_BYTES))
    if wires.world_size == 1:
        return Interconnect(bandwidth_bytes_s=1e12, latency_s=0.0)
    least = [inf, inf]
    for number, tensor in [(n, t) for _ in range(_PINGS) for n, t in enumerate((small, large))]:
        began = time.perf_counter()
        if wires.rank < 2:
            there = 1 - wires.rank
            for sends in (wires.rank == 0, wires.rank == 1):
                wires.post([(there, tensor)] if sends else [], [] if sends else [(there, tensor)])()
            if wires.device.type == "cuda":
                torch.cuda.synchronize()
        least[number] = min(least[number], (time.perf_counter() - began) / 2)
    # Half of it at least: by chance a small message takes as long, which would make transfers free.
    seconds = max(1e-9, least[1] - least[0], least[1] / 2)
    return Interconnect(bandwidth_bytes_s=_PING_BYTES / seconds, latency_s=least[0])


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(
            where=str(path), got=str(error.strerror), accepted="a file that can be read"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(where=str(path), got=f"not JSON: {error}", accepted="JSON") from None
