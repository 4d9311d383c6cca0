"""`trainer = prepare_trainer(trainer)`: the callback, and what a callback cannot do.

The checkpoint to go on from is an argument of `train`, and the accumulation has to be known before. A
checkpoint is good when it is on disk (`checkpoints`), the sum of losses is the Trainer's own (`window`), and
so is the order of samples (`order`): each of these modules puts something around a method of the Trainer.
"""

from __future__ import annotations

import inspect
import math
from pathlib import Path
from typing import Any, NoReturn

import transformers
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import TrainOutput, get_last_checkpoint

from hpcsched.errors import ConfigError
from hpcsched.integrations import leaving
from hpcsched.integrations.agreement import Agreement
from hpcsched.integrations.global_batch import split
from hpcsched.integrations.metrics import Metrics
from hpcsched.integrations.transformers import loggers
from hpcsched.integrations.transformers.checkpoints import Checkpoints
from hpcsched.integrations.transformers.note import Note, whole
from hpcsched.integrations.transformers.order import SampleOrder
from hpcsched.integrations.transformers.window import LossWindow
from hpcsched.worker.link import Link, Wish
from hpcsched.worker.process.contract import say

OLDEST = (4, 57)


def prepare_trainer(trainer: Trainer, *, global_batch: int | None = None) -> Trainer:
    """The same Trainer, made one that hpcsched can suspend, resume and move to another number of ranks.

    `global_batch`: samples of one step, on any number of ranks. None: what its arguments come to at the first
    start (`per_device_train_batch_size` x `gradient_accumulation_steps` x ranks), and the same from then on.
    Call it before `train`, last; without hpcsched it does nothing.

    Raises ConfigError for what cannot be suspended, and for a global batch that does not divide.
    """
    if any(isinstance(one, HpcschedCallback) for one in trainer.callback_handler.callbacks):
        return trainer
    link = Link()
    if link.active:
        _check(trainer)
        _retire_jit(trainer)
        link.take_signals()
        trainer.add_callback(HpcschedCallback(trainer, link, global_batch))
    return trainer


