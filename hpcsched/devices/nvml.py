"""NVIDIA GPUs and MIG instances through NVML (nvidia-ml-py): inventory, utilisation, health.

NVML is asked without a CUDA context, so watching costs no GPU memory.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpcsched.contract.variables import CUDA_DEVICES
from hpcsched.contract.visibility import CUDA
from hpcsched.core.model import ComputeMode, Device
from hpcsched.devices.base import Sample
from hpcsched.devices.bounded_call import BoundedCalls
from hpcsched.devices.health import GpuHealth, Reading, Trouble

MIB = 2.0**20

FREE_SLACK_MIB = 64.0
"""Memory above the least ever seen at which a device still counts as free (chosen): less than the smallest
CUDA context takes (100 MiB and more), more than what the driver, or an MPS server without clients, keeps."""

_ANSWER_WITHIN_S = 0.2
"""How long `free` waits for the driver (chosen)."""

_WORD_BITS = 64
"""The bits of C's unsigned long on Linux, in which NVML writes sets of cores."""

_RECOVERY_ACTION = 230
"""NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, which older bindings have no name for."""

_DIGITS = 9
"""The most digits of an index; Python refuses to read some thousands of them."""

_NO_INSTANCE = 0xFFFFFFFF
"""The number of an instance in an event that is about the board."""


_COMPUTE_MODES = {2: ComputeMode.PROHIBITED, 3: ComputeMode.EXCLUSIVE_PROCESS}
"""NVML_COMPUTEMODE_*."""


@dataclass(slots=True)
class _Gpu:
    """A device in NVML."""

    handle: Any
    name: str
    """Its name in CUDA_VISIBLE_DEVICES: the UUID, or the index where NVML has none."""
    board: Any
    """NVML's handle of the physical GPU, where a MIG instance's errors are reported."""
    board_uuid: str
    number: int | None = None
    """The index that CUDA gives it where it counts in the order of the PCI bus; a MIG instance has none."""
    instance: tuple[int | None, int | None] | None = None
    """Of a MIG instance: the numbers of its GPU instance and its compute instance, as far as they are
    known."""
    idle_mib: float | None = None
    """The least memory that has been seen in use: what the driver keeps, and others who share the GPU."""
    health: GpuHealth = field(default_factory=GpuHealth)

    @property
    def watched_as(self) -> str:
        """Which physical GPU it is, for its errors."""
        return self.board_uuid or self.name


