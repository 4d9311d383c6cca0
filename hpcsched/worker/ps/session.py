"""A training by parameter servers and workers, which come and go between two steps (NEARCHUS, section IV)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from hpcsched.errors import LaunchError
from hpcsched.planning.ps.options import PsOptions
from hpcsched.worker import rng
from hpcsched.worker.contract import EXIT_SUSPENDED, JobEnv, ResizeOrder, say
from hpcsched.worker.ps.carry import carry
from hpcsched.worker.ps.client import Client
from hpcsched.worker.ps.crew import Crew, Roles
from hpcsched.worker.ps.link import Link
from hpcsched.worker.ps.meter import Meter
from hpcsched.worker.ps.server import Server
from hpcsched.worker.ps.shard import Fragment, Shard, cannot_be_on, check
from hpcsched.worker.ps.shares import CpuShare
from hpcsched.worker.ps.slices import Move, Owners, before_leaving, moves, renumbered, share_out
from hpcsched.worker.ps.wire import PeerLost, Wire
from hpcsched.worker.rendezvous import own_device
from hpcsched.worker.sampler import Sampler, share
from hpcsched.worker.session import Metrics, Session
from hpcsched.worker.trainer import Parts, Place, read, rehearse

_NO_INDICES = torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True, kw_only=True)
class _Change:
    """What those of a new group, some of whom may just have joined, have to know of the training.

    `owners` is who has what now, by the new numbers, `workers` who was one before.
    """

    order: ResizeOrder
    owners: Owners
    workers: tuple[int, ...]
    step: int
    samples: int
    sampler: dict[str, Any]
    scheduler: dict[str, Any] | None
    groups: list[dict[str, Any]]


class PsSession(Session):
    """A `Session` of servers, which have the parameters, and workers, which compute: `take_step` is all that
    a step is.

        session = PsSession(parts, options, env)
        for _ in session.steps():
            session.take_step()
        session.finish(...)

    `step` counts the optimizer's steps on a server, and on a worker what it has pushed: the same at a step
    boundary where all meet, which is only when the chief, rank 0, has a reason.
    """

    def __init__(self, parts: Parts, options: PsOptions, env: JobEnv) -> None:
        self._parts = parts
        self._options = options
        self._roles = Roles.of(env, parts.global_batch)
        check(parts.optimizer, len(self._roles.servers))
        self._shard = Shard(parts.optimizer)
        self._buffers = list(parts.model.buffers())
        self._generators: list[Any] = []
        self._gathered: list[Fragment] = []
        self._held: list[Fragment] | None = None
        self._man: Server | Client | None = None
        self._late = 0
        self._met = False
        self._batches: Iterator[Any] = iter(())
        self._before: dict[str, Any] = rng.capture(torch.device("cpu"))
        seat = self._roles.seats[env.rank]
        self._share = CpuShare(seat.share, seat.cores)
        self._crew = Crew.join(env, own_device(env))
        super().__init__(
            model=parts.model,
            optimizer=parts.optimizer,
            scheduler=parts.scheduler,
            dataset_size=parts.size,
            global_batch=parts.global_batch,
            seed=parts.seed,
            in_place=True,
            rehearse=lambda session: rehearse(parts, session._example()),
            ranks=self._crew,
        )
        if self._man is None:
            self._owners = self._new_owners()
            self._shard.install(self._owners.get(self.rank, ()), self._shard.fragments())
            self._take_post()
        self._meter = Meter(self._crew, self._share, self._attempt)

    # -- a step ----------------------------------------------------------------------------------------

    def take_step(self) -> None:
        """On a worker gradients of its share of the global batch, pushed and answered; on a server a step of
        the optimizer for as many of those as there are workers."""
        try:
            if isinstance(self._man, Client):
                self._work(self._man)
            else:
                self._serve()
        except PeerLost as error:
            self._lost(error)

    def _work(self, client: Client) -> None:
        for parameter in self._shard.parameters:
            parameter.grad = None
        self.model.zero_grad()  # also what no optimizer updates: it must not add up
        share = self._share_of_batch(self.global_batch)
        losses = self._parts.loss(self.model, next(self._batches))
        if losses.ndim > 1 or (losses.ndim == 1 and len(losses) != len(share)):
            raise ValueError(
                f"losses of shape {list(losses.shape)} for {len(share)} samples; expected one loss a sample "
                "(shape [samples]), or their mean (shape [])"
            )
        total = losses.sum() if losses.ndim else losses * len(share)
        (total / self.global_batch).backward()  # type: ignore[no-untyped-call]
        client.push(self.step + 1, float(total.detach()), stop=self._flag.wanted is not None)
        self._share.rest(lambda: self._flag.wanted)
        client.pull()

    def _serve(self) -> None:
        server = self._man
        assert isinstance(server, Server)
        self._catch_up()
        server.take_step()
        # Taken when it is sure that the step stays.
        self._late = 1
        self._loss = torch.tensor(server.loss / self.global_batch, dtype=torch.float64)
        self._share.rest(lambda: self._flag.wanted)

    def _catch_up(self) -> None:
        """The step of the learning-rate schedule that belongs to the last one of the optimizer."""
        if self._late and self.scheduler is not None:
            self.scheduler.step()  # type: ignore[attr-defined]
        self._late = 0

    def _wants_meeting(self) -> bool:
        """On the chief: whether anybody wants anything of all ranks."""
        server = self._man
        if self._met or not isinstance(server, Server):
            return False
        self._met = any(self._wishes()) or server.stop
        return self._met

    def finish(self, metrics: Metrics | Callable[[], Metrics] | None = None) -> None:
        self._catch_up()
        super().finish(metrics)

    # -- what a step is of -----------------------------------------------------------------------------

    def _share_of_batch(self, batch: int) -> range:
        number = self._roles.worker(self.rank)
        assert number is not None
        return share(range(batch), number, len(self._roles.workers))  # type: ignore[no-any-return]

    def _share_at(self, samples: int) -> torch.Tensor:
        """Nothing: `take_step` reads its own."""
        return _NO_INDICES

    def _make_alike(self) -> None:
        """Nothing: answers have what all have in common."""

    def _places(self) -> Iterator[Sequence[Place]]:
        """This worker's samples of all coming steps."""
        part, samples = self._share_of_batch(self.global_batch), self.samples
        for _ in range(self.step, self._last_step(None)):
            batch = self._sampler.batch(samples + part.start, len(part)).tolist()
            yield list(enumerate(batch, samples + part.start))
            samples += self.global_batch

    def _example(self) -> Any:
        """Samples to rehearse with: two at least, as batch norm wants."""
        return self._parts.batch([i % self._parts.size for i in range(2)])

    # -- posts -----------------------------------------------------------------------------------------

    @property
    def _attempt(self) -> int:
        assert self._env is not None
        return self._env.attempt

    @property
    def _wire(self) -> Wire:
        assert self._crew.wire is not None
        return self._crew.wire

    def _new_owners(self) -> Owners:
        return share_out(self._shard.sizes, self._roles.servers, cut=self._shard.cut)

    def _take_post(self) -> None:
        """Be what the seats say, for the present owners."""
        if isinstance(self._man, Server):
            self._man.close()
        number = self._roles.worker(self.rank)
        if number is not None:
            self._shard.forget()
            self._man = Client(
                self._wire,
                self._shard,
                self._owners,
                number=number,
                workers=len(self._roles.workers),
                buffers=self._buffers,
            )
        else:
            self._man = Server(
                self._wire,
                self._shard,
                self._roles.workers,
                step=self.step,
                staleness=self._options.staleness,
                link=Link(self._options.link_mib_s, time.time()),
                buffers=self._buffers if self.rank == 0 else (),
                undo=len(self._roles.servers) > 1 and not self._options.staleness,
                wants_meeting=self._wants_meeting if self.rank == 0 else lambda: False,
                wants_stop=lambda: self._flag.wanted is not None,
            )
        self._man.meet_at = self.step
