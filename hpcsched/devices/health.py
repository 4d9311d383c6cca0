"""When a GPU is condemned, and when it is used again. No NVML here, no clock."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from hpcsched.devices import xid
from hpcsched.devices.xid import Xid

ASK_AGAIN_S = 60.0
"""Time after which a condemned GPU is asked again (chosen: a reset takes some seconds, and a person
minutes)."""

ASK_AT_MOST_S = 3600.0
"""It doubles each time the GPU is asked in vain or condemned again, up to this (chosen)."""

UNKNOWN_IN_A_ROW = 3
"""Answers "unknown error" in a row that condemn a GPU, if others of the host answer (chosen)."""

NOTHING, GPU_RESET, NODE_REBOOT, DRAIN_P2P, DRAIN_AND_RESET = range(5)
RECOVERY = {
    GPU_RESET: "a reset of the GPU",
    NODE_REBOOT: "a reboot of the host",
    DRAIN_P2P: "all traffic between GPUs to end, and a reset",
    5: "a recovery of the IMEX domain",
    6: "a reset of the GPU's PCIe bus",
    7: "a reboot of the system",
}
"""What the driver says that a GPU needs before anything can run on it (nvmlDeviceGpuRecoveryAction_t, from
R570 on). DRAIN_AND_RESET is not among them: then it runs on with a little less memory until the site resets
it."""


class Trouble(Enum):
    """Why NVML has not answered about a GPU."""

    GONE = "gone"
    """The GPU is lost, or has to be reset."""
    UNKNOWN = "unknown"
    """"Unknown error": of the GPU, or of our access to the driver (in a container, after a reload of
    systemd)."""
    PASSING = "passing"
    """A timeout, an argument that was not taken (a MIG instance in change), and all else: it says nothing."""


@dataclass(frozen=True)
class Reading:
    """What NVML has answered about a GPU; None where it does not know that of this GPU.

    `recovery`: the driver's recovery action. `memory_errors`: uncorrectable ones since the driver was loaded.
    `remap_failed`: whether a broken memory row could not be replaced; None without row remapping. `energy_j`:
    joules since the driver was loaded.
    """

    utilisation: float | None = None
    memory_mib: float | None = None
    recovery: int | None = None
    memory_errors: int | None = None
    remap_failed: bool | None = None
    energy_j: float | None = None


class GpuHealth:
    """Whether one GPU, or MIG instance, may be used. Times are seconds of any clock that does not go back.

    What passes: an error of NVML, when it answers again; what the driver asked for, when it asks no more;
    counted memory errors, when the count is back (a reset clears it). A fatal Xid passes only together with
    one of the first two: without that nobody can see that the GPU has been reset.
    """

    def __init__(self, first: Reading | None = None) -> None:
        """`first`: how the GPU is when the site gives it to us: it left it in service with that."""
        self.why = ""
        """Why it must not be used; "" if it may."""
        first = first or Reading()
        self._errors_at_start = first.memory_errors or 0
        self._remap_failed_at_start = bool(first.remap_failed)
        self._driver_says = first.recovery is not None
        self._reset_shows = False  # the driver, or NVML, says itself that it cannot be used now
        self._lasting = False  # a fatal Xid
        self._unknown = 0
        self._ask_at, self._period_s = 0.0, ASK_AGAIN_S

    def due(self, now: float) -> bool:
        """Whether it is to be asked: always while it is in use, from time to time while it is condemned."""
        return not self.why or now >= self._ask_at

    def xid(self, number: int, now: float) -> None:
        """The driver has reported an Xid for it."""
        said = xid.judged(number)
        if said is Xid.FATAL or (said is Xid.DRIVER_KNOWS and not self._driver_says):
            self.why = self.why or xid.in_words(number)
            if not self._lasting:
                self._ask_at = (
                    now  # that the driver asks for a reset has to be seen before somebody resets it
                )
            self._lasting = True

    def answered(self, reading: Reading, now: float) -> None:
        """NVML has answered all questions about it."""
        self._unknown = 0
        self._driver_says = reading.recovery is not None
        if complaint := self._complaint(reading):
            self._condemn(complaint, now)
        elif self.why and self._lasting and not self._reset_shows:
            self._put_off(now)
        else:
            self.why, self._lasting, self._reset_shows = "", False, False

    def failed(self, trouble: Trouble, said: str, now: float, *, alone: bool) -> None:
        """NVML has answered with an error; `alone`: about this GPU, and not about all others that it was
        asked about just now."""
        self._unknown = self._unknown + 1 if trouble is Trouble.UNKNOWN and alone else 0
        self._reset_shows |= trouble is Trouble.GONE
        if trouble is Trouble.GONE or self._unknown >= UNKNOWN_IN_A_ROW:
            self._condemn(f"NVML: {said}", now)
        elif self.why:
            self._put_off(now)

    def _complaint(self, reading: Reading) -> str:
        if reading.recovery in RECOVERY:
            self._reset_shows = True
            return f"the driver asks for {RECOVERY[reading.recovery]}"
        if reading.recovery is not None:
            return ""  # it knows of all memory errors, and which of them were contained
        if reading.remap_failed and not self._remap_failed_at_start:
            return "a memory row could not be remapped"
        new = (reading.memory_errors or 0) - self._errors_at_start
        return f"{new} uncorrectable ECC errors" if new > 0 and reading.remap_failed is None else ""

    def _condemn(self, why: str, now: float) -> None:
        self.why = self.why or why
        self._put_off(now)

    def _put_off(self, now: float) -> None:
        self._ask_at = now + self._period_s
        self._period_s = min(2 * self._period_s, ASK_AT_MOST_S)