class NvmlDevices:
    """The GPUs of CUDA_VISIBLE_DEVICES, or all where it is not set; at most `most` of them.

    Without a driver, or without a visible GPU, the inventory is empty and `missing` is the reason. Names come
    as CUDA takes them (indices in PCI order, UUIDs also abbreviated, MIG names); like CUDA, the list ends at
    the first name that is not there. They are handed on as full UUIDs, which mean the same GPU to every
    process, in whatever order it counts.

    `nvml`: the library; default: pynvml. `visible`: what stands for CUDA_VISIBLE_DEVICES in our environment.
    """

    speed = 1.0
    visibility = CUDA

    def __init__(
        self,
        host: str,
        most: int | None = None,
        *,
        nvml: Any = None,
        visible: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.missing = ""
        self._clock = clock
        self._gpus: list[_Gpu] = []
        self._inventory: tuple[Device, ...] = ()
        self._events: dict[str, Any] = {}
        """What tells of each GPU's Xid errors: one for all of them tells of none once a GPU is lost."""
        self._open = False
        self._calls = BoundedCalls("nvml")
        if nvml is None:
            visible = os.environ.get(CUDA.variable) if visible is None else visible
            try:
                import pynvml
            except ImportError as error:
                self.missing = str(error)
                return
            nvml = pynvml
        self._nvml: Any = nvml
        self._cannot_say = (
            nvml.NVML_ERROR_NOT_SUPPORTED,
            nvml.NVML_ERROR_NO_PERMISSION,
            nvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        )
        try:
            self._nvml.nvmlInit()
            self._open = True
            self._gpus = list(self._all() if visible is None else self._named(visible))[:most]
            if not self._gpus and visible is not None:
                self.missing = f"{CUDA.variable} is {visible!r}"
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
        names = ",".join(device.handle for device in devices)
        # Else each rank has as many threads as there are cores. One number serves all ranks of a group.
        threads = min((self._threads(device) for device in devices), default=1)
        return {
            CUDA.variable: names,
            CUDA.order: CUDA.pci_order,  # in which NVML counts; by default CUDA does not
            CUDA_DEVICES: names,  # stays as it is, so that a worker knows what it was given
            "OMP_NUM_THREADS": str(threads),
        }

    def numbered(self, devices: Sequence[Device]) -> dict[str, str]:
        numbers = [self._gpus[device.index].number for device in devices]
        if None in numbers:
            return {}
        names = ",".join(map(str, numbers))
        return {CUDA.variable: names, CUDA.order: CUDA.pci_order, CUDA_DEVICES: names}

    def cpus(self, device: Device) -> frozenset[int] | None:
        return self._near[device.index]

    def _threads(self, device: Device) -> int:
        """The number of threads of a device: its part of the cores near it, or of all if NVML knows none."""
        near = self._near[device.index]
        sharing = self._near.count(near)
        return max(1, len(near or os.sched_getaffinity(0)) // sharing)

    def sample(self) -> list[Sample]:
        """One sample a device. A condemned one is asked again from time to time; see `GpuHealth`."""
        now = self._clock()
        self._drain_events(now)
        asked = {i: self._asked(gpu) for i, gpu in enumerate(self._gpus) if gpu.health.due(now)}
        some_answer = any(isinstance(found, Reading) for found in asked.values())
        for i, found in asked.items():
            gpu = self._gpus[i]
            condemned = bool(gpu.health.why)
            if isinstance(found, Reading):
                gpu.health.answered(found, now)
            else:
                gpu.health.failed(*found, now, alone=some_answer)
            if condemned and not gpu.health.why:
                self._register(gpu)  # it has been reset, maybe
        return [self._sample(i, gpu, asked.get(i)) for i, gpu in enumerate(self._gpus)]

    def free(self, device: Device) -> bool | None:
        gpu = self._gpus[device.index]
        answered, used = self._calls.call(lambda: self._used_mib(gpu), _ANSWER_WITHIN_S)
        if not answered:
            return False
        if used is None or gpu.idle_mib is None:
            return None
        return used <= gpu.idle_mib + FREE_SLACK_MIB

    def close(self) -> None:
        if not self._open:
            return
        self._open = False
        with contextlib.suppress(self._nvml.NVMLError):
            for watched_as in list(self._events):
                self._unregister(watched_as)
            self._nvml.nvmlShutdown()

    # -- which devices -------------------------------------------------------------------------------

    def _boards(self) -> list[Any]:
        """All GPUs in PCI order: without those that we have no permission for, which CUDA does not count
        either; one that has fallen off the bus keeps its place, as None."""
        boards = []
        for i in range(self._nvml.nvmlDeviceGetCount()):
            try:
                boards.append(self._nvml.nvmlDeviceGetHandleByIndex(i))
            except self._nvml.NVMLError as error:
                if error.value != self._nvml.NVML_ERROR_NO_PERMISSION:
                    boards.append(None)
        return boards

    def _all(self) -> Iterator[_Gpu]:
        """Every GPU; of a GPU in MIG mode its instances."""
        for i, board in enumerate(self._boards()):
            if board is None:
                continue
            if self._mig_enabled(board):
                for instance in self._instances(board):
                    yield self._instance(instance, board)
            else:
                yield self._gpu(board, i)

    def _named(self, visible: str) -> Iterator[_Gpu]:
        boards = self._boards()
        seen: set[str] = set()
        for name in (part.strip() for part in visible.split(",")):
            gpu = self._find(name, boards)
            if gpu is None:
                return
            if gpu.name not in seen:
                seen.add(gpu.name)
                yield gpu

    def _find(self, name: str, boards: list[Any]) -> _Gpu | None:
        """The device of a name out of CUDA_VISIBLE_DEVICES, if it is there."""
        if name.startswith(CUDA.part):
            try:
                handle = self._nvml.nvmlDeviceGetHandleByUUID(name)
            except self._nvml.NVMLError:
                return None
            board = self._ask("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle)
            return self._instance(handle, handle if board is None else board, name)
        if name.isdecimal():
            number = int(name) if len(name) <= _DIGITS else len(boards)
            matching = [number] if number < len(boards) and boards[number] is not None else []
        else:
            matching = [i for i, board in enumerate(boards) if self._uuid(board).startswith(name)]
            matching = matching if name.startswith(CUDA.whole) else []
        if len(matching) != 1:
            return None
        board = boards[matching[0]]
        if self._mig_enabled(board):  # CUDA then takes its first instance
            instances = list(self._instances(board))
            return self._instance(instances[0], board) if instances else None
        return self._gpu(board, matching[0])

    def _gpu(self, board: Any, number: int) -> _Gpu:
        uuid = self._uuid(board)
        return _Gpu(handle=board, name=uuid or str(number), board=board, board_uuid=uuid, number=number)

    def _instance(self, handle: Any, board: Any, name: str = "") -> _Gpu:
        numbers = (
            self._ask("nvmlDeviceGetGpuInstanceId", handle),
            self._ask("nvmlDeviceGetComputeInstanceId", handle),
        )
        return _Gpu(
            handle=handle,
            name=self._uuid(handle) or name,
            board=board,
            board_uuid=self._uuid(board),
            instance=numbers,
        )

    def _mig_enabled(self, handle: Any) -> bool:
        mode = self._ask("nvmlDeviceGetMigMode", handle)
        return mode is not None and bool(mode[0])

    def _instances(self, handle: Any) -> Iterator[Any]:
        """Those that have a name: an instance has no index."""
        for i in range(self._ask("nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
            instance = self._ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, i)
            if self._uuid(instance):
                yield instance

    def _describe(self, index: int, gpu: _Gpu, host: str) -> Device:
        memory, name = (self._ask(f"nvmlDeviceGet{what}", gpu.handle) for what in ("MemoryInfo", "Name"))
        mode = self._ask("nvmlDeviceGetComputeMode", gpu.handle)
        return Device(
            index=index,
            host=host,
            kind=_text(name) if name is not None else "cuda",
            handle=gpu.name,
            memory_mib=None if memory is None else memory.total / MIB,
            compute_mode=_COMPUTE_MODES.get(mode, ComputeMode.DEFAULT),
        )

    def _cores_near(self, gpu: _Gpu) -> frozenset[int] | None:
        """Those of the cores that we may use that are on the GPU's side of the host; None: not known."""
        allowed = os.sched_getaffinity(0)
        words = max(allowed) // _WORD_BITS + 1
        # What runs on a MIG instance is near to its board.
        mask = self._ask("nvmlDeviceGetCpuAffinity", gpu.board, words) or ()
        near = {core for core in allowed if mask and mask[core // _WORD_BITS] >> core % _WORD_BITS & 1}
        return frozenset(near) or None

    def _uuid(self, handle: Any) -> str:
        uuid = None if handle is None else self._ask("nvmlDeviceGetUUID", handle)
        return "" if uuid is None else _text(uuid)

    def _ask(self, call: str, *args: Any) -> Any:
        """What NVML answers, or None where it does not."""
        try:
            return getattr(self._nvml, call)(*args)
        except (self._nvml.NVMLError, AttributeError):  # older bindings do not have all calls
            return None

    # -- how they are --------------------------------------------------------------------------------

    def _sample(self, index: int, gpu: _Gpu, found: Reading | tuple[Trouble, str] | None) -> Sample:
        seen = found if isinstance(found, Reading) and not gpu.health.why else Reading()
        return Sample(
            gpu=index,
            utilisation=seen.utilisation,
            memory_mib=seen.memory_mib,
            energy_j=seen.energy_j,
            healthy=not gpu.health.why,
            why=gpu.health.why,
        )

    def _asked(self, gpu: _Gpu) -> Reading | tuple[Trouble, str]:
        """What NVML answers to all questions about a device, or its error."""
        if gpu.health.why:  # after a reset its handles are new
            self._renew(gpu)
        try:
            return self._reading(gpu)
        except self._nvml.NVMLError as error:
            return self._trouble(error.value), str(error)

    def _reading(self, gpu: _Gpu) -> Reading:
        rates = self._measure("nvmlDeviceGetUtilizationRates", gpu.handle)
        memory = self._measure("nvmlDeviceGetMemoryInfo", gpu.handle)
        uncorrected, volatile = self._nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, self._nvml.NVML_VOLATILE_ECC
        errors = self._measure("nvmlDeviceGetTotalEccErrors", gpu.handle, uncorrected, volatile)
        remapped = self._measure("nvmlDeviceGetRemappedRows", gpu.board)
        used = None if memory is None else memory.used / MIB
        self._note_idle(gpu, used)
        return Reading(
            utilisation=None if rates is None else rates.gpu / 100,
            memory_mib=used,
            recovery=self._recovery(gpu),
            memory_errors=errors,
            remap_failed=None if remapped is None else bool(remapped[3]),
            energy_j=self._energy_j(gpu),
        )

    def _energy_j(self, gpu: _Gpu) -> float | None:
        """NVML counts it in millijoules, from Volta on, and of whole GPUs only."""
        count = None if gpu.instance else self._ask("nvmlDeviceGetTotalEnergyConsumption", gpu.board)
        return None if count is None else count / 1000

    def _recovery(self, gpu: _Gpu) -> int | None:
        """What the driver says the board needs; None before R570."""
        values = self._ask("nvmlDeviceGetFieldValues", gpu.board, [_RECOVERY_ACTION])
        return int(values[0].value.uiVal) if values and values[0].nvmlReturn == 0 else None

    def _renew(self, gpu: _Gpu) -> None:
        for handle, uuid in (("board", gpu.board_uuid), ("handle", gpu.name)):
            if (found := self._ask("nvmlDeviceGetHandleByUUID", uuid)) is not None:
                setattr(gpu, handle, found)

    def _trouble(self, value: int) -> Trouble:
        nvml = self._nvml
        if value in (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_RESET_REQUIRED):
            return Trouble.GONE
        return Trouble.UNKNOWN if value == nvml.NVML_ERROR_UNKNOWN else Trouble.PASSING

    def _measure(self, call: str, *args: Any) -> Any:
        """What NVML answers, None where this device cannot say; NVMLError if the device is in trouble."""
        try:
            return getattr(self._nvml, call)(*args)
        except AttributeError:
            return None
        except self._nvml.NVMLError as error:
            if error.value in self._cannot_say:
                return None
            raise

    def _used_mib(self, gpu: _Gpu) -> float | None:
        """The memory in use; None where NVML does not say."""
        memory = self._ask("nvmlDeviceGetMemoryInfo", gpu.handle)
        used = None if memory is None else float(memory.used / MIB)
        self._note_idle(gpu, used)
        return used

    @staticmethod
    def _note_idle(gpu: _Gpu, used: float | None) -> None:
        if used is not None:
            gpu.idle_mib = used if gpu.idle_mib is None else min(used, gpu.idle_mib)

    def _watch(self) -> None:
        """Take what happened before us as given, and ask to be told of Xid errors where NVML can."""
        for gpu in self._gpus:
            found = self._asked(gpu)
            gpu.health = GpuHealth(found if isinstance(found, Reading) else None)
        for gpu in self._gpus:
            if gpu.watched_as not in self._events:
                self._register(gpu)

    def _register(self, gpu: _Gpu) -> None:
        """Ask to be told of the Xid errors of a device's GPU, from now on."""
        self._unregister(gpu.watched_as)
        if (events := self._ask("nvmlEventSetCreate")) is not None:
            self._events[gpu.watched_as] = events
            kind = self._nvml.nvmlEventTypeXidCriticalError
            self._ask("nvmlDeviceRegisterEvents", gpu.board, kind, events)

    def _unregister(self, watched_as: str) -> None:
        if (events := self._events.pop(watched_as, None)) is not None:
            self._ask("nvmlEventSetFree", events)

    def _drain_events(self, now: float) -> None:
        """Take the Xid errors that have come in; a timeout of 0 makes NVML answer at once."""
        for watched_as, events in list(self._events.items()):
            for _ in range(64):  # bounded: a device in trouble can report faster than we read
                event = self._ask("nvmlEventSetWait_v2", events, 0)
                if event is None:
                    break
                for gpu in self._gpus:
                    if gpu.watched_as == watched_as and _concerns(event, gpu.instance):
                        gpu.health.xid(int(event.eventData), now)


def _concerns(event: Any, instance: tuple[int | None, int | None] | None) -> bool:
    """Whether an event of its board concerns a device: the board itself, or a MIG instance that is named in
    the event, or may be."""
    if instance is None:
        return True
    named = (event.gpuInstanceId, event.computeInstanceId)
    return all(
        told in (_NO_INSTANCE, ours) or ours is None for told, ours in zip(named, instance, strict=True)
    )


def _text(value: str | bytes) -> str:
    """Older nvidia-ml-py answers in bytes."""
    return value.decode() if isinstance(value, bytes) else value
