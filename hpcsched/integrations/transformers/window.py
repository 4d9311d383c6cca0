"""The losses that a Trainer has summed since it last logged their mean, over a suspension."""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers import Trainer

from hpcsched.integrations.transformers.note import Note

_AVERAGES = ("_metrics", "_total_train_tokens")
"""Where TRL's trainers keep what they log the means of."""


class LossWindow:
    """Sees the sum of losses pass by, and puts one of before into the first step's loss.

    The Trainer has no hook for it: in transformers 4 the sum is a local variable of its loop.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._sum: torch.Tensor | None = None
        self._carried: float | None = None
        self._offset = 0.0
        """What `_total_loss_scalar` lacks of the losses of all steps."""
        self._log = trainer._maybe_log_save_evaluate
        self._step = trainer.training_step
        trainer._maybe_log_save_evaluate = self._see
        trainer.training_step = self._first_step

    def fill(self, note: Note) -> None:
        """Put what is known of losses at a checkpoint into it. All ranks call it, and wait for each other."""
        trainer = self._trainer
        own = torch.zeros((), device=trainer.args.device) if self._sum is None else self._sum.detach()
        note.losses = [float(one) for one in trainer.accelerator.gather(own.float().reshape(1)).tolist()]
        note.logged_at = trainer._globalstep_last_logged
        note.total_loss = float(trainer._total_loss_scalar) + self._offset
        for name in _AVERAGES:
            value = getattr(trainer, name, None)
            if isinstance(value, dict):
                value = {key: list(values) for key, values in value.get("train", {}).items()}
            if value is not None:
                note.averages[name] = value

    def restore(self, note: Note) -> None:
        """Go on from it, once the Trainer has set its own sums to zero."""
        trainer = self._trainer
        mean = math.fsum(note.losses) / note.world_size
        same = trainer.args.world_size == note.world_size
        self._carried = note.losses[trainer.args.process_index] if same else mean
        trainer._globalstep_last_logged = note.logged_at
        if hasattr(trainer, "_initial_global_step"):
            # transformers 5: `train_loss` is the mean over the steps of this call of train()
            trainer._total_loss_scalar = -mean
            self._offset = note.total_loss + mean
        else:  # over all steps
            trainer._total_loss_scalar = note.total_loss
        for name, value in note.averages.items():
            if name in _AVERAGES and isinstance(value, dict):
                getattr(trainer, name)["train"].update(value)
            elif name in _AVERAGES:
                setattr(trainer, name, value)

    def _see(self, tr_loss: torch.Tensor, *more: Any, **others: Any) -> None:
        self._sum = tr_loss
        self._log(tr_loss, *more, **others)

    def _first_step(self, *more: Any, **others: Any) -> torch.Tensor:
        self._trainer.training_step = self._step
        loss: torch.Tensor = self._step(*more, **others)
        # Only summed: gradients have been computed by now.
        return loss if self._carried is None else loss + self._carried
