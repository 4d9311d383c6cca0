"""A Trainer's own checkpoints, put on record for hpcsched once they are whole."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import Trainer, trainer_utils
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hpcsched.integrations.transformers.note import Note
from hpcsched.worker.link import Link


class Checkpoints:
    """Puts each checkpoint of a Trainer on record, and deletes older ones only then.

    `note` makes what is written beside it; all ranks call it, and are together when it returns. `last`: the
    checkpoint that the training goes on from, of which `extra` says whether it is only there for us.
    """

    def __init__(
        self, trainer: Trainer, link: Link, note: Callable[[], Note], *, last: Path | None, extra: bool
    ) -> None:
        self.extra = False
        """Whether the next one is none of those that the Trainer's arguments ask for."""
        self.step = -1
        """Step of the newest one that this process has put on record. All ranks know it."""
        self._trainer, self._link, self._note = trainer, link, note
        self._former = last if extra else None
        self._save = trainer._save_checkpoint
        trainer._save_checkpoint = self._save_on_record

    def _save_on_record(self, model: Any, trial: Any = None, **others: Any) -> None:
        trainer, args = self._trainer, self._trainer.args
        step = trainer.state.global_step
        folder = Path(trainer._get_output_dir(trial), f"{PREFIX_CHECKPOINT_DIR}-{step}")
        aside = self._set_aside(folder, step) if args.should_save else None
        trainer.accelerator.wait_for_everyone()
        limit, args.save_total_limit = args.save_total_limit, None
        try:
            self._save(model, trial, **others)
        finally:
            args.save_total_limit = limit
        note = self._note()
        note.extra = self.extra
        if args.should_save:
            note.write(folder)
        self._link.saved(step, folder, samples=step * note.global_batch)
        self.step = step
        if args.should_save:
            self._delete_older(folder, aside)

    def _set_aside(self, folder: Path, step: int) -> Path | None:
        """Make room for a checkpoint of which there is one, by an attempt that died or by this one."""
        if not folder.exists():
            return None
        aside = None
        if self._link.checkpoint is not None and self._link.checkpoint.resolve() == folder.resolve():
            # On record, so it stays while it is written again: under a name that no framework looks for.
            aside = folder.with_name(f".{folder.name}")
            shutil.rmtree(aside, ignore_errors=True)
            shutil.copytree(folder, aside, copy_function=os.link)
            self._link.saved(step, aside)
        shutil.rmtree(folder)
        return aside

    def _delete_older(self, folder: Path, aside: Path | None) -> None:
        trainer = self._trainer
        best = trainer.state.best_model_checkpoint
        if aside is not None:
            shutil.rmtree(aside, ignore_errors=True)
        if self._former is not None and self._former.resolve() not in (
            folder.resolve(),
            Path(best or ".").resolve(),
        ):
            shutil.rmtree(self._former, ignore_errors=True)
        self._former = folder if self.extra else None
        if hasattr(trainer, "_rotate_checkpoints"):  # transformers 4
            trainer._rotate_checkpoints(use_mtime=True, output_dir=str(folder.parent))
        else:
            trainer_utils.rotate_checkpoints(
                output_dir=str(folder.parent),
                save_total_limit=trainer.args.save_total_limit,
                best_model_checkpoint=best,
                use_mtime=True,
            )
