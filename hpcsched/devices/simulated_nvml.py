"""NVML over GPUs that are not there: the calls of pynvml that we use, answered as NVIDIA documents them.

It stands in for the library in `NvmlDevices`. What happens to the GPUs comes from a script with times, or
from who changes them between two calls.
"""

# ruff: noqa: N802, N815 - names are pynvml's

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from hpcsched.devices.xid import FATAL_XIDS

MIB = 2.0**20

INVALID_ARGUMENT, NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND = 2, 3, 4, 6
DRIVER_NOT_LOADED, TIMEOUT, NO_FUNCTION, LOST, RESET_REQUIRED, UNKNOWN = 9, 10, 13, 15, 16, 999
_NO_INSTANCE = 0xFFFFFFFF
_RECOVERY_ACTION = 230
_OFF_THE_BUS = 79
_RESET, _DRAIN_AND_RESET = 1, 4
_SAID = {
    INVALID_ARGUMENT: "Invalid Argument",
    NOT_SUPPORTED: "Not Supported",
    NO_PERMISSION: "Insufficient Permissions",
    NOT_FOUND: "Not Found",
    DRIVER_NOT_LOADED: "Driver Not Loaded",
    TIMEOUT: "Timeout",
    LOST: "GPU is lost",
    RESET_REQUIRED: "GPU requires reset",
    UNKNOWN: "Unknown Error",
}


class NvmlError(Exception):
    """An error of NVML; `value` is its number."""

    def __init__(self, value: int) -> None:
        super().__init__(_SAID.get(value, f"error {value}"))
        self.value = value


@dataclass
class SimulatedGpu:
    """A GPU, or an instance of a GPU in MIG mode, as it is now; None: NVML does not know that of it.

    `error`: the number of the error that every question is answered with; 0: none. `recovery`: the driver's
    recovery action. `near`: the cores on its side. `watts`: what it takes, all
    the time. `permitted`: whether this process may open it.
    """

    uuid: str
    name: str | bytes = "NVIDIA H100 80GB HBM3"
    memory_mib: float | None = 81559.0
    used_mib: float | None = 512.0
    busy: int | None = 40
    ecc: int | None = 0
    recovery: int | None = None
    remap_failed: bool | None = None
    near: Sequence[int] | None = None
    watts: float | None = None
    error: int = 0
    permitted: bool = True
    instances: list[SimulatedGpu] = field(default_factory=list)
    parent: SimulatedGpu | None = None
    numbers: tuple[int, int] = (_NO_INSTANCE, _NO_INSTANCE)
    """Of an instance: of its GPU instance, and of its compute instance."""


@dataclass(frozen=True, kw_only=True)
class Happening:
    """What happens to a GPU, or to an instance of it, `at_s` seconds after the library was opened.

    `what`: "xid" (with its number), "lost", "returns" (after a reset), "memory-error" (one that is counted);
    and for `for_s` seconds "hang" (NVML does not answer about it), "timeout", "unknown-error", "memory-stays"
    (half of its memory is in use).
    """

    at_s: float
    gpu: int
    what: str
    xid: int = 0
    for_s: float = 0.0
    instance: int | None = None


