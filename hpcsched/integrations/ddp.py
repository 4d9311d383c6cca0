"""A loop of one's own with DistributedDataParallel, as `torchrun` starts it.

    from hpcsched.integrations.ddp import Elastic

    elastic = Elastic(model=model, optimizer=optimizer, scheduler=scheduler)    # when they are made
    loader = elastic.loader(loader)
    for epoch in elastic.epochs(10):                    # in place of range(10)

or, where batches are made by number, `for step in elastic.steps(1000):` and no loader. Without hpcsched it
changes nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from hpcsched.errors import ConfigError
from hpcsched.integrations.boundary import Boundary, bare
from hpcsched.integrations.global_batch import accumulation
from hpcsched.integrations.metrics import whole_work
from hpcsched.worker.link import Link
from hpcsched.worker.process import rng
from hpcsched.worker.process.contract import say

_STATE = "state.pt"
_LOADER_OPTIONS = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context"),
    *("generator", "prefetch_factor", "persistent_workers", "pin_memory_device"),
)


@dataclasses.dataclass
class _Place:
    """Where a training is: after `step` steps, in `epoch`, in which its loop over the loader, behind `looks`
    others that made no step, has had `batches`, of all ranks together."""

    step: int = 0
    epoch: int = 0
    batches: int = 0
    looks: int = 0


@dataclasses.dataclass(eq=False)
class _Pass:
    """One pass over the loader, behind `others` in the epoch: `had` batches, of all ranks together."""

    others: int
    had: int


class Elastic:
    """Takes up the newest checkpoint, saves when it is due, and leaves when it is told to, on all ranks.

    Give it what has `state_dict` and `load_state_dict`, by any names: the model (wrapped or not), optimizers,
    schedulers, a GradScaler. With several ranks the process group is there before. It loads when it is made;
    a step is acted on when the next one, the next batch, or the next epoch is asked for.

    Args:
        seed: for the order of samples, and for what ranks draw at random after their number has changed.
        parts: what is saved.

    Raises ConfigError for what does not fit, SystemExit: 75 once saved, 74 if it could not be.
    """

    def __init__(self, *, seed: int = 0, **parts: Any) -> None:
        self.link = Link()
        self._seed, self._parts = seed, parts
        self._place = _Place()
        self._boundary = Boundary(self.link, self._save)
        self._loaders = 0
        self._stepped = False
        self._passes: list[_Pass] = []  # under way, such as a look at the samples within a training's
        self._stepping: list[_Pass] = []  # those that were when the optimizer made its step
        self._begun = 0  # passes in this epoch
        self._epochs = 0
        self._epoch_began: int | None = None  # the step; of one that this attempt has not begun: None
        self._total: int | None = None
        self._inside = False
        self._rng: dict[str, Any] | None = None
        self._device = _device(parts)
        for part in parts.values():
            if isinstance(part, torch.optim.Optimizer):
                part.register_step_post_hook(self._note_step)
        if not self.link.active:
            return
        _check(parts, self.link)
        if (found := self.link.checkpoint) is not None:
            self._load(found)

    @property
    def step(self) -> int:
        """The steps made so far, over all attempts; within `epochs` one counts with its optimizer's step."""
        return self._place.step + (self._inside and self._stepped)

    def steps(self, steps: int) -> Iterator[int]:
        """The numbers of the steps from the first one not made yet, up to `steps` - 1.

        For batches that are made by their number: a DataLoader within begins anew where a training goes on.
        """
        if not self.link.active:
            for self._place.step in range(steps):
                yield self._place.step
            self._place.step = steps
            return
        self._begin()
        self._total = steps
        while self._place.step < steps:
            yield from self._given(self._place.step)
            self._count()
            if self._place.step < steps:
                self._boundary.act()
        self._end()

    def epochs(self, epochs: int) -> Iterator[int]:
        """The numbers of the epochs from the first one not over yet; its loop over `loader` goes on behind
        the batches that it has had. Steps are counted by the optimizer's."""
        if not self.link.active:
            self._inside = True
            yield from range(epochs)
            return
        self._begin()
        self._inside = True
        self._epochs = epochs
        self._epoch_began = None if self._place.batches else self._place.step
        while self._place.epoch < epochs:
            yield from self._given(self._place.epoch)
            if self._stepped:  # with a batch whose loop is not known to be over
                self._count()
            self._place = _Place(self._place.step, self._place.epoch + 1)
            self._epoch_began = self._place.step
            self._begun = 0
            if self._place.epoch < epochs:
                self._boundary.act()
        self._inside = False
        self._end()

    def loader(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """The same batches over any number of ranks: `batch_size` is that of all together.

        The order is that of DistributedSampler, whatever the sampler is; the last batch of an epoch is made
        full with samples from the epoch's beginning, or left out with `drop_last`.
        """
        if not self.link.active:
            return loader
        if self._loaders:
            raise _cannot("a second loader", "one: the place in the data is that of one loader")
        self._loaders += 1
        return _Loader(self, loader)  # type: ignore[return-value]

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Log numbers by name after the steps made so far, into the job's metrics. Learning rates (`lr`) are
        logged without it."""
        self._boundary.metrics.log(metrics, self.step)

    def finish(self, metrics: Mapping[str, float] | None = None) -> None:
        """The training is done, with these results."""
        self.link.finish(metrics)

    # -- what the loader asks for -------------------------------------------------------------------------

    def new_pass(self) -> _Pass:
        """Behind the batches that were had before, if it is the one that goes on. Raises ConfigError."""
        if not self._inside:
            raise _cannot("a loop over `loader` outside of `epochs`", "one in each epoch of `epochs`")
        others, place = self._begun, self._place
        self._begun += 1
        self._passes.append(this := _Pass(others, place.batches if others == place.looks else 0))
        return this

    @property
    def epoch(self) -> int:
        """The number of the epoch."""
        return self._place.epoch

    @property
    def seed(self) -> int:
        """Of the order of samples."""
        return self._seed

    def begun(self, this: _Pass, loader: DataLoader[Any]) -> Iterator[Any]:
        """An iterator over it; where it goes on, what was drawn at random before it was drawn before."""
        batches = iter(loader)
        if this.had:
            self._draw_on()
        return batches

    def batch_made(self, this: _Pass, length: int, *, last: bool) -> None:
        """A batch of `length` has been computed, and maybe with it a step: that of the `last` one is acted on
        when the next epoch is asked for, so that what follows the loop is done before. Raises ConfigError."""
        if not self._stepped or this not in self._stepping:
            return
        place = self._place
        if place.batches and place.looks != this.others:
            got = (
                f"steps in loops {place.looks + 1} and {this.others + 1} over `loader` in epoch {place.epoch}"
            )
            raise _cannot(got, "in one, the same when a training goes on: the place is that in it")
        place.looks, place.batches = this.others, this.had
        self._count(length)
        if not last:
            self._boundary.act()

    def passed(self, this: _Pass) -> None:
        """A pass is over, or was left."""
        self._passes.remove(this)

    # -- a training ----------------------------------------------------------------------------------------

    def _note_step(self, *_: Any) -> None:
        self._stepped = self.link.active
        self._stepping = [*self._passes]
        if self._inside and not self._stepped:  # nobody asks at the next batch then
            self._place.step += 1

    def _given(self, number: int) -> Iterator[int]:
        """To a loop; one that is left by `break` or by an error is not suspended from then on."""
        try:
            yield number
        except GeneratorExit:  # other ranks may be anywhere
            self.link.close()
            raise

    def _count(self, length: int | None = None) -> None:
        """A step is made; with a batch of `length` in the epoch, if one of `loader`'s."""
        place, self._stepped = self._place, False
        place.step += 1
        if length is not None and self._epoch_began is not None:
            self._total = whole_work(
                begun=self._epoch_began,
                epochs=self._epochs - place.epoch,
                steps=place.step - self._epoch_began,
                batches=place.batches,
                length=length,
            )
        self._boundary.made(place.step, self._rates(), total=self._total)

    def _rates(self) -> dict[str, float]:
        """The learning rate of each optimizer, as its first group has it."""
        parts = {n: part for n, part in self._parts.items() if isinstance(part, torch.optim.Optimizer)}
        return {
            "lr" if len(parts) == 1 else f"lr-{name}": part.param_groups[0]["lr"]
            for name, part in parts.items()
            if part.param_groups and "lr" in part.param_groups[0]
        }

    def _draw_on(self) -> None:
        """Have random numbers go on from the checkpoint, if there is one."""
        if self._rng is not None:
            rng.restore(self._rng, self._device)
        elif self.link.checkpoint is not None:
            rng.reseed(self._seed, self._place.step, self.link.rank)

    def _begin(self) -> None:
        self._draw_on()
        self._stepped = False
        self.link.ready()

    def _end(self) -> None:
        self._boundary.end(self._place.step)

    def _save(self, folder: Path) -> None:
        torch.save(rng.capture(self._device), folder / _rng_of(self.link.rank))
        if self.link.rank == 0:
            states = {name: _inner(part).state_dict() for name, part in self._parts.items()}
            kept = {"parts": states, "world_size": self.link.world_size, **dataclasses.asdict(self._place)}
            torch.save(kept, folder / _STATE)

    def _load(self, folder: Path) -> None:
        # The program's own files, of nobody else's (`Link`): states of schedulers may hold any object.
        kept = torch.load(folder / _STATE, map_location="cpu", weights_only=False)  # nosec B614 # as said
        if kept["parts"].keys() != self._parts.keys():
            raise _cannot(f"{sorted(kept['parts'])} in {folder}", f"{sorted(self._parts)}, as they are given")
        for name, part in self._parts.items():
            _inner(part).load_state_dict(kept["parts"][name])
        looks = kept.get("looks", 0)  # was not kept by earlier versions
        self._place = _Place(kept["step"], kept["epoch"], kept["batches"], looks)
        if kept["world_size"] == self.link.world_size:
            state = folder / _rng_of(self.link.rank)
            self._rng = torch.load(state, map_location="cpu", weights_only=False)  # nosec B614 # as above


class _Loader:
    """A DataLoader's batches in an order that does not depend on the ranks; all else is the loader's own."""

    def __init__(self, elastic: Elastic, loader: DataLoader[Any]) -> None:
        self._elastic, self._loader, self._skip = elastic, loader, 0
        sampler, size, ranks = loader.sampler, loader.batch_size, elastic.link.world_size
        known = (RandomSampler, SequentialSampler, DistributedSampler)
        if size is None or type(sampler) not in known or getattr(sampler, "replacement", False):
            got = f"a DataLoader with {type(sampler).__name__}"
            raise _cannot(got, "one with batch_size and shuffle, or with DistributedSampler")
        accumulation(size, per_device=1, world_size=ranks)
        self._shuffled = not isinstance(sampler, SequentialSampler) and getattr(sampler, "shuffle", True)
        self._seed = getattr(sampler, "seed", elastic.seed)
        self._samples, self._size = len(loader.dataset), size  # type: ignore[arg-type]
        options = {name: getattr(loader, name) for name in _LOADER_OPTIONS}
        self._inner: DataLoader[Any] = DataLoader(loader.dataset, batch_sampler=_Order(self), **options)

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # while it is unpickled
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        whole, rest = divmod(self._samples, self._size)
        return whole + (1 if rest and not self._loader.drop_last else 0)

    def __iter__(self) -> Iterator[Any]:
        elastic = self._elastic
        this = elastic.new_pass()
        self._skip = this.had
        try:
            for batch in elastic.begun(this, self._inner):
                this.had += 1
                yield batch
                elastic.batch_made(this, len(self), last=this.had == len(self))
        except GeneratorExit:  # left by `break`: as after the last one
            elastic.batch_made(this, len(self), last=True)
            raise
        finally:
            elastic.passed(this)

    def shares(self) -> Iterator[list[int]]:
        """This rank's samples of each batch from the first one not had yet."""
        link, size = self._elastic.link, self._size
        order = torch.arange(self._samples)
        if self._shuffled:
            generator = torch.Generator().manual_seed(self._seed + self._elastic.epoch)
            order = torch.randperm(self._samples, generator=generator)
        for number in range(self._skip, len(self)):
            batch = order[number * size : (number + 1) * size].tolist()
            while len(batch) < size:
                batch += order[: size - len(batch)].tolist()
            yield batch[link.rank :: link.world_size]


class _Order:
    """A loader's `batch_sampler`."""

    def __init__(self, loader: _Loader) -> None:
        self._of = loader

    def __iter__(self) -> Iterator[list[int]]:
        return self._of.shares()

    def __len__(self) -> int:
        return len(self._of)


def _inner(part: Any) -> Any:
    return bare(part) if isinstance(part, torch.nn.Module) else part


def _rng_of(rank: int) -> str:
    return f"rng-{rank}.pt"


def _device(parts: Mapping[str, Any]) -> torch.device:
    models = (part for part in parts.values() if isinstance(part, torch.nn.Module))
    return next((one.device for model in models for one in model.parameters()), torch.device("cpu"))


def _check(parts: Mapping[str, Any], link: Link) -> None:
    """Raises ConfigError for what could not be saved, or would train alone."""
    for name, part in parts.items():
        if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
            raise _cannot(f"{name}: {type(part).__name__}", "what has state_dict and load_state_dict")
    if link.world_size == 1:
        return
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if ranks != link.world_size:
        raise _cannot(f"a process group of {ranks} ranks", f"of {link.world_size}: init_process_group before")
    models = [part for part in parts.values() if isinstance(part, torch.nn.Module)]
    if link.rank == 0 and not any(isinstance(model, DistributedDataParallel) for model in models):
        say("no model is wrapped in DistributedDataParallel: the program has to sum the gradients itself")


def _cannot(got: str, accepted: str) -> ConfigError:
    return ConfigError(where="Elastic", got=got, accepted=accepted)
