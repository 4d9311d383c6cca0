"""NVIDIA GPUs and MIG instances through NVML (nvidia-ml-py): inventory, utilisation, health.

NVML is asked without a CUDA context, so watching costs no GPU memory.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hpcsched.contract.variables import CUDA_DEVICES
from hpcsched.core.model import ComputeMode, Device
from hpcsched.devices.bounded_call import BoundedCalls
from hpcsched.devices.base import Sample

MIB = 2.0**20

FREE_SLACK_MIB = 64.0
"""Memory above the least ever seen at which a device still counts as free (chosen): less than the smallest
CUDA context takes (100 MiB and more), more than what the driver, or an MPS server without clients, keeps."""

_ANSWER_WITHIN_S = 0.2
"""How long `free` waits for the driver (chosen)."""

_WORD_BITS = 64
"""The bits of C's unsigned long on Linux, in which NVML writes sets of cores."""

APPLICATION_XIDS = frozenset({13, 31, 43, 45, 68, 109})
"""Xid errors that a program causes; the device stays usable (NVIDIA's list of Xid errors)."""


_COMPUTE_MODES = {2: ComputeMode.PROHIBITED, 3: ComputeMode.EXCLUSIVE_PROCESS}
"""NVML_COMPUTEMODE_*."""


@dataclass(slots=True)
class _Gpu:
    """A device in NVML, and its faults so far."""

    handle: Any
    name: str
    """Its name in CUDA_VISIBLE_DEVICES."""
    board: str
    """UUID of the physical GPU: a MIG instance's errors are reported there."""
    ecc_at_start: int | None = None
    idle_mib: float | None = None
    """The least memory that has been seen in use: what the driver keeps, and others who share the GPU."""
    broken: str = ""


