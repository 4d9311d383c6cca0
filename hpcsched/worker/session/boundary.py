"""What happens to a training between two steps: it is saved, suspended, and resized in place."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Optional

import torch
from torch.nn.parallel import DistributedDataParallel

from hpcsched.contract import exits
from hpcsched.contract.environment import Environment
from hpcsched.contract.orders import Resize
from hpcsched.contract.words import Ready
from hpcsched.errors import ConfigError, LaunchError, StoreError
from hpcsched.worker.checkpoint.files import storable
from hpcsched.worker.checkpoint.saving import Saves, ShardedSaves
from hpcsched.worker.checkpoint.shared_memory import Held
from hpcsched.worker.process import rng
from hpcsched.worker.process.contract import JobEnv, Orders, Progress, say
from hpcsched.worker.ranks.gradient_sum import GradientSum
from hpcsched.worker.ranks.process_group import Peers, own_device
from hpcsched.worker.ranks.reproducible import VirtualShards, deterministic, pin_threads
from hpcsched.worker.session.duty_cycle import Rest
from hpcsched.worker.session.sampler import Sampler
from hpcsched.worker.session.state import Stateful, Training
from hpcsched.worker.session.stopping import StopFlag

if TYPE_CHECKING:
    from typing import Self  # novermin


class Elastic(Training):
    """The part of a `Session` that its user does not see: its arguments are explained there."""

    def __init__(
        self,
        *,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        dataset_size: int,
        global_batch: int,
        total_steps: int | None = None,
        scheduler: Stateful | None = None,
        seed: int = 0,
        also: Mapping[str, Stateful] | None = None,
        in_place: bool = False,
        reproducible: bool = False,
        shards: int | None = None,
        rehearse: Callable[[Self], object] | None = None,
        ranks: Peers | None = None,
        checkpoint_dir: str | Path | None = None,
        checkpoint_every_s: float = 600.0,
    ) -> None:
        env = self._env = JobEnv.from_environ()
        self.global_batch = global_batch
        if env is not None and (why := self._cannot_be(env.world_size)):
            accepted = "at least one sample for each rank"
            raise ConfigError(where="training", key="global_batch", got=why, accepted=accepted)
        self.model = model
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.also = dict(also or {})
        self.total_steps = env.steps if env is not None and env.steps is not None else total_steps
        self.seed = seed
        self.step = 0
        self.samples = 0
        self.resumed = False
        self._sampler = Sampler(dataset_size, seed)
        self._fed = 0
        self._share_size = self._part_size = 0
        self._loss = None
        self._in_place = False
        self._answer = None
        self._asked: Resize | None = None
        self._begun = 0
        if scheduler is not None:
            storable(scheduler.state_dict(), "scheduler")  # better now than at the first save

        self._flag = StopFlag(env.notify_pid, env.stop_file) if env else StopFlag(None)
        elastic = env is None or self._flag.install()
        self._orders = Orders(env.control_fd if env else None)
        self._rest = Rest()
        self.device = own_device(env)
        if reproducible:
            deterministic(self.device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self._peers = ranks or Peers.join(env, self.device)
        self._progress = Progress(env.progress_fd if env else None)
        self._every_s = env.checkpoint_every_s if env else checkpoint_every_s
        self._spread = any(hasattr(parameter, "device_mesh") for parameter in model.parameters())
        if self._spread:  # by fully_shard, which sees to the gradients too
            self._saves = self._spread_over_ranks(env, checkpoint_dir, reproducible=reproducible)
        else:
            self._saves = Saves(env, checkpoint_dir)
            model.to(self.device)
        self._gradients = GradientSum(model.parameters(), self._peers)
        self._virtual = None
        if reproducible:
            self._virtual = VirtualShards(
                model, self._peers, count=shards, global_batch=global_batch, seed=seed
            )
        self._next_save = time.monotonic() + self._every_s
        if env is not None and env.joining:
            self._enter(rehearse)
            return
        if self._virtual is not None and self.device.type == "cpu":
            pin_threads(1)  # how many cores a rank has depends on how many ranks there are
        self._restore(wanted=env is None or env.resume)
        (cannot,) = self._peers.agree(not elastic)  # also: all ranks have come this far
        if env is not None and self.rank == 0 and not cannot:
            self._in_place = in_place and not self._spread and env.control_fd is not None
            # Behind a launcher, maybe in a script, what the agent starts is not one of several ranks.
            env.mark_ready(Ready(parallel=not env.launched, in_place=self._in_place))

    def _spread_over_ranks(
        self, env: JobEnv | None, checkpoint_dir: str | Path | None, *, reproducible: bool
    ) -> Saves:
        from hpcsched.worker.checkpoint.sharded import sum_gradients  # takes its time to import

        if reproducible:
            raise ConfigError(
                where="training",
                key="reproducible",
                got="a model that is spread over the ranks",
                accepted="a model that every rank has whole",
            )
        sum_gradients(self.model, self._peers.world_size)
        return ShardedSaves(env, checkpoint_dir, self.model, self.optimizer)

    # -- between two steps -----------------------------------------------------------------------------

    def _boundary(self) -> None:
        """Between two steps: all ranks agree whether to leave, to change their number, and to save."""
        if self.rank == 0:
            self._rest.take(self._pace, lambda: self._flag.wanted, self._settle)
        answer, self._answer = self._answer, None
        stop, save, resize = answer() if answer else self._peers.agree(*self._wishes())
        del answer  # holds on to the process group, which must be let go before it is left
        if stop:
            self._suspend()
        if resize:
            self._resize()
        elif save:
            error = self._save(background=True)
            if error and self.rank == 0:
                say(f"step {self.step}: periodic checkpoint failed, training goes on: {error}")
            self._next_save = time.monotonic() + self._every_s
            self._look_back()

    def _look_back(self) -> None:
        """After a periodic checkpoint, on all ranks: time to do better from here on."""

    def _pace(self) -> float:
        """The share of the time that the agent leaves to this training."""
        self._orders.look()
        return self._orders.pace

    def _settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _wishes(self) -> tuple[bool, bool, bool]:
        """Whether this rank should leave, a periodic checkpoint is due, and a resize can be done now."""
        if self.rank > 0:
            return self._flag.wanted is not None, False, False
        try:
            self._saves.look()
        except StoreError as error:
            say(f"periodic checkpoint failed, training goes on: {error}")
        self._orders.look()
        self._asked = self._ready_to_resize(self._orders.resize)
        due = self._saves.store is not None and time.monotonic() >= self._next_save
        return self._flag.wanted is not None, due, self._asked is not None

    # -- leaving ---------------------------------------------------------------------------------------

    def _suspend(self) -> None:
        self._report(force=True)
        self._save_or_exit(quick=self._orders.quick)
        code = self._env.leave() if self._env is not None else exits.SUSPENDED
        if self.rank == 0 and self._env is not None:
            self._env.wake_agent()
        self._part()
        raise SystemExit(code)

    # -- resizing in place -----------------------------------------------------------------------------

    def _ready_to_resize(self, order: Resize | None) -> Resize | None:
        """On rank 0: the order, once all who are to join wait for it; one that cannot be is refused."""
        if order is None or self._env is None:
            return None
        why = ""
        if not self._in_place:
            why = "this program has not said that it can"
        elif cannot := self._cannot_be(order.world_size):
            why = cannot
        elif self._virtual is not None and order.world_size > self._virtual.count:
            why = f"{self._virtual.count} shards cannot be computed by {order.world_size} ranks"
        elif self._is_wrapped():
            why = "the model is wrapped in DistributedDataParallel, which does not learn of new ranks"
        elif len([rank for rank in order.keep if rank < self.world_size]) != len(order.keep):
            why = f"ranks {order.keep} of {self.world_size} are to stay"
        if not why:
            try:
                return order if self._peers.joined(order) else None
            except LaunchError as error:
                why = str(error)
        self._orders.resize = None
        self._env.refuse(order.attempt, why)
        self._env.wake_agent()
        return None

    def _cannot_be(self, world_size: int) -> str:
        """Why so many ranks cannot train this; empty if they can."""
        too_many = world_size > self.global_batch
        return (
            f"a global batch of {self.global_batch} samples is too small for {world_size} ranks"
            if too_many
            else ""
        )

    def _is_wrapped(self) -> bool:
        """Whether a loop of the user's own has put the model into a wrapper that fixes the ranks."""
        if self._env is None or self._env.trainer is not None:
            return False
        # By its type: to ask things themselves for their class makes some of them warn.
        wrappers = (thing for thing in gc.get_objects() if issubclass(type(thing), DistributedDataParallel))
        return any(wrapper.module is self.model for wrapper in wrappers)

    def _resize(self) -> None:
        """Go on with other ranks: some stay, others leave or join. Nothing of the training changes."""
        began = time.monotonic()
        if self.rank == 0 and self._orders.resize is not self._asked:
            self._asked = None  # taken back since we asked
        order: Resize | None = self._peers.tell(self._asked, Optional[Resize])
        self._asked = self._orders.resize = None
        if order is None:
            return
        try:
            held = None
            if self.rank == 0:
                if order.joining and order.one_host:
                    held = self._saves.hand_over(self._state([]))
                self._peers.let_in(order)
            if not self._peers.regroup(order):
                self._leave_for_good()
            self._now_is(order.attempt)
            self._exchange(held, order)
        except (RuntimeError, StoreError) as error:
            self._stranded(error)
        if self.rank == 0 and self._env is not None:
            stopped_s = time.monotonic() - began
            self._env.mark_ready(Ready(in_place=True, step=self.step, stopped_s=stopped_s))
            self._env.wake_agent()

    def _enter(self, rehearse: Callable[[Self], object] | None) -> None:
        """On a joining rank: wait until the others let us in, and take their state over."""
        assert self._env is not None
        if rehearse is not None:
            rehearse(self)
        if self._virtual is None:
            self._gradients.prepare()
        self._saves.touch()
        self._peers.enter(self._env, lambda: self._flag.wanted)
        try:
            self._exchange(None, None)
        except RuntimeError as error:
            raise LaunchError(f"could not join the others: {error}", transient=True) from error
        self._answer = lambda: (False, False, False)  # we come in the middle of the others' step boundary

    def _exchange(self, held: Held | None, order: Resize | None) -> None:
        """In the new group: those that have just joined (with no `order`) get the state of the others."""
        mine = held, order is not None and order.joining > 0
        held, joined = self._peers.tell(mine, tuple[Optional[Held], bool])
        if held is not None and order is None:
            self._take(self._saves.load(held, self._own), "shared memory")
        elif held is None and joined:
            state = self._peers.broadcast_state(self._state([]) if self.rank == 0 else None)
            if order is None:
                self._take(state, "rank 0")
        # As after a restart on another number of ranks.
        rng.reseed(self.seed, self.step, self.rank)
        self._peers.agree(False)  # all have it: from here on a failure is that of a step

    def _now_is(self, attempt: int) -> None:
        """This process belongs to another attempt from now on."""
        assert self._env is not None
        self._env = self._saves.env = replace(
            self._env, attempt=attempt, rank=self.rank, world_size=self.world_size
        )
        os.environ.update(RANK=str(self.rank), WORLD_SIZE=str(self.world_size))
        now = Environment(attempt=attempt, rank=self.rank, world_size=self.world_size)
        os.environ.update(now.to_environ())

    def _leave_for_good(self) -> None:
        """This rank's part is done; the others go on without it."""
        self._peers.wait_parted()
        self._part()
        raise SystemExit(0)

    def _stranded(self, error: Exception) -> None:
        """The new group could not be made: what we have is whole, so save it, and start again from there."""
        say(f"step {self.step}: the resize in place failed, so this attempt ends: {error}")
        first = self.rank == 0
        self._peers.abandon()
        if first:
            self._save_or_exit()
            if self._env is not None:
                self._env.wake_agent()
        raise SystemExit(exits.SUSPENDED)
