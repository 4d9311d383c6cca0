"""A worker's part of a step besides computing: gradients go out, new parameters come."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from hpcsched.compat import zip
from hpcsched.worker.process.contract import say
from hpcsched.worker.ps.placement import Owners, ParameterPiece
from hpcsched.worker.ps.protocol import Frame, MessageBuffer, PeerChannels
from hpcsched.worker.ps.server import BYTES, CLOCK, LOSS, MEET, SENT_NS, STOP, frames
from hpcsched.worker.ps.shard import ServerShard


@dataclass(frozen=True)
class _Line:
    """To one server."""

    rank: int
    pieces: tuple[ParameterPiece, ...]
    frame: Frame
    push: MessageBuffer
    pull: MessageBuffer


class PsClient:
    """Pushes this worker's gradients to the servers, and pulls parameters into the model.

    Args:
        shard: the parameters, none of which is trained here.
        owners: which server has what.
        number: of this worker among all `workers`.
        buffers: gives those of the model, which may replace them; the first worker's go to the chief, which
            gives them to the others.
    """

    def __init__(
        self,
        wire: PeerChannels,
        shard: ServerShard,
        owners: Owners,
        *,
        number: int,
        workers: int,
        buffers: Callable[[], list[torch.Tensor]],
    ) -> None:
        self.meet_at = 0
        self.stop = False
        self.bytes = 0
        self._wire, self._shard, self._number, self._buffers = wire, shard, number, buffers
        self._lines = []
        for rank, pieces in sorted(owners.items()):
            forms = [(shard.parameters[piece.parameter].dtype, piece.size) for piece in pieces]
            push, pull = frames(forms, workers, buffers() if rank == 0 else ())
            self._lines.append(_Line(rank, pieces, push, push.page(), pull.page()))
        self._sending: list[Callable[[], None]] = []
        self._coming: list[tuple[_Line, Callable[[], None]]] = []
        self._dense = False

    def open(self, end: int) -> None:
        """Go on: the next meeting is after step `end`, if nobody wants one earlier."""
        self.meet_at, self.stop = end, False

    def push(self, clock: int, loss: float, *, stop: bool) -> None:
        """Start to send the gradients of step `clock`, and to receive what comes back. Raises PeerLost."""
        gradients = self._gradients()
        for line in self._lines:
            _fill(line, gradients)
            first = line.rank == 0 and self._number == 0
            if first:
                for room, buffer in zip(line.push.buffers, self._buffers(), strict=True):
                    room.copy_(buffer)
            size = line.frame.size if first else line.frame.short
            words = line.push.words
            words[CLOCK], words[MEET], words[STOP] = clock, self.meet_at, int(stop or self.stop)
            words[LOSS] = struct.unpack("q", struct.pack("d", loss))[0]
            words[SENT_NS], words[BYTES] = time.time_ns(), size
            self.expect(line)
            self._sending.append(self._wire.send(line.push.data[:size], line.rank))

    def expect(self, *lines: _Line) -> None:
        """Be ready for parameters, by default from all servers."""
        for line in lines or self._lines:
            self._coming.append((line, self._wire.receive(line.pull.data, line.rank)))

    @torch.no_grad()
    def pull(self, *, fresh: bool = False) -> None:
        """Wait for what comes back, and make it the model's. Raises PeerLost.

        `fresh`: buffers too, even if this is the first worker.
        """
        due_ns = 0
        for line, wait in self._coming:
            wait()
            sent_ns, meet, stop, *due = line.pull.words.tolist()
            # A clock that is another host's may be wrong: nothing takes longer than its sender says.
            now = time.time_ns()
            due_ns = max(due_ns, min(due[self._number], now + due[self._number] - sent_ns))
            self.meet_at, self.stop = min(self.meet_at, meet), self.stop or bool(stop)
            if line.pieces:
                torch._foreach_copy_([self._shard.flat(piece) for piece in line.pieces], line.pull.tensors)
            if line.rank == 0 and (fresh or self._number > 0):
                for buffer, new in zip(self._buffers(), line.pull.buffers, strict=True):
                    buffer.copy_(new)
        for done in self._sending:
            done()
        self._coming, self._sending = [], []
        if (left_s := (due_ns - time.time_ns()) / 1e9) > 0:
            time.sleep(left_s)

    def _gradients(self) -> Mapping[int, torch.Tensor]:
        found = {}
        for number, parameter in enumerate(self._shard.parameters):
            if parameter.grad is None:
                continue
            gradient = parameter.grad
            if gradient.is_sparse:
                gradient = gradient.to_dense()
                if not self._dense and self._number == 0:
                    say("sparse gradients are made dense for the servers")
                self._dense = True
            found[number] = gradient.reshape(-1)
        return found


@torch.no_grad()
def _fill(line: _Line, gradients: Mapping[int, torch.Tensor]) -> None:
    for at, (piece, room) in enumerate(zip(line.pieces, line.push.tensors, strict=True)):
        gradient = gradients.get(piece.parameter)
        line.push.flags[at] = gradient is not None
        if gradient is None:
            room.zero_()
        else:
            room.copy_(gradient[piece.start : piece.stop])
