"""A parameter server's part of a step: gradients come, are added up, and new parameters go out."""

from __future__ import annotations

import queue
import struct
import threading
import time
from collections.abc import Callable, Sequence

import torch

from hpcsched.compat import zip
from hpcsched.worker.packing.rollback import Weights
from hpcsched.worker.ps.link import ServerLink
from hpcsched.worker.ps.protocol import Frame, PeerChannels, PeerLost
from hpcsched.worker.ps.shard import ServerShard

CLOCK, MEET, STOP, LOSS, SENT_NS, BYTES = range(6)
"""The words of a push: the worker's step, when to meet, whether to leave, its loss (the bits of a float64),
when it was sent, its length."""
PUSH_WORDS = 8

DUE_NS = 3
"""Where an answer's words begin that say when it has come over a link as slow as ours is taken to be, one for
each worker; before those MEET and STOP, as in a push, and, in the place of the clock, when it was sent."""


def frames(
    forms: Sequence[tuple[torch.dtype, int]], workers: int, buffers: Sequence[torch.Tensor]
) -> tuple[Frame, Frame]:
    """How pushes to a server and its answers are laid out; it has pieces of these forms."""
    return Frame(PUSH_WORDS, len(forms), forms, buffers), Frame(DUE_NS + workers, 0, forms, buffers)


