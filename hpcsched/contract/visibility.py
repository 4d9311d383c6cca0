"""What shows GPUs to a process and hides them from it: names of variables and device files.

Data only, for both sides: a kind of device says by its `Visibility` what launchers, workers and batch systems have
to set, or to look at.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Visibility:
    """How a kind of device is shown.

    `variable` lists the devices that a process sees. `order` is the variable that says in which order the
    runtime counts them, `pci_order` its value for the order of the PCI bus, in which NVML counts.
    `device_files` are beginnings of paths that only who uses the devices has open.
    """

    variable: str
    order: str
    pci_order: str
    device_files: tuple[str, ...]


CUDA = Visibility(
    variable="CUDA_VISIBLE_DEVICES",
    order="CUDA_DEVICE_ORDER",
    pci_order="PCI_BUS_ID",
    device_files=("/dev/nvidia",),
)
"""NVIDIA GPUs; "CUDA environment variables" in the CUDA programming guide."""
