"""Supervised fine-tuning by LoRA, to be packed: TRL's `SFTTrainer` as a hpcsched `Trainer`.

The model (a tiny Llama), its tokenizer (a token for each byte) and the texts (sums, `17 + 25 = 42`) are made
here; nothing is downloaded.
"""

import random

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

from hpcsched.integrations.transformers import parts_of
from hpcsched.worker import Parts, Trainer


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte, and two special ones."""
    bytes_of_text = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(["<pad>", "<eos>", *bytes_of_text])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def texts(count: int, seed: int) -> Dataset:
    """Sums of numbers below 100."""
    draw = random.Random(seed)
    pairs = [(draw.randrange(100), draw.randrange(100)) for _ in range(count)]
    return Dataset.from_dict({"text": [f"{a} + {b} = {a + b}" for a, b in pairs]})


def frozen_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """The same in all jobs; yours comes `from_pretrained`."""
    set_seed(0)
    return LlamaForCausalLM(
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


class Tuning(Trainer):
    """Its `args`: `rank`, `alpha`, `lr`, `batch`, `epochs`."""

    def build(self, args: dict) -> Parts:
        tokenizer = byte_tokenizer()
        rank = args.get("rank", 8)
        trainer = SFTTrainer(
            model=frozen_model(tokenizer),
            args=SFTConfig(
                num_train_epochs=args.get("epochs", 2),
                per_device_train_batch_size=args.get("batch", 16),
                learning_rate=args.get("lr", 1e-2),
                lr_scheduler_type="constant_with_warmup",
                warmup_steps=5,
                bf16=False,
                gradient_checkpointing=False,
                use_cpu=not torch.cuda.is_available(),
                report_to="none",
                disable_tqdm=True,
            ),
            train_dataset=texts(1000, seed=0),
            eval_dataset=texts(100, seed=1),
            processing_class=tokenizer,
            peft_config=LoraConfig(
                r=rank,
                lora_alpha=args.get("alpha", 2 * rank),
                target_modules=["q_proj", "v_proj", "up_proj", "down_proj"],
                modules_to_save=["embed_tokens", "lm_head"],  # the model has learned nothing yet
            ),
        )
        return parts_of(trainer)
