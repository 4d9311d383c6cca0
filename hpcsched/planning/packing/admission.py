"""Which packs fit on a device: by measured peaks of memory (section 4.5), with some kept in reserve."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hpcsched.planning.packing.costs import ModelBatch
from hpcsched.planning.packing.speeds import Speeds

MAX_PACK_SIZE = 16
"""The most members of a pack (chosen): where memory sets no limit, and as models of one process share its
threads."""

MEMORY_RESERVE = 0.1
"""The share of memory that packs leave free (chosen): the sum of peaks is an estimate, and allocators
fragment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackLimits:
    """The limits of each device.

    Args:
        capacity_mib: its memory; None: no limit, as on a CPU.
        most: members of a pack, at most.
        reserve: the share of memory that a pack of several leaves free. A training alone may have all:
            what it takes was measured, not summed up.
    """

    capacity_mib: float | None = None
    most: int = MAX_PACK_SIZE
    reserve: float = MEMORY_RESERVE

    def refusal(self, groups: Mapping[ModelBatch, int], speeds: Speeds) -> str:
        """Why so many members of each key cannot share a device; empty: they can.

        A training whose memory was not measured can be alone on a device, but not with others.
        """
        count = sum(groups.values())
        if count > self.most and count > 1:
            return f"{count} members, at most {self.most} may share a device"
        if self.capacity_mib is None:
            return ""
        total_mib = 0.0
        for key, n in groups.items():
            mib = speeds.peak_mib(key, n)
            if mib is not None:
                total_mib += mib
            elif count > 1:
                return f"the memory of {key.model} with batch {key.batch} was not measured"
        limit_mib = self.capacity_mib * (1 - self.reserve) if count > 1 else self.capacity_mib
        if total_mib <= limit_mib:
            return ""
        free = f", of which {self.reserve:.0%} stay free" if count > 1 and self.reserve else ""
        return f"{total_mib:.0f} MiB, the device has {self.capacity_mib:.0f}{free}"


def peak_mib(groups: Mapping[ModelBatch, int], speeds: Speeds) -> float | None:
    """The peak memory of a pack: the sum over its groups of identical members; None: not known."""
    peaks = [speeds.peak_mib(key, n) for key, n in groups.items()]
    return None if None in peaks else sum(mib for mib in peaks if mib is not None)
