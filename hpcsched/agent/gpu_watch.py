"""What samples say of the GPUs: which are lost, which can be used again, and of which nothing is known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from hpcsched.agent.clock import monotonic
from hpcsched.core import events as ev
from hpcsched.core.model import ComputeMode, Device
from hpcsched.printing import gpus
from hpcsched.store.status import MeasuredGpu

if TYPE_CHECKING:
    from hpcsched.agent.monitor import Monitor
    from hpcsched.core.machine import Machine
    from hpcsched.devices.base import Sample
    from hpcsched.store.device_use import UseRecord

OLD_AFTER_S = 30.0
"""Samples that are late by more than this are not shown as present ones, and the log says so (chosen): NVML
answers within milliseconds, and within seconds while a GPU is being reset."""

UNKNOWN_AFTER_S = 120.0
"""When samples are late by more than this, nothing is known of the health of their GPUs (chosen)."""

WELL_FOR_S = 30.0
"""A lost GPU whose samples have all been healthy for so long is used again (chosen): longer than a reset."""

MOST_LOSSES = 2
"""A GPU that samples have condemned this often stays out for the agent's life (chosen): what comes and goes
costs an attempt each time."""


class GpuWatch:
    """Turns samples into events, and into what `status` shows.

    A driver that hangs is no proof of a dead GPU: it may wait for a reset of another one, and trainings go on
    meanwhile. So GPUs of which nothing is known stay in use, and are well again with the next sample.

    Args:
        publish: takes what is known of each GPU, by its number.
        keep: takes the time on the run's clock and new samples, for the record.
        tell: takes a line that people should see.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        monitor: Monitor,
        machine: Machine,
        *,
        publish: Callable[[Mapping[int, MeasuredGpu]], object],
        keep: Callable[[float, Sequence[Sample]], object] = lambda at, samples: None,
        tell: Callable[[str], object],
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._monitor, self._machine = monitor, machine
        self._publish, self._keep, self._tell, self._clock = publish, keep, tell, clock
        self._old_after_s = monitor.interval_s + OLD_AFTER_S
        self._unknown_after_s = monitor.interval_s + UNKNOWN_AFTER_S
        self._newest: dict[int, Sample] = {}
        self._late: frozenset[int] = frozenset()
        """The GPUs whose samples are too old to be shown."""
        self._losses: Counter[int] = Counter()
        """How often samples have condemned each GPU."""
        self._well: dict[int, tuple[float, float] | None] = {}
        """The GPUs that samples have condemned and that may come back: since when they are well, and until
        when."""

    def used_mib(self, gpu: int) -> float | None:
        """The memory that is used on a GPU, in MiB, by its newest sample; None if that is not known."""
        sample = self.sample(gpu)
        return None if sample is None else sample.memory_mib

    def sample(self, gpu: int) -> Sample | None:
        """The newest sample of a GPU; None if there is none, or it is old."""
        return None if gpu in self._late else self._newest.get(gpu)

    def look(self, at: float, told: Sequence[ev.Event] = ()) -> list[ev.Event]:
        """The events of samples that have come since the last call; `at`: now, on the run's clock.

        `told`: other events of this moment. A GPU that a worker could not use does not come back by samples:
        NVML does not know what CUDA needs.
        """
        for gpu in [event.gpu for event in told if isinstance(event, ev.DeviceLost)]:
            self._well.pop(gpu, None)
            self._losses[gpu] = MOST_LOSSES
        samples = self._monitor.take()
        if samples is None and not self._late and self._monitor.age_s <= self._old_after_s:
            return []
        if samples is not None:
            self._newest = {sample.gpu: sample for sample in samples}
        self._look_at_ages()
        if samples is None:
            return []
        self._keep(at, [sample for sample in samples if sample.gpu not in self._late])
        return [event for sample in samples if (event := self._judged(sample, at)) is not None]

    def _judged(self, sample: Sample, at: float) -> ev.Event | None:
        gpu = sample.gpu
        if not sample.healthy:
            if gpu in self._well:
                self._well[gpu] = None
            return self._condemn(sample, at) if gpu in self._machine.ledger.devices else None
        if gpu not in self._well or gpu not in self._machine.ledger.lost:
            return None
        seen = self._clock() - sample.age_s
        since, last = self._well[gpu] or (seen, seen)
        if seen - last > self._old_after_s:
            since = seen  # nobody knows what it was meanwhile
        self._well[gpu] = since, seen
        if seen - since < WELL_FOR_S:
            return None
        del self._well[gpu]
        return ev.DeviceFound(at=at, gpu=gpu, why=f"well for {WELL_FOR_S:g} s")

    def _condemn(self, sample: Sample, at: float) -> ev.Event:
        self._losses[sample.gpu] += 1
        why = sample.why
        if self._losses[sample.gpu] < MOST_LOSSES:
            self._well[sample.gpu] = None
        elif self._losses[sample.gpu] == MOST_LOSSES:
            why = f"{why} (lost {MOST_LOSSES} times: it stays out)"
        return ev.DeviceLost(at=at, gpu=sample.gpu, why=why)

    # --- ages -------------------------------------------------------------------------------

    def _look_at_ages(self) -> None:
        """Show what is known, and say once when a driver falls silent or answers again."""
        shown, ages = {}, dict[int, float]()
        for gpu in self._machine.ledger.devices:
            sample = self._newest.get(gpu)
            age_s = self._monitor.age_s + (sample.age_s if sample else 0.0)
            if age_s > self._old_after_s:
                ages[gpu] = age_s
                health = "unknown" if age_s > self._unknown_after_s else "ok"
                shown[gpu] = MeasuredGpu(sample_age_s=round(age_s, 1), health=health)
            elif sample:
                shown[gpu] = MeasuredGpu(utilisation=sample.utilisation, memory_mib=sample.memory_mib)
        self._publish(shown)
        late = frozenset(ages)
        if new := late - self._late:
            self._tell(
                f"no sample of {gpus(new)} for {max(ages[gpu] for gpu in new):.0f} s: the driver does not "
                f"answer; jobs go on, and {_their(new)} health is unknown if it still does not"
            )
        if back := (self._late - late) & self._machine.ledger.devices.keys():
            self._tell(f"samples of {gpus(back)} come again")
        self._late = late