class SimulatedNvml:
    """The part of pynvml that is used, over `gpus`, of which `script` says what happens to them.

    `clock` in seconds; `sleep` is what a hanging call does.
    """

    NVMLError = NvmlError
    NVML_ERROR_NOT_SUPPORTED = NOT_SUPPORTED
    NVML_ERROR_NO_PERMISSION = NO_PERMISSION
    NVML_ERROR_FUNCTION_NOT_FOUND = NO_FUNCTION
    NVML_ERROR_GPU_IS_LOST = LOST
    NVML_ERROR_RESET_REQUIRED = RESET_REQUIRED
    NVML_ERROR_UNKNOWN = UNKNOWN
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    NVML_VOLATILE_ECC = 0
    nvmlEventTypeXidCriticalError = 8

    def __init__(
        self,
        gpus: Sequence[SimulatedGpu],
        script: Sequence[Happening] = (),
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.gpus = list(gpus)
        self.events: list[tuple[SimulatedGpu, int] | tuple[SimulatedGpu, int, int, int]] = []
        """Those that are not read yet: the GPU and the Xid's number; and of an instance its two numbers."""
        self.registered: list[str] = []
        self.shut = 0
        self.broken_driver = False
        self._clock, self._sleep = clock, sleep
        self._began = clock()
        self._due = deque(sorted(script, key=lambda happening: happening.at_s))
        self._hangs: dict[str, float] = {}
        """By UUID until when."""
        self._passing: list[tuple[float, SimulatedGpu, str, Any]] = []
        """What is as it was again at a time: an attribute of a GPU, and its value."""
        for gpu in self.gpus:
            for i, instance in enumerate(gpu.instances):
                instance.parent = gpu
                if instance.numbers == (_NO_INSTANCE, _NO_INSTANCE):
                    instance.numbers = (i + 1, 0)

    # -- what happens ----------------------------------------------------------------------------------

    def _advance(self) -> float:
        """Let all happen that is due; the time."""
        now = self._clock() - self._began
        for entry in [entry for entry in self._passing if entry[0] <= now]:
            self._passing.remove(entry)
            setattr(entry[1], entry[2], entry[3])
        while self._due and self._due[0].at_s <= now:
            self._happen(self._due.popleft())
        return now

    def _happen(self, it: Happening) -> None:
        board = self.gpus[it.gpu]
        gpu = board if it.instance is None else board.instances[it.instance]
        until = it.at_s + it.for_s
        match it.what:
            case "xid":
                self._xid(board, gpu, it.xid)
            case "lost":
                gpu.error = LOST
            case "returns":
                for one in (board, *board.instances):
                    one.error = 0
                    one.recovery = None if one.recovery is None else 0
                    one.ecc = None if one.ecc is None else 0
            case "memory-error":
                gpu.ecc = (gpu.ecc or 0) + 1
            case "hang":
                for one in (gpu, *gpu.instances):
                    self._hangs[one.uuid] = until
            case "timeout" | "unknown-error":
                self._passing.append((until, gpu, "error", gpu.error))
                gpu.error = TIMEOUT if it.what == "timeout" else UNKNOWN
            case "memory-stays":
                self._passing.append((until, gpu, "used_mib", gpu.used_mib))
                gpu.used_mib = (gpu.memory_mib or 0) / 2

    def _xid(self, board: SimulatedGpu, gpu: SimulatedGpu, number: int) -> None:
        self.events.append((board, number, *gpu.numbers))
        if number in FATAL_XIDS and board.recovery is not None:
            # After one in a MIG instance the others go on, and the board is to be reset when they are done.
            board.recovery = _RESET if gpu is board else _DRAIN_AND_RESET
        if number == _OFF_THE_BUS:
            for one in (board, *board.instances):
                one.error = LOST

    def _asked(self, gpu: SimulatedGpu) -> SimulatedGpu:
        """The GPU, as every question begins: it may hang, or end with an error."""
        now = self._advance()
        if (until := self._hangs.get(gpu.uuid, 0.0)) > now:
            self._sleep(until - now)
            self._advance()
        if gpu.error:
            raise NvmlError(gpu.error)
        return gpu

    # -- the library's calls ---------------------------------------------------------------------------

    def nvmlInit(self) -> None:
        if self.broken_driver:
            raise NvmlError(DRIVER_NOT_LOADED)

    def nvmlShutdown(self) -> None:
        self.shut += 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, i: int) -> SimulatedGpu:
        if not self.gpus[i].permitted:
            raise NvmlError(NO_PERMISSION)
        return self._asked(self.gpus[i])

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> SimulatedGpu:
        for gpu in self.gpus:
            for one in (gpu, *gpu.instances):
                if one.uuid == uuid:
                    return self._asked(one)
        raise NvmlError(NOT_FOUND)

    def nvmlDeviceGetUUID(self, gpu: SimulatedGpu) -> str:
        if not gpu.uuid:
            raise NvmlError(NOT_SUPPORTED)
        return gpu.uuid

    def nvmlDeviceGetName(self, gpu: SimulatedGpu) -> str | bytes:
        return self._asked(gpu).name

    def nvmlDeviceGetMemoryInfo(self, gpu: SimulatedGpu) -> Any:
        total, used = self._asked(gpu).memory_mib, gpu.used_mib
        return SimpleNamespace(total=int(_known(total) * MIB), used=int(_known(used) * MIB))

    def nvmlDeviceGetTotalEnergyConsumption(self, gpu: SimulatedGpu) -> int:
        if gpu.parent:
            raise NvmlError(NOT_SUPPORTED)
        return int(_known(self._asked(gpu).watts) * self._advance() * 1000)

    def nvmlDeviceGetUtilizationRates(self, gpu: SimulatedGpu) -> Any:
        return SimpleNamespace(gpu=_known(self._asked(gpu).busy))

    def nvmlDeviceGetTotalEccErrors(self, gpu: SimulatedGpu, kind: int, counter: int) -> int:
        return int(_known(self._asked(gpu).ecc))

    def nvmlDeviceGetRemappedRows(self, gpu: SimulatedGpu) -> tuple[int, int, bool, bool]:
        return 0, 0, False, bool(_known(self._asked(gpu).remap_failed))

    def nvmlDeviceGetFieldValues(self, gpu: SimulatedGpu, fields: Sequence[int]) -> list[Any]:
        self._asked(gpu)
        known = [gpu.recovery if number == _RECOVERY_ACTION else None for number in fields]
        return [
            SimpleNamespace(
                nvmlReturn=NOT_SUPPORTED if value is None else 0, value=SimpleNamespace(uiVal=value or 0)
            )
            for value in known
        ]

    def nvmlDeviceGetCpuAffinity(self, gpu: SimulatedGpu, words: int) -> list[int]:
        if gpu.parent or gpu.near is None:
            raise NvmlError(NOT_SUPPORTED)
        return [sum(1 << core % 64 for core in gpu.near if core // 64 == word) for word in range(words)]

    def nvmlDeviceGetMigMode(self, gpu: SimulatedGpu) -> list[int]:
        if gpu.parent:
            raise NvmlError(INVALID_ARGUMENT)
        return [int(bool(gpu.instances))] * 2

    def nvmlDeviceGetMaxMigDeviceCount(self, gpu: SimulatedGpu) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, gpu: SimulatedGpu, i: int) -> SimulatedGpu:
        if i >= len(gpu.instances):
            raise NvmlError(NOT_FOUND)
        return gpu.instances[i]

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, gpu: SimulatedGpu) -> SimulatedGpu:
        if gpu.parent is None:
            raise NvmlError(INVALID_ARGUMENT)
        return gpu.parent

    def nvmlDeviceGetGpuInstanceId(self, gpu: SimulatedGpu) -> int:
        return gpu.numbers[0]

    def nvmlDeviceGetComputeInstanceId(self, gpu: SimulatedGpu) -> int:
        return gpu.numbers[1]

    def nvmlEventSetCreate(self) -> list[SimulatedGpu]:
        return []

    def nvmlEventSetFree(self, events: list[SimulatedGpu]) -> None:
        events.clear()

    def nvmlDeviceRegisterEvents(self, gpu: SimulatedGpu, types: int, events: list[SimulatedGpu]) -> None:
        self.registered.append(gpu.uuid)
        events.append(gpu)

    def nvmlEventSetWait_v2(self, events: list[SimulatedGpu], timeout_ms: int) -> Any:
        self._advance()
        lost = [gpu for gpu in events if gpu.error == LOST]
        told = lost or events  # a lost GPU's own last errors are told, then nobody's
        due = [i for i, event in enumerate(self.events) if any(event[0] is gpu for gpu in told)]
        if not due:
            raise NvmlError(LOST if lost else TIMEOUT)
        gpu, xid, *numbers = self.events.pop(due[0])
        of_gpu, of_compute = numbers or (_NO_INSTANCE, _NO_INSTANCE)
        return SimpleNamespace(device=gpu, eventData=xid, gpuInstanceId=of_gpu, computeInstanceId=of_compute)


def _known(value: float | bool | None) -> float:
    if value is None:
        raise NvmlError(NOT_SUPPORTED)
    return value
