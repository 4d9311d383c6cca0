"""Makes a training loop elastic: it can be suspended at any step and go on at another rank count."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from hpcsched.contract import exits
from hpcsched.errors import StoreError
from hpcsched.worker.process.contract import say
from hpcsched.worker.session.boundary import Elastic
from hpcsched.worker.session.sampler import share

Metrics = Mapping[str, float]


class Session(Elastic):
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

    Raises ConfigError when the arguments do not fit the environment or the checkpoint, LaunchError
    when the ranks do not find each other.
    """

    def steps(self, until: int | None = None) -> Iterator[torch.Tensor]:
        """Yield, for each step up to `until` (default: `total_steps`), this rank's sample indices.

        int64 on the CPU, shape [this rank's share of the global batch]. Between two steps the state
        is saved when that is due; when asked to suspend it is saved and SystemExit(75) ends the
        process (74 if it cannot be saved). A step counts as done when the next one is asked for.

        Raises ValueError when neither `until` nor `total_steps` is known, RuntimeError when a step
        of several ranks did not call `backward` for all its samples.
        """
        last = self._last_step(until)
        while self.step < last:
            self._boundary()
            self._make_alike()
            indices = self._share_at(self.samples)
            self._fed, self._share_size = 0, len(indices)
            self._part_size = self._share_size
            try:
                yield indices
            except GeneratorExit:  # the loop was left with `break`
                if self._fed == self._share_size:
                    self._count_step(last)
                raise
            if self._virtual is not None and not self._virtual.complete:
                raise RuntimeError(f"step {self.step}: go through all of Session.shards(indices), to its end")
            if self.world_size > 1 and self._fed != self._share_size:
                raise RuntimeError(
                    f"step {self.step}: Session.backward got {self._fed} of this rank's "
                    f"{self._share_size} samples; it needs each of them once"
                )
            self._count_step(last)

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
        count = losses.numel() if losses.ndim else self._part_size
        if losses.ndim > 1 or self._fed + count > self._share_size:
            raise ValueError(
                f"losses of shape {list(losses.shape)} after {self._fed} of this rank's {self._share_size} "
                "samples; expected one loss a sample (shape [samples]), or their mean (shape [])"
            )
        total = losses.sum() if losses.ndim else losses * count
        part = total / self.global_batch
        self._fed += count
        complete = self._fed == self._share_size
        if complete and self.world_size > 1:  # travels while the backward pass computes
            self._answer = self._peers.ask(*self._wishes())
        summing = complete and self._virtual is None and not self._spread
        if summing:
            self._gradients.expect()
        (scale(part) if scale else part).backward()  # type: ignore[no-untyped-call]
        if summing:
            self._gradients.complete()
        self._loss = (total / count).detach()
        return self._loss

    def shards(self, indices: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the parts of this rank's `indices` that are to be computed one by one.

        All of them at once, unless the training is to be `reproducible`.
        """
        for part in (indices,) if self._virtual is None else self._virtual.parts(indices):
            self._part_size = len(part)
            yield part

    def upcoming(self, until: int | None = None) -> Iterator[list[int]]:
        """What `steps` is going to yield, as lists: a DataLoader's `batch_sampler`, to read ahead.

        Raises RuntimeError once a resize in place has changed the shares: ask for it anew then.
        """
        for parts in self.upcoming_places(until):
            yield [index for part in parts for _, index in part]

    def upcoming_places(self, until: int | None = None) -> Iterator[list[list[tuple[int, int]]]]:
        """The same, part by part of `shards`, with the place of each sample in the stream of all samples."""
        samples, ranks = self.samples, (self.rank, self.world_size)
        for _ in range(self.step, self._last_step(until)):
            if ranks != (self.rank, self.world_size):
                raise RuntimeError("the ranks have changed: ask Session.upcoming for the new shares")
            batch = self._sampler.batch(samples, self.global_batch).tolist()
            mine = self._mine(list(enumerate(batch, samples)))
            yield [mine] if self._virtual is None else self._virtual.split(mine)
            samples += self.global_batch

    def end_after(self, epochs: float | None) -> None:
        """Where nobody has said how many steps to train: for so many passes over the data, as the job says,
        else as given here, else one."""
        if self.total_steps is None:
            told = self._env.epochs if self._env is not None else None
            self.total_steps = self.steps_for(told or epochs or 1)

    def steps_for(self, epochs: float) -> int:
        """The steps that cover the dataset this many times, rounded up."""
        return -int(-epochs * self._sampler.size // self.global_batch)

    def finish(self, metrics: Metrics | Callable[[], Metrics] | None = None) -> None:
        """Save the final state and part from the other ranks; call it once, after the last step.

        `metrics` (numbers by name, or a function that returns them) is asked for on rank 0 only, after
        the other ranks were let go, and goes into STATE.json. Exits with 74 if nothing can be saved.
        """
        if self._answer is not None:
            self._answer()  # asked in the last step; whatever it is, there is nothing left to suspend
        self._save_or_exit()
        self._part()
        if self.rank == 0 and self._env is not None and metrics is not None:
            values = metrics() if callable(metrics) else metrics
            try:
                self._saves.record(self.step, self.samples, loss=self._last_loss(), metrics=values)
            except StoreError as error:
                say(f"the metrics could not be saved: {error}")
                raise SystemExit(exits.CANNOT_SAVE) from None
        self._flag.close()

    # How it works.

    def _last_step(self, until: int | None) -> int:
        if until is None and self.total_steps is None:
            raise ValueError("how many steps? give Session total_steps, or steps() an `until`")
        return min(x for x in (until, self.total_steps) if x is not None)

    def _make_alike(self) -> None:
        """Before a step: let all ranks begin with what they are to have in common."""
        if self._virtual is not None:
            self._virtual.begin(self.step)
        elif not self._spread:
            self._peers.copy_from_first(self.model.buffers())

    def _share_at(self, samples: int) -> torch.Tensor:
        return torch.from_numpy(self._mine(self._sampler.batch(samples, self.global_batch)).copy())

    def _mine(self, batch: Any) -> Any:
        """This rank's share of what belongs to a global batch."""
        if self._virtual is not None:
            return batch[self._virtual.place]
        return share(batch, self.rank, self.world_size)

    def _advance(self, last: int) -> None:
        """A step is done; `last` is the one after which the training ends."""
        self.step += 1
        self.samples += self.global_batch

    def _count_step(self, last: int) -> None:
        self._advance(last)
        self._begun += 1
        if self._begun == 2 and self.rank == 0:  # the optimizer has its state by now
            self._saves.reserve(self._state([]))
        self._report(force=self.step in (1, last))
