"""What a run has found out of models that share devices, for the next one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedUse:
    """One model, or several that share a device (in order of their names, one of them maybe twice).

    Of one: the most memory that a job of it had on the device, in MiB, and the share of the time for which it
    had it busy. Of several: what all did `together`, in shares of their speeds alone. None: not known; of
    several also that they are not to be together.
    """

    models: tuple[str, ...]
    memory_mib: float | None = None
    busy: float | None = None
    together: float | None = None
