"""Admission of a background job to a GPU, by its memory."""

from __future__ import annotations

from hpcsched.compat import dataclass
from hpcsched.errors import ConfigError

RESERVE_BYTES = 1 << 30
"""Memory that is left free, in bytes (chosen): contexts, work areas of libraries, what the allocator cannot
use of its blocks."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """The most memory that a job holds on the device at any time."""

    job: str
    peak_bytes: int


def admit(
    foreground: Footprint, background: Footprint, device_bytes: int, reserve_bytes: int = RESERVE_BYTES
) -> None:
    """Let both be on the device; raises ConfigError with the background job's name if they do not fit."""
    needed = foreground.peak_bytes + background.peak_bytes + reserve_bytes
    if needed > device_bytes:
        room = max(0, device_bytes - foreground.peak_bytes - reserve_bytes)
        raise ConfigError(
            where=f"background job {background.job!r}",
            key="memory",
            got=f"{background.peak_bytes} bytes at its peak",
            accepted=f"at most {room} bytes beside {foreground.job!r} ({foreground.peak_bytes} bytes) on a "
            f"device of {device_bytes} bytes",
        )
