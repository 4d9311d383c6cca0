"""What the workers of one device take: by local batch, by how many there are at once, until its memory or the
gain ends (JABAS, section 5.1)."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import field
from statistics import median

import torch

from hpcsched.compat import dataclass
from hpcsched.errors import ConfigError
from hpcsched.planning.vsw.costs import BatchTimes, GpuCosts, Times
from hpcsched.worker.packing.failures import let_go, line_of, out_of_memory
from hpcsched.worker.ranks.gradient_sum import GradientSum, in_buckets
from hpcsched.worker.ranks.process_group import Peers
from hpcsched.worker.session.batches import places_of, summed
from hpcsched.worker.session.sampler import Sampler
from hpcsched.worker.session.trainer import Parts, Place, rehearse
from hpcsched.worker.vsw.clock import KEPT, DeviceClock, RoundTime
from hpcsched.worker.vsw.gradient_halves import HalvedBucket, HalvedSum
from hpcsched.worker.vsw.measurements import GAIN
from hpcsched.worker.vsw.reading import BatchReader
from hpcsched.worker.vsw.streams import MOST_STREAMS, StreamWorkers

MOST_AT_ONCE = MOST_STREAMS
"""More workers at once are not tried: they would share streams, and the gain has ended long before."""

ROUNDS = 2
"""In a step: the first makes the gradients, the second adds to them, which needs more memory."""

WARM_UP, LEAST = 2, 3
"""Steps that count for nothing, and how many do at least."""

FLAT = 2
"""A CPU's local batches end when a larger one has gained too little so many times in a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbePoint:
    """Rounds of one kind, `update_s` of the optimizer's step and `begin_s` of bringing the workers' buffers
    together, medians all; `memory_mib` of a GPU that was allocated at the peak."""

    local_batch: int
    at_once: int
    round: RoundTime
    update_s: float
    begin_s: float
    memory_mib: float | None

    @property
    def samples_s(self) -> float:
        """Samples a second."""
        return self.local_batch * self.at_once / self.round.all_s


@dataclass(kw_only=True)
class VswTimes:
    """What is known so far.

    `most`: the workers at once that fit, by local batch, where one more did not; `too_large`: the local batch
    of which not even one did, and `why`. `single`: why there is only one worker at once, where the model
    cannot be copied. `flat`: larger local batches would gain nothing.
    """

    points: list[ProbePoint] = field(default_factory=list)
    most: dict[int, int] = field(default_factory=dict)
    too_large: int | None = None
    why: str = ""
    single: str = ""
    flat: bool = False

    @property
    def costs(self) -> GpuCosts:
        """The same as the planner takes it. Workers share weights: there is nothing to copy."""
        speeds = {}
        for local in dict.fromkeys(point.local_batch for point in self.points):
            times = {p.at_once: _times(p.round) for p in self.points if p.local_batch == local}
            speeds[local] = BatchTimes(local_batch=local, times=times, most=self.most.get(local))
        buffers_s = [point.begin_s / point.at_once for point in self.points if point.at_once > 1]
        return GpuCosts(
            speeds=speeds,
            update_s=median(point.update_s for point in self.points),
            buffers_s=median(buffers_s) if buffers_s else 0.0,
        )


