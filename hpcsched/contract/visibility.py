"""What shows GPUs to a process and hides them from it: names of variables and of device files.

Data only, and for both sides: launchers set what a `Visibility` names, workers and readers of a batch
system's variables look at it.
"""

from __future__ import annotations

from dataclasses import dataclass

_SHORT = len("GPU-") + 8
"""The first of the five parts of a UUID."""


@dataclass(frozen=True)
class Visibility:
    """How a kind of device is shown.

    - `variable` lists the devices that a process sees; `none` are its values that name none.
    - `order` says in which order the runtime counts devices, `pci_order` being its word for that of the PCI
      bus.
    - `whole` and `part` begin the names of a whole GPU and of a part of one (a MIG instance), of which a
      process sees one only: the first in the list.
    - `hides` are variables and values by which a process sees no device, of whatever kind.
    - `device_files` begin the paths of files that only who uses the driver has open.
    - `hook` are variables and values by which a container runtime's hook puts the driver into a container.
    """

    variable: str
    none: tuple[str, ...]
    order: str
    pci_order: str
    whole: str
    part: str
    hides: tuple[tuple[str, str], ...]
    device_files: tuple[str, ...]
    hook: tuple[tuple[str, str], ...]

    def short(self, name: str) -> str:
        """A device's name for people: of a UUID the beginning, which the runtime takes too."""
        return name[:_SHORT] if name.startswith((self.whole, self.part)) else name

    def hidden(self) -> dict[str, str]:
        """The variables that hide all devices from a process."""
        return dict(self.hides)


CUDA = Visibility(
    variable="CUDA_VISIBLE_DEVICES",
    none=("", "-1"),
    order="CUDA_DEVICE_ORDER",
    pci_order="PCI_BUS_ID",
    whole="GPU-",
    part="MIG-",
    # HIP takes an empty list for all devices, and looks at its own variable first: a torch for AMD GPUs would
    # compute on them in a job that was given CPU cores.
    hides=(("CUDA_VISIBLE_DEVICES", ""), ("HIP_VISIBLE_DEVICES", "-1")),
    device_files=("/dev/nvidia",),
    hook=(("NVIDIA_VISIBLE_DEVICES", "all"), ("NVIDIA_DRIVER_CAPABILITIES", "compute,utility")),
)
"""NVIDIA GPUs: "CUDA environment variables" in the CUDA programming guide, "GPU isolation" in ROCm's."""

OF_BATCH_STEPS = (CUDA.variable, "GPU_DEVICE_ORDINAL", "ROCR_VISIBLE_DEVICES")
"""The variables by which a batch system shows a step its GPUs."""
