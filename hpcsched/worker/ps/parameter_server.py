"""The parameter-server strategy (NEARCHUS): its state is spread over servers, gathered to be saved, and moved
when servers and workers come and go."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hpcsched.compat import dataclass, zip
from hpcsched.contract.orders import Resize
from hpcsched.contract.seats import Seat
from hpcsched.errors import LaunchError
from hpcsched.worker.process import rng
from hpcsched.worker.process.contract import Facts, JobEnv
from hpcsched.worker.ps.client import PsClient
from hpcsched.worker.ps.cpu_throttle import CpuShare
from hpcsched.worker.ps.link import ServerLink
from hpcsched.worker.ps.meter import UsageReports
from hpcsched.worker.ps.placement import Owners, PieceMove, before_leaving, moves, renumbered, share_out
from hpcsched.worker.ps.protocol import Frame, PeerChannels, PeerLost
from hpcsched.worker.ps.roles import Roles, WiredPeers
from hpcsched.worker.ps.server import PsServer
from hpcsched.worker.ps.shard import Fragment, ServerShard, cannot_be_on, check
from hpcsched.worker.ps.state_transfer import carry
from hpcsched.worker.ps.steps import ThrottledSteps
from hpcsched.worker.session.agreement import Agreement
from hpcsched.worker.session.context import Context
from hpcsched.worker.session.replicated import NO_INDICES, Replicated
from hpcsched.worker.session.state import TrainingState
from hpcsched.worker.session.strategy import Stranded
from hpcsched.worker.session.trainer import Parts, rehearse


@dataclass(frozen=True, kw_only=True)
class _Change:
    """What the ranks of a new group, some of whom may have just joined, have to know of the training.

    By the new numbers, `owners` is who has what at present, and `workers` are those who were workers before.
    """

    order: Resize
    owners: Owners
    workers: tuple[int, ...]
    step: int
    samples: int


class ParameterServer(Replicated):
    """A strategy of servers, which have the parameters, and of workers, which compute.

    `training.step` counts the optimizer's steps on a server, and on a worker those that it has pushed
    gradients for. Both are the same where all ranks meet: at a step boundary that the chief, rank 0, calls
    them to.

    Args:
        parts: of the training.
        env: with a seat for each rank.
        staleness: how many steps a worker may be ahead of another one; with 0 the result is that of one
            process.
        link_mib_s: what a server's link can take in, and give out, in MiB/s; None: any amount.

    Raises ConfigError for seats and optimizers that cannot be.
    """

    in_place = True

    def __init__(self, parts: Parts, env: JobEnv, *, staleness: int, link_mib_s: float | None) -> None:
        self._parts = parts
        self._staleness, self._link_mib_s = staleness, link_mib_s
        self._roles = Roles.of(env, parts.global_batch)
        check(parts.optimizer, len(self._roles.servers))
        seat = self._roles.seats[env.rank]
        self._cpu_share = CpuShare(seat.share, seat.cores)
        self._called = self._stranded = False
        self._generators: list[Any] = []
        self._gathered: list[Fragment] = []
        self._relayed: list[Fragment] = []
        self._fresh: list[int] = []
        self._post: PsServer | PsClient | None = None

    def refuses(self, training: TrainingState, world_size: int, seats: Sequence[Seat]) -> str:
        coming = Roles(seats)
        return coming.cannot_be(world_size, training.global_batch) or cannot_be_on(
            self._parts.optimizer, len(coming.servers)
        )

    def setup(self, context: Context, agreement: Agreement) -> None:
        super().setup(context, agreement)
        assert isinstance(context.peers, WiredPeers)
        self._peers = context.peers
        self._steps = ThrottledSteps(self._parts, context, self._cpu_share)
        self._usage = UsageReports(context.peers, self._cpu_share)
        self._built = rng.capture(context.device)

    @property
    def post(self) -> PsServer | PsClient:
        """What this rank is at present."""
        assert self._post is not None
        return self._post

    @property
    def _attempt(self) -> int:
        assert self.context.env is not None
        return self.context.env.attempt

    # -- a step ----------------------------------------------------------------------------------------

    def begin_step(self) -> torch.Tensor:
        """What all have in common comes with the answers."""
        return NO_INDICES

    def train_step(self) -> None:
        """On a worker gradients of its share of the global batch, pushed and answered; on a server a step of
        the optimizer, for as many of those as there are workers."""
        post = self.post
        try:
            if isinstance(post, PsServer):
                self._steps.serve(post)
            else:
                self._steps.work(post, self._shard, self._roles)
        except PeerLost as error:
            self._lost(error)
        link = post.link if isinstance(post, PsServer) else None
        self._usage.note(self.training.step + 1, self._attempt, link)

    def facts(self) -> Facts:
        return Facts(usage=self._usage.take())

    def between_steps(self, meet: Callable[[], None]) -> None:
        """All ranks meet, if that was called for."""
        if self.training.step < self.post.meet_at:
            return
        self._catch_up()
        try:
            meet()
        except RuntimeError as error:
            self._lost(error)
        self._called = False
        self.post.open(self.training.last_step())

    def _wants_meeting(self) -> bool:
        """On the chief: whether anybody wants anything of all ranks; only once until they have met."""
        if not self._called:
            self._called = any(self.agreement.wishes()) or self.post.stop
            return self._called
        return False

    def _catch_up(self) -> None:
        if isinstance(self._post, PsServer):
            self._post.catch_up()

    # -- posts -----------------------------------------------------------------------------------------

    def _take_post(self) -> None:
        """Be what the seats say, of the present owners."""
        assert self._peers.wire is not None
        self._wire = self._peers.wire
        number = self._roles.worker(self.rank)
        if number is not None:
            self._post = PsClient(
                self._wire,
                self._shard,
                self._owners,
                number=number,
                workers=len(self._roles.workers),
                buffers=self._buffers,
            )
        else:
            chief = self.rank == 0
            self._post = PsServer(
                self._wire,
                self._shard,
                self._roles.workers,
                step=self.training.step,
                staleness=self._staleness,
                link=ServerLink(self._link_mib_s, time.time()),
                buffers=self._buffers if chief else list,
                undo=len(self._roles.servers) > 1 and not self._staleness,
                schedule=self._schedule,
                wants_meeting=self._wants_meeting if chief else lambda: False,
                wants_stop=lambda: self.context.flag.wanted is not None,
            )

    def _buffers(self) -> list[torch.Tensor]:
        return list(self.training.model.buffers())

    def _schedule(self) -> None:
        if self._parts.scheduler is not None:
            self._parts.scheduler.step()

    # -- the state -------------------------------------------------------------------------------------

    def start(self) -> None:
        """Every rank has taken up the whole state; now servers keep what is theirs, and workers nothing."""
        if self._post is not None:  # it has joined
            return
        training = self.training
        number, workers = self._roles.worker(self.rank), len(self._roles.workers)
        if number is not None:  # as the rank of this number would draw, if there were no servers
            if len(self._generators) == workers:
                rng.restore(self._generators[number], self.device)
            elif training.resumed or workers > 1:
                rng.reseed(training.seed, training.step, number)
            else:
                rng.restore(self._built, self.device)
        self._shard = ServerShard(training.optimizer)
        self._owners = share_out(self._shard.sizes, self._roles.servers, cut=self._shard.cut)
        self._shard.install(self._owners.get(self.rank, ()), self._shard.fragments())
        self._take_post()

    def load_state_dict(self, state: dict[str, Any], where: str) -> None:
        super().load_state_dict(state, where)
        self._generators = state["rng"]

    def gather_state(self) -> None:
        """Servers give the chief what is theirs."""
        self._catch_up()
        everything = [
            PieceMove(rank, 0, piece) for rank, pieces in self._owners.items() for piece in pieces if rank > 0
        ]
        try:
            self._gathered = carry(self._wire, everything, self._here())
        except PeerLost as error:
            if not self._stranded:
                raise
            raise LaunchError(f"step {self.training.step}: {error}, a server", transient=True) from error

    def _here(self) -> list[Fragment]:
        """All that this rank has, also of those that are about to leave."""
        return [*self._shard.fragments(), *self._relayed]

    def state_dict(self, generators: list[Any]) -> dict[str, Any]:
        """As every strategy saves it: in the user's own layout, the generators those of the workers."""
        drawing = [
            state for state, seat in zip(generators, self._roles.seats, strict=False) if not seat.server
        ]
        gathered, self._gathered = self._gathered, []
        with self._shard.whole([*self._relayed, *gathered]):
            return super().state_dict(drawing)

    # -- who is lost -----------------------------------------------------------------------------------

    def _lost(self, error: Exception) -> None:
        """A rank is gone. If that was a worker, nothing is lost: the servers go back to the last step that
        all of them have taken, and the chief saves that."""
        server = self.post
        if not isinstance(server, PsServer):
            raise LaunchError(f"step {self.training.step}: {error}", transient=True) from error
        try:
            step = self._common_step(server.step)
            server.back_to(step)
            server.catch_up()
            training = self.training
            training.samples += (step - training.step) * training.global_batch
            training.step = step
        except PeerLost as other:
            raise LaunchError(f"step {self.training.step}: {other}, a server", transient=True) from error
        raise self._ends(error) from error

    def _ends(self, error: Exception) -> Stranded:
        self._stranded = True
        return Stranded(f"this attempt ends: {error}")

    def _common_step(self, step: int) -> int:
        """The last step that all servers have taken."""
        mine = torch.tensor([step])
        if self.rank > 0:
            self._wire.send(mine, 0)()
            self._wire.receive(mine, 0)()
            return int(mine)
        others = self._roles.servers[1:]
        theirs = [torch.zeros(1, dtype=torch.int64) for _ in others]
        for wait in [self._wire.receive(room, rank) for rank, room in zip(others, theirs, strict=True)]:
            wait()
        common = min([mine, *theirs])
        for wait in [self._wire.send(common, rank) for rank in others]:
            wait()
        return int(common)

    # -- changes in place ------------------------------------------------------------------------------

    def resize(self, order: Resize) -> bool:
        """Go on with other servers and workers, or with other shares. Nothing of the training changes."""
        roles = Roles(order.seats)
        alike = order.keep == tuple(range(order.world_size)) and order.world_size == self.world_size
        try:
            same = alike and roles.servers == self._roles.servers
            if not same and not self._change(order, roles, alike=alike):
                return False
        except RuntimeError as error:
            raise self._ends(error) from error
        self._roles = roles
        self._hand_out()
        self.context.becomes(order.attempt, order.seats)
        self._cpu_share.set(roles.seats[self.rank].share, roles.seats[self.rank].cores)
        return True

    def _change(self, order: Resize, roles: Roles, *, alike: bool) -> bool:
        """Those that leave hand over what they have; then the others meet with those that join. False: this
        rank has left."""
        owners = share_out(self._shard.sizes, roles.servers, cut=self._shard.cut)
        between = before_leaving(self._owners, owners, order.keep)
        if handed := moves(self._owners, between):
            self._relayed = carry(self._wire, handed, self._here())
            self._owners = between
            self._peers.agree(False)  # it may take longer than those who meet are waited for
        change = _Change(
            order=order,
            owners=renumbered(between, order.keep),
            workers=tuple(order.keep.index(rank) for rank in self._roles.workers if rank in order.keep),
            step=self.training.step,
            samples=self.training.samples,
        )
        if not alike:
            if self.rank == 0:
                self._peers.let_in(order)
            if not self._peers.regroup(order):
                return False
        self._take_up(change)
        return True

    def warm_up(self) -> None:
        rehearse(self._parts, self._parts.batch([i % self._parts.size for i in range(2)]))
        self._shard = ServerShard(self.training.optimizer)
        self._shard.forget()

    def join(self) -> None:
        self._take_up(None)
        self._hand_out()

    def _take_up(self, change: _Change | None) -> None:
        """In the new group: those that have just joined (with no `change`) get the state of the others."""
        joined = change is None
        change = self._peers.tell(change, _Change)
        course = self._peers.broadcast_state(self._course() if self.rank == 0 else None)
        assert change is not None and self._peers.wire is not None
        roles, wire = Roles(change.order.seats), self._peers.wire
        owners = share_out(self._shard.sizes, roles.servers, cut=self._shard.cut)
        came = carry(wire, moves(change.owners, owners), self._here())
        if joined:
            self._learn(change, course)
        fresh = [rank for rank in roles.workers if rank not in change.workers]
        self._untrained(wire, fresh)
        self._peers.agree(False)  # all have it: from here on nobody needs to go back
        former = None if joined else self._wire
        self._shard.install(owners.get(self.rank, ()), [*self._here(), *came])
        self._relayed, self._roles, self._owners = [], roles, owners
        if not joined and isinstance(self._post, PsServer):
            self._post.close()
        self._take_post()
        if former is not None and former is not wire:
            former.close()
        self._fresh = fresh
        if (number := roles.worker(self.rank)) is not None:  # as after a restart with other workers
            rng.reseed(self.training.seed, self.training.step, number)

    def _hand_out(self) -> None:
        """Those who have just become workers pull the parameters."""
        fresh, self._fresh = self._fresh, []
        if isinstance(self._post, PsServer) and fresh:
            self._post.hand_out(fresh)
        elif isinstance(self._post, PsClient) and self.rank in fresh:
            self._post.expect()
            self._post.pull(fresh=True)

    def _course(self) -> dict[str, Any]:
        """What there is of a training's state beside parameters and what the optimizer has of them."""
        training = self.training
        groups = training.optimizer.param_groups
        return {
            "sampler": training.sampler.state(training.samples),
            "scheduler": None if training.scheduler is None else training.scheduler.state_dict(),
            "groups": [{key: value for key, value in g.items() if key != "params"} for g in groups],
        }

    def _learn(self, change: _Change, course: dict[str, Any]) -> None:
        training = self.training
        training.goes_on(course["sampler"], step=change.step, samples=change.samples)
        if training.scheduler is not None and course["scheduler"] is not None:
            training.scheduler.load_state_dict(course["scheduler"])
        for group, told in zip(training.optimizer.param_groups, course["groups"], strict=True):
            group.update(told)

    @torch.no_grad()
    def _untrained(self, wire: PeerChannels, fresh: list[int]) -> None:
        """The chief gives those who have become workers the parameters that no server has."""
        trained = set(self._shard.parameters)
        rest = [p for p in self.training.model.parameters() if p not in trained]
        if not rest or not (self.rank == 0 or self.rank in fresh):
            return
        page = Frame(0, 0, [(p.dtype, p.numel()) for p in rest]).page()
        if self.rank in fresh:
            wire.receive(page.data, 0)()
            for parameter, came in zip(rest, page.tensors, strict=True):
                parameter.copy_(came.view(parameter.shape))
            return
        for room, parameter in zip(page.tensors, rest, strict=True):
            room.copy_(parameter.reshape(-1))
        for wait in [wire.send(page.data, rank) for rank in fresh]:
            wait()
