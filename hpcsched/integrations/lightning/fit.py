"""One call of `Trainer.fit` under hpcsched."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hpcsched.contract import exits
from hpcsched.integrations import leaving
from hpcsched.integrations.agreement import Agreement
from hpcsched.integrations.lightning import frozen, loggers, loops
from hpcsched.integrations.lightning.batches import Position, shared, unsuited
from hpcsched.integrations.lightning.framework import pl
from hpcsched.integrations.metrics import Metrics
from hpcsched.ownership import make_private
from hpcsched.worker.link import Link, Wish
from hpcsched.worker.process import rng
from hpcsched.worker.process.contract import say


class Fit:
    """Prepares a trainer, goes on from what is on record of this fit, saves and leaves between two steps.

    Args:
        trainer: Lightning's, before anything is loaded.
        link: an active one, of this rank.
        number: how many fits the program has had before; a program has them in the same order each time.
        earlier_steps: the steps that these have made.

    Raises SystemExit for a trainer with which it would go wrong, after one line.
    """

    def __init__(self, trainer: Any, link: Link, *, number: int, earlier_steps: int) -> None:
        self._trainer = trainer
        self._link = link
        self._number = number
        self._earlier_steps = earlier_steps
        self._undo = contextlib.ExitStack()
        self._agree = Agreement()
        self._position = Position(trainer.current_epoch)
        self._together = 1
        self._samplers: list[Any] = []
        self._offset = 0  # steps of earlier fits, where the trainer does not count them itself
        self._step = 0
        self._total: int | None = None
        self._metrics = Metrics(link)
        self._rngs: list[dict[str, Any]] = []
        self._trained: dict[str, bool] = {}
        self._ours: dict[str, Any] = {}
        self._check_ranks()
        self._count_batches()
        self._share_loaders()
        folder = self._folder_to_go_on_from()
        self._resumed = folder is not None
        if folder is not None:
            loggers.go_on(trainer, folder)
            self._resume_from(folder / self._file)

    # -- what is asked of the trainer ---------------------------------------------------------

    def _check_ranks(self) -> None:
        trainer, link = self._trainer, self._link
        if (trainer.world_size, trainer.global_rank) == (link.world_size, link.rank):
            return
        if trainer.world_size < link.world_size:
            self._refuse(
                f"the Trainer has {trainer.world_size} of {link.world_size} ranks: each would train alone; "
                'leave `devices` and `strategy` out, or at "auto"'
            )
        self._refuse(
            f"the Trainer has {trainer.world_size} ranks, of which hpcsched has started {link.world_size}: "
            'set processes = "per-gpu" in the job file'
        )

    def _refuse(self, why: str) -> None:
        if self._trainer.is_global_zero and self._link.rank == 0:
            say(f"Lightning: {why}")
        self._link.close()
        raise SystemExit(exits.REFUSED)

    def _count_batches(self) -> None:
        trainer = self._trainer
        scheduler = pl.callbacks.GradientAccumulationScheduler
        scheduled = any(isinstance(one, scheduler) for one in trainer.callbacks)
        for name in loops.IN_BATCHES:
            self._undo.callback(setattr, trainer, name, getattr(trainer, name))
        self._together = loops.together(trainer, self._link.world_size, scheduled=scheduled)
        loops.count_by(trainer, self._together)

    def _share_loaders(self) -> None:
        connector = self._trainer._data_connector
        prepare = connector._prepare_dataloader

        def prepare_ours(dataloader: Any, shuffle: bool, mode: Any) -> Any:
            if mode.value == "train" and self._can_share(dataloader):
                return self._share(dataloader)
            return prepare(dataloader, shuffle=shuffle, mode=mode)

        connector._prepare_dataloader = prepare_ours
        self._undo.callback(delattr, connector, "_prepare_dataloader")

    def _can_share(self, dataloader: Any) -> bool:
        link = self._link
        why = unsuited(dataloader)
        if why is None and not self._trainer._accelerator_connector.use_distributed_sampler:
            why = "use_distributed_sampler=False leaves samples to the program"
        if why is None:
            return True
        if self._together != link.world_size:
            factor = link.world_size // self._together
            self._refuse(
                f"{why}, so on {link.world_size} ranks the global batch would be {factor} times as large"
            )
        if link.rank == 0:
            say(f"Lightning: {why}: a training that goes on begins its epoch with the first samples again")
        return False

    def _share(self, dataloader: Any) -> Any:
        world_size = self._link.world_size
        size = getattr(dataloader.batch_sampler, "batch_size", None)
        if size is not None and size * self._together % world_size:
            self._refuse(
                f"DataLoader: batch_size: {size}, {self._together} at a time; "
                f"accepted: what {world_size} ranks can share evenly"
            )
        found = shared(
            dataloader,
            rank=self._link.rank,
            world_size=world_size,
            together=self._together,
            position=self._position,
        )
        self._samplers.append(found.batch_sampler)
        return found

    # -- going on -----------------------------------------------------------------------------

    @property
    def _file(self) -> str:
        return f"fit-{self._number}.ckpt"

    @property
    def _done(self) -> Path:
        assert self._link.checkpoint_dir is not None
        return self._link.checkpoint_dir / f"done-{self._number}"

    def _folder_to_go_on_from(self) -> Path | None:
        record = self._link.checkpoint
        if record is None or (record / self._file).exists():
            return record
        # The record is of a later fit, so this one was done; or of an earlier one, so this one is new.
        return self._done if (self._done / self._file).exists() else None

    def _resume_from(self, path: Path) -> None:
        connector = self._trainer._checkpoint_connector
        start = connector.resume_start

        def start_from_ours(checkpoint_path: object = None, **options: Any) -> None:
            start(str(path), **dict.fromkeys(options, False))  # weights_only: this file is our own

        connector.resume_start = start_from_ours
        self._undo.callback(delattr, connector, "resume_start")

    def load(self, state: dict[str, Any], checkpoint: dict[str, Any]) -> None:
        """Take up what `state` has returned; `checkpoint` is what Lightning is about to load."""
        loops.recount(checkpoint, state["together"], self._together)
        self._position.epoch, self._position.batches = state["epoch"], state["batches"]
        if self._resumed:
            self._rngs = state["rngs"]
            self._trained = state.get("trained", {})  # older versions have not kept it
            self._offset = state["offset"]
            self._trainer.should_stop = state["should_stop"]

    def state(self) -> dict[str, Any]:
        """What any checkpoint of this fit keeps: where the training is in its data."""
        position = self._position
        return {
            "epoch": position.epoch,
            "batches": position.batches,
            "together": self._together,
            **self._ours,
        }

    # -- steps --------------------------------------------------------------------------------

    def take_signals(self) -> None:
        """Take the signals from Lightning, whose handler of SIGTERM waits for the other ranks."""
        self._link.take_signals()

    def begin(self) -> None:
        """The training begins, or goes on."""
        trainer = self._trainer
        self._link.take_signals()
        now = (self._position.epoch, self._position.batches)
        if any(sampler.began not in (None, now) for sampler in self._samplers):
            iter(trainer.fit_loop._data_fetcher)  # it had begun before the checkpoint was loaded
        if not self._resumed and self._number:
            self._offset = self._earlier_steps - trainer.global_step
        self._step = self._offset + trainer.global_step
        loops.between_steps(trainer, self._between_steps)
        self._undo.callback(delattr, trainer.fit_loop.epoch_loop, "advance")
        loops.when_logged(trainer, self._log)
        self._undo.callback(delattr, trainer._logger_connector, "log_metrics")
        steps = loops.whole_work(trainer)
        self._total = None if steps is None else self._offset + steps
        self._link.ready()
        self._link.report(self._step, total=self._total)

    def batch_done(self, outputs: Any, batch_idx: int) -> None:
        """Count a batch; report a step."""
        trainer = self._trainer
        if batch_idx + 1 >= trainer.num_training_batches:
            self._position.epoch, self._position.batches = trainer.current_epoch + 1, 0
        else:
            self._position.batches = (batch_idx + 1) * self._together
        step = self._offset + trainer.global_step
        if step != self._step:
            self._link.report(step, loops.loss_of(trainer, outputs), total=self._total)

    def _log(self, values: Mapping[str, Any]) -> None:
        self._metrics.log(values, self._offset + self._trainer.global_step)

    def _between_steps(self) -> None:
        trainer = self._trainer
        if self._resumed:
            frozen.restore(trainer.lightning_module, self._trained)
            loops.end_restart(trainer)
            loops.begin_epoch_again(trainer)
            self._restore_rng()
            self._resumed = False
        step = self._offset + trainer.global_step
        if step == self._step:  # gradients are being accumulated
            return
        self._step = step
        wish = self._agree(self._link.wishes())
        if wish:
            failed = self._save(self._link.place(step))
            if wish & Wish.STOP and failed:
                leaving.cannot_save(self._link, failed)
            if wish & Wish.STOP:
                leaving.leave(self._link)
            if failed:
                self._link.not_saved()
                if self._link.rank == 0:
                    say(f"step {step}: periodic checkpoint failed, training goes on: {failed}")

    def _restore_rng(self) -> None:
        rank = self._link.rank
        if len(self._rngs) == self._link.world_size:
            rng.restore(self._rngs[rank], self._trainer.strategy.root_device)
        else:
            rng.reseed("lightning", os.environ.get("PL_GLOBAL_SEED", "0"), self._step, rank)
        self._rngs = []

    # -- saving -------------------------------------------------------------------------------

    def save_done(self) -> None:
        """The training is done."""
        self._step = self._offset + self._trainer.global_step
        failed = self._save(self._done)
        if failed and self._link.rank == 0:
            say(f"Lightning: the end of the training could not be saved: {failed}")

    def _save(self, folder: Path) -> str | None:
        """Save into a folder and put it on record. Why it cannot be saved, the same on all ranks; or None."""
        trainer = self._trainer
        self._ours = {
            "rngs": _of_all_ranks(rng.capture(trainer.strategy.root_device)),
            "trained": frozen.capture(trainer.lightning_module),
            "offset": self._offset,
            "should_stop": trainer.should_stop,
        }
        failed: str | None = None
        try:
            if self._link.rank == 0:
                make_private(folder)
                loggers.keep(trainer, folder)
            with _written_at_once(trainer.strategy):
                trainer.save_checkpoint(folder / self._file)
        except OSError as error:
            failed = str(error)
            trainer.strategy.barrier()  # the one with which `save_checkpoint` ends
        finally:
            self._ours = {}
        failed = trainer.strategy.broadcast(failed)
        if failed is None:
            self._link.saved(self._step, folder)
        return failed

    def close(self) -> int:
        """All is as it was before. Returns the steps that the fits so far have made."""
        steps: int = self._offset + self._trainer.global_step
        self._undo.close()
        self._link.close()
        return steps


def _of_all_ranks(own: dict[str, Any]) -> list[dict[str, Any]]:
    if not (dist.is_available() and dist.is_initialized()):
        return [own]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found


@contextlib.contextmanager
def _written_at_once(strategy: Any) -> Any:
    """Inside, checkpoints are on disk when they are said to be saved, also with AsyncCheckpointIO."""
    plugin = strategy.checkpoint_io
    if isinstance(plugin, pl.plugins.AsyncCheckpointIO):
        strategy.checkpoint_io = plugin.checkpoint_io
    try:
        yield
    finally:
        strategy.checkpoint_io = plugin
