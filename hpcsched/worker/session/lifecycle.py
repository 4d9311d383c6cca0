"""The life of a training in this process: it begins, is looked after between two steps, and ends."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from hpcsched.contract import exits
from hpcsched.contract.words import Ready
from hpcsched.errors import ConfigError, LaunchError, StoreError
from hpcsched.worker.background.own_process import cap_memory
from hpcsched.worker.checkpoint.saving import Saves, ShardedSaves
from hpcsched.worker.process.contract import JobEnv, OrderReader, ProgressWriter, say
from hpcsched.worker.ranks.process_group import Peers, own_device
from hpcsched.worker.ranks.reproducible import deterministic
from hpcsched.worker.session.agreement import Agreement
from hpcsched.worker.session.checkpoints import Checkpoints
from hpcsched.worker.session.context import Context
from hpcsched.worker.session.duty_cycle import DutyCycle
from hpcsched.worker.session.state import TrainingState
from hpcsched.worker.session.stopping import StopFlag
from hpcsched.worker.session.strategy import Stranded, Strategy
from hpcsched.worker.session.training_log import TrainingLog

Metrics = Mapping[str, float]


class Lifecycle:
    """A training by a strategy, on this rank; `begin` first.

    Args:
        training: what is trained.
        strategy: how it uses its ranks.
        ranks: those that have met already.
        checkpoint_dir: where to save without an agent.
        checkpoint_every_s: seconds between these checkpoints.

    Raises ConfigError when training and environment do not fit, LaunchError when the ranks do not meet.
    """

    def __init__(
        self,
        training: TrainingState,
        strategy: Strategy,
        *,
        ranks: Peers | None = None,
        checkpoint_dir: str | Path | None = None,
        checkpoint_every_s: float = 600.0,
    ) -> None:
        env = JobEnv.from_environ()
        if env is not None and (why := strategy.refuses(training, env.world_size, env.seats)):
            accepted = "at least one sample for each rank"
            raise ConfigError(where="training", key="global_batch", got=why, accepted=accepted)
        if env is not None and env.steps is not None:
            training.total_steps = env.steps
        flag = StopFlag(env.notify_pid, env.stop_file) if env else StopFlag(None)
        self._can_stop = env is None or flag.install()
        self._rest = DutyCycle()
        orders = OrderReader(env.control_fd if env else None)
        device = own_device(env)
        if strategy.reproducible:
            deterministic(device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
            cap_memory(os.environ, device)
        peers = ranks or Peers.join(env, device)
        progress = ProgressWriter(env.progress_fd if env else None)
        self.training, self.strategy = training, strategy
        self.context = Context(
            training,
            env=env,
            device=device,
            peers=peers,
            saves=_saves(training, env, checkpoint_dir),
            flag=flag,
            orders=orders,
            progress=progress,
        )
        self.agreement = Agreement(
            self.context,
            lambda order: strategy.refuses(training, order.world_size, order.seats),
            every_s=env.checkpoint_every_s if env else checkpoint_every_s,
        )
        self.log = TrainingLog(self.context)
        self.checkpoints = Checkpoints(self.context, self.agreement, strategy)
        if not training.spread:
            training.model.to(device)
        strategy.setup(self.context, self.agreement)

    def begin(self) -> None:
        """Restore what was saved, or join the others' training; then say that it is ready."""
        context, env = self.context, self.context.env
        if env is not None and env.joining:
            self._join(env)
            return
        self.checkpoints.restore(wanted=env is None or env.resume)
        self.strategy.start()
        (cannot,) = context.peers.agree(not self._can_stop)  # also: all ranks have come this far
        if env is not None and context.rank == 0 and not cannot:
            in_place = self.strategy.in_place and not self.training.spread and env.control_fd is not None
            self.agreement.in_place = in_place
            # Behind a launcher, maybe in a script, what the agent starts is not one of several ranks.
            env.mark_ready(Ready(parallel=not env.launched, in_place=in_place))

    def _join(self, env: JobEnv) -> None:
        self.strategy.warm_up()
        self.context.peers.enter(env, lambda: self.context.flag.wanted)
        try:
            self.strategy.join()
        except RuntimeError as error:
            raise LaunchError(f"could not join the others: {error}", transient=True) from error
        self.strategy.start()
        self.agreement.skip()  # we come in the middle of the others' step boundary

    def end_after(self, epochs: float | None) -> None:
        """Where nobody has said how many steps to train: for so many passes over the data, as the job says,
        else as given here, else one."""
        if self.training.total_steps is None:
            told = self.context.env.epochs if self.context.env is not None else None
            self.training.total_steps = self.training.steps_for(told or epochs or 1)

    # -- between two steps -------------------------------------------------------------------------------

    def between_steps(self) -> None:
        """Save, leave or resize, if that is wanted. Raises SystemExit: 75 once saved, 74 if it cannot be."""
        try:
            self.strategy.between_steps(self.meet)
        except Stranded as error:
            self.checkpoints.save_and_end(str(error))

    def train_step(self) -> None:
        """A step as the strategy makes it. Raises SystemExit(75), with all saved, if other ranks are lost."""
        try:
            self.strategy.train_step()
        except Stranded as error:
            self.checkpoints.save_and_end(str(error))

    def meet(self) -> None:
        """All ranks agree whether to leave, to change their number, and to save; and do so."""
        context = self.context
        if context.rank == 0:
            self._rest.take(self._pace, lambda: context.flag.wanted, self._settle)
        stop, save, resize = self.agreement.conclude()
        if stop:
            self._suspend()
        if resize:
            self._resize()
        elif save:
            error = self.checkpoints.save(background=True)
            if error and context.rank == 0:
                step = self.training.step
                say(f"step {step}: periodic checkpoint failed, training goes on: {error}")
            self.agreement.saved()
            self.strategy.checkpointed()

    def _pace(self) -> float:
        """The share of the time that the agent leaves to this training."""
        self.context.orders.look()
        return self.context.orders.pace

    def _settle(self) -> None:
        if self.context.device.type == "cuda":
            torch.cuda.synchronize(self.context.device)

    def _suspend(self) -> None:
        context = self.context
        self.report(force=True)
        self.checkpoints.save_or_exit(quick=context.orders.quick)
        self.log.close()
        code = context.env.leave() if context.env is not None else exits.SUSPENDED
        if context.rank == 0 and context.env is not None:
            context.env.wake_agent()
        self.checkpoints.part()
        raise SystemExit(code)

    def _resize(self) -> None:
        """Go on with other ranks: some stay, others leave or join. Nothing of the training changes."""
        began, context = time.monotonic(), self.context
        order = self.agreement.order()
        if order is None:
            return
        context.gather_sums()
        context.peers.settle()
        if not self.strategy.resize(order):
            context.peers.wait_parted()
            self.checkpoints.part()
            raise SystemExit(0)
        if context.rank == 0 and context.env is not None:
            stopped_s = time.monotonic() - began
            context.env.mark_ready(Ready(in_place=True, step=self.training.step, stopped_s=stopped_s))
            context.env.wake_agent()

    # -- steps -------------------------------------------------------------------------------------------

    def count_step(self, last: int) -> None:
        """A step is made; `last` is the one after which the training ends."""
        training = self.training
        self.strategy.advance()
        training.made += 1
        if training.made == 2 and self.context.rank == 0:  # the optimizer has its state by now
            self.context.saves.reserve(self.strategy.state_dict([]))
        self.report(force=training.step in (1, last))

    def report(self, *, force: bool = False) -> None:
        """Tell the agent how far it is, if that is due."""
        training = self.training
        self.context.progress.report(
            training.step,
            training.last_loss,
            force=force,
            facts=self.strategy.facts,
            total=training.total_steps,
        )
        self.log.step_made(force=force)

    # -- the end -----------------------------------------------------------------------------------------

    def finish(self, metrics: Metrics | Callable[[], Metrics] | None = None) -> None:
        """Save the final state, part from the others, record the metrics. Exits with 74 if it cannot be."""
        context = self.context
        if self.agreement.asked:
            self.agreement.conclude()  # in the last step; whatever it is, there is nothing left to suspend
        self.checkpoints.save_or_exit()
        self.checkpoints.part()
        if context.rank == 0 and context.env is not None and metrics is not None:
            values = metrics() if callable(metrics) else metrics
            try:
                self.checkpoints.record(values)
            except StoreError as error:
                say(f"the metrics could not be saved: {error}")
                raise SystemExit(exits.CANNOT_SAVE) from None
        self.log.close()
        context.flag.close()


def _saves(training: TrainingState, env: JobEnv | None, checkpoint_dir: str | Path | None) -> Saves:
    if training.spread:  # by fully_shard, which sees to the gradients too
        return ShardedSaves(env, checkpoint_dir, training.model, training.optimizer)
    return Saves(env, checkpoint_dir)
