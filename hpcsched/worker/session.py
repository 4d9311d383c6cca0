"""Makes a training loop elastic: it can be suspended at any step and go on at another rank count."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from hpcsched.errors import ConfigError, StoreError
from hpcsched.worker import rng
from hpcsched.worker.checkpoint import CheckpointStore, read_checkpoint, storable
from hpcsched.worker.contract import EXIT_CANNOT_SAVE, EXIT_SUSPENDED, JobEnv, Progress, StopFlag, say
from hpcsched.worker.gradients import GradientSum
from hpcsched.worker.rendezvous import Peers, own_device
from hpcsched.worker.sampler import Sampler, share
from hpcsched.worker.startup import exit_quickly

Metrics = Mapping[str, float]


class Stateful(Protocol):
    """Anything that can hand out its state and take it back: schedulers, scalers, averages."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


class Session:
    """One training as seen by one rank: restores it at the start, saves it, leaves when asked to.

        session = Session(model=model, optimizer=optimizer, dataset_size=len(x), global_batch=64,
                          total_steps=1000)
        for indices in session.steps():               # this rank's samples of the next global batch
            optimizer.zero_grad()
            session.backward(loss(model(x[indices]), y[indices]))       # per-sample losses, or a mean
            optimizer.step()
        session.finish(lambda: {"accuracy": accuracy(model)})

    The global batch is the same at every rank count, and gradients are means over all of it. Run
    without hpcsched, it is an ordinary single-process loop on the GPU, if there is one, or the CPU.

    Args:
        model: moved to `session.device` in place; use it as it is, it needs no wrapper.
        optimizer: built on the model's parameters.
        dataset_size: samples in the training set.
        global_batch: samples in a step, over all ranks.
        total_steps: steps of the whole training; the job file's `steps` goes first, None leaves it
            to that or to `steps(until)`.
        scheduler: learning-rate scheduler (the loop calls its `step`), saved and restored.
        seed: of the order of samples, and of what each rank draws at random.
        also: more things to save and restore, by name (a GradScaler, averaged weights).
        checkpoint_dir, checkpoint_every_s: for runs without hpcsched, which otherwise save nothing;
            such a run goes on from the newest checkpoint in there.

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
        checkpoint_dir: str | Path | None = None,
        checkpoint_every_s: float = 600.0,
    ) -> None:
        env = self._env = JobEnv.from_environ()
        if env is not None and global_batch < env.world_size:
            raise ConfigError(
                where="training",
                key="global_batch",
                got=f"{global_batch} samples for {env.world_size} ranks",
                accepted="at least one sample for each rank",
            )
        self.model = model
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.also = dict(also or {})
        self.global_batch = global_batch
        self.total_steps = env.steps if env is not None and env.steps is not None else total_steps
        self.seed = seed
        self.step = 0
        self.samples = 0
        self.resumed = False
        self._sampler = Sampler(dataset_size, seed)
        self._fed = 0
        self._share_size = 0
        self._loss: torch.Tensor | None = None
        self._answer: Callable[[], tuple[bool, ...]] | None = None
        self._saved_step: int | None = None
        self._checkpoint: Path | None = None
        if scheduler is not None:
            storable(scheduler.state_dict(), "scheduler")  # better now than at the first save

        self._flag = StopFlag(env.notify_pid if env else None)
        elastic = env is None or self._flag.install()
        self.device = own_device(env)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self._peers = Peers.join(env, self.device)
        self.rank, self.world_size = self._peers.rank, self._peers.world_size
        self._progress = Progress(env.progress_fd if env else None)
        self._every_s = env.checkpoint_every_s if env else checkpoint_every_s
        folder = env.checkpoint_dir if env else checkpoint_dir
        self._store = CheckpointStore(folder, env.keep if env else 2) if folder is not None else None
        model.to(self.device)
        self._gradients = GradientSum(model.parameters(), self._peers)
        self._restore(wanted=env is None or env.resume)
        self._next_save = time.monotonic() + self._every_s
        (cannot,) = self._peers.agree(not elastic)  # also: all ranks have come this far
        if env is not None and self.rank == 0 and not cannot:
            env.mark_ready()

    # What a loop calls.

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
            self._peers.copy_from_first(self.model.buffers())
            indices = self._share_at(self.samples)
            self._fed, self._share_size = 0, len(indices)
            try:
                yield indices
            except GeneratorExit:  # the loop was left with `break`
                if self._fed == self._share_size:
                    self._count_step(last)
                raise
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
            losses: one loss a sample, shape [samples]; or their mean, shape [], over the whole share.
            scale: applied before the backward pass, e.g. `scaler.scale` of a GradScaler.

        Returns the mean of `losses`, detached, shape []. Raises ValueError for other shapes.
        """
        count = losses.numel() if losses.ndim else self._share_size
        if losses.ndim > 1 or self._fed + count > self._share_size:
            raise ValueError(
                f"losses of shape {list(losses.shape)} after {self._fed} of this rank's {self._share_size} "
                "samples; expected one loss a sample (shape [samples]), or their mean (shape [])"
            )
        total = losses.sum() if losses.ndim else losses * count
        part = total / self.global_batch
        self._fed += count
        complete = self._fed == self._share_size
        if complete:
            if self.world_size > 1:  # travels while the backward pass computes
                self._answer = self._peers.ask(*self._wishes())
            self._gradients.expect()
        (scale(part) if scale else part).backward()  # type: ignore[no-untyped-call]
        if complete:
            self._gradients.complete()
        self._loss = (total / count).detach()
        return self._loss

    def upcoming(self, until: int | None = None) -> Iterator[list[int]]:
        """What `steps` is going to yield, as lists: a DataLoader's `batch_sampler`, to read ahead."""
        samples = self.samples
        for _ in range(self.step, self._last_step(until)):
            yield self._share_at(samples).tolist()
            samples += self.global_batch

    def steps_for(self, epochs: float) -> int:
        """Steps that cover the dataset this many times."""
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
        if self.rank == 0 and self._env is not None and metrics is not None and self._checkpoint is not None:
            try:
                self._write_state(self._checkpoint, metrics() if callable(metrics) else metrics)
            except StoreError as error:
                say(f"the metrics could not be saved: {error}")
                raise SystemExit(EXIT_CANNOT_SAVE) from None
        self._flag.close()

    # How it works.

    def _last_step(self, until: int | None) -> int:
        if until is None and self.total_steps is None:
            raise ValueError("how many steps? give Session total_steps, or steps() an `until`")
        return min(x for x in (until, self.total_steps) if x is not None)

    def _share_at(self, samples: int) -> torch.Tensor:
        batch = self._sampler.batch(samples, self.global_batch)
        return torch.from_numpy(share(batch, self.rank, self.world_size).copy())

    def _count_step(self, last: int) -> None:
        self.step += 1
        self.samples += self.global_batch
        self._report(force=self.step in (1, last))

    def _report(self, *, force: bool) -> None:
        self._progress.report(self.step, self._last_loss, force=force)

    def _last_loss(self) -> float | None:
        loss = None if self._loss is None else float(self._loss)
        return loss if loss is not None and math.isfinite(loss) else None  # JSON has no NaN

    def _boundary(self) -> None:
        """Between two steps: all ranks agree whether to leave, and whether to save."""
        answer, self._answer = self._answer, None
        stop, save = answer() if answer else self._peers.agree(*self._wishes())
        del answer  # holds on to the process group, which must be let go before it is left
        if stop:
            self._suspend()
        elif save:
            error = self._save()
            if error and self.rank == 0:
                say(f"step {self.step}: periodic checkpoint failed, training goes on: {error}")
            self._next_save = time.monotonic() + self._every_s

    def _wishes(self) -> tuple[bool, bool]:
        """Whether this rank should leave, and whether it is time for a periodic checkpoint."""
        due = self.rank == 0 and self._store is not None and time.monotonic() >= self._next_save
        return self._flag.wanted is not None, due

    def _suspend(self) -> None:
        self._report(force=True)
        self._save_or_exit()
        if self.rank == 0 and self._env is not None:
            self._env.wake_agent()
        self._part()
        raise SystemExit(EXIT_SUSPENDED)

    def _save_or_exit(self) -> None:
        """Save for good; if that fails once more with all the room old checkpoints can give, exit 74."""
        error = self._save()
        if error and self._store is not None:
            if self.rank == 0:
                say(f"{error}; trying again without the older checkpoints")
                self._store.prune(1, thorough=True)
            error = self._save()
        if error:
            if self.rank == 0:
                say(f"step {self.step} could not be saved: {error}")
            self._part()
            raise SystemExit(EXIT_CANNOT_SAVE)

    def _save(self) -> str | None:
        """Save the state of this step, all ranks together; returns what went wrong, the same on all."""
        if self._store is None:
            return None
        news = self._saved_step != self.step
        generators = self._peers.gather(rng.capture(self.device)) if news else []
        error: str | None = None
        if self.rank == 0:
            try:
                if news or self._checkpoint is None:
                    self._checkpoint = self._store.save(self._state(generators))
                self._write_state(self._checkpoint)
            except StoreError as problem:
                error = str(problem)
        error = self._peers.tell(error)
        if error is None:
            self._saved_step = self.step
        return error

    def _state(self, generators: list[Any]) -> dict[str, Any]:
        return {
            "schema": 1,
            "step": self.step,
            "samples": self.samples,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "sampler": self._sampler.state(self.samples),
            "rng": generators,
            "extra": {name: thing.state_dict() for name, thing in self.also.items()},
        }

    def _write_state(self, checkpoint: Path, metrics: Metrics | None = None) -> None:
        if self._env is None:
            return
        try:
            self._env.write_state(
                step=self.step,
                samples=self.samples,
                checkpoint=checkpoint,
                metrics=metrics,
                loss=self._last_loss(),
            )
        except OSError as error:
            raise StoreError(
                f"{self._env.job_dir}/STATE.json: cannot be written: {error.strerror}"
            ) from error

    def _restore(self, *, wanted: bool) -> None:
        """Go on from the newest good checkpoint, if there is one and it is wanted."""
        path: Path | None = None
        if self._store is not None and self.rank == 0:
            self._store.clear_leftovers()
            if wanted:
                path = self._store.newest()
                self._store.quarantine_newer(path)
                if path is None and self._env is not None:
                    say(f"{self._store.folder}: no good checkpoint to resume from; starting at step 0")
            else:
                self._store.set_aside(f"before-attempt-{self._env.attempt if self._env else 0}")
        path = self._peers.tell(path)
        if path is None:
            self._peers.copy_from_first([*self.model.parameters(), *self.model.buffers()])
            if self.world_size > 1:  # else every rank would drop out the same neurons
                rng.reseed(self.seed, 0, self.rank)
            return
        state = read_checkpoint(path)
        sampler = state["sampler"]
        if sampler["size"] != self._sampler.size:
            raise ConfigError(
                where=str(path),
                key="dataset_size",
                got=f"{self._sampler.size} samples",
                accepted=f"{sampler['size']}, as when this checkpoint was saved",
            )
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scheduler is not None and state["scheduler"] is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        for name, thing in self.also.items():
            if name in state["extra"]:
                thing.load_state_dict(state["extra"][name])
        self._sampler = Sampler(sampler["size"], sampler["seed"])
        self.step, self.samples = state["step"], sampler["position"]
        self._saved_step, self._checkpoint, self.resumed = self.step, path, True
        if len(state["rng"]) == self.world_size:
            rng.restore(state["rng"][self.rank], self.device)
        else:
            rng.reseed(self.seed, self.step, self.rank)
        if self.rank == 0:
            # Tells the agent which step this attempt goes on from: a damaged checkpoint may be newer.
            try:
                self._write_state(path)
            except StoreError as error:
                say(str(error))

    def _part(self) -> None:
        """Leave the other ranks. The signal handlers stay: being told twice must not end us half-way."""
        self._answer = None
        self._peers.close()
        if self._env is not None:
            exit_quickly()
