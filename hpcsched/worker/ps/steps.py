"""A step of a parameter-server training, on a server and on a worker (NEARCHUS, section III)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from hpcsched.worker.ps.client import PsClient
from hpcsched.worker.ps.cpu_throttle import CpuShare
from hpcsched.worker.ps.roles import Roles
from hpcsched.worker.ps.server import PsServer
from hpcsched.worker.ps.shard import ServerShard
from hpcsched.worker.session.batches import coming_places, summed
from hpcsched.worker.session.context import Context
from hpcsched.worker.session.sampler import share
from hpcsched.worker.session.trainer import Parts, read


class ThrottledSteps:
    """Makes steps, within a share of the CPU cores.

    Args:
        parts: of the training.
        context: of this rank.
        cpu_share: of this rank; it rests for the others in each step.
    """

    def __init__(self, parts: Parts, context: Context, cpu_share: CpuShare) -> None:
        self._parts, self._context, self._cpu_share = parts, context, cpu_share
        self._batches: Iterator[Any] = iter(())
        self._read_for: tuple[int | None, int] | None = None

    def serve(self, server: PsServer) -> None:
        """On a server: a step of the optimizer, for as many pushes as there are workers. Raises PeerLost."""
        training = self._context.training
        server.take_step()
        training.loss = torch.tensor(server.loss / training.global_batch, dtype=torch.float64)
        self._rest()

    def work(self, client: PsClient, shard: ServerShard, roles: Roles) -> None:
        """On a worker: gradients of its share of the global batch, pushed and answered. Raises PeerLost."""
        training, number = self._context.training, roles.worker(self._context.rank)
        assert number is not None
        part: range = share(range(training.global_batch), number, len(roles.workers))
        if self._read_for != (key := (number, len(roles.workers))):
            self._read_for = key  # what was read ahead is another share's
            self._batches = read(
                self._parts,
                coming_places(training, part),
                device=self._context.device,
                loaders=self._parts.loaders,
                step=training.step,
            )
        training.model.zero_grad()  # also what no optimizer updates: it must not add up
        for parameter in shard.parameters:
            parameter.grad = None
        total = summed(self._parts.loss(training.model, next(self._batches)), len(part))
        (total / training.global_batch).backward()  # type: ignore[no-untyped-call]
        stop = self._context.flag.wanted is not None
        client.push(training.step + 1, float(total.detach()), stop=stop)
        self._rest()
        client.pull()

    def _rest(self) -> None:
        self._cpu_share.rest(lambda: self._context.flag.wanted)
