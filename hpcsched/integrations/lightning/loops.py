"""Lightning's loops: what of them counts batches, and the one place where a training can be left."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from typing import Any

from hpcsched.integrations.lightning.framework import pl

IN_BATCHES = ("accumulate_grad_batches", "limit_train_batches", "val_check_interval")
"""What a Trainer counts in batches; the last two are a share of an epoch where they are no whole number."""


def together(trainer: Any, world_size: int, *, scheduled: bool) -> int:
    """How many of the program's batches all ranks take at a time, so that fewer are accumulated.

    The most with which all that is counted in batches stays whole. `scheduled`: a callback changes the
    accumulation while it trains, so that is left alone.
    """
    if scheduled:
        return 1
    counts = (getattr(trainer, name) for name in IN_BATCHES)
    return math.gcd(world_size, *(count for count in counts if isinstance(count, int)))


def count_by(trainer: Any, together: int) -> None:
    """Have a trainer count what is taken at a time as one batch."""
    for name in IN_BATCHES:
        count = getattr(trainer, name)
        if isinstance(count, int):
            setattr(trainer, name, count // together)


def recount(checkpoint: dict[str, Any], before: int, now: int) -> None:
    """Count the batches in a checkpoint anew: `before` of the program's were one, and `now` are now."""
    progress = checkpoint["loops"]["fit_loop"].get("epoch_loop.batch_progress", {})
    for counts in (progress.get("total", {}), progress.get("current", {})):
        for name in counts:
            counts[name] = -(-counts[name] * before // now)


def between_steps(trainer: Any, act: Callable[[], None]) -> None:
    """Have `act` called before each batch of a fit, when all that belongs to the one before is done.

    There is no hook for that: after `on_train_batch_end` come the module's own hook, the loggers, checkpoints
    of other callbacks and a validation, and before `on_train_batch_start` the next batch has been fetched.
    """
    loop = trainer.fit_loop.epoch_loop
    advance = loop.advance

    def act_and_advance(data_fetcher: Any) -> None:
        act()
        advance(data_fetcher)

    loop.advance = act_and_advance


def end_restart(trainer: Any) -> None:
    """A checkpoint from between two steps leaves nothing to be made up for.

    Lightning would run the validation of the step before again, or leave out what ends the epoch.
    """
    fit = trainer.fit_loop
    for loop in (fit, fit.epoch_loop, fit.epoch_loop.val_loop):
        loop._restarting = False


def begin_epoch_again(trainer: Any) -> None:
    """Have callbacks and the module hear that an epoch begins where it was cut in two.

    What many set in place then is in no checkpoint: an accumulation, a schedule, what is trained. Up to
    Lightning 2.4 they hear it in any case. A BaseFinetuning does not: all of its own is loaded, and what it
    multiplies by (a learning rate) would count twice.
    """
    fit, callbacks = trainer.fit_loop, trainer.callbacks
    if not (getattr(fit, "restarted_mid_epoch", False) or getattr(fit, "restarted_on_epoch_end", False)):
        return
    call = pl.trainer.call
    trainer.callbacks = [one for one in callbacks if not isinstance(one, pl.callbacks.BaseFinetuning)]
    try:
        call._call_callback_hooks(trainer, "on_train_epoch_start")
    finally:
        trainer.callbacks = callbacks
    call._call_lightning_module_hook(trainer, "on_train_epoch_start")


def loss_of(trainer: Any, outputs: Any) -> Any:
    """The loss of a batch among the outputs of its training step: a tensor, or None."""
    loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
    if loss is not None and trainer.lightning_module.automatic_optimization:
        loss = loss * trainer.accumulate_grad_batches  # Lightning has divided it
    return loss


def when_logged(trainer: Any, log: Callable[[Mapping[str, Any]], None]) -> None:
    """Have `log` called with all that Lightning logs of a fit, when it does: what the module has logged, each
    `log_every_n_steps` steps, at the end of an epoch, and of a validation; with loggers or without.

    There is no hook for that, and `logged_metrics` also has what was logged long before.
    """
    connector = trainer._logger_connector
    to_loggers = connector.log_metrics

    def log_metrics(metrics: Mapping[str, Any], step: int | None = None) -> None:
        if step is None:  # else a batch of a validation, by its number in that
            log(metrics)
        to_loggers(metrics, step=step)

    connector.log_metrics = log_metrics


def whole_work(trainer: Any) -> int | None:
    """The steps of a fit, those of its attempts before included; None if Lightning does not know them."""
    steps = trainer.max_steps
    if trainer.lightning_module.automatic_optimization:  # else a batch may make several steps
        with contextlib.suppress(pl.utilities.exceptions.MisconfigurationException):  # a schedule of batches
            steps = trainer.estimated_stepping_batches
    return int(steps) if 0 < steps < math.inf else None
