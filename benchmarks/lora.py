"""A small language model with random weights and an adapter (LoRA, of PEFT) on it; and its training as people
have it:

    python lora.py '{"name": "lora-0", "record": "FOLDER", "steps": 1000, "rank": 8, ...}'

It knows nothing of hpcsched. `Record` leaves in FOLDER what a training did and when, whoever makes its steps.
"""

import copy
import functools
import json
import logging
import os
import struct
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BEGAN = time.time()
WORDS, SAMPLES = 512, 400

warnings.filterwarnings("ignore")  # of PEFT, on layers of GPT-2, and of its own renamed parts
logging.getLogger("transformers").setLevel(logging.ERROR)


@dataclass
class Training:
    """What is trained, and on what."""

    model: Any
    optimizer: Any
    tokens: Any
    loss: Callable[[Any, Any], Any]


def training(
    *,
    rank: int,
    alpha: float,
    lr: float,
    kind: str = "gpt2",
    width: int = 64,
    layers: int = 2,
    tokens: int = 32,
    words: int = WORDS,
    dtype: str = "float32",
    seed: int = 0,
) -> Training:
    """An adapter on the attention of a GPT-2 or a Llama, the same one in all trainings of one size.

    `dtype`: of what is frozen; `tokens`: of a sample; `seed`: of the adapter's weights.
    """
    import torch
    from peft import LoraConfig, get_peft_model
    from torch.nn.functional import cross_entropy

    base = copy.deepcopy(_base(kind, width, layers, tokens, words, dtype))
    targets = ["c_attn"] if kind == "gpt2" else ["q_proj", "v_proj"]
    torch.manual_seed(seed)
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets, task_type="CAUSAL_LM")
    model = get_peft_model(base, config)
    samples = torch.randint(0, words, (SAMPLES, tokens), generator=torch.Generator().manual_seed(1))

    def loss(model: Any, batch: Any) -> Any:
        (ids,) = batch
        logits = model(input_ids=ids).logits[:, :-1]
        each = cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none")
        return each.view(len(ids), -1).mean(1)

    trained = [p for p in model.parameters() if p.requires_grad]
    return Training(model, torch.optim.AdamW(trained, lr=lr), samples, loss)


@functools.lru_cache(maxsize=1)  # to draw the weights of a larger one takes seconds
def _base(kind: str, width: int, layers: int, tokens: int, words: int, dtype: str) -> Any:
    import torch
    import transformers

    torch.manual_seed(0)
    heads = max(2, width // 64)
    many = {"vocab_size": words, "bos_token_id": 0, "eos_token_id": 0}
    if kind == "gpt2":
        still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        size = {"n_positions": tokens, "n_embd": width, "n_layer": layers, "n_head": heads}
        base: Any = transformers.GPT2LMHeadModel(transformers.GPT2Config(**many, **size, **still))
    else:
        size = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
        size |= {"intermediate_size": 8 * width // 3, "max_position_embeddings": tokens}
        base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**many, **size))
    return base.to(getattr(torch, dtype))


class Record:
    """What a training leaves of itself in a folder: NAME.json (its process, when that began), NAME.steps (the
    time of each step, of eight bytes) and, after the last one, NAME.pt (the adapter)."""

    def __init__(self, made: Training, *, name: str, record: str, steps: int) -> None:
        self._model, self._steps, self._made = made.model, steps, 0
        self._place = Path(record) / name
        self._place.with_suffix(".json").write_text(json.dumps({"pid": os.getpid(), "began": BEGAN}))
        self._file = os.open(self._place.with_suffix(".steps"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        made.optimizer.register_step_post_hook(self)

    def __call__(self, *_: Any) -> None:
        os.write(self._file, struct.pack("<d", time.time()))
        self._made += 1
        if self._made == self._steps:
            import torch

            trained = {n: p.detach().cpu() for n, p in self._model.named_parameters() if p.requires_grad}
            torch.save(trained, self._place.with_suffix(".pt"))


def steps_in(file: Path) -> list[float]:
    """When the steps were made of which a training has left a record."""
    data = file.read_bytes()
    return list(struct.unpack(f"<{len(data) // 8}d", data))


def main() -> None:
    args = json.loads(sys.argv[1])
    import torch

    torch.set_num_threads(args.pop("threads", 1))
    about = {key: args.pop(key) for key in ("name", "record", "steps")}
    batch = args.pop("batch")
    made = training(**args)
    Record(made, **about)
    drawn = torch.Generator().manual_seed(0)
    for _ in range(about["steps"]):
        ids = made.tokens[torch.randint(len(made.tokens), (batch,), generator=drawn)]
        made.optimizer.zero_grad()
        made.loss(made.model, (ids,)).mean().backward()
        made.optimizer.step()


if __name__ == "__main__":
    main()
