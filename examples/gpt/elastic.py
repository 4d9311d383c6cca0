"""A GPT in a single file, trained on text that is made here: all settings at the top, nothing hidden.

    python train.py                                      one device
    torchrun --standalone --nproc-per-node=2 train.py    two: the batches of a step are shared

Under hpcsched it goes on after any step, with any number of processes that divides `accumulation`.
"""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from hpcsched.integrations.ddp import Elastic

# -- settings ----------------------------------------------------------------------------------------------
block_size, batch_size, accumulation = 64, 4, 4  # tokens, sequences, batches of a step on all devices
n_layer, n_head, n_embd, dropout, vocab_size = 2, 4, 96, 0.0, 64
learning_rate, min_lr, warmup_steps, weight_decay, grad_clip = 1e-3, 1e-4, 10, 0.1, 1.0
save_every = 20
seed = 1337


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        q, k, v = (
            part.view(rows, length, n_head, width // n_head).transpose(1, 2)
            for part in self.qkv(x).split(width, 2)
        )
        p = dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(rows, length, width))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attention = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd), Attention()
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd))
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop(self.attention(self.norm1(x)))
        return x + self.drop(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(vocab_size, n_embd), nn.Embedding(block_size, n_embd)
        self.blocks = nn.Sequential(*(Block() for _ in range(n_layer)))
        self.norm, self.head = nn.LayerNorm(n_embd), nn.Linear(n_embd, vocab_size, bias=False)
        self.head.weight = self.token.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        logits = self.head(self.norm(self.blocks(x)))
        return F.cross_entropy(logits.view(-1, vocab_size), targets.view(-1))


def text() -> torch.Tensor:
    """A hundred thousand tokens of sentences from a vocabulary of made-up words."""
    generator = torch.Generator().manual_seed(seed)
    words = [torch.randint(1, vocab_size, (length,), generator=generator) for length in (3, 4, 5, 6) * 25]
    picked = torch.randint(len(words), (20_000,), generator=generator)
    return torch.cat(
        [part for at in picked.tolist() for part in (words[at], torch.zeros(1, dtype=torch.long))]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path, default=Path("gpt-out"))
    args = parser.parse_args()

    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    ddp = int(os.environ.get("RANK", -1)) != -1
    if ddp:
        dist.init_process_group("nccl" if device_type == "cuda" else "gloo")
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if ddp else (0, 1)
    device = torch.device(
        device_type, int(os.environ.get("LOCAL_RANK", 0)) if device_type == "cuda" else None
    )
    assert accumulation % world_size == 0
    micro_steps = accumulation // world_size

    data = text()

    def get_batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Batch `number` of the training: the same one on whatever device it is computed."""
        generator = torch.Generator().manual_seed(seed + number)
        starts = torch.randint(len(data) - block_size, (batch_size,), generator=generator).tolist()
        x = torch.stack([data[at : at + block_size] for at in starts])
        y = torch.stack([data[at + 1 : at + 1 + block_size] for at in starts])
        return x.to(device), y.to(device)

    def get_lr(step: int) -> float:
        if step < warmup_steps:
            return learning_rate * (step + 1) / warmup_steps
        decay = min(1.0, (step - warmup_steps) / max(1, args.steps - warmup_steps))
        return min_lr + 0.5 * (1 + math.cos(math.pi * decay)) * (learning_rate - min_lr)

    torch.manual_seed(seed + rank)
    model = GPT().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=weight_decay, betas=(0.9, 0.95))
    raw_model = model
    if ddp:
        model = DistributedDataParallel(model)

    total = torch.full((), math.nan, device=device)  # where all steps were made before
    elastic = Elastic(model=model, optimizer=optimizer)
    for step in elastic.steps(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = get_lr(step)
        total.zero_()
        for micro_step in range(micro_steps):
            if ddp:
                model.require_backward_grad_sync = micro_step == micro_steps - 1
            loss = model(*get_batch(step * accumulation + micro_step * world_size + rank)) / micro_steps
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if ddp:
            dist.all_reduce(total)
        if rank == 0:
            print(f"step {step + 1} loss {total.item() / world_size!r}", flush=True)
            if (step + 1) % save_every == 0:
                args.out.mkdir(parents=True, exist_ok=True)
                kept = {
                    "model": raw_model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "step": step + 1,
                }
                torch.save(kept, args.out / "ckpt.new")
                (args.out / "ckpt.new").replace(args.out / "ckpt.pt")
    if rank == 0:
        print(f"done step {args.steps} loss {total.item() / world_size!r}", flush=True)
    if ddp:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
