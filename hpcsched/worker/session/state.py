"""The state of a training: what is trained, how far it is, and what a checkpoint of it holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Optional, Protocol, Union

import torch

from hpcsched.errors import ConfigError
from hpcsched.worker.process.storable import storable
from hpcsched.worker.session.sampler import Sampler
from hpcsched.worker.session.sums import EpochSums

SUMS = "sums of the epoch"
"""Their name among what is saved besides."""

Loss = Union[torch.Tensor, Callable[[], Optional[torch.Tensor]], None]


class Stateful(Protocol):
    """Anything that can hand out its state and take it back: schedulers, scalers, averages."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


class TrainingState:
    """A training as this rank has it.

    `step` and `samples` are done so far. `global_batch` is that of the coming step; `step_samples` is what a
    step of the job counts for: the batch that the training began with. `made` counts the steps of this
    process; `stopped`: no more are to be made. `sums` is what is added up in an epoch. `loss` is the mean
    loss of the newest step, shape [], or a function that gives it. `spread`: the model is spread over the
    ranks (`fully_shard`), so no rank has all of it.
    """

    def __init__(
        self,
        *,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Stateful | None,
        also: Mapping[str, Stateful] | None,
        dataset_size: int,
        global_batch: int,
        total_steps: int | None,
        seed: int,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.sums = EpochSums()
        self.also = {**(also or {}), SUMS: self.sums}
        self.sampler = Sampler(dataset_size, seed)
        self.global_batch = self.step_samples = global_batch
        self.total_steps = total_steps
        self.seed = seed
        self.step = 0
        self.samples = 0
        self.made = 0
        self.resumed = self.stopped = False
        self.loss: Loss = None
        self.spread = any(hasattr(parameter, "device_mesh") for parameter in model.parameters())
        if scheduler is not None:
            storable(scheduler.state_dict(), "scheduler")  # better now than at the first save

    def last_step(self, until: int | None = None) -> int:
        """The step after which the training ends, or comes to `until`. Raises ValueError if nobody knows."""
        if until is None and self.total_steps is None:
            raise ValueError("how many steps? give Session total_steps, or steps() an `until`")
        return min(x for x in (until, self.total_steps) if x is not None)

    def steps_for(self, epochs: float) -> int:
        """The steps that cover the dataset this many times, rounded up."""
        return -int(-epochs * self.sampler.size // self.step_samples)

    def last_loss(self) -> float | None:
        """The loss of the newest step; None where it is not known, or no number."""
        loss = self.loss() if callable(self.loss) else self.loss
        number = None if loss is None else float(loss)
        return number if number is not None and math.isfinite(number) else None  # JSON has no NaN

    def state_dict(self, generators: list[Any], shards: dict[str, Any] | None = None) -> dict[str, Any]:
        """What a checkpoint holds. `generators` are the random generators by rank; `shards` those of a
        reproducible training."""
        return {
            "schema": 1,
            "step": self.step,
            "samples": self.samples,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "sampler": self.sampler.state(self.samples),
            "rng": generators,
            "shards": shards,
            "extra": {
                name: thing.state_dict()
                for name, thing in self.also.items()
                if thing is not self.sums or self.sums.epoch >= 0  # only of a loop over epochs
            },
        }

    def load_state_dict(self, state: Mapping[str, Any], where: str) -> None:
        """Put a state in the place of ours; `where` says whence it came.

        Raises ConfigError when it is not of this training.
        """
        sampler = state["sampler"]
        if sampler["size"] != self.sampler.size:
            raise ConfigError(
                where=where,
                key="dataset_size",
                got=f"{self.sampler.size} samples",
                accepted=f"{sampler['size']}, as when this checkpoint was saved",
            )
        if not self.spread:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
        if self.scheduler is not None and state["scheduler"] is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        for name, thing in self.also.items():
            if name in state["extra"]:
                thing.load_state_dict(state["extra"][name])
        self.goes_on(sampler, step=state["step"], samples=sampler["position"])

    def goes_on(self, sampler: Mapping[str, Any], *, step: int, samples: int) -> None:
        """It is at this step of an earlier process from now on; `sampler` is what that one's `state` gave."""
        self.sampler = Sampler(sampler["size"], sampler["seed"])
        self.step, self.samples, self.resumed = step, samples, True

    def tensors(self) -> dict[str, Any]:
        """The tensors that a state in memory is copied into: not what the user may hold on to or compare.

        Where the optimizer has none yet, the device on which it will keep them.
        """
        parameters = self.model.named_parameters(remove_duplicate=False)
        model = {name: parameter.detach() for name, parameter in parameters}
        numbered = enumerate(p for group in self.optimizer.param_groups for p in group["params"])
        devices = {number: parameter.device for number, parameter in numbered}
        return {"model": model, "optimizer": {"state": devices | self.optimizer.state_dict()["state"]}}
