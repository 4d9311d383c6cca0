"""A Transformers or TRL Trainer as the parts of a hpcsched Trainer, so that it can be packed with others.

    class Tuning(hpcsched.Trainer):
        def build(self, args):
            trainer = SFTTrainer(model, args=SFTConfig(...), peft_config=LoraConfig(r=args["r"]), ...)
            return parts_of(trainer)

The Trainer's own loss, collator, optimizer, schedule and evaluation are used; the steps, their samples, the
checkpoints and the end are hpcsched's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from numbers import Real
from typing import Any

import torch
from transformers import Trainer

from hpcsched.errors import ConfigError
from hpcsched.worker.session.trainer import Parts

_UNTOLD = (
    ("fp16", "bf16 or full precision"),
    ("deepspeed", "no DeepSpeed"),
    ("fsdp", "no FSDP"),
    ("neftune_noise_alpha", "no noise in embeddings"),
    ("auto_find_batch_size", "a batch size"),
    ("torch_compile", "a model that is not compiled"),
)
"""Arguments that mean something else here, or nothing, and what is accepted."""


def parts_of(trainer: Trainer) -> Parts:
    """What a Trainer is made of.

    A step is on `per_device_train_batch_size * gradient_accumulation_steps` samples at once. The samples are
    drawn by hpcsched, with `data_seed` or `seed`. Callbacks are not called; of logs there is the loss.

    Raises ConfigError for Trainers that cannot be computed so.
    """
    args = trainer.args
    for key, accepted in _UNTOLD:
        if getattr(args, key, None):
            raise _refused(key, getattr(args, key), accepted)
    data = trainer.train_dataset
    if data is None or not hasattr(data, "__len__"):
        raise _refused("train_dataset", type(data).__name__, "a dataset with a length")
    batch = args.per_device_train_batch_size * args.gradient_accumulation_steps
    steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * len(data) / batch)
    optimizer = trainer.create_optimizer()
    collate: Any = trainer.data_collator
    if hasattr(data, "remove_columns"):  # of `datasets`: columns that the model does not take
        data = trainer._remove_unused_columns(data, description="training")
    else:
        collate = trainer._get_collator_with_removed_columns(collate, description="training")
    device = args.device.type

    def loss(model: torch.nn.Module, inputs: Mapping[str, Any]) -> torch.Tensor:
        """The mean over the batch, shape []."""
        mean: torch.Tensor = trainer.compute_loss(model, dict(inputs))
        return mean

    theirs = type(trainer).compute_loss.__module__.partition(".")[0] in ("transformers", "trl")
    # Their metrics: no loss depends on them. Of others' losses nobody knows.
    loss.keeps_records_only = theirs and trainer.compute_loss_func is None  # type: ignore[attr-defined]
    return Parts(
        model=trainer.model,
        optimizer=optimizer,
        scheduler=trainer.create_scheduler(num_training_steps=steps, optimizer=optimizer),
        dataset=data,
        collate=collate,
        global_batch=batch,
        loss=loss,
        evaluate=None if trainer.eval_dataset is None else lambda _: _numbers(trainer.evaluate()),
        seed=args.seed if args.data_seed is None else args.data_seed,
        epochs=Fraction(steps * batch, len(data)),  # type: ignore[arg-type]  # a fraction: exactly `steps`
        loaders=args.dataloader_num_workers,
        precision="bf16" if args.bf16 and device != "mps" else None,
        clip_norm=args.max_grad_norm if args.max_grad_norm and args.max_grad_norm > 0 else None,
    )


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Those that say how good the model is, not how long that took."""
    beside = ("_runtime", "_per_second", "_time", "_num_tokens")
    return {
        name: float(value)
        for name, value in metrics.items()
        if isinstance(value, Real) and name != "epoch" and not name.endswith(beside)
    }


def _refused(key: str, got: Any, accepted: str) -> ConfigError:
    return ConfigError(where="Trainer", key=key, got=repr(got), accepted=f"{accepted}, to be packed")
