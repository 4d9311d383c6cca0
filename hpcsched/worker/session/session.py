"""Makes a training loop elastic: it can be suspended at any step and go on at another rank count."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from hpcsched.errors import ConfigError
from hpcsched.worker.process.contract import JobEnv
from hpcsched.worker.ranks.process_group import Peers
from hpcsched.worker.session.callbacks import Hooks
from hpcsched.worker.session.data_parallel import DataParallel
from hpcsched.worker.session.epochs import Epoch, epochs_left
from hpcsched.worker.session.lifecycle import Lifecycle, Metrics
from hpcsched.worker.session.state import Stateful, TrainingState
from hpcsched.worker.session.strategy import Strategy
from hpcsched.worker.session.trainer import Parts, Trainer, build, evaluate, is_watched, refuse_mixed


class Session:
    """One training as seen by one rank: restores it at the start, saves it, leaves when asked to.

    In a loop::

        session = Session(model=model, optimizer=optimizer, dataset_size=len(x), global_batch=64,
                          total_steps=1000)
        for indices in session.steps():               # this rank's samples of the next global batch
            optimizer.zero_grad()
            session.backward(loss(model(x[indices]), y[indices]))       # per-sample losses, or a mean
            optimizer.step()
        session.finish(lambda: {"accuracy": accuracy(model)})

    The global batch is the same at every rank count, and gradients are means over all of it. Run
    without hpcsched, it is an ordinary single-process loop on the GPU, if there is one, or the CPU.
    `rank`, `world_size`, `device`, `step` and `samples` (both: done so far) can be read at any time.

    Args:
        model: the model, moved to `session.device` in place; use it as it is, it needs no wrapper.
        optimizer: an optimizer over the model's parameters.
        dataset_size: the samples in the training set.
        global_batch: the samples of a step over all ranks.
        total_steps: the steps of the whole training; the job file's `steps` goes first, None leaves it
            to that or to `steps(until)`.
        scheduler: a learning-rate scheduler (the loop calls its `step`), saved and restored.
        seed: the seed of the order of samples, and of what each rank draws at random.
        also: more things to save and restore, by name (a GradScaler, averaged weights).
        in_place: the loop allows that `rank`, `world_size` and its share of the batch change between two
            steps: ranks then come and go while it trains, without a restart.
        reproducible: the result is the same to the last bit over any rank counts, on one type of device; the
            loop then computes each part that `shards` yields by itself. Costs time: see docs/resizing.md.
        shards: the parts into which each global batch is then cut (8); there cannot be more ranks than that.
        rehearse: a function called on a rank that is about to join a running training, to pay for
            what the first step costs more; what it changes in model and optimizer is overwritten.
        ranks: what `join()` gave; for models that need the process group before, as `fully_shard` does. Such
            a model is not moved, and saved by all ranks together.
        checkpoint_dir: a folder for checkpoints, for runs without hpcsched, which otherwise save nothing;
            such a run goes on from the newest checkpoint in there.
        checkpoint_every_s: the seconds between these checkpoints.
        strategy: how the ranks are used; default: data parallel, with this loop's own steps. `in_place`,
            `reproducible`, `shards` and `rehearse` are the default one's: another is told when it is made.
        hooks: what is called and measured between steps; a trainer's, see `Parts.callbacks`.

    Raises ConfigError when the arguments do not fit the environment or the checkpoint, LaunchError
    when the ranks do not find each other.
    """

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
        rehearse: Callable[[Session], object] | None = None,
        ranks: Peers | None = None,
        checkpoint_dir: str | Path | None = None,
        checkpoint_every_s: float = 600.0,
        strategy: Strategy | None = None,
        hooks: Hooks | None = None,
    ) -> None:
        also = {**(also or {}), **(hooks.states() if hooks else {})}
        training = TrainingState(
            model=model,
            optimizer=optimizer,
            scheduler=scheduler,
            also=also,
            dataset_size=dataset_size,
            global_batch=global_batch,
            total_steps=total_steps,
            seed=seed,
        )
        if strategy is not None:
            _refuse_default(in_place=in_place, reproducible=reproducible, shards=shards, rehearse=rehearse)
        self._strategy = strategy or DataParallel(
            in_place=in_place,
            reproducible=reproducible,
            shards=shards,
            rehearse=(lambda: rehearse(self)) if rehearse is not None else None,
        )
        self._life = Lifecycle(
            training,
            self._strategy,
            ranks=ranks,
            checkpoint_dir=checkpoint_dir,
            checkpoint_every_s=checkpoint_every_s,
        )
        self._training, self._context = training, self._life.context
        self._in_step, self._hooks = False, hooks
        self._life.log.also = hooks.loggers if hooks is not None else []
        self._life.begin()

    # -- what it is -----------------------------------------------------------------------------------

    @property
    def model(self) -> torch.nn.Module:
        """What is trained."""
        return self._training.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer over the model's parameters."""
        return self._training.optimizer

    @property
    def scheduler(self) -> Stateful | None:
        """The learning-rate scheduler."""
        return self._training.scheduler

    @property
    def also(self) -> dict[str, Stateful]:
        """What else is saved, by name."""
        return self._training.also

    @property
    def seed(self) -> int:
        """The seed of the order of samples, and of what each rank draws at random."""
        return self._training.seed

    @property
    def global_batch(self) -> int:
        """The samples of a step over all ranks."""
        return self._training.global_batch

    @property
    def total_steps(self) -> int | None:
        """The steps of the whole training; None while nobody has said."""
        return self._training.total_steps

    @total_steps.setter
    def total_steps(self, steps: int | None) -> None:
        self._training.total_steps = steps

    @property
    def step(self) -> int:
        """The steps done so far."""
        return self._training.step

    @property
    def samples(self) -> int:
        """The samples seen so far, over all ranks."""
        return self._training.samples

    @property
    def resumed(self) -> bool:
        """Whether it went on from a checkpoint, or from other ranks' state."""
        return self._training.resumed

    @property
    def device(self) -> torch.device:
        """Where this rank trains."""
        return self._context.device

    @property
    def rank(self) -> int:
        """This rank's number now; a resize in place may change it between two steps."""
        return self._context.rank

    @property
    def world_size(self) -> int:
        """How many ranks share the global batch now."""
        return self._context.world_size

    @property
    def reproducible(self) -> bool:
        """Whether the result is the same to the last bit over any rank counts."""
        return self._strategy.reproducible

    # -- a training -----------------------------------------------------------------------------------

    def steps(self, until: int | None = None) -> Iterator[torch.Tensor]:
        """Yield, for each step up to `until` (default: `total_steps`), this rank's sample indices.

        int64 on the CPU, shape [this rank's share of the global batch]. Between two steps the state
        is saved when that is due; when asked to suspend it is saved and SystemExit(75) ends the
        process (74 if it cannot be saved). A step counts as done when the next one is asked for.

        Raises ValueError when neither `until` nor `total_steps` is known, RuntimeError when a step
        of several ranks did not call `backward` for all its samples.
        """
        last = self._training.last_step(until)
        while self._training.step < last and not self._training.stopped:
            self._life.between_steps()
            indices = self._strategy.begin_step()
            self._in_step = True
            try:
                yield indices
            except GeneratorExit:  # the loop was left with `break`
                if self._strategy.step_made():
                    self._life.count_step(last)
                raise
            finally:
                self._in_step = False
            self._strategy.check_step()
            self._life.count_step(last)
            if self._hooks is not None:
                self._hooks.step_made(self)

    def epochs(self, number: float) -> Iterator[Epoch]:
        """Yield the epochs that are left of so many passes over the data; iterate over each as over `steps`.

        What is to be done once an epoch stands behind the inner loop, such as `scheduler.step()`: it is done
        once for each, however often the training is suspended. An epoch ends with the step that covers the
        rest of the data. Where the job file says `steps` or `epochs`, or `total_steps` was given, that goes
        first.
        """
        self._life.end_after(number)
        training, peers = self._training, self._context.peers

        def make(epoch: int, until: int) -> Epoch:
            training.sums.begin(epoch)
            return Epoch(epoch, until, sums=training.sums, peers=peers, steps=self.steps)

        yield from epochs_left(training, training.last_step(), make)

    def log(self, metrics: Mapping[str, float]) -> None:
        """Log metrics by name, for the step that is being made, else for the newest: see docs/logging.md.

        Rank 0's count. Raises ValueError for names that are reserved (step, t, attempt) or cannot be printed.
        """
        self._life.log.write(metrics, step=self._training.step + self._in_step)

    def stop(self) -> None:
        """Make no more steps after this one: the training is complete. To be called on all ranks alike."""
        self._training.stopped = True

    def agreed(self, metrics: Metrics) -> Metrics:
        """Rank 0's metrics, on every rank; all ranks call this."""
        found: Metrics = self._context.peers.tell(dict(metrics), dict[str, float])
        return found

    def save_beside(self, name: str, state: Mapping[str, Any]) -> None:
        """Write a file of this name into the folder of checkpoints, whole or not at all; nothing without one.

        Raises StoreError.
        """
        self._context.saves.save_beside(name, state)

    def train(self, metrics: Metrics | Callable[[], Metrics] | None = None) -> None:
        """Make all steps as the strategy makes them, then `finish`."""
        if self._hooks is not None:
            self._hooks.start(self)
        for _ in self.steps():
            self._life.train_step()
        if self._hooks is not None:
            self._hooks.end(self)
            metrics = self._hooks.final
        self.finish(metrics)

    def backward(
        self,
        losses: torch.Tensor,
        *,
        scale: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Add this rank's part of the gradient of the mean loss over the global batch.

        May be called several times in a step, with the losses of some of its samples each: once all
        have been, the gradients are summed over the ranks.

        Args:
            losses: one loss a sample, shape [samples]; or their mean, shape [], over the whole share (over
                the part that `shards` gave).
            scale: applied before the backward pass, e.g. `scaler.scale` of a GradScaler.

        Returns the mean of `losses`, detached, shape []. Raises ValueError for other shapes.
        """
        return self._shared.backward(losses, scale=scale)

    def shards(self, indices: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the parts of this rank's `indices` that are to be computed one by one.

        All of them at once, unless the training is to be `reproducible`.
        """
        return self._shared.shards(indices)

    def upcoming(self, until: int | None = None) -> Iterator[list[int]]:
        """What `steps` is going to yield, as lists: a DataLoader's `batch_sampler`, to read ahead.

        Raises RuntimeError once a resize in place has changed the shares: ask for it anew then.
        """
        for parts in self.upcoming_places(until):
            yield [index for part in parts for _, index in part]

    def upcoming_places(self, until: int | None = None) -> Iterator[list[list[tuple[int, int]]]]:
        """The same, part by part of `shards`, with the place of each sample in the stream of all samples."""
        return self._shared.upcoming_places(until)

    def end_after(self, epochs: float | None) -> None:
        """Where nobody has said how many steps to train: for so many passes over the data, as the job says,
        else as given here, else one."""
        self._life.end_after(epochs)

    def steps_for(self, epochs: float) -> int:
        """The steps that cover the dataset this many times, rounded up."""
        return self._training.steps_for(epochs)

    def finish(self, metrics: Metrics | Callable[[], Metrics] | None = None) -> None:
        """Save the final state and part from the other ranks; call it once, after the last step.

        `metrics` (numbers by name, or a function that returns them) is asked for on rank 0 only, after
        the other ranks were let go, and goes into STATE.json. Exits with 74 if nothing can be saved.
        """
        self._life.finish(metrics)

    @property
    def _shared(self) -> DataParallel:
        assert isinstance(self._strategy, DataParallel), "this strategy makes its steps itself"
        return self._strategy


def _refuse_default(**options: Any) -> None:
    """Refuse what only the default strategy is told by a session; it would be passed over."""
    for key, value in options.items():
        if value not in (None, False):
            got = "given together with a strategy"
            raise ConfigError(where="training", key=key, got=got, accepted="one or the other")


def session_of(parts: Parts, strategy: Strategy | None = None, **options: Any) -> Session:
    """A session of these parts, in training mode, which ends when `parts.epochs` are over.

    `options` are more of `Session`'s arguments. Raises ConfigError for parts that the strategy does not
    compute.
    """
    if not getattr(strategy, "mixed", False):
        refuse_mixed(parts)
    parts.model.train()
    hooks = Hooks(parts) if is_watched(parts) else None
    session = Session(
        hooks=hooks,
        model=parts.model,
        optimizer=parts.optimizer,
        scheduler=parts.scheduler,
        dataset_size=parts.size,
        global_batch=parts.global_batch,
        seed=parts.seed,
        strategy=strategy,
        **options,
    )
    session.end_after(parts.epochs)
    return session


def train(trainer: Trainer, env: JobEnv, strategy: Callable[[Parts], Strategy], **options: Any) -> None:
    """Train to the end by the strategy that is made for the trainer's parts; save the final state and its
    metrics. `options` are more of `Session`'s arguments."""
    parts = build(trainer, env.args)
    session_of(parts, strategy(parts), **options).train(lambda: evaluate(parts))
