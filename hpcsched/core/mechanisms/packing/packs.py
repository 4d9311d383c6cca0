"""Jobs that are trained as one on a GPU (pack, sections 2.2 and 5.2), as far as the core is concerned.

One of them holds the GPU as any job does; the others ride: they have attempts of their own and no lease. When
the holder leaves, the one that has been there longest holds the GPU from then on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hpcsched.core.mechanisms.riders import Riders
from hpcsched.core.model import Device, JobSpec, Kind
from hpcsched.core.reasons import Reason


@dataclass(slots=True)
class Packs(Riders):
    """Who rides where; `alone` says by job id who is not packed any more.

    `idle_s` is since when a GPU has been free that no job waits for, `parted` who has left a pack for one in
    this life of the run.
    """

    alone: dict[int, Reason] = field(default_factory=dict)
    idle_s: float | None = None
    parted: set[int] = field(default_factory=set)


def is_packed(spec: JobSpec) -> bool:
    """Whether a job may be trained as one with others."""
    return bool(spec.strategy["kind"] == "packed")


def can_ride(spec: JobSpec, device: Device) -> bool:
    """Whether a job can ride on such a device: stand-ins of a real run have processes of their own only."""
    if device.kind == "simulated":
        return is_packed(spec)
    return is_packed(spec) and spec.kind is Kind.TRAINER and device.kind != "replay"


def key_of(spec: JobSpec) -> tuple[object, ...]:
    """What jobs have in common that may be in one process: their program, its interpreter and surroundings,
    and what their users say belongs together."""

    def sorted_items(table: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
        return tuple(sorted(table.items()))

    strategy = spec.strategy
    where = spec.environment, spec.workdir, sorted_items(spec.env)
    modules = spec.needs.modules if spec.needs else ()
    return spec.kind, spec.trainer, *where, modules, strategy.get("pack"), strategy.get("mode", "auto")