class HpcschedCallback(TrainerCallback):  # type: ignore[misc]
    """What `prepare_trainer` adds to a Trainer: reports steps, asks for checkpoints, and leaves."""

    def __init__(self, trainer: Trainer, link: Link, global_batch: int | None = None) -> None:
        self._trainer, self._link = trainer, link
        self._agree, self._metrics = Agreement(), Metrics(link)
        self._wish = Wish.NOTHING
        self._begun = self._trained = self._at_epoch_end = False
        self._found = link.checkpoint
        self._before = _note_of(self._found, Path(trainer.args.output_dir).resolve())
        self._global_batch = _keep_batch(trainer, self._before, global_batch)
        self._window = LossWindow(trainer)
        self._order = SampleOrder(trainer, self._global_batch)
        extra = self._before is not None and self._before.extra
        self._checkpoints = Checkpoints(
            trainer,
            link,
            agree=self._agree,
            note=self._note,
            cannot_save=self._cannot_save,
            failed=self._save_failed,
            last=self._found,
            extra=extra,
        )
        self._hearers: list[TrainerCallback] = []
        self._train, trainer.train = trainer.train, self._resuming_train

    # -- events --------------------------------------------------------------------------------

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self._link.take_signals()
        self._link.report(state.global_step, total=state.max_steps)
        if self._before is not None:
            if state.global_step >= state.max_steps or self._before.stopped:
                raise _Trained
            self._order.go_on(self._before, state.global_step)
            self._window.restore(self._before)
        self._link.ready()

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self._order.begin_epoch(int(state.epoch or 0))

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        self._link.report(state.global_step, _last_loss(state), total=state.max_steps)
        self._wish |= self._agree(self._link.wishes())
        self._checkpoints.stopping = bool(self._wish & Wish.STOP)
        # What belongs to the end of an epoch (evaluation, logs) would never be done after a resume from here.
        self._at_epoch_end = state.epoch is not None and float(state.epoch).is_integer()
        if not self._at_epoch_end and self._wish and not _over(state, control):
            self._ask(control)
        return control

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        self._at_epoch_end = False
        # The end of the training is also one of an epoch. Where its last step is not saved, it is now.
        if self._checkpoints.step != state.global_step if _over(state, control) else self._wish:
            self._ask(control)
        return control

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        self._metrics.log(logs or {}, state.global_step)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self._checkpoints.extra = False
        if self._hearers:
            self._trainer.callback_handler.callbacks, self._hearers = self._hearers, []
        if self._at_epoch_end:
            return
        wish, self._wish = self._wish, Wish.NOTHING
        if wish & Wish.STOP and not control.should_training_stop:
            self._leave()

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        # After the training all is saved. In its midst an evaluation goes first: it draws random numbers.
        if self._trained and self._agree(self._link.wishes()) & Wish.STOP:
            self._leave()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self._trained = state.global_step == self._checkpoints.step

    # -- what they do --------------------------------------------------------------------------

    def _ask(self, control: TrainerControl) -> None:
        self._checkpoints.extra = not control.should_save
        control.should_save = True

    def _save_failed(self) -> None:
        """No other callback is to hear of a checkpoint that is not there: see `on_save`, which comes next."""
        handler = self._trainer.callback_handler
        self._hearers, handler.callbacks = handler.callbacks, [self]

    def _leave(self) -> NoReturn:
        self._close_loggers()
        leaving.leave(self._link)

    def _cannot_save(self, why: str) -> NoReturn:
        self._close_loggers()
        leaving.cannot_save(self._link, why)

    def _close_loggers(self) -> None:
        # After the training they have been told already.
        loggers.close(self._trainer, told=self._trained)

    def _resuming_train(self, resume_from_checkpoint: Any = None, *more: Any, **others: Any) -> TrainOutput:
        trainer, before = self._trainer, self._before
        if self._begun or more or others.get("trial") is not None:
            raise _refused("train()", "a second training, or a search", "one training a program")
        self._begun = True
        # The last one: whoever else wants something of a step has said so by then.
        callbacks = trainer.callback_handler.callbacks
        callbacks.append(callbacks.pop(callbacks.index(self)))
        loggers.go_on(trainer, before.loggers if before else {})
        if before is None:
            return self._train(self._passed(resume_from_checkpoint), **others)
        self._say_ranks(before)
        try:
            return self._train(str(self._found), **others)
        except _Trained:
            return self._all_done(before)

    def _passed(self, given: Any) -> Any:
        """What the script says to resume from, if it is whole: an attempt may have died while it saved."""
        if given is True:
            given = get_last_checkpoint(self._trainer.args.output_dir)
        if not given or whole(Path(given)):
            return given
        say(f"{given} is not whole, so the training begins without it")
        return None

    def _say_ranks(self, before: Note) -> None:
        now = self._trainer.args.world_size
        if now == before.world_size:
            return
        if hasattr(self._trainer.args, "generation_batch_size"):  # GRPO, RLOO
            raise _refused(
                "ranks", str(now), f"{before.world_size}, as it was: each generates its own samples"
            )
        if self._link.rank == 0:
            say(
                f"goes on with {now} ranks instead of {before.world_size}:"
                " random numbers (dropout) begin anew from the seed"
            )

    def _all_done(self, before: Note) -> TrainOutput:
        """What `train` answers when the training had ended before: the Trainer would do one more step."""
        trainer = self._trainer
        if self._link.rank == 0:
            say(f"the training had ended before, after step {trainer.state.global_step}")
        if trainer.args.load_best_model_at_end and trainer.state.best_model_checkpoint is not None:
            trainer._load_best_model()
        self._checkpoints.step = trainer.state.global_step
        self._link.ready()
        trainer.callback_handler.on_train_end(trainer.args, trainer.state, trainer.control)
        trainer.is_in_train = False
        mean = (before.total_loss + math.fsum(before.losses) / before.world_size) / trainer.state.global_step
        return TrainOutput(trainer.state.global_step, mean, {"train_loss": mean})

    def _note(self) -> Note:
        trainer = self._trainer
        note = Note(global_batch=self._global_batch, max_steps=trainer.state.max_steps)
        note.loggers = loggers.runs(trainer) if trainer.is_world_process_zero() else {}
        # At the last step it is always so; that alone does not forbid a script that wants more steps later.
        note.stopped = trainer.control.should_training_stop and trainer.state.global_step < note.max_steps
        self._order.fill(note)
        self._window.fill(note)
        return note