class VswProbe:
    """Trains on this device, to measure it; weights and random numbers are spoilt by that.

    Args:
        parts: of the training.
        device: where.
        halves: whether there is to be room for the two halves of the gradient, as jobs with an adaptive batch
            need it.
        seconds: for each point, at least.
        alive: called between two steps.

    Raises ConfigError if the model itself does not fit.
    """

    def __init__(
        self,
        parts: Parts,
        device: torch.device,
        *,
        halves: bool,
        seconds: float,
        alive: Callable[[], object] = lambda: None,
    ) -> None:
        self._parts, self._device, self._seconds, self._alive = parts, device, seconds, alive
        self._cuda = device.type == "cuda"
        try:
            parts.model.to(device).train()
            peers, parameters = Peers(0, 1, device), list(parts.model.parameters())
            # What is in the way in a training of several ranks, to find out what fits beside it.
            self._sums = [GradientSum(parameters, peers)]
            self._sums += [HalvedSum(parameters, peers, HalvedBucket)] if halves else []
            for sums in self._sums:
                sums.prepare()
        except Exception as error:
            if not out_of_memory(error):
                raise
            raise _no_room("the model", line_of(error)) from error
        self._workers = StreamWorkers(parts.model, parts.loss, device)
        self._sampler = Sampler(parts.size, parts.seed)
        self._reader = BatchReader(parts, device, lambda: 0)

    @property
    def buckets(self) -> list[int]:
        """Bytes of the gradient buckets, in the order in which they are summed."""
        trained = [p for p in reversed(list(self._parts.model.parameters())) if p.requires_grad]
        return [sum(p.numel() * p.element_size() for p in group) for group in in_buckets(trained)]

    def run(self, local_batches: Sequence[int], at_once: int) -> Iterator[VswTimes]:
        """Measure; gives what is known so far after each point, and once more at the end.

        Local batches grow until one does not fit or, on a CPU, larger ones gain nothing; workers at once up
        to `at_once`, until one more does not fit or the last one gained nothing. Raises ConfigError if not
        even one worker with the first local batch fits.
        """
        found = VswTimes()
        for local in local_batches:
            for count in range(1, at_once + 1):
                try:
                    if not found.points:
                        self._rehearse(local)
                    point = self._point(local, count)
                except Exception as error:
                    full, why = _full(error), _why(error)
                    if not full and not (count > 1 and isinstance(error, ConfigError)):
                        raise
                    self._let_go(error)
                    if not full:
                        found.single, at_once = why, 1
                        break
                    if not found.points:
                        raise _no_room(f"a local batch of {local}", why) from error
                    if count == 1:
                        found.too_large, found.why = local, why
                        yield found
                        return
                    found.most[local] = count - 1
                    break
                found.points.append(point)
                yield found
                if count > 1 and not _gains(*found.points[-2:]):
                    break
            if self._device.type == "cpu" and local != local_batches[-1] and _flat(found.points):
                found.flat = True
                break
        yield found

    def _rehearse(self, local: int) -> None:
        """A first step: from it on the optimizer has its state."""
        self._reader.aim(self._pieces(local))
        rehearse(self._parts, self._reader.next())

    def _point(self, local: int, count: int) -> ProbePoint:
        if count < self._workers.count:
            self._give_back_work_areas()
        if why := self._workers.have(count):
            raise ConfigError(where="model", got=f"cannot be copied: {why}", accepted="one worker at once")
        self._reader.aim(self._pieces(local))
        if self._cuda:
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
        clock, begins = DeviceClock(self._device), DeviceClock(self._device)

        def step() -> None:
            self._step(local, count, clock, begins)

        for _ in range(WARM_UP):
            step()
        clock.take()
        begins.take()
        windows, steps, until = [], 0, time.monotonic() + self._seconds
        while steps < LEAST or time.monotonic() < until:
            for _ in range(KEPT // ROUNDS):  # the clock keeps no more
                step()
                steps += 1
                if steps >= LEAST and time.monotonic() >= until:
                    break
            windows.append((clock.take(), begins.take()))
        rounds = [taken.rounds[local, count] for taken, _ in windows]
        return ProbePoint(
            local_batch=local,
            at_once=count,
            round=RoundTime(
                read_s=median(each.read_s for each in rounds),
                forward_s=median(each.forward_s for each in rounds),
                backward_s=median(each.backward_s for each in rounds),
            ),
            update_s=median(taken.update_s or 0.0 for taken, _ in windows),
            begin_s=median(taken.update_s or 0.0 for _, taken in windows),
            memory_mib=torch.cuda.max_memory_allocated(self._device) / 2**20 if self._cuda else None,
        )

    def _step(self, local: int, count: int, clock: DeviceClock, begins: DeviceClock) -> None:
        """As in a training of one rank."""
        self._alive()
        self._parts.optimizer.zero_grad()
        begun = begins.mark()
        self._workers.begin()
        begins.update(begun, begins.mark())
        for _ in range(ROUNDS):
            self._round(local, count, clock)
        begun = clock.mark()
        self._parts.optimizer.step()
        clock.update(begun, clock.mark())

    def _round(self, local: int, count: int, clock: DeviceClock) -> None:
        begun = clock.mark()
        batches = [self._reader.next() for _ in range(count)]
        read = clock.mark()
        losses = self._workers.forward(batches)
        totals = [summed(loss, local) for loss in losses]
        forward = clock.mark()
        torch.autograd.backward([total / (ROUNDS * count * local) for total in totals])
        clock.round((local, count), begun, read, forward, clock.mark())

    def _pieces(self, local: int) -> Iterator[Sequence[Place]]:
        """Local batches without end."""
        for position in itertools.count(0, local):
            yield places_of(self._sampler, position, range(local))

    def _let_go(self, error: BaseException) -> None:
        """Free what a point that did not fit still holds."""
        let_go(error)
        self._parts.optimizer.zero_grad()
        self._workers.have(1)
        gc.collect()
        self._give_back_work_areas()
        if self._cuda:
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()

    def _give_back_work_areas(self) -> None:
        """Of cuBLAS, on all streams: else the memory of fewer workers would have those of more in it.

        A training does not: there may be graphs in its process, which were captured with them.
        """
        if self._cuda:
            torch._C._cuda_clearCublasWorkspaces()


def doubled(low: int, high: int) -> list[int]:
    """From `low` on, each twice the one before, and `high`."""
    sizes = []
    while low < high:
        sizes.append(low)
        low *= 2
    return [*sizes, high]


def _times(each: RoundTime) -> Times:
    return Times(data_s=each.read_s, forward_s=each.forward_s, backward_s=each.backward_s)


def _gains(former: ProbePoint, point: ProbePoint) -> bool:
    return point.samples_s >= (1 + GAIN) * former.samples_s


def _flat(points: Sequence[ProbePoint]) -> bool:
    """Whether the last local batches gained nothing, each over the one before."""
    alone = [point for point in points if point.at_once == 1][-FLAT - 1 :]
    return len(alone) > FLAT and not any(map(_gains, alone, alone[1:]))


def _full(error: BaseException) -> bool:
    """Whether it failed for want of memory; a worker's copy of the model says so by its cause."""
    return out_of_memory(error) or (error.__cause__ is not None and out_of_memory(error.__cause__))


def _why(error: BaseException) -> str:
    return line_of(error if error.__cause__ is None else error.__cause__)


def _no_room(what: str, why: str) -> ConfigError:
    return ConfigError(where=what, got=f"no room for it: {why}", accepted="one that fits into memory")
