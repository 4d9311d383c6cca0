"""A training by parameter servers and workers that share CPU cores (NEARCHUS, section III)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from hpcsched.worker.process.contract import Facts, JobEnv
from hpcsched.worker.ps.client import Client
from hpcsched.worker.ps.meter import Collector, Meter
from hpcsched.worker.ps.protocol import PeerLost
from hpcsched.worker.ps.reconfigure import Changing
from hpcsched.worker.ps.server import Server
from hpcsched.worker.session.sampler import share
from hpcsched.worker.session.session import Metrics
from hpcsched.worker.session.trainer import Parts, Place, read

_NO_INDICES = torch.empty(0, dtype=torch.int64)


class PsSession(Changing):
    """A `Session` of servers, which have the parameters, and of workers, which compute: `take_step` is all
    that a step is.

        session = PsSession(parts, env, staleness=0, link_mib_s=None)
        for _ in session.steps():
            session.take_step()
        session.finish(...)

    `step` counts the optimizer's steps on a server, and on a worker those that it has pushed gradients for.
    Both are the same where all ranks meet: at a step boundary that the chief, rank 0, calls them to.

    Args:
        parts: of the training.
        env: with a seat for each rank.
        staleness: how many steps a worker may be ahead of another one; with 0 the result is that of one
            process.
        link_mib_s: what a server's link can take in, and give out, in MiB/s; None: any amount.

    Raises ConfigError for seats and optimizers that cannot be.
    """

    def __init__(self, parts: Parts, env: JobEnv, *, staleness: int, link_mib_s: float | None) -> None:
        super().__init__(parts, env, staleness=staleness, link_mib_s=link_mib_s)
        self._batches: Iterator[Any] = iter(())
        self._read_for: tuple[int | None, int] | None = None
        self._measured = 0
        self._meter: Meter | None = None
        self._collector: Collector | None = None

    def take_step(self) -> None:
        """On a worker gradients of its share of the global batch, pushed and answered; on a server a step of
        the optimizer, for as many of those as there are workers."""
        try:
            if isinstance(self._post, Server):
                self._serve(self._post)
            else:
                self._work(self._post)
        except PeerLost as error:
            self._lost(error)
        self._measure()

    def finish(self, metrics: Metrics | Callable[[], Metrics] | None = None) -> None:
        """Save the final state and part from the other ranks; call it once, after the last step."""
        self._catch_up()
        super().finish(metrics)

    # How it works.

    def _serve(self, server: Server) -> None:
        server.take_step()
        self._loss = torch.tensor(server.loss / self.global_batch, dtype=torch.float64)
        self._share.rest(lambda: self._flag.wanted)

    def _work(self, client: Client) -> None:
        part = self._own_part()
        if self._read_for != (key := (self._roles.worker(self.rank), len(self._roles.workers))):
            self._read_for = key  # what was read ahead is another share's
            self._batches = read(
                self._parts,
                self._places(part),
                device=self.device,
                loaders=self._parts.loaders,
                step=self.step,
            )
        self.model.zero_grad()  # also what no optimizer updates: it must not add up
        for parameter in self._shard.parameters:
            parameter.grad = None
        losses = self._parts.loss(self.model, next(self._batches))
        if losses.ndim > 1 or (losses.ndim == 1 and len(losses) != len(part)):
            raise ValueError(
                f"losses of shape {list(losses.shape)} for {len(part)} samples; expected one loss a sample "
                "(shape [samples]), or their mean (shape [])"
            )
        total = losses.sum() if losses.ndim else losses * len(part)
        (total / self.global_batch).backward()  # type: ignore[no-untyped-call]
        client.push(self.step + 1, float(total.detach()), stop=self._flag.wanted is not None)
        self._share.rest(lambda: self._flag.wanted)
        client.pull()

    def _own_part(self) -> range:
        """The places in a global batch of the samples that are this worker's."""
        number = self._roles.worker(self.rank)
        assert number is not None
        return share(range(self.global_batch), number, len(self._roles.workers))  # type: ignore[no-any-return]

    def _places(self, part: range) -> Iterator[Sequence[Place]]:
        """Its samples of all coming steps."""
        samples = self.samples
        for _ in range(self.step, self._last_step(None)):
            indices = self._sampler.batch(samples + part.start, len(part)).tolist()
            yield list(enumerate(indices, samples + part.start))
            samples += self.global_batch

    def _share_at(self, samples: int) -> torch.Tensor:
        """Nothing: `take_step` reads its own."""
        return _NO_INDICES

    def _make_alike(self) -> None:
        """Nothing: what all have in common comes with the answers."""

    # -- measuring -------------------------------------------------------------------------------------

    def _measure(self) -> None:
        """A step has ended."""
        if self._meter is None or self._measured != self._attempt:
            self._measured = self._attempt
            board = self._crew.board(self._attempt)
            link = self._post.link if isinstance(self._post, Server) else None
            self._meter = Meter(board, self.rank, lambda: self._share.used_s, link)
            self._collector = Collector(board, self._attempt, self.world_size) if self.rank == 0 else None
        step = self.step + 1
        if self._meter.note(step) and self._collector is not None:
            self._collector.look(step)

    def _report(self, *, force: bool) -> None:
        self._progress.report(self.step, self._last_loss, force=force, facts=self._told)

    def _told(self) -> Facts:
        """What the agent is told besides."""
        return Facts(usage=self._collector.take() if self._collector is not None else None)