class NvmlDevices:
    """The GPUs of CUDA_VISIBLE_DEVICES, or all where it is not set; at most `most` of them.

    Without a driver, or without a visible GPU, the inventory is empty and `missing` is the reason.
    Names come as CUDA takes them (indices in PCI order, UUIDs also abbreviated, MIG names) and are
    handed on in the same form; like CUDA, the list ends at the first name that is not there.
    """

    speed = 1.0

    def __init__(self, host: str, most: int | None = None) -> None:
        self.missing = ""
        self._gpus: list[_Gpu] = []
        self._inventory: tuple[Device, ...] = ()
        self._events: Any = None
        self._open = False
        self._calls = BoundedCalls("nvml")
        try:
            import pynvml
        except ImportError as error:
            self.missing = str(error)
            return
        self._nvml: Any = pynvml
        self._cannot_say = (
            pynvml.NVML_ERROR_NOT_SUPPORTED,
            pynvml.NVML_ERROR_NO_PERMISSION,
            pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        )
        try:
            self._nvml.nvmlInit()
            self._open = True
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            self._gpus = list(self._all() if visible is None else self._named(visible))[:most]
            if not self._gpus and visible is not None:
                self.missing = f"CUDA_VISIBLE_DEVICES is {visible!r}"
        except self._nvml.NVMLError as error:
            self.missing = f"NVML: {error}"
        self._inventory = tuple(self._describe(i, gpu, host) for i, gpu in enumerate(self._gpus))
        self._near = [self._cores_near(gpu) for gpu in self._gpus]
        self._watch()

    @property
    def kind(self) -> str:
        """The most common type of the devices."""
        kinds = Counter(device.kind for device in self._inventory)
        return kinds.most_common(1)[0][0] if kinds else "cuda"

    def inventory(self) -> tuple[Device, ...]:
        return self._inventory

    def environment(self, devices: Sequence[Device]) -> dict[str, str]:
        # NVML counts in PCI order; by default CUDA does not, and an index would mean another GPU there.
        order = os.environ.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
        names = ",".join(device.handle for device in devices)
        shown = {
            "CUDA_VISIBLE_DEVICES": names,
            "CUDA_DEVICE_ORDER": order,
            CUDA_DEVICES: names,  # stays as it is, so that a worker knows what it was given
        }
        if "OMP_NUM_THREADS" not in os.environ:
            # Else each rank has as many threads as there are cores. One number serves all ranks of a group.
            threads = min((self._threads(device) for device in devices), default=1)
            shown["OMP_NUM_THREADS"] = str(threads)
        return shown

    def cpus(self, device: Device) -> frozenset[int] | None:
        return self._near[device.index]

    def _threads(self, device: Device) -> int:
        """The number of threads of a device: its part of the cores near it, or of all if NVML knows none."""
        near = self._near[device.index]
        sharing = self._near.count(near)
        return max(1, len(near or os.sched_getaffinity(0)) // sharing)

    def sample(self) -> list[Sample]:
        """One sample a device; a device that NVML failed on, or with a fatal error, stays unhealthy."""
        self._drain_events()
        return [self._sample(i, gpu) for i, gpu in enumerate(self._gpus)]

    def free(self, device: Device) -> bool | None:
        gpu = self._gpus[device.index]
        answered, used = self._calls.call(lambda: self._used_mib(gpu), _ANSWER_WITHIN_S)
        if not answered:
            return False
        if used is None or gpu.idle_mib is None:
            return None
        return used <= gpu.idle_mib + FREE_SLACK_MIB

    def _used_mib(self, gpu: _Gpu) -> float | None:
        """The memory in use; None where NVML does not say."""
        memory = self._ask("nvmlDeviceGetMemoryInfo", gpu.handle)
        if memory is None:
            return None
        used = float(memory.used / MIB)
        gpu.idle_mib = used if gpu.idle_mib is None else min(used, gpu.idle_mib)
        return used

    def close(self) -> None:
        if not self._open:
            return
        self._open = False
        with contextlib.suppress(self._nvml.NVMLError):
            if self._events is not None:
                self._nvml.nvmlEventSetFree(self._events)
            self._nvml.nvmlShutdown()

    # -- which devices -------------------------------------------------------------------------------

    def _boards(self) -> list[Any]:
        # A GPU that has fallen off the bus keeps its index, as None.
        return [self._ask("nvmlDeviceGetHandleByIndex", i) for i in range(self._nvml.nvmlDeviceGetCount())]

    def _all(self) -> Iterator[_Gpu]:
        """Every GPU by its index; of a GPU in MIG mode its instances, which have no index, by UUID."""
        for i, handle in enumerate(self._boards()):
            board = self._uuid(handle)
            if handle is None:
                continue
            if self._mig_enabled(handle):
                for instance in self._instances(handle):
                    yield _Gpu(handle=instance, name=self._uuid(instance), board=board)
            else:
                yield _Gpu(handle=handle, name=str(i), board=board)

    def _named(self, visible: str) -> Iterator[_Gpu]:
        boards = self._boards()
        seen: set[str] = set()
        for name in (part.strip() for part in visible.split(",")):
            handle = self._find(name, boards)
            if handle is None:
                return
            if name not in seen:
                seen.add(name)
                yield _Gpu(handle=handle, name=name, board=self._board_of(name, handle))

    def _find(self, name: str, boards: list[Any]) -> Any:
        """NVML's handle for a name out of CUDA_VISIBLE_DEVICES, or None."""
        if name.isdecimal():
            return boards[int(name)] if int(name) < len(boards) else None
        if name.startswith("MIG-"):
            try:
                return self._nvml.nvmlDeviceGetHandleByUUID(name)
            except self._nvml.NVMLError:
                return None
        matching = [board for board in boards if self._uuid(board).startswith(name)]
        return matching[0] if name.startswith("GPU-") and len(matching) == 1 else None

    def _board_of(self, name: str, handle: Any) -> str:
        if name.startswith("MIG-"):
            handle = self._ask("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle) or handle
        return self._uuid(handle)

    def _mig_enabled(self, handle: Any) -> bool:
        mode = self._ask("nvmlDeviceGetMigMode", handle)
        return mode is not None and bool(mode[0])

    def _instances(self, handle: Any) -> Iterator[Any]:
        for i in range(self._ask("nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
            instance = self._ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, i)
            if instance is not None:
                yield instance

    def _describe(self, index: int, gpu: _Gpu, host: str) -> Device:
        memory = self._ask("nvmlDeviceGetMemoryInfo", gpu.handle)
        name = self._ask("nvmlDeviceGetName", gpu.handle)
        return Device(
            index=index,
            host=host,
            kind=_text(name) if name is not None else "cuda",
            handle=gpu.name,
            memory_mib=None if memory is None else memory.total / MIB,
            compute_mode=_COMPUTE_MODES.get(
                self._ask("nvmlDeviceGetComputeMode", gpu.handle), ComputeMode.DEFAULT
            ),
        )

    def _cores_near(self, gpu: _Gpu) -> frozenset[int] | None:
        """Those of the cores that we may use that are on the GPU's side of the host; None: not known."""
        allowed = os.sched_getaffinity(0)
        words = max(allowed) // _WORD_BITS + 1
        # What runs on a MIG instance is near to its board.
        board = self._ask("nvmlDeviceGetHandleByUUID", gpu.board) or gpu.handle
        mask = self._ask("nvmlDeviceGetCpuAffinity", board, words) or ()
        near = {core for core in allowed if mask and mask[core // _WORD_BITS] >> core % _WORD_BITS & 1}
        return frozenset(near) or None

    def _uuid(self, handle: Any) -> str:
        uuid = None if handle is None else self._ask("nvmlDeviceGetUUID", handle)
        return "" if uuid is None else _text(uuid)

    def _ask(self, call: str, *args: Any) -> Any:
        """What NVML answers, or None where it does not."""
        try:
            return getattr(self._nvml, call)(*args)
        except self._nvml.NVMLError:
            return None

    # -- how they are --------------------------------------------------------------------------------

    def _sample(self, index: int, gpu: _Gpu) -> Sample:
        utilisation = memory = None
        if not gpu.broken:
            try:
                rates = self._measure("nvmlDeviceGetUtilizationRates", gpu.handle)
                used = self._measure("nvmlDeviceGetMemoryInfo", gpu.handle)
                errors = self._uncorrected(gpu)
            except self._nvml.NVMLError as error:
                gpu.broken = f"NVML: {error}"
            else:
                utilisation = None if rates is None else rates.gpu / 100
                memory = None if used is None else used.used / MIB
                if errors is not None and errors > (gpu.ecc_at_start or 0):
                    gpu.broken = f"{errors - (gpu.ecc_at_start or 0)} uncorrectable ECC errors"
        return Sample(
            gpu=index, utilisation=utilisation, memory_mib=memory, healthy=not gpu.broken, why=gpu.broken
        )

    def _measure(self, call: str, *args: Any) -> Any:
        """What NVML answers, None where this device cannot say; NVMLError if the device is in trouble."""
        try:
            return getattr(self._nvml, call)(*args)
        except self._nvml.NVMLError as error:
            if error.value in self._cannot_say:
                return None
            raise

    def _uncorrected(self, gpu: _Gpu) -> int | None:
        """Uncorrectable memory errors since the driver was loaded; None without ECC."""
        uncorrected, volatile = self._nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, self._nvml.NVML_VOLATILE_ECC
        count: int | None = self._measure("nvmlDeviceGetTotalEccErrors", gpu.handle, uncorrected, volatile)
        return count

    def _watch(self) -> None:
        """Take what happened before us as given, and ask to be told of Xid errors where NVML can."""
        for gpu in self._gpus:
            self._used_mib(gpu)
            # The site left this GPU in service with the errors it had; only new ones count.
            with contextlib.suppress(self._nvml.NVMLError):
                gpu.ecc_at_start = self._uncorrected(gpu)
        if not self._gpus:
            return
        self._events = self._ask("nvmlEventSetCreate")
        if self._events is None:
            return
        for board in dict.fromkeys(gpu.board for gpu in self._gpus):
            handle = self._ask("nvmlDeviceGetHandleByUUID", board)
            if handle is not None:
                self._ask(
                    "nvmlDeviceRegisterEvents", handle, self._nvml.nvmlEventTypeXidCriticalError, self._events
                )

    def _drain_events(self) -> None:
        """Note fatal Xid errors that have come in; a timeout of 0 makes NVML answer at once."""
        if self._events is None:
            return
        for _ in range(64):  # bounded: a device in trouble can report faster than we read
            event = self._ask("nvmlEventSetWait_v2", self._events, 0)
            if event is None:
                return
            if event.eventData in APPLICATION_XIDS:
                continue
            board = self._uuid(event.device)
            for gpu in self._gpus:
                if board and gpu.board == board and not gpu.broken:
                    gpu.broken = f"Xid {event.eventData}"


def _text(value: str | bytes) -> str:
    """Older nvidia-ml-py answers in bytes."""
    return value.decode() if isinstance(value, bytes) else value
