"""A simulated GPU that does not preempt: what two lanes do to each other there, event by event.

The model of section 5 of the DeepPool paper, in microseconds. Hosts launch kernels, or groups of them as CUDA
graphs, into one queue of the driver's, first in, first out, whatever their priority. The device takes them
over one kernel at a time, as long as it has room for more of that stream's; one that has to wait keeps all
behind it waiting. A stream's kernels run one after another. Free places go to the ready kernel of the highest
priority (of the same one: to the one ready first), block by block, and a block that has begun runs to its
end.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Kernel:
    """`blocks` thread blocks of `block_us` each; one whose blocks start in company takes (1 + `suffers`)
    times as long."""

    blocks: int
    block_us: float
    suffers: float = 0.0


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive kernels of a step, launched as one CUDA graph where graphs are used."""

    name: str
    kernels: tuple[Kernel, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What the device and its driver are like.

    `places`: blocks that run at once. `queue`: launches that the driver holds; a host that launches more has
    to wait. `ahead`: kernels of one stream that the device holds. `transfer_us`: to hand one kernel to the
    device. `gap_us`: between two kernels of a stream. `launch_us`: a host's time for one launch; `poll_us`:
    how often it looks whether it may.
    """

    places: int = 108
    queue: int = 64
    ahead: int = 16
    transfer_us: float = 0.5
    gap_us: float = 1.0
    launch_us: float = 8.0
    poll_us: float = 10.0


class Gate(Protocol):
    """Decides when a lane may launch; `planning.background.Referee` is one."""

    def may_launch(self, key: object, now_us: float) -> bool: ...

    def launched(self, key: object, now_us: float) -> None: ...

    def completed(self, now_us: float, took_us: float | None = None) -> None: ...


class Watcher(Protocol):
    """Is told which chunk of a lane the device is in; `planning.background.Referee` is one."""

    def began(self, chunk: int, now_us: float) -> None: ...

    def ended(self, chunk: int, now_us: float, took_us: float) -> None: ...


@dataclass(eq=False)
class _Launch:
    lane: Lane
    chunk: int
    kernels: tuple[Kernel, ...]
    first: bool  # of its chunk
    last: bool
    moved: int = 0  # kernels that the device has


@dataclass(eq=False)
class _Running:
    kernel: Kernel
    launch: _Launch
    opens: bool  # a chunk
    ends: bool  # a launch
    closes: bool  # a chunk
    ready_us: float = -1.0  # not yet
    begun: int = 0
    done: int = 0


@dataclass(eq=False)
class Lane:
    """A program, launched again and again, on a stream of its own.

    Args:
        chunks: the program's step.
        priority: larger is more urgent.
        graphs: each chunk is one launch; else each kernel is.
        gate: asked before each launch; None: launches as fast as the host can.
        watcher: told of the chunks.

    After a run `steps` holds how many steps were made (a share of one counts), `chunk_us` the mean time per
    chunk.
    """

    chunks: Sequence[Chunk]
    priority: int = 0
    graphs: bool = True
    gate: Gate | None = None
    watcher: Watcher | None = None
    most_outstanding: int = field(default=0, init=False)
    ended: int = field(default=0, init=False)
    spent_us: list[float] = field(init=False)
    _to_launch: deque[_Launch] = field(default_factory=deque, init=False)
    _stream: deque[_Running] = field(default_factory=deque, init=False)
    _busy: bool = field(default=False, init=False)
    _stuck: bool = field(default=False, init=False)
    _began_us: float = field(default=0.0, init=False)
    _outstanding: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.spent_us = [0.0] * len(self.chunks)

    @property
    def steps(self) -> float:
        """Steps made, with the share of the last one by chunks."""
        return self.ended / len(self.chunks)

    def chunk_us(self, index: int) -> float:
        """Mean time of one chunk, from when the device could begin with it to its end."""
        times = self.ended // len(self.chunks) + (self.ended % len(self.chunks) > index)
        return self.spent_us[index] / times

    def _next(self) -> _Launch:
        if not self._to_launch:
            for index, chunk in enumerate(self.chunks):
                parts = [chunk.kernels] if self.graphs else [(kernel,) for kernel in chunk.kernels]
                ends = range(1, len(parts) + 1)
                self._to_launch += [
                    _Launch(self, index, part, end == 1, end == len(parts))
                    for part, end in zip(parts, ends, strict=True)
                ]
        return self._to_launch[0]


class Device:
    """Runs lanes side by side."""

    def __init__(self, model: Model, lanes: Sequence[Lane]) -> None:
        self.model, self.lanes = model, lanes
        self.now_us = 0.0
        self._free = model.places
        self._on_device = {id(lane): 0 for lane in lanes}  # blocks of each that run
        self._queue: deque[_Launch] = deque()
        self._stuck: deque[_Launch] = deque()
        self._moving = False
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = count()

    def run(self, until_us: float) -> None:
        """Go on until then."""
        for lane in self.lanes:
            self._host(lane)
        while self._events and self._events[0][0] <= until_us:
            self.now_us, _, happen = heapq.heappop(self._events)
            happen()

    def _after(self, delay_us: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now_us + delay_us, next(self._count), happen))

    # -- the host ----------------------------------------------------------------------------------------

    def _host(self, lane: Lane) -> None:
        """The lane's thread on the host: launch the next piece, if that may be."""
        if lane._busy or lane._stuck:
            return
        launch = lane._next()
        lane._busy = True
        if lane.gate is not None:
            key = (launch.chunk, len(lane.chunks[launch.chunk].kernels))
            if not lane.gate.may_launch(key, self.now_us):
                self._after(self.model.poll_us, lambda: self._look_again(lane))
                return
            lane.gate.launched(key, self.now_us)
        lane._to_launch.popleft()
        lane._outstanding += 1
        lane.most_outstanding = max(lane.most_outstanding, lane._outstanding)
        self._after(self.model.launch_us, lambda: self._launched(launch))

    def _look_again(self, lane: Lane) -> None:
        lane._busy = False
        self._host(lane)

    def _launched(self, launch: _Launch) -> None:
        launch.lane._busy = False
        if len(self._queue) >= self.model.queue:
            launch.lane._stuck = True  # the driver lets the host wait
            self._stuck.append(launch)
            return
        self._queue.append(launch)
        self._move()
        self._host(launch.lane)

    # -- the driver --------------------------------------------------------------------------------------

    def _move(self) -> None:
        """Hand the kernel at the head of the queue to the device, if that has room in its stream."""
        if self._moving or not self._queue:
            return
        head = self._queue[0]
        if len(head.lane._stream) >= self.model.ahead:
            return
        self._moving = True
        self._after(self.model.transfer_us, self._moved)

    def _moved(self) -> None:
        self._moving = False
        launch = self._queue[0]
        lane = launch.lane
        first, launch.moved = launch.moved == 0, launch.moved + 1
        last = launch.moved == len(launch.kernels)
        lane._stream.append(
            _Running(
                kernel=launch.kernels[launch.moved - 1],
                launch=launch,
                opens=first and launch.first,
                ends=last,
                closes=last and launch.last,
            )
        )
        if len(lane._stream) == 1:
            self._ready(lane)
        if last:
            self._queue.popleft()
            if self._stuck:
                stuck = self._stuck.popleft()
                stuck.lane._stuck = False
                self._launched(stuck)
        self._move()

    # -- the device --------------------------------------------------------------------------------------

    def _ready(self, lane: Lane) -> None:
        """The kernel at the head of a stream can run."""
        head = lane._stream[0]
        head.ready_us = self.now_us
        if head.opens:
            lane._began_us = self.now_us
            if lane.watcher is not None:
                lane.watcher.began(head.launch.chunk, self.now_us)
        self._dispatch()

    def _dispatch(self) -> None:
        heads = [(lane, lane._stream[0]) for lane in self.lanes if lane._stream]
        heads = [
            (lane, head) for lane, head in heads if head.begun < head.kernel.blocks and head.ready_us >= 0
        ]
        for lane, head in sorted(heads, key=lambda item: (-item[0].priority, item[1].ready_us)):
            number = min(self._free, head.kernel.blocks - head.begun)
            if not number:
                continue
            company = any(on for other, on in self._on_device.items() if other != id(lane))
            self._free -= number
            self._on_device[id(lane)] += number
            head.begun += number
            takes_us = head.kernel.block_us * (1.0 + head.kernel.suffers * company)
            self._after(takes_us, lambda lane=lane, head=head, n=number: self._done(lane, head, n))  # type: ignore[misc]

    def _done(self, lane: Lane, running: _Running, blocks: int) -> None:
        """So many blocks of a kernel have run to their end."""
        self._free += blocks
        self._on_device[id(lane)] -= blocks
        running.done += blocks
        if running.done == running.kernel.blocks:
            self._kernel_done(lane, running)
        self._dispatch()

    def _kernel_done(self, lane: Lane, running: _Running) -> None:
        lane._stream.popleft()
        if lane._stream:
            self._after(self.model.gap_us, lambda: self._ready(lane))
        launch = running.launch
        if running.ends:
            lane._outstanding -= 1
            if lane.gate is not None:
                lane.gate.completed(self.now_us)
        if running.closes:
            took_us = self.now_us - lane._began_us
            lane.spent_us[launch.chunk] += took_us
            lane.ended += 1
            if lane.watcher is not None:
                lane.watcher.ended(launch.chunk, self.now_us, took_us)
        self._move()
        for host in self.lanes:
            self._host(host)
