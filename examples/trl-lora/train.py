"""Supervised fine-tuning with TRL and PEFT: LoRA on a tiny Llama; model, tokenizer and texts are made here.

It saves the adapter by itself, every 20 steps, and goes on from its last checkpoint.
"""

import argparse
import math
import random
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback, set_seed
from transformers.trainer_utils import get_last_checkpoint
from trl import SFTConfig, SFTTrainer


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte, and two special ones."""
    bytes_of_text = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(["<pad>", "<eos>", *bytes_of_text])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def texts(count: int) -> Dataset:
    """Sums in words of digits: `17 + 25 = 42`."""
    draw = random.Random(0)
    pairs = [(draw.randrange(100), draw.randrange(100)) for _ in range(count)]
    return Dataset.from_dict({"text": [f"{a} + {b} = {a + b}" for a, b in pairs]})


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
    tokenizer = byte_tokenizer()
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=128,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.eos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    args = SFTConfig(
        output_dir=options.out,
        max_steps=options.steps,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        warmup_steps=5,
        logging_steps=1,
        save_steps=20,
        save_total_limit=2,
        report_to="none",
        disable_tqdm=True,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=not torch.cuda.is_available(),
    )
    printing = PrintLoss()
    trainer = SFTTrainer(
        model=model,
        args=args,
        train_dataset=texts(2000),
        processing_class=tokenizer,
        peft_config=LoraConfig(
            r=8,
            lora_alpha=16,
            lora_dropout=0.1,
            target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"],
            modules_to_save=["embed_tokens", "lm_head"],  # the model has learned nothing yet
        ),
        callbacks=[printing],
    )
    last = get_last_checkpoint(options.out) if Path(options.out).is_dir() else None
    result = trainer.train(resume_from_checkpoint=last)
    if trainer.is_world_process_zero() and result.global_step == options.steps:
        print(f"done step {result.global_step} loss {printing.last!r}", flush=True)


if __name__ == "__main__":
    main()