class PsServer:
    """Adds up what workers push, takes the optimizer's step, and answers with parameters.

    A step is one for as many pushes as there are workers. Who has pushed for step c is answered as soon as
    nobody is more than `staleness` steps behind that; with 0, gradients are added up in the workers' order.

    Args:
        workers: their ranks, in order.
        step: how many steps are done.
        buffers: on the chief, gives those of the model, which may replace them: the first worker's are the
            truth, and go to all others.
        undo: whether a step may have to be undone.
        schedule: takes the step of the learning-rate schedule that belongs to one of the optimizer.
        wants_meeting: on the chief, asked before answers go out: whether all are to meet.
        wants_stop: whether this process has been asked to leave.
    """

    def __init__(
        self,
        wire: PeerChannels,
        shard: ServerShard,
        workers: Sequence[int],
        *,
        step: int,
        staleness: int,
        link: ServerLink,
        buffers: Callable[[], list[torch.Tensor]] = list,
        undo: bool = False,
        schedule: Callable[[], object] = lambda: None,
        wants_meeting: Callable[[], bool] = lambda: False,
        wants_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.link = link
        self.step = step
        self.meet_at = step
        self.stop = False
        self.loss = 0.0
        self._wire, self._shard, self._workers = wire, shard, list(workers)
        self._staleness = staleness
        self._buffers = buffers
        self._undo, self._schedule, self._late = undo, schedule, False
        self._wants_meeting, self._wants_stop = wants_meeting, wants_stop
        forms = [(tensor.dtype, tensor.numel()) for tensor in shard.tensors]
        push, pull = frames(forms, len(self._workers), buffers())
        self._rooms = [push.page() for _ in self._workers]
        self._sum = Frame(0, len(forms), forms).page()
        self._page = pull.page()
        self._values = [tensor.detach().view(-1) for tensor in shard.tensors]
        self._sending: list[Callable[[], None]] = []
        self._clocks = [step] * len(self._workers)
        self._answered = [step] * len(self._workers)
        self._expected: set[int] = set()
        self._arrived: dict[int, float] = {}
        self._came: queue.SimpleQueue[tuple[int, float, PeerLost | None]] = queue.SimpleQueue()
        self._waiters = [_Waiter(number, self._came) for number in range(len(self._workers))]
        self._weights: Weights | None = None
        self._buffers_before = step, [buffer.clone() for buffer in buffers()]

    def open(self, end: int) -> None:
        """Go on: the next meeting is after step `end`, if nobody wants one earlier."""
        self.meet_at, self.stop = end, False

    def take_step(self) -> None:
        """One step of the optimizer; then `loss` is the sum of what the pushes said. Raises PeerLost."""
        self.loss = 0.0
        self._sum.flags.zero_()
        count = len(self._workers)
        for number in range(count):
            self._expect()
            self._add(self._next(number), first=number == 0)
            if number == count - 1:
                self._apply()
            self._answer()

    def hand_out(self, workers: Sequence[int]) -> None:
        """Send the parameters as they are to these ranks, which have just come."""
        self._send([self._workers.index(rank) for rank in workers])

    def catch_up(self) -> None:
        """Take the step of the schedule that is due: not before it is sure that the optimizer's stays."""
        if self._late:
            self._late = False
            self._schedule()

    def back_to(self, step: int) -> None:
        """Undo what has been done since: a part of a step, or the last one."""
        clock, buffers = self._buffers_before
        if clock > step:
            for buffer, before in zip(self._buffers(), buffers, strict=True):
                buffer.copy_(before)
        if step < self.step and self._weights is not None:
            self._weights.put_back()
            self.step, self._late = step, False

    def close(self) -> None:
        """Have no threads any more."""
        for waiter in self._waiters:
            waiter.work.put(None)

    # How it works.

    def _expect(self) -> None:
        for number, clock in enumerate(self._clocks):
            if number not in self._expected and self._answered[number] == clock < self.meet_at:
                self._expected.add(number)
                wait = self._wire.receive(self._rooms[number].data, self._workers[number])
                self._waiters[number].work.put(wait)

    def _next(self, number: int) -> int:
        """Whose push to take next: with no staleness that of this number, else the first that comes."""
        while not (self._arrived if self._staleness else number in self._arrived):
            worker, at, error = self._came.get()
            if error is not None:
                raise error
            self._arrived[worker] = at
        return next(iter(self._arrived)) if self._staleness else number

    def _add(self, worker: int, *, first: bool) -> None:
        at = self._arrived.pop(worker)
        room = self._rooms[worker]
        clock, meet, stop, loss, sent_ns, size, *_ = room.words.tolist()
        # The other one's clock may be another host's: what has come was not sent later than that.
        self._until(self.link.inward.transfer(size, min(at, sent_ns / 1e9)))
        self.meet_at = min(self.meet_at, meet)
        self.stop = self.stop or bool(stop)
        self.loss += struct.unpack("d", struct.pack("q", loss))[0]
        for dtype, flat in self._sum.flats.items():
            if first:
                flat.copy_(room.flats[dtype])
            else:
                flat.add_(room.flats[dtype])
        self._sum.flags.bitwise_or_(room.flags)
        if worker == 0:
            self._buffers_before = clock, [buffer.clone() for buffer in self._buffers()]
            for buffer, new in zip(self._buffers(), room.buffers, strict=True):
                buffer.copy_(new)
        self._clocks[worker] = clock
        self._expected.discard(worker)

    def _until(self, end: float) -> None:
        if (left_s := end - time.time()) > 0:
            time.sleep(left_s)

    def _apply(self) -> None:
        self.catch_up()  # whoever pushes has been answered by all servers
        shard = self._shard
        for tensor, gradient, used in zip(
            shard.tensors, self._sum.tensors, self._sum.flags.tolist(), strict=True
        ):
            tensor.grad = gradient.view(tensor.shape) if used else None
        if self._undo:
            self._weights = Weights(shard.optimizer)
        shard.step()
        self.step, self._late = self.step + 1, True

    def _answer(self) -> None:
        """To all who have waited long enough."""
        slowest = min(self._clocks)
        ready = [
            number
            for number, clock in enumerate(self._clocks)
            if self._answered[number] < clock <= slowest + self._staleness
        ]
        if not ready:
            return
        if self._wants_meeting():
            ahead = max(c + (c == a) for c, a in zip(self._clocks, self._answered, strict=True))
            # Who is answered tells the other servers with the next push.
            self.meet_at = min(self.meet_at, ahead + 1)
        for number in ready:
            self._answered[number] = self._clocks[number]
        self._send(ready)

    def _send(self, ready: Sequence[int]) -> None:
        for wait in self._sending:
            wait()
        page, now = self._page, time.time()
        _copy(page.tensors, self._values)
        _copy(page.buffers, self._buffers())
        words = [int(now * 1e9), self.meet_at, int(self._wants_stop()), *[0] * len(self._workers)]
        for number in ready:
            words[DUE_NS + number] = int(self.link.outward.transfer(len(page.data), now) * 1e9)
        page.words.copy_(torch.tensor(words))
        self._sending = [self._wire.send(page.data, self._workers[number]) for number in ready]


class _Waiter:
    """A thread that waits for one worker's pushes: gloo cannot wait for any of several and see one die."""

    def __init__(self, number: int, came: queue.SimpleQueue[tuple[int, float, PeerLost | None]]) -> None:
        self.work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._number, self._came = number, came
        threading.Thread(target=self._run, name=f"waits for worker {number}", daemon=True).start()

    def _run(self) -> None:
        while (wait := self.work.get()) is not None:
            error = None
            try:
                wait()
            except PeerLost as lost:
                error = lost
            self._came.put((self._number, time.time(), error))


@torch.no_grad()
def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, sources)
