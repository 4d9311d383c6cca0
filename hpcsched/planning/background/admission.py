"""Admission of a background job to a GPU: its memory, and the batch it may use."""

from __future__ import annotations

from collections.abc import Mapping

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


def largest_batch(job: str, longest_us: Mapping[int, float], bound_us: float) -> int:
    """The largest batch size whose longest chunk is no longer than the bound (section 7.3).

    The foreground may have to wait for one chunk of the background's to run to its end. `longest_us`: by
    batch size, the longest chunk, microseconds. Raises ConfigError with the job's name if none is short
    enough.
    """
    fitting = [batch for batch, us in longest_us.items() if us <= bound_us]
    if not fitting:
        shortest = min(longest_us.values(), default=0.0)
        raise ConfigError(
            where=f"background job {job!r}",
            key="batch",
            got=f"chunks of at least {shortest:.0f} us",
            accepted=f"a model that can be cut into chunks of at most {bound_us:.0f} us",
        )
    return max(fitting)
