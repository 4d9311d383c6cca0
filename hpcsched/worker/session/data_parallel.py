"""Data parallel: every rank has the whole model and an equal share of each global batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from hpcsched.contract.seats import Seat
from hpcsched.errors import ConfigError
from hpcsched.worker.process.contract import say
from hpcsched.worker.ranks.gradient_sum import GradientSum
from hpcsched.worker.ranks.reproducible import VirtualShards, pin_threads
from hpcsched.worker.session.agreement import Agreement
from hpcsched.worker.session.batches import in_micro_batches
from hpcsched.worker.session.context import Context
from hpcsched.worker.session.replicated import Replicated
from hpcsched.worker.session.sampler import share
from hpcsched.worker.session.state import TrainingState
from hpcsched.worker.session.trainer import Parts, Place, clip, read, rehearse


class DataParallel(Replicated):
    """Each step is that of a single process on the whole global batch.

    With `parts` in fp16 the loss is scaled. All ranks have the same gradients, so they skip the same steps. A
    step that is skipped counts like any other: its samples have been seen, and the scheduler goes on.

    Args:
        parts: of the training, for `train_step`; None where the user's own loop makes the steps.
        micro_batch: the most samples that a rank takes through the model at a time; larger shares are split
            and their gradients added up, which changes memory and nothing else.
        in_place: ranks may come and go between two steps.
        reproducible: the same result to the last bit over any rank counts.
        shards: the parts into which each global batch is then cut (8).
        rehearse: what a rank that is about to join does first; by default a step, if there are `parts`.
    """

    mixed = True

    def __init__(
        self,
        parts: Parts | None = None,
        *,
        micro_batch: int | None = None,
        in_place: bool = True,
        reproducible: bool = False,
        shards: int | None = None,
        rehearse: Callable[[], object] | None = None,
    ) -> None:
        self.in_place, self.reproducible = in_place, reproducible
        self._parts, self._micro_batch = parts, micro_batch
        self._count, self._rehearse = shards, rehearse or (self._make_step if parts is not None else None)
        self._virtual: VirtualShards | None = None
        self._indices = torch.empty(0, dtype=torch.int64)
        self._fed = self._share_size = self._part_size = 0
        self._batches: Iterator[Any] = iter(())
        self._scaler: torch.amp.GradScaler | None = None
        self._read_for: tuple[int, int] | None = None

    def refuses(self, training: TrainingState, world_size: int, seats: Sequence[Seat]) -> str:
        if why := super().refuses(training, world_size, seats):
            return why
        if self._virtual is not None and world_size > self._virtual.count:
            return f"{self._virtual.count} shards cannot be computed by {world_size} ranks"
        return ""

    def setup(self, context: Context, agreement: Agreement) -> None:
        super().setup(context, agreement)
        training = context.training
        if training.spread:
            self._setup_spread()
        self._gradients = GradientSum(training.model.parameters(), context.peers)
        if self._parts is not None and self._parts.precision == "fp16":
            self._scaler = torch.amp.GradScaler(context.device.type)
            training.also["grad_scaler"] = self._scaler
            # The scheduler complains where the first step is skipped, and nobody could do anything about it.
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
        if self.reproducible:
            self._virtual = VirtualShards(
                training.model,
                context.peers,
                count=self._count,
                global_batch=training.global_batch,
                seed=training.seed,
            )
            if context.device.type == "cpu" and not (context.env and context.env.joining):
                pin_threads(1)  # how many cores a rank has depends on how many ranks there are

    def _setup_spread(self) -> None:
        from hpcsched.worker.checkpoint.sharded import sum_gradients  # takes its time to import

        if self.reproducible:
            raise ConfigError(
                where="training",
                key="reproducible",
                got="a model that is spread over the ranks",
                accepted="a model that every rank has whole",
            )
        sum_gradients(self.training.model, self.world_size)

    def warm_up(self) -> None:
        if self._rehearse is not None:
            self._rehearse()
        if self._virtual is None:
            self._gradients.prepare()
        super().warm_up()

    def _make_step(self) -> None:
        assert self._parts is not None
        rehearse(self._parts, next(self.batches(loaders=0, until=self.training.step + 1)))

    # -- a step ------------------------------------------------------------------------------------------

    def begin_step(self) -> torch.Tensor:
        training = self.training
        if self._virtual is not None:
            self._virtual.begin(training.step)
        else:
            super().begin_step()
        batch = training.sampler.batch(training.samples, training.global_batch)
        self._indices = torch.from_numpy(self._mine(batch).copy())
        self._fed, self._share_size = 0, len(self._indices)
        self._part_size = self._share_size
        return self._indices

    def train_step(self) -> None:
        parts = self._parts
        assert parts is not None, "a loop of the user's own makes the steps"
        if self._read_for != (self.rank, self.world_size):  # what was read ahead is another share's
            self._read_for = self.rank, self.world_size
            self._batches = self.batches(loaders=parts.loaders)
        parts.optimizer.zero_grad()
        scale = None if self._scaler is None else self._scaler.scale
        for part in self.shards(self._indices):
            for _ in range(-(-len(part) // (self._micro_batch or len(part)))):
                self.backward(parts.losses(next(self._batches)), scale=scale)
        if self._scaler is not None:
            self._scaler.unscale_(parts.optimizer)
        self.update()

    def update(self) -> None:
        """The second half of a step: every parameter's `grad` is that of the whole global batch."""
        parts = self._parts
        assert parts is not None
        clip(parts)
        if self._scaler is None:
            parts.optimizer.step()
        else:
            self._scaler.step(parts.optimizer)
            self._scaler.update()
        if parts.scheduler is not None:
            parts.scheduler.step()

    def batches(self, *, loaders: int, until: int | None = None) -> Iterator[Any]:
        """This rank's batches of all coming steps, on its device, at most `micro_batch` samples each."""
        assert self._parts is not None
        places = (
            piece
            for step in self.upcoming_places(until)
            for part in step
            for piece in in_micro_batches(part, self._micro_batch)
        )
        return read(
            self._parts,
            places,
            device=self.device,
            loaders=loaders,
            seeded=self.reproducible,
            step=self.training.step,
        )

    def backward(
        self, losses: torch.Tensor, *, scale: Callable[[torch.Tensor], torch.Tensor] | None = None
    ) -> torch.Tensor:
        """As `Session.backward`."""
        count = losses.numel() if losses.ndim else self._part_size
        if losses.ndim > 1 or self._fed + count > self._share_size:
            raise ValueError(
                f"losses of shape {list(losses.shape)} after {self._fed} of this rank's {self._share_size} "
                "samples; expected one loss a sample (shape [samples]), or their mean (shape [])"
            )
        total = losses.sum() if losses.ndim else losses * count
        part = total / self.training.global_batch
        self._fed += count
        complete = self._fed == self._share_size
        if complete and self.world_size > 1:  # travels while the backward pass computes
            self.agreement.ask()
        summing = complete and self._virtual is None and not self.training.spread
        if summing:
            self._gradients.expect()
        (scale(part) if scale else part).backward()  # type: ignore[no-untyped-call]
        if summing:
            self._gradients.complete()
        loss = self.training.loss = (total / count).detach()
        return loss

    def shards(self, indices: torch.Tensor) -> Iterator[torch.Tensor]:
        """As `Session.shards`."""
        for part in (indices,) if self._virtual is None else self._virtual.parts(indices):
            self._part_size = len(part)
            yield part

    def step_made(self) -> bool:
        return self._fed == self._share_size

    def check_step(self) -> None:
        step = self.training.step
        if self._virtual is not None and not self._virtual.complete:
            raise RuntimeError(f"step {step}: go through all of Session.shards(indices), to its end")
        if self.world_size > 1 and self._fed != self._share_size:
            raise RuntimeError(
                f"step {step}: Session.backward got {self._fed} of this rank's "
                f"{self._share_size} samples; it needs each of them once"
            )

    def upcoming_places(self, until: int | None = None) -> Iterator[list[list[Place]]]:
        """As `Session.upcoming_places`."""
        training, ranks = self.training, (self.rank, self.world_size)
        samples = training.samples
        for _ in range(training.step, training.last_step(until)):
            if ranks != (self.rank, self.world_size):
                raise RuntimeError("the ranks have changed: ask Session.upcoming for the new shares")
            batch = training.sampler.batch(samples, training.global_batch).tolist()
            mine = self._mine(list(enumerate(batch, samples)))
            yield [mine] if self._virtual is None else self._virtual.split(mine)
            samples += training.global_batch

    def _mine(self, batch: Any) -> Any:
        """This rank's share of what belongs to a global batch."""
        if self._virtual is not None:
            return batch[self._virtual.place]
        return share(batch, self.rank, self.world_size)

    # -- its state ---------------------------------------------------------------------------------------

    def state_dict(self, generators: list[Any]) -> dict[str, Any]:
        return self.training.state_dict(generators, None if self._virtual is None else self._virtual.state())

    def load_state_dict(self, state: dict[str, Any], where: str) -> None:
        super().load_state_dict(state, where)
        kept = state.get("shards")
        for line in self._virtual.restore(kept, where) if self._virtual and kept else ():
            if self.rank == 0:
                say(line)