class _Trained(Exception):
    """The checkpoint is that of the end of the training."""


def _over(state: TrainerState, control: TrainerControl) -> bool:
    """Whether this is the last step."""
    return bool(control.should_training_stop or state.global_step >= state.max_steps)


def _last_loss(state: TrainerState) -> float | None:
    return state.log_history[-1].get("loss") if state.log_history else None


def _note_of(found: Path | None, place: Path) -> Note | None:
    """What lies beside the checkpoint on record. Raises ConfigError for one that is not in `place`."""
    if found is None:
        return None
    if found.resolve().parent != place:
        raise _refused("output_dir", str(place), f"{found.parent}, where this job has saved")
    return Note.read(found)


def _keep_batch(trainer: Trainer, before: Note | None, wanted: int | None) -> int:
    """The global batch; the Trainer's arguments become what keeps it on this number of ranks."""
    args = trainer.args
    if before is not None and wanted not in (None, before.global_batch):
        raise _refused("global_batch", str(wanted), f"{before.global_batch}, as it was")
    devices = args.world_size * max(1, args.n_gpu)
    said = args.per_device_train_batch_size * args.gradient_accumulation_steps * devices
    batch = before.global_batch if before is not None else wanted or said
    at_once, times = split(batch, per_device=args.per_device_train_batch_size, world_size=devices)
    if args.process_index == 0:
        say(f"global batch {batch}: {at_once} samples x {times} accumulated x {devices} devices")
    args.per_device_train_batch_size, args.gradient_accumulation_steps = at_once, times
    trainer._train_batch_size = args.train_batch_size
    return batch


def _check(trainer: Trainer) -> None:
    """Raise ConfigError for what is not supported."""
    args = trainer.args
    if tuple(int(part) for part in transformers.__version__.split(".")[:2]) < OLDEST:
        raise _refused("transformers", transformers.__version__, ".".join(map(str, OLDEST)) + " or newer")
    if "resume_from_checkpoint" not in inspect.signature(trainer.train).parameters:
        raise _refused(
            type(trainer).__name__, "a train() that cannot resume", "one with resume_from_checkpoint"
        )
    for key in ("is_deepspeed_enabled", "is_fsdp_enabled"):
        if getattr(trainer, key, False):
            raise _refused(key[3:-8], "not supported", "data parallelism (DDP)")
    if getattr(args, "parallelism_config", None) is not None:
        raise _refused("parallelism_config", "not supported", "data parallelism (DDP)")
    if args.save_only_model:
        raise _refused("save_only_model", "True", "False: to go on the optimizer's state is needed, too")
    if args.auto_find_batch_size:
        raise _refused("auto_find_batch_size", "True", "False: it changes the global batch")


def _retire_jit(trainer: Trainer) -> None:
    """Take out what `enable_jit_checkpoint` adds: on SIGTERM both would save, and each rank when it likes."""
    for one in list(trainer.callback_handler.callbacks):
        if type(one).__name__ == "JITCheckpointCallback":
            one.on_train_end(trainer.args, trainer.state, trainer.control)  # gives SIGTERM back
            trainer.remove_callback(one)


def _refused(key: str, got: str, accepted: str) -> ConfigError:
    return ConfigError(where="integrations.transformers", key=key, got=got, accepted=accepted)
