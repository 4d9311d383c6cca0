"""Hugging Face Accelerate: an `Accelerator` whose training can be suspended and change its number of ranks.

    from hpcsched.integrations.accelerate import Accelerator    # in place of accelerate's

    for epoch in accelerator.epochs(3):                         # in place of range(3)

Without hpcsched it is accelerate's.
"""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate.utils import DistributedType
from torch.utils.data import BatchSampler, IterableDataset, SequentialSampler

from hpcsched.errors import ConfigError
from hpcsched.integrations.accelerate_place import At, Pass, Place
from hpcsched.integrations.boundary import Boundary, bare
from hpcsched.integrations.global_batch import accumulation
from hpcsched.integrations.metrics import whole_work
from hpcsched.worker.link import Link
from hpcsched.worker.process import rng
from hpcsched.worker.process.contract import say

_KINDS = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
_END = object()


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """Accelerate's, which under hpcsched also

    - keeps the global batch that its arguments give on **one** device: gradient_accumulation_steps is shared
      by the ranks; where it cannot be, each batch is split over them, as with `split_batches`,
    - advances a prepared scheduler once a step, as on one device, however many ranks there are,
    - draws the order of samples from seed and epoch (`use_seedable_sampler`),
    - in `epochs` takes up the newest checkpoint, saves when it is due, and leaves when told to.

    A step is an optimizer's, and is acted on when the next batch is asked for; the last one of a loader when
    the next epoch is. Trainings with DeepSpeed or FSDP go on unchanged, and are not suspended.

    Raises ConfigError for `use_stateful_dataloader=True`, and for `even_batches=False` with several ranks.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        link = Link()
        if link.active and link.world_size > 1 and not torch.cuda.is_available():
            kwargs.setdefault("cpu", True)  # without it Accelerate makes one process of each rank
        super().__init__(*args, **kwargs)
        if link.active and self.num_processes != link.world_size:
            got = f"Accelerate sees {self.num_processes} of {link.world_size} processes"
            raise _cannot(got, "all of them: do not say `cpu` or another launcher's variables")
        self._elastic = _Elastic(self, link)
        if self._elastic.link.active:
            self._elastic.share_global_batch()

    @property
    def completed_steps(self) -> int:
        """Steps so far, over all attempts; one counts as soon as a prepared optimizer has made it."""
        return self._elastic.place.step + self._elastic.under_way

    def epochs(self, epochs: int) -> Iterator[int]:
        """The numbers of the epochs from 0 on; those that are over are left out, and in the one under way the
        loader loops that made its steps go on behind the batches that they have had.

        Begin it when all is prepared and registered. All ranks do. May raise SystemExit: 75, saved, 74 if it
        could not be.
        """
        if not self._elastic.able:
            yield from range(epochs)
            return
        self._elastic.begin(epochs)
        place = self._elastic.place
        try:
            while place.epoch < epochs:
                yield place.epoch
                self._elastic.count()
                place.epoch, place.loaders = place.epoch + 1, {}
                self._elastic.begin_epoch()
                if place.epoch < epochs:
                    self._elastic.boundary.act()
        except GeneratorExit:  # left by `break` or by an error: other ranks may be anywhere
            self._elastic.link.close()
            raise
        self._elastic.boundary.end(place.step)

    # -- what Accelerate asks of an Accelerator ------------------------------------------------------------

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        """As accelerate's."""
        prepared = super().prepare_data_loader(data_loader, *args, **kwargs)
        if not self._elastic.able or isinstance(prepared, _Loader):
            return prepared
        loader = _Loader(self._elastic, self._dataloaders.index(prepared), prepared)
        loader.keep_order()
        return loader

    def prepare_optimizer(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """As accelerate's."""
        prepared = super().prepare_optimizer(optimizer, *args, **kwargs)
        if prepared is not optimizer and not self.has_lomo_optimizer:  # LOMO's steps are made in `backward`
            self._elastic.ask(optimizer)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """As accelerate's; it advances once a step, whatever the number of processes."""
        prepared = super().prepare_scheduler(scheduler)
        if self._elastic.able:
            prepared.split_batches = True  # to a scheduler: the global batch is that of one device
        return prepared

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """As accelerate's."""
        if not isinstance(dataloader, _Loader):
            return super().skip_first_batches(dataloader, num_batches)
        return dataloader.skipped(num_batches)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """As accelerate's."""
        super().backward(loss, **kwargs)
        self._elastic.computed(loss.detach())

    def log(self, values: dict[str, Any], step: int | None = None, *args: Any, **kwargs: Any) -> None:
        """As accelerate's; numbers also go into the job's metrics, after as many steps as are completed. The
        last ones by name become its results at `end_training`."""
        self._elastic.boundary.metrics.log(values, self.completed_steps)
        self._elastic.results |= {
            name: float(value) for name, value in values.items() if isinstance(value, (int, float))
        }
        super().log(values, step, *args, **kwargs)

    def end_training(self) -> None:
        """As accelerate's."""
        self._elastic.link.finish(self._elastic.results)
        super().end_training()


class _Elastic:
    """What an `Accelerator` has for hpcsched."""

    def __init__(self, accelerator: Accelerator, link: Link) -> None:
        self.link = link
        self.loss: torch.Tensor | None = None
        """Of the newest backward pass; None while there was none since the last step."""
        self.results: dict[str, float] = {}
        self.passes: list[Pass] = []
        """Those under way: an evaluation's within a training's."""
        self._stepping: list[Pass] = []
        """Those of the newest step: that were under way then, and not only to keep a look."""
        self._stepped = self._asked = False
        self._accelerator = accelerator
        self._rng: dict[str, Any] | None = None
        self.boundary = Boundary(link, self._save)
        self._known = accelerator.distributed_type in _KINDS
        self.able = self.link.active and self._known
        if self.link.active and not self.able and self.link.rank == 0:
            kind = accelerator.distributed_type.value
            say(f"Accelerate with {kind} goes on unchanged: it is not suspended or given more ranks")
        found = self.link.checkpoint if self.able else None
        self.place = Place.load(found) if found else Place()
        self.found = found
        self._epochs = 0
        self._epoch_began: int | None = None
        """The steps before this epoch; None for one of which this attempt has not seen the beginning."""
        self._total: int | None = None
        self._goes_on: dict[int, At] = {}
        self._begun: Counter[int] = Counter()

    # -- the global batch --------------------------------------------------------------------------------

    def share_global_batch(self) -> None:
        """Have the ranks together compute the global batch of one device."""
        accelerator = self._accelerator
        config = accelerator.dataloader_config = copy.copy(accelerator.dataloader_config)
        if not self.able:
            return
        if getattr(config, "use_stateful_dataloader", False):
            raise _cannot("use_stateful_dataloader=True", "False: the place in the data is kept anyway")
        ranks, micro = accelerator.num_processes, accelerator.gradient_accumulation_steps
        if ranks > 1 and not config.even_batches:
            raise _cannot("even_batches=False", "True: all ranks make the same number of steps")
        config.use_seedable_sampler = True
        if ranks == 1 or config.split_batches:
            return
        whole = accelerator.gradient_state.sync_with_dataloader  # no step goes on into the next epoch
        if micro % ranks == 0 and whole:
            accelerator.gradient_accumulation_steps = accumulation(micro, per_device=1, world_size=ranks)
        else:
            config.split_batches = True
        if self.link.rank == 0:
            kept = "each batch is split" if config.split_batches else f"accumulated {micro // ranks} times"
            say(f"the global batch stays as on one device: {ranks} ranks, {kept} (not {micro} on each)")

    @property
    def share(self) -> int:
        """How many batches all ranks have had when each has had one."""
        accelerator = self._accelerator
        return 1 if accelerator.split_batches else int(accelerator.num_processes)

    # -- a training --------------------------------------------------------------------------------------

    def begin(self, epochs: int) -> None:
        """Take up what was saved, and say that it can be suspended."""
        accelerator, place = self._accelerator, self.place
        self._epochs = epochs
        if self.found is not None:
            hook = accelerator.register_load_state_pre_hook(_into_bare)
            try:
                accelerator.load_state(str(self.found))
            finally:
                hook.remove()
            accelerator.step = 0  # of an accumulation: a step had been made
            if place.world_size == accelerator.num_processes:  # Accelerate's own loader may fail in silence
                file = self.found / self._rng_file  # nobody else's: `Link`
                self._rng = torch.load(file, map_location="cpu", weights_only=False)  # nosec B614 # as said
            self._draw_on()
        self.begin_epoch()
        self._goes_on = {**place.loaders}
        self._epoch_began = None if place.loaders else place.step
        place.world_size = accelerator.num_processes
        accelerator.wait_for_everyone()
        self.link.ready()

    def without(self, loader: Any, batches: int) -> Any:
        """Accelerate's own way of skipping."""
        return accelerate.Accelerator.skip_first_batches(self._accelerator, loader, batches)

    def begin_epoch(self) -> None:
        """No pass over a loader has begun in it yet."""
        self._epoch_began = self.place.step
        self._goes_on = {}
        self._begun.clear()

    def new_pass(self, number: int) -> Pass:
        """Over the loader of this number."""
        others = self._begun[number]
        self._begun[number] += 1
        at = self._goes_on.get(number)
        if at is None or at.others != others:
            return Pass(number, others)
        return Pass(number, others, at.batches // self.share, at.through, part=True)

    def taken_up(self, source: Any) -> Iterator[Any]:
        """The batches of a loader that was left in the middle: what was drawn at random before was drawn
        before, and does not count again."""
        batches = iter(source)
        first = next(batches, _END)
        self._draw_on()
        if first is not _END:
            yield first
            yield from batches

    def _draw_on(self) -> None:
        """Have random numbers go on from the checkpoint."""
        accelerator, place = self._accelerator, self.place
        if self._rng is not None:
            rng.restore(self._rng, accelerator.device)
        else:
            rng.reseed(*sorted(place.seeds.values()), place.step, accelerator.process_index)

    @property
    def under_way(self) -> bool:
        """Whether a step has been made that is not counted yet."""
        return self._stepped and bool(self._accelerator.sync_gradients)

    def ask(self, optimizer: torch.optim.Optimizer) -> None:
        """Have it say when it has made a step."""
        if self._known:  # others wrap it, or make its steps themselves
            optimizer.register_step_post_hook(self._note_step)
            self._asked = True

    def computed(self, loss: torch.Tensor) -> None:
        """A backward pass is done."""
        self.loss = loss
        if not self._asked:  # no optimizer says when it has made a step
            self._note_step()

    def _note_step(self, *_: Any) -> None:
        self._stepped = True
        self._stepping = [one for one in self.passes if one.part or one.had != one.first]
        if not self.able:  # then nobody asks at the next batch
            self.count()

    def batch_made(self, this: Pass, *, act: bool = True) -> None:
        """A batch of this pass has been computed: if a step has been made with it, count that, and save or
        leave. After a pass's last one that waits for another loader's, or the next epoch: what follows the
        loop is done before."""
        if this not in self._stepping or not self.count():
            return
        through = [one.through for one in self._stepping if one.part]
        if act and through and not any(through):
            self.boundary.act()

    def count(self) -> bool:
        """Whether a step has been made since this was asked; reports it."""
        place, made = self.place, self.under_way
        self._stepped = False
        if not made:
            return False
        loss, self.loss = self.loss, None
        place.step += 1
        for one in self._stepping:
            # Beside other passes, the first batches may be a look that is kept: the next ones tell.
            one.part = one.part or one.first > 0 or len(self._stepping) == 1
            one.first = one.first or one.had
            if one.part:
                place.put(one.number, At(one.had * self.share, one.through, one.others))
        self._estimate()
        self.boundary.made(place.step, {"loss": loss}, total=self._total)
        return True

    def _estimate(self) -> None:
        """How many steps there will be, from those of this epoch: where it was seen from its beginning."""
        of_steps = [one for one in self._stepping if one.part]
        if self._epochs and self._epoch_began is not None and len(of_steps) == 1:
            (one,) = of_steps
            with contextlib.suppress(TypeError):  # of unknown length
                self._total = whole_work(
                    begun=self._epoch_began,
                    epochs=self._epochs - self.place.epoch,
                    steps=self.place.step - self._epoch_began,
                    batches=one.had - one.skipped,
                    length=len(self._accelerator._dataloaders[one.number]),
                )

    def _save(self, folder: Path) -> None:
        accelerator = self._accelerator
        project = accelerator.project_configuration
        named, iteration = project.automatic_checkpoint_naming, project.iteration
        hook = accelerator.register_save_state_pre_hook(_of_bare)
        project.automatic_checkpoint_naming = False  # its names and its count are the user's
        try:
            accelerator.save_state(str(folder))
        finally:
            hook.remove()
            project.automatic_checkpoint_naming, project.iteration = named, iteration
        torch.save(rng.capture(accelerator.device), folder / self._rng_file)
        if self.link.rank == 0:
            self.place.save(folder)

    @property
    def _rng_file(self) -> str:
        return f"hpcsched-rng-{self._accelerator.process_index}.pt"


class _Loader:
    """A prepared loader that goes on where the training was; all else is the loader's own."""

    def __init__(self, elastic: _Elastic, number: int, inner: Any, skip: int = 0) -> None:
        self._elastic, self._number, self._inner, self._skip = elastic, number, inner, skip

    def keep_order(self) -> None:
        """Have the order of samples be the same on all ranks, and in all attempts."""
        elastic, number = self._elastic, self._number
        if isinstance(self._inner.dataset, IterableDataset):  # its order is its own
            return
        sampler = _sampler(self._inner)
        if hasattr(sampler, "initial_seed"):  # Accelerate's SeedableRandomSampler: the same on all ranks
            seeds = elastic.place.seeds
            seed = seeds.get(number, sampler.initial_seed)
            seeds[number] = sampler.initial_seed = _of_first(seed)
        elif sampler is not None and type(sampler) is not SequentialSampler and elastic.link.rank == 0:
            name = type(sampler).__name__
            say(f"{name} draws its order anew when a training goes on in the middle of an epoch")

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":  # while it is unpickled
            raise AttributeError(name)
        return getattr(self._inner, name)

    @property
    def __class__(self) -> Any:
        """For `isinstance(loader, DataLoader)`, as Accelerate's own."""
        return self._inner.__class__

    @__class__.setter
    def __class__(self, value: Any) -> None:
        raise TypeError("the class of a loader is fixed")

    def __len__(self) -> int:
        return len(self._inner)

    def skipped(self, batches: int) -> _Loader:
        """The same without its first batches."""
        return _Loader(self._elastic, self._number, self._inner, self._skip + batches)

    def __iter__(self) -> Iterator[Any]:
        elastic = self._elastic
        this = elastic.new_pass(self._number)
        if this.through:
            return
        goes_on = this.part
        if not goes_on:
            this.had = this.skipped = self._skip
        source = self._behind(this.had)
        batches = elastic.taken_up(source) if goes_on else source
        elastic.passes.append(this)
        try:
            for batch in batches:
                this.had += 1
                this.through = source.end_of_dataloader
                yield batch
                elastic.batch_made(this)
        except GeneratorExit:  # left by `break`: as after the last one
            elastic.batch_made(this, act=False)
            raise
        finally:
            elastic.passes.remove(this)

    def _behind(self, batches: int) -> Any:
        """The loader without its first batches, which are not read."""
        self._inner.set_epoch(self._elastic.place.epoch)
        return self._elastic.without(self._inner, batches) if batches else self._inner


def _sampler(loader: Any) -> Any:
    """What gives a loader the order of its samples."""
    found = getattr(loader, "batch_sampler", None)
    while found is not None and (isinstance(found, BatchSampler) or hasattr(found, "batch_sampler")):
        inner = getattr(found, "batch_sampler", None)
        if inner is None:
            inner = getattr(found, "sampler", None)
        found = inner
    return found


def _of_first(number: int) -> int:
    """Rank 0's number, on all ranks."""
    box = [number]
    accelerate.utils.broadcast_object_list(box)
    return box[0]


def _of_bare(models: list[torch.nn.Module], weights: list[dict[str, Any]], _folder: str) -> None:
    weights[:] = [bare(model).state_dict() for model in models]


def _into_bare(models: list[torch.nn.Module], _folder: str) -> None:
    models[:] = [bare(model) for model in models]


def _cannot(got: str, accepted: str) -> ConfigError:
    return ConfigError(where="Accelerator", got=got, accepted=accepted)
