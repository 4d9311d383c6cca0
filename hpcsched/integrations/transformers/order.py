"""In which order samples come, over a suspension and another number of ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import RandomSampler, SequentialSampler
from transformers import Trainer
from transformers.trainer_pt_utils import LengthGroupedSampler

from hpcsched.errors import ConfigError
from hpcsched.integrations.transformers.note import Note
from hpcsched.worker.process.contract import say

_MAY = "may be lost or come again"


class SampleOrder:
    """Keeps the order of a Trainer's samples the same on any number of ranks, where it draws one itself.

    Accelerate seeds a random order by epoch; one by length is drawn from the process's random numbers, in
    groups of a size that changes with the accumulation. Of others is said what is not known of them.
    """

    def __init__(self, trainer: Trainer, global_batch: int) -> None:
        self._trainer, self._global_batch = trainer, global_batch
        self._by_length = torch.Generator()
        self._passes = 0
        self._uncertain: str | None = None
        self._make = trainer._get_train_sampler
        trainer._get_train_sampler = self._sampler

    def begin_epoch(self, epoch: int) -> None:
        """Hear of an epoch, from 0, before its first sample is drawn."""
        args = self._trainer.args
        self._by_length.manual_seed((args.seed if args.data_seed is None else args.data_seed) + epoch)
        self._passes += 1

    def fill(self, note: Note) -> None:
        """Put what is known of epochs at a checkpoint into it."""
        note.steps_per_epoch = self._steps_per_epoch()
        note.passes = self._passes if note.steps_per_epoch is None else 1

    def go_on(self, note: Note, step: int) -> None:
        """Begin behind a checkpoint after `step` steps, and say what cannot be kept.

        Raises ConfigError where the same steps would have other samples.
        """
        steps = self._steps_per_epoch()
        if note.world_size != self._trainer.args.world_size and note.steps_per_epoch != steps:
            raise ConfigError(
                where="integrations.transformers",
                key="steps in an epoch",
                got=f"{steps}, and {note.steps_per_epoch} on {note.world_size} ranks",
                accepted="the same: dataloader_drop_last = False, or samples that the global batch divides",
            )
        in_an_epoch = step % steps if steps else step
        if self._trainer.args.ignore_data_skip and in_an_epoch:
            say("ignore_data_skip: samples of this epoch come again")
        elif steps is None and note.passes > 1:
            say(f"a dataset of unknown length, in pass {note.passes}: samples {_MAY}")
        elif self._uncertain and (steps is None or step > steps):
            say(f"{self._uncertain} draws from the process's random numbers: samples {_MAY}")

    def _sampler(self, *more: Any, **others: Any) -> Any:
        sampler = self._make(*more, **others)
        if isinstance(sampler, LengthGroupedSampler):
            sampler.batch_size = self._global_batch
            sampler.generator = self._by_length
        elif isinstance(sampler, RandomSampler):
            if not self._trainer.args.accelerator_config.use_seedable_sampler:
                self._uncertain = "use_seedable_sampler = False"
        elif sampler is not None and not isinstance(sampler, SequentialSampler):
            self._uncertain = type(sampler).__name__
        return sampler

    def _steps_per_epoch(self) -> int | None:
        try:
            batches = len(self._trainer.callback_handler.train_dataloader)
        except TypeError:  # of an IterableDataset
            return None
        return int(-(-batches // self._trainer.args.gradient_accumulation_steps))
