"""Causal language modelling with Transformers: a tiny GPT-2, from scratch, on text made here.

It saves by itself, every 20 steps and on SIGTERM, and goes on from its last checkpoint.
"""

import argparse
import math
from pathlib import Path

import torch
import transformers
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

from hpcsched.integrations.transformers import prepare_trainer

VOCABULARY, LENGTH = 128, 64


class Chains(Dataset):
    """Chains of tokens, each with two possible successors: the loss falls from ln 128 towards ln 2 = 0.69."""

    def __init__(self, samples: int, seed: int = 0) -> None:
        draw = torch.Generator().manual_seed(seed)
        successors = torch.randint(VOCABULARY, (VOCABULARY, 2), generator=draw)
        self.tokens = torch.empty(samples, LENGTH, dtype=torch.long)
        self.tokens[:, 0] = torch.randint(VOCABULARY, (samples,), generator=draw)
        for at in range(1, LENGTH):
            chosen = torch.randint(2, (samples,), generator=draw)
            self.tokens[:, at] = successors[self.tokens[:, at - 1], chosen]

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


class PrintLoss(TrainerCallback):
    """`step 12 loss 4.61...` for each line of the log, on rank 0."""

    last = math.nan  # where all steps were made before

    def on_log(self, args, state, control, logs=None, **_):
        if state.is_world_process_zero and "loss" in logs:
            self.last = logs["loss"]
            print(f"step {state.global_step} loss {self.last!r}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", default="out")
    options = parser.parse_args()

    set_seed(0)
    args = TrainingArguments(
        output_dir=options.out,
        max_steps=options.steps,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        warmup_steps=10,
        lr_scheduler_type="cosine",
        logging_steps=1,
        save_steps=20,
        save_total_limit=2,
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        **({"enable_jit_checkpoint": True} if transformers.__version__ >= "5" else {}),
    )
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=LENGTH,
            n_embd=64,
            n_layer=2,
            n_head=2,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    printing = PrintLoss()
    trainer = Trainer(model=model, args=args, train_dataset=Chains(2048), callbacks=[printing])
    trainer = prepare_trainer(trainer)
    last = get_last_checkpoint(options.out) if Path(options.out).is_dir() else None
    result = trainer.train(resume_from_checkpoint=last)
    if trainer.is_world_process_zero() and result.global_step == options.steps:
        print(f"done step {result.global_step} loss {printing.last!r}", flush=True)


if __name__ == "__main__":
    main()
