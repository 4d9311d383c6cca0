"""How a user describes a training to the library, once for every strategy."""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from hpcsched.compat import dataclass
from hpcsched.errors import ConfigError
from hpcsched.worker.process.contract import say
from hpcsched.worker.process.startup import fewer_collections
from hpcsched.worker.ranks.reproducible import Seeded
from hpcsched.worker.session.state import Stateful

Place = tuple[int, int]
"""A sample: its place in the stream of all samples, and its index in the dataset."""

PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""What `Parts.precision` can be."""


class Scheduler(Stateful, Protocol):
    """What the library needs of a learning-rate scheduler."""

    def step(self) -> Any: ...


@dataclass(kw_only=True)
class Parts:
    """The parts of a training.

    Attributes:
        model: the model, built on the CPU; the library moves it to the device and trains it in place.
        optimizer: an optimizer over the model's parameters.
        dataset: anything with `len` and integer indexing; or a tuple of tensors, or a TensorDataset,
            with the samples along the first dimension (fast: indexed a whole batch at a time).
        global_batch: the samples of a step over all ranks; the same at every rank count.
        loss: a function of (model, batch) that returns the losses of the samples, shape [samples]. The
            library averages over the global batch. `batch` is a tuple of tensors for tensor datasets, else
            what `collate` makes of a list of samples; its tensors are on the model's device.
        scheduler: a learning-rate scheduler, advanced after every step.
        evaluate: a function of the model (in evaluation mode, no gradients) that returns numbers by name;
            called at the end.
        evaluate_every: the number of steps after which it is called too, or "epoch"; on every rank, and
            rank 0's numbers count. They are logged, and told to the callbacks.
        callbacks: what is called while it trains, on every rank: `Callback`, `EarlyStopping`,
            `ModelCheckpoint`, loggers.
        collate: a function that makes a batch of a list of samples; default: torch's default_collate.
        seed: the seed of the order of the samples and of the ranks' random numbers.
        epochs: the passes over the data when the job names no number of steps; default 1.
        loaders: the processes that read a map-style dataset ahead (0: read in the training process).
        data: a name of the dataset; packed jobs read it once if all give the same name (default: if their
            datasets hold the same).
        precision: the type that `loss` is computed in under torch's autocast, "bf16" or "fp16" (None: as it
            stands). With "fp16" the loss is scaled (torch's GradScaler), and a step whose gradients overflow
            changes no parameter.
        clip_norm: the largest L2 norm of the gradient of the global batch, over the optimizer's parameters; a
            larger one is scaled down to it.
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    dataset: Dataset[Any] | Sequence[Any] | tuple[torch.Tensor, ...]
    global_batch: int
    loss: Callable[[torch.nn.Module, Any], torch.Tensor]
    scheduler: Scheduler | None = None
    evaluate: Callable[[torch.nn.Module], Mapping[str, float]] | None = None
    evaluate_every: int | str | None = None
    callbacks: Sequence[Any] = ()
    collate: Callable[[list[Any]], Any] | None = None
    seed: int = 0
    epochs: float | None = None
    loaders: int = 0
    data: str | None = None
    precision: str | None = None
    clip_norm: float | None = None

    @property
    def tensors(self) -> tuple[torch.Tensor, ...] | None:
        """The dataset as tensors that can be indexed by a whole batch, where it is such a one."""
        if isinstance(self.dataset, TensorDataset):
            return tuple(self.dataset.tensors)
        if isinstance(self.dataset, tuple) and all(isinstance(t, torch.Tensor) for t in self.dataset):
            return self.dataset
        return None

    @property
    def size(self) -> int:
        """Samples in the dataset."""
        return len(self.tensors[0]) if self.tensors else len(self.dataset)  # type: ignore[arg-type]

    def losses(self, batch: Any) -> torch.Tensor:
        """The losses of these samples, computed in `precision`."""
        if self.precision is None:
            return self.loss(self.model, batch)
        device = next(self.model.parameters()).device.type
        with torch.autocast(device, dtype=PRECISIONS[self.precision]):
            return self.loss(self.model, batch).float()  # their sum is not to be rounded

    def batch(self, indices: Sequence[int]) -> Any:
        """The samples of these indices as one batch, where the dataset is."""
        if self.tensors is not None:
            chosen = torch.tensor(indices)
            return tuple(t[chosen.to(t.device)] for t in self.tensors)
        return (self.collate or default_collate)([self.dataset[i] for i in indices])


class Trainer(ABC):
    """A training job: a subclass that builds its parts.

    A job file names it as `trainer = "package.module:Name"`.
    """

    @abstractmethod
    def build(self, args: dict[str, Any]) -> Parts:
        """Make the parts of the training.

        Called once in every rank, with torch, numpy and Python seeded alike, so that all build the
        same.

        Args:
            args: the job file's `args`.
        """


def build(trainer: Trainer, args: Mapping[str, Any]) -> Parts:
    """Have the parts built with all random generators seeded, so that all ranks agree.

    The seed is `args["seed"]` where that is a whole number, else 0. Raises ConfigError when what
    comes back cannot be trained.
    """
    seed = args.get("seed", 0)
    seed = seed if isinstance(seed, int) else 0
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    with fewer_collections():  # the first optimizer of a process imports half of torch's compiler
        parts = trainer.build(dict(args))
    where = f"{type(trainer).__module__}:{type(trainer).__qualname__}.build"
    if not isinstance(parts, Parts):
        raise ConfigError(where=where, got=f"returned a {type(parts).__name__}", accepted="Parts")
    for key, value in (("dataset", parts.size), ("global_batch", parts.global_batch)):
        if value < 1:
            raise ConfigError(where=where, key=key, got=f"{value} samples", accepted="at least 1")
    if parts.precision not in (None, *PRECISIONS):
        accepted = f"None, {', '.join(map(repr, PRECISIONS))}"
        raise ConfigError(where=where, key="precision", got=repr(parts.precision), accepted=accepted)
    clip: Any = parts.clip_norm  # a user's: anything
    number = isinstance(clip, Real) and not isinstance(clip, bool)
    if clip is not None and not (number and 0 < clip < math.inf):
        raise ConfigError(
            where=where, key="clip_norm", got=repr(parts.clip_norm), accepted="None, or a positive number"
        )
    return parts


def is_watched(parts: Parts) -> bool:
    """Whether something is called between the steps of this training: only the strategy `ddp` does that."""
    return parts.evaluate_every is not None or bool(parts.callbacks)


def refuse_mixed(parts: Parts, *, taken: Sequence[str] = ()) -> None:
    """Raise ConfigError for parts that a strategy would pass over, which is not data parallel training.

    `taken`: what it does take of `Parts.precision`, and "clip_norm" if it takes that.
    """
    known = [name for name in PRECISIONS if name in taken]
    for key, value, accepted in (
        ("precision", parts.precision, [None, *known]),
        ("clip_norm", None if "clip_norm" in taken else parts.clip_norm, [None]),
        ("evaluate_every", parts.evaluate_every, [None]),
        ("callbacks", list(parts.callbacks) or None, [None]),
    ):
        if value not in accepted:
            words = " or ".join(map(repr, accepted)) + " under this strategy; the strategy 'ddp' takes it"
            raise ConfigError(where="training", key=key, got=repr(value), accepted=words)


def clip(parts: Parts) -> None:
    """Scale the gradients down to `Parts.clip_norm`, where there is one."""
    if parts.clip_norm is not None:
        # The optimizer's only: gradients of others still have the scale, and are those of all steps.
        kept = {id(p) for group in parts.optimizer.param_groups for p in group["params"]}
        clipped = [p for p in parts.model.parameters() if id(p) in kept]
        torch.nn.utils.clip_grad_norm_(clipped, parts.clip_norm)


def read(
    parts: Parts,
    places: Iterator[Sequence[Place]],
    *,
    device: torch.device,
    loaders: int,
    seeded: bool = False,
    step: int = 0,
) -> Iterator[Any]:
    """The batches of these samples, one after the other, on the device.

    Args:
        places: the samples of each batch.
        loaders: processes that read ahead, where that is of use.
        seeded: what is drawn at random for a sample depends on its place, not on which process draws it.
        step: at which all this begins.
    """
    dataset: Any = parts.dataset
    collate: Any = parts.collate
    make: Any = parts.batch
    pieces: Iterator[Any] = ([index for _, index in piece] for piece in places)
    if seeded and parts.tensors is None:
        wrapped = Seeded(parts.dataset, parts.seed, parts.collate)
        dataset, collate, make, pieces = wrapped, wrapped.collate, wrapped.batch, places
    if loaders == 0 or parts.tensors is not None:
        return (to_device(make(piece), device) for piece in pieces)
    # The loader processes inherit handlers that only take a note, so a signal to the whole process
    # group does not end them while the last step still needs them.
    loader = DataLoader(
        dataset,
        batch_sampler=pieces,
        num_workers=loaders,
        collate_fn=collate,
        pin_memory=device.type == "cuda",
        # Its own, so that reading ahead takes nothing out of the generators that are saved.
        generator=torch.Generator().manual_seed(parts.seed + step),
    )
    return (to_device(batch, device) for batch in loader)


def rehearse(parts: Parts, batch: Any) -> None:
    """Pay now for what a first step costs more, with these samples; model and optimizer state are spoilt by
    it.

    Raises OutOfMemoryError if there is no room for a step.
    """
    parts.losses(batch).sum().backward()  # type: ignore[no-untyped-call]
    try:
        parts.optimizer.step()
    except torch.OutOfMemoryError:
        raise  # better now, when it costs the others nothing
    except Exception as error:  # it may need the other ranks
        say(f"the optimizer cannot be rehearsed, so the first step will take longer: {error}")
    parts.optimizer.zero_grad()


@torch.no_grad()
def evaluate(parts: Parts) -> Mapping[str, float]:
    """What the user wants to know at the end; nothing where there is no `evaluate`."""
    if parts.evaluate is None:
        return {}
    parts.model.eval()
    return parts.evaluate(parts.model)


def to_device(batch: Any, device: torch.device) -> Any:
    """The same batch with every tensor in its tuples, lists and dicts on `device`."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(to_device(value, device) for value in batch)
    return batch
