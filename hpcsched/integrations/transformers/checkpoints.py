"""A Trainer's own checkpoints, put on record for hpcsched once they are whole."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch
from transformers import Trainer, trainer_utils
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy

from hpcsched.integrations.agreement import Agreement
from hpcsched.integrations.transformers.note import Note
from hpcsched.worker.link import Link
from hpcsched.worker.process.contract import say


class Checkpoints:
    """Puts each checkpoint of a Trainer on record, and deletes older ones only then.

    `note` makes what is written beside it; all ranks call it. `cannot_save` is called where the training is
    to leave, and why it cannot be saved; `failed` where it goes on without this one. `last`: the checkpoint
    that the training goes on from, of which `extra` says whether it is only there for us.
    """

    def __init__(
        self,
        trainer: Trainer,
        link: Link,
        *,
        agree: Agreement,
        note: Callable[[], Note],
        cannot_save: Callable[[str], NoReturn],
        failed: Callable[[], None],
        last: Path | None,
        extra: bool,
    ) -> None:
        self.extra = False
        """Whether the next one is none of those that the Trainer's arguments ask for."""
        self.stopping = False
        """Whether the training leaves with the next one."""
        self.step = -1
        """Step of the newest one that this process has put on record. All ranks know it."""
        self._trainer, self._link, self._agree = trainer, link, agree
        self._note, self._cannot_save, self._failed = note, cannot_save, failed
        self._asked = -1  # step of the newest one that the Trainer's arguments have asked for
        self._aside: Path | None = None
        if last is not None and last.name.startswith("."):  # an attempt has died while it saved it again
            self._aside, last = last, last.with_name(last.name[1:])
            if trainer.args.should_save:
                self._put_back(self._aside, last, link.step)
        self._former = last if extra else None
        self._save = trainer._save_checkpoint
        trainer._save_checkpoint = self._save_on_record

    def _save_on_record(self, model: Any, trial: Any = None, **others: Any) -> None:
        trainer = self._trainer
        step = trainer.state.global_step
        folder = Path(trainer._get_output_dir(trial), f"{PREFIX_CHECKPOINT_DIR}-{step}")
        if trainer.args.save_strategy == SaveStrategy.BEST and trainer.state.best_global_step == step:
            self.extra = False  # the evaluation has asked for it since
        note = self._note()
        note.extra = self.extra and step != self._asked  # this one stays, though we have it written again
        error = self._together(lambda: self._write(folder, note, model, trial, **others))
        if error and trainer.args.should_save:
            self._take_back(folder, step)
        samples = step * note.global_batch
        error = error or self._together(lambda: self._link.saved(step, folder, samples=samples))
        if error and self.stopping:
            self._cannot_save(error)
        if error:
            self._link.not_saved()
            if self._link.rank == 0:
                say(f"step {step}: periodic checkpoint failed, training goes on: {error}")
            self._failed()
            return
        self.step = step
        if not note.extra:
            self._asked = step
        if trainer.args.should_save:
            self._delete_older(folder, extra=note.extra)

    def _together(self, act: Callable[[], None]) -> str:
        """All ranks do it; returns what went wrong, on all of them, or nothing.

        Raises it in a checkpoint that the Trainer's arguments ask for, of a training that goes on.
        """
        error = ""
        try:
            act()
        except Exception as problem:  # of any library that writes: other ranks must not wait for this one
            if not self._may_fail():
                raise
            error = f"{type(problem).__name__}: {problem}"
        return (error or "another rank could not write its part") if self._agree.any(bool(error)) else ""

    def _may_fail(self) -> bool:
        # Where a best step is known the Trainer waits for all ranks while it saves, except in our own.
        alone = self._trainer.args.world_size == 1 or not self._trainer.state.best_global_step
        return self.extra or (self.stopping and alone)

    def _write(self, folder: Path, note: Note, model: Any, trial: Any, **others: Any) -> None:
        trainer = self._trainer
        try:
            if trainer.args.should_save:
                self._make_room(folder, trainer.state.global_step)
        finally:
            trainer.accelerator.wait_for_everyone()
        with self._arguments():
            self._save(model, trial, **others)
        if trainer.args.should_save:
            if (folder / TRAINING_ARGS_NAME).exists():
                torch.save(trainer.args, folder / TRAINING_ARGS_NAME)  # as the program has them
            note.write(folder)

    @contextlib.contextmanager
    def _arguments(self) -> Iterator[None]:
        """Inside, the Trainer deletes nothing, and takes only what it asks for itself as its best."""
        args, best = self._trainer.args, f"{PREFIX_CHECKPOINT_DIR}-{self._trainer.state.best_global_step}"
        asked = args.save_total_limit, args.save_strategy
        args.save_total_limit = None
        if self.extra or (self._former is not None and self._former.name == best):
            args.save_strategy = SaveStrategy.NO
        try:
            yield
        finally:
            args.save_total_limit, args.save_strategy = asked

    def _make_room(self, folder: Path, step: int) -> None:
        """Make room for a checkpoint of which there is one, by an attempt that died or by this one."""
        if not folder.exists():
            return
        if self._link.checkpoint is not None and self._link.checkpoint.resolve() == folder.resolve():
            # On record, so it stays while it is written again: under a name that no framework looks for.
            self._aside = folder.with_name(f".{folder.name}")
            self._copy(folder, self._aside, step)
        shutil.rmtree(folder)

    def _take_back(self, folder: Path, step: int) -> None:
        """Remove what could not be written; what was set aside for it is there again."""
        shutil.rmtree(folder, ignore_errors=True)
        aside = self._aside
        if aside is not None and aside.name == f".{folder.name}" and self._put_back(aside, folder, step):
            shutil.rmtree(aside, ignore_errors=True)
            self._aside = None

    def _put_back(self, aside: Path, folder: Path, step: int) -> bool:
        try:
            self._copy(aside, folder, step)
        except OSError:  # then it is on record as it is
            return False
        return True

    def _copy(self, folder: Path, to: Path, step: int) -> None:
        """Have what is on record under another name, too, and have that on record."""
        shutil.rmtree(to, ignore_errors=True)
        shutil.copytree(folder, to, copy_function=os.link)
        self._link.saved(step, to)

    def _delete_older(self, folder: Path, *, extra: bool) -> None:
        trainer = self._trainer
        best = trainer.state.best_model_checkpoint
        if self._aside is not None:
            shutil.rmtree(self._aside, ignore_errors=True)
            self._aside = None
        if self._former is not None and self._former.resolve() not in (
            folder.resolve(),
            Path(best or ".").resolve(),
        ):
            shutil.rmtree(self._former, ignore_errors=True)
        self._former = folder if extra else None
        if hasattr(trainer, "_rotate_checkpoints"):  # transformers 4
            trainer._rotate_checkpoints(use_mtime=True, output_dir=str(folder.parent))
        else:
            trainer_utils.rotate_checkpoints(
                output_dir=str(folder.parent),
                save_total_limit=trainer.args.save_total_limit,
                best_model_checkpoint=best,
                use_mtime=True,
            )