def keep_samples(record: UseRecord, at: float, samples: Sequence[Sample]) -> None:
    """Put what samples have measured on record."""
    measured = {sample.gpu: (sample.utilisation, sample.memory_mib) for sample in samples}
    record.add(at, {gpu: use for gpu, use in measured.items() if use != (None, None)})


def compute_modes(devices: Iterable[Device]) -> dict[ComputeMode, str]:
    """A line for each compute mode in which GPUs let fewer processes in than usual."""
    of: dict[ComputeMode, set[int]] = {}
    for device in devices:
        of.setdefault(device.compute_mode, set()).add(device.index)
    means = {
        ComputeMode.PROHIBITED: "no process can use {it}",
        ComputeMode.EXCLUSIVE_PROCESS: "one process at a time: no job shares {it} with a background job in "
        "a process of its own",
    }
    return {
        mode: f"{gpus(of[mode])}: compute mode {mode}: "
        + said.format(it="it" if len(of[mode]) == 1 else "them")
        for mode, said in means.items()
        if mode in of
    }


def prohibited(devices: Iterable[Device], at: float) -> list[ev.Event]:
    """The loss of the GPUs that no process can use; `at`: now, on the run's clock."""
    why = f"its compute mode is {ComputeMode.PROHIBITED}"
    return [
        ev.DeviceLost(at=at, gpu=device.index, why=why)
        for device in devices
        if device.compute_mode is ComputeMode.PROHIBITED
    ]


def _their(numbers: frozenset[int]) -> str:
    return "their" if len(numbers) > 1 else "its"
