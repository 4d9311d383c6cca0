"""The state of a parameter-server training: spread over servers, gathered to be saved, and moved when servers
and workers come and go."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Optional

import torch

from hpcsched.compat import dataclass, zip
from hpcsched.contract import exits
from hpcsched.contract.orders import Resize
from hpcsched.contract.words import Ready
from hpcsched.errors import LaunchError
from hpcsched.worker.process import rng
from hpcsched.worker.process.contract import JobEnv, say
from hpcsched.worker.ps.client import Client
from hpcsched.worker.ps.cpu_throttle import CpuShare
from hpcsched.worker.ps.link import Link
from hpcsched.worker.ps.placement import Move, Owners, before_leaving, moves, renumbered, share_out
from hpcsched.worker.ps.protocol import Frame, PeerLost, Wire
from hpcsched.worker.ps.roles import Crew, Roles
from hpcsched.worker.ps.server import Server
from hpcsched.worker.ps.shard import Fragment, Shard, cannot_be_on, check
from hpcsched.worker.ps.state_transfer import carry
from hpcsched.worker.ranks.process_group import own_device
from hpcsched.worker.session.sampler import Sampler
from hpcsched.worker.session.session import Session
from hpcsched.worker.session.trainer import Parts, rehearse

if TYPE_CHECKING:
    from typing import Self  # novermin


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


class Changing(Session):
    """The part of a `PsSession` that is not about steps: its arguments are explained there."""

    _wire: Wire
    _shard: Shard
    _owners: Owners
    _post: Server | Client

    def __init__(self, parts: Parts, env: JobEnv, *, staleness: int, link_mib_s: float | None) -> None:
        self._parts = parts
        self._staleness, self._link_mib_s = staleness, link_mib_s
        self._roles = self._coming = Roles.of(env, parts.global_batch)
        check(parts.optimizer, len(self._roles.servers))
        self._called = False
        self._generators: list[Any] = []
        self._gathered: list[Fragment] = []
        self._relayed: list[Fragment] = []
        self._fresh: list[int] = []
        seat = self._roles.seats[env.rank]
        self._share = CpuShare(seat.share, seat.cores)
        crew = Crew.join(env, own_device(env))
        assert isinstance(crew, Crew)
        self._crew = crew
        super().__init__(
            model=parts.model,
            optimizer=parts.optimizer,
            scheduler=parts.scheduler,
            dataset_size=parts.size,
            global_batch=parts.global_batch,
            seed=parts.seed,
            in_place=True,
            rehearse=lambda _: rehearse(parts, parts.batch([i % parts.size for i in range(2)])),
            ranks=self._crew,
        )

    @property
    def _attempt(self) -> int:
        assert self._env is not None
        return self._env.attempt

    # -- posts -----------------------------------------------------------------------------------------

    def _take_post(self) -> None:
        """Be what the seats say, of the present owners."""
        assert self._crew.wire is not None
        self._wire = self._crew.wire
        number = self._roles.worker(self.rank)
        if number is not None:
            self._post = Client(
                self._wire,
                self._shard,
                self._owners,
                number=number,
                workers=len(self._roles.workers),
                buffers=self._buffers,
            )
        else:
            chief = self.rank == 0
            self._post = Server(
                self._wire,
                self._shard,
                self._roles.workers,
                step=self.step,
                staleness=self._staleness,
                link=Link(self._link_mib_s, time.time()),
                buffers=self._buffers if chief else list,
                undo=len(self._roles.servers) > 1 and not self._staleness,
                schedule=self._schedule,
                wants_meeting=self._wants_meeting if chief else lambda: False,
                wants_stop=lambda: self._flag.wanted is not None,
            )

    def _buffers(self) -> list[torch.Tensor]:
        return list(self.model.buffers())

    def _schedule(self) -> None:
        if self.scheduler is not None:
            self.scheduler.step()  # type: ignore[attr-defined]

    def _wants_meeting(self) -> bool:
        """On the chief: whether anybody wants anything of all ranks; only once until they have met."""
        if not self._called:
            self._called = any(self._wishes()) or self._post.stop
            return self._called
        return False

    def _boundary(self) -> None:
        """Between two steps: all ranks meet, if that was called for."""
        if self.step < self._post.meet_at:
            return
        self._catch_up()
        try:
            super()._boundary()
        except RuntimeError as error:
            self._lost(error)
        self._called = False
        self._post.open(self._last_step(None))

    def _catch_up(self) -> None:
        if isinstance(self._post, Server):
            self._post.catch_up()

    # -- the state -------------------------------------------------------------------------------------

    def _restore(self, *, wanted: bool) -> None:
        """Every rank takes up the whole state; then servers keep what is theirs, and workers nothing."""
        built = rng.capture(self.device)
        super()._restore(wanted=wanted)
        number, workers = self._roles.worker(self.rank), len(self._roles.workers)
        if number is not None:  # as the rank of this number would draw, if there were no servers
            if len(self._generators) == workers:
                rng.restore(self._generators[number], self.device)
            elif self.resumed or workers > 1:
                rng.reseed(self.seed, self.step, number)
            else:
                rng.restore(built, self.device)
        self._shard = Shard(self.optimizer)
        self._owners = share_out(self._shard.sizes, self._roles.servers, cut=self._shard.cut)
        self._shard.install(self._owners.get(self.rank, ()), self._shard.fragments())
        self._take_post()

    def _take(self, state: dict[str, Any], where: str) -> None:
        super()._take(state, where)
        self._generators = state["rng"]

    def _gather_state(self) -> None:
        everything = [
            Move(rank, 0, piece) for rank, pieces in self._owners.items() for piece in pieces if rank > 0
        ]
        self._gathered = carry(self._wire, everything, self._here())

    def _here(self) -> list[Fragment]:
        """All that this rank has, also of those that are about to leave."""
        return [*self._shard.fragments(), *self._relayed]

    def _state(self, generators: list[Any]) -> dict[str, Any]:
        """As every strategy saves it: in the user's own layout, the generators those of the workers."""
        drawing = [
            state for state, seat in zip(generators, self._roles.seats, strict=False) if not seat.server
        ]
        with self._shard.whole([*self._relayed, *self._gathered]):
            return super()._state(drawing)

    def _save(self, *, quick: bool = False, background: bool = False) -> str | None:
        try:
            return super()._save(quick=quick, background=background)
        finally:
            self._gathered = []

    # -- who is lost -----------------------------------------------------------------------------------

    def _lost(self, error: Exception) -> None:
        """A rank is gone. If that was a worker, nothing is lost: the servers go back to the last step that
        all of them have taken, and the chief saves that."""
        server = self._post
        if not isinstance(server, Server):
            raise LaunchError(f"step {self.step}: {error}", transient=True) from error
        try:
            step = self._common_step(server.step)
            server.back_to(step)
            server.catch_up()
            self.samples += (step - self.step) * self.global_batch
            self.step = step
            self._stranded(error)
        except PeerLost as other:
            raise LaunchError(f"step {self.step}: {other}, a server", transient=True) from error

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

    def _stranded(self, error: Exception) -> None:
        """What we have is whole, so save it, and start again from there."""
        say(f"step {self.step}: this attempt ends: {error}")
        server, first = isinstance(self._post, Server), self._wire.rank == 0
        self._peers.abandon()
        if first:
            self._save_or_exit()
            if self._env is not None:
                self._env.wake_agent()
        elif server:
            self._gather_state()
        raise SystemExit(exits.SUSPENDED)

    # -- changes in place ------------------------------------------------------------------------------

    def _ready_to_resize(self, order: Resize | None) -> Resize | None:
        if order is not None:
            self._coming = Roles(order.seats)
        return super()._ready_to_resize(order)

    def _cannot_be(self, world_size: int) -> str:
        return self._coming.cannot_be(world_size, self.global_batch) or cannot_be_on(
            self._parts.optimizer, len(self._coming.servers)
        )

    def _resize(self) -> None:
        """Go on with other servers and workers, or with other shares. Nothing of the training changes."""
        began = time.monotonic()
        if self.rank == 0 and self._orders.resize is not self._asked:
            self._asked = None  # taken back since we asked
        order: Resize | None = self._peers.tell(self._asked, Optional[Resize])
        self._asked = self._orders.resize = None
        if order is None:
            return
        roles = Roles(order.seats)
        alike = order.keep == tuple(range(order.world_size)) and order.world_size == self.world_size
        try:
            if not (alike and roles.servers == self._roles.servers):
                self._change(order, roles, alike=alike)
        except RuntimeError as error:
            self._stranded(error)
        self._roles = roles
        self._hand_out()
        self._now_is(order.attempt)
        assert self._env is not None
        self._env = self._saves.env = replace(self._env, seats=order.seats)
        self._share.set(roles.seats[self.rank].share, roles.seats[self.rank].cores)
        if self.rank == 0:
            stopped_s = time.monotonic() - began
            self._env.mark_ready(Ready(in_place=True, step=self.step, stopped_s=stopped_s))
            self._env.wake_agent()

    def _change(self, order: Resize, roles: Roles, *, alike: bool) -> None:
        """Those that leave hand over what they have; then the others meet with those that join."""
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
            step=self.step,
            samples=self.samples,
        )
        if not alike:
            if self.rank == 0:
                self._peers.let_in(order)
            if not self._peers.regroup(order):
                self._leave_for_good()
        self._take_up(change)

    def _enter(self, rehearse: Callable[[Self], object] | None) -> None:
        """On a joining rank: wait until the others let us in, and take over what is ours."""
        assert self._env is not None
        if rehearse is not None:
            rehearse(self)
        self._shard = Shard(self.optimizer)
        self._shard.forget()
        self._peers.enter(self._env, lambda: self._flag.wanted)
        try:
            self._take_up(None)
            self._hand_out()
        except RuntimeError as error:
            raise LaunchError(f"could not join the others: {error}", transient=True) from error
        self._answer = lambda: (False, False, False)  # we come in the middle of the others' step boundary

    def _take_up(self, change: _Change | None) -> None:
        """In the new group: those that have just joined (with no `change`) get the state of the others."""
        joined = change is None
        change = self._peers.tell(change, _Change)
        course = self._peers.broadcast_state(self._course() if self.rank == 0 else None)
        assert change is not None and self._crew.wire is not None
        roles, wire = Roles(change.order.seats), self._crew.wire
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
        if not joined and isinstance(self._post, Server):
            self._post.close()
        self._take_post()
        if former is not None and former is not wire:
            former.close()
        self._fresh = fresh
        if (number := roles.worker(self.rank)) is not None:  # as after a restart with other workers
            rng.reseed(self.seed, self.step, number)

    def _hand_out(self) -> None:
        """Those who have just become workers pull the parameters."""
        fresh, self._fresh = self._fresh, []
        if isinstance(self._post, Server) and fresh:
            self._post.hand_out(fresh)
        elif isinstance(self._post, Client) and self.rank in fresh:
            self._post.expect()
            self._post.pull(fresh=True)

    def _course(self) -> dict[str, Any]:
        """What there is of a training's state beside parameters and what the optimizer has of them."""
        groups = self.optimizer.param_groups
        return {
            "sampler": self._sampler.state(self.samples),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "groups": [{key: value for key, value in g.items() if key != "params"} for g in groups],
        }

    def _learn(self, change: _Change, course: dict[str, Any]) -> None:
        self.step, self.samples, self.resumed = change.step, change.samples, True
        self._sampler = Sampler(course["sampler"]["size"], course["sampler"]["seed"])
        if self.scheduler is not None and course["scheduler"] is not None:
            self.scheduler.load_state_dict(course["scheduler"])
        for group, told in zip(self.optimizer.param_groups, course["groups"], strict=True):
            group.update(told)

    @torch.no_grad()
    def _untrained(self, wire: Wire, fresh: list[int]) -> None:
        """The chief gives those who have become workers the parameters that no server has."""
        trained = set(self._shard.parameters)
        rest = [p for p in self.model.parameters() if p not in trained]
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
