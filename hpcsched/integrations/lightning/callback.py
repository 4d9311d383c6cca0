"""The callback: what a program adds to its Trainer."""

from __future__ import annotations

import os
from typing import Any

from hpcsched.integrations.lightning.fit import Fit
from hpcsched.integrations.lightning.framework import pl
from hpcsched.worker.link import Link
from hpcsched.worker.process.contract import JobEnv, say

_TUNERS = (pl.callbacks.LearningRateFinder, pl.callbacks.BatchSizeFinder)


class HpcschedCallback(pl.Callback):  # type: ignore[misc]
    """Makes `Trainer.fit` elastic under hpcsched: `Trainer(callbacks=[HpcschedCallback()])`.

    What the program says is read as meant for one GPU: a batch of its DataLoader is one of all ranks
    together, so the global batch is the same on any number. A fit goes on from the newest checkpoint on
    record, whatever `ckpt_path` says. Make it before the Trainer (as an argument it is), since
    `devices="auto"` is to mean what hpcsched gives. Without hpcsched it does nothing.

    In a fit it raises SystemExit: with 2, after one line, for a Trainer with other ranks than hpcsched's, or
    for a batch that so many ranks cannot share; with the contract's codes when it leaves.
    """

    def __init__(self) -> None:
        self._active = JobEnv.from_environ() is not None
        self._fit: Fit | None = None
        self._fits = 0
        self._steps = 0
        if self._active:
            _count_devices()

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Before anything is loaded: ranks, batches, loggers, and where to go on from."""
        if stage != "fit" or not self._active:
            return
        if any(isinstance(one, _TUNERS) for one in trainer.callbacks):
            # It trains to try something out, with another batch or learning rate each time: not to be kept.
            if trainer.is_global_zero:
                say("Lightning: a fit with a LearningRateFinder or BatchSizeFinder cannot be suspended")
        else:
            self._fit = Fit(trainer, Link(), number=self._fits, earlier_steps=self._steps)
            self._fits += 1

    def on_sanity_check_start(self, trainer: Any, pl_module: Any) -> None:
        """Lightning has just put its own handlers of signals in place."""
        if self._fit:
            self._fit.take_signals()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """From here on the training can be suspended."""
        if self._fit:
            self._fit.begin()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """A batch is done."""
        if self._fit:
            self._fit.batch_done(outputs, batch_idx)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """What is trained goes on record: whatever becomes of the rest of the program, it is not lost."""
        if self._fit:
            self._fit.save_done()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """The fit is over: all is as it was before."""
        self._close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """The fit is over, by an error or because it leaves."""
        self._close()

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Before the loops are loaded."""
        state = checkpoint.get("callbacks", {}).get(self.state_key)
        if self._fit and state:
            self._fit.load(state, checkpoint)

    def state_dict(self) -> dict[str, Any]:
        """What each checkpoint keeps, those of other callbacks too."""
        return self._fit.state() if self._fit else {}

    def _close(self) -> None:
        if self._fit:
            self._steps = self._fit.close()
        self._fit = None


def _count_devices() -> None:
    """Have `devices="auto"` and the default of `num_nodes` mean the ranks that hpcsched has started.

    Lightning takes "auto" for one process where there is no GPU, and knows nothing of other hosts.
    """
    here = os.environ.get("LOCAL_WORLD_SIZE")
    if here:
        pl.accelerators.CPUAccelerator.auto_device_count = staticmethod(lambda: int(here))
    if int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1:
        os.environ.setdefault("PL_TRAINER_NUM_NODES", os.environ["GROUP_WORLD_SIZE"])
