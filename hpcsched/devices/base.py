"""The seam to the devices of this host: their inventory, the variables that show them, their utilisation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from hpcsched.contract.visibility import Visibility
from hpcsched.core.model import Device


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One device at one moment: utilisation 0..1 and used memory in MiB, None where it is not measured.

    An unhealthy device must not be used; `why` is the reason. It may be healthy again in a later sample: the
    backend asks again whether what was wrong has passed, and says so only when it has. `age_s`: how many
    seconds ago this was measured, where it has come from another host. `energy_j`: the joules that it took
    since its driver was loaded; of an instance of a GPU nobody knows that.
    """

    gpu: int
    utilisation: float | None = None
    memory_mib: float | None = None
    energy_j: float | None = None
    healthy: bool = True
    why: str = ""
    age_s: float = 0.0


class Devices(Protocol):
    """The devices of one host. Only opening them raises; what cannot be measured later is None."""

    @property
    def speed(self) -> float:
        """Seconds of the profile that pass in one second of the clock; 1.0 except for `replay`."""

    @property
    def visibility(self) -> Visibility:
        """How devices of this kind are shown to a process."""

    @property
    def kind(self) -> str:
        """The device type that profiles are looked up by, e.g. "NVIDIA H200", "cpu", "replay"."""

    def inventory(self) -> tuple[Device, ...]:
        """The devices, with indices 0..n-1 in order."""

    def environment(self, devices: Sequence[Device]) -> dict[str, str]:
        """The variables that show these devices, and no other GPU, to the workers of one group, and that set
        the threads of a rank on one of them."""

    def numbered(self, devices: Sequence[Device]) -> dict[str, str]:
        """The variables of `environment` that name the devices, for programs that read these names as
        numbers; empty where devices have none, or are not shown."""

    def cpus(self, device: Device) -> frozenset[int] | None:
        """The cores to pin this device's worker to; None: leave it where it is."""

    def sample(self) -> list[Sample]:
        """One sample for each device, in order of index; never blocks, never raises."""

    def free(self, device: Device) -> bool | None:
        """Whether the memory of what ran on this device is free again; None: nobody can say here.

        Processes that have been killed, and those that they started, hold it until they are gone. False is
        "not yet", and what a driver that does not answer leaves us with: ask again, with a deadline. Takes at
        most some tenths of a second, also where the driver hangs; never raises; from any thread.
        """

    def close(self) -> None:
        """Close libraries and handles; may be called twice."""
