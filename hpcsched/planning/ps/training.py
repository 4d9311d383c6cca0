"""A training on CPU cores as simulations have it: its speed, what is measured of it, what changes cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hpcsched.contract.seats import Seat
from hpcsched.planning.jobs.course import Course
from hpcsched.planning.ps.model import NetworkLink, PsModel, usage

FULL_LINK_SHARE = 0.9
"""The share of its capacity above which a link is full (NEARCHUS, section IV)."""

NET_SAMPLES = 30
"""Samples of the network that are looked at (NEARCHUS, section IV: N_net)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PsTraining:
    """The training of one model. Times are seconds.

    `start_s` goes by before the first step, `suspend_s` for saving and leaving; `stable_s` until what its
    processes use is known, after a start or a change. A change stops it for `change_s`, after processes that
    join have started in `build_s` while it goes on.
    """

    model: PsModel
    link: NetworkLink | None = None
    start_s: float = 10.0
    suspend_s: float = 5.0
    stable_s: float = 8.0
    build_s: float = 10.0
    change_s: float = 0.1

    def course(self, seats: Sequence[Seat], *, from_step: int, steps: int) -> Course:
        """The course of an attempt with these seats."""
        rate = usage(self.model, seats, self.link).rate
        return Course(
            from_step=from_step, steps=steps, rate=rate, start_s=self.start_s, suspend_s=self.suspend_s
        )

    def measured(self, seats: Sequence[Seat]) -> dict[str, Any]:
        """The fields that an agent is told: see `core.events.UsageMeasured`."""
        seen = usage(self.model, seats, self.link)
        net = tuple(float(part > FULL_LINK_SHARE) for part in seen.net)
        return {"rate": seen.rate, "cpu": seen.cpu, "net": net, "samples": NET_SAMPLES, "stable": True}
