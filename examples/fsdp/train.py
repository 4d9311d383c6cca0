"""A small GPT, sharded: FSDP2 over the data ranks, tensor parallel within groups of --tensor-parallel ranks.

    torchrun --nproc-per-node=4 train.py --tensor-parallel 2

Checkpoints by torch.distributed.checkpoint (DCP) in --out, which it finds again when started anew.
"""

import argparse
import math
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

TOKENS, LENGTH, WIDTH, LAYERS, HEADS = 64, 32, 128, 2, 4
GLOBAL_BATCH = 16


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.project = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        y = self.norm1(x)
        projected = self.query(y), self.key(y), self.value(y)
        heads = [part.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in projected]
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.position = nn.Embedding(TOKENS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, TOKENS)

    def forward(self, x):
        x = self.token(x) + self.position.weight[: x.shape[1]]
        return self.head(self.norm(self.blocks(x)))


class State:
    """Model and optimizer as DCP saves them: independent of the number of ranks."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state):
        model, optimizer = state["model"], state["optimizer"]
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)


def batch_of(step):
    """The global batch of a step: each token is one of two that can follow the last one."""
    generator = torch.Generator().manual_seed(step)
    follows = torch.randint(TOKENS, (TOKENS, 2), generator=torch.Generator().manual_seed(0))
    tokens = torch.randint(TOKENS, (GLOBAL_BATCH, 1), generator=generator)
    for _ in range(LENGTH):
        which = torch.randint(2, (GLOBAL_BATCH,), generator=generator)
        tokens = torch.cat([tokens, follows[tokens[:, -1], which].unsqueeze(1)], dim=1)
    return tokens


def newest(folder):
    """The newest whole checkpoint, and its step."""
    whole = [path.parent for path in Path(folder).glob("step-*/.metadata")]  # what DCP writes last
    found = max(whole, key=lambda path: int(path.name[5:]), default=None)
    return found, int(found.name[5:]) if found else 0


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", default="out")
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    rank, data_ranks = dist.get_rank(), dist.get_world_size() // args.tensor_parallel
    mesh = init_device_mesh(device, (data_ranks, args.tensor_parallel), mesh_dim_names=("data", "tensor"))

    torch.manual_seed(0)
    model = GPT().to(device)
    if args.tensor_parallel > 1:
        for block in model.blocks:
            plan = {name: ColwiseParallel() for name in ("query", "key", "value", "up")}
            plan |= {name: RowwiseParallel() for name in ("project", "down")}
            parallelize_module(block, mesh["tensor"], plan)
    for block in model.blocks:
        fully_shard(block, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state = State(model, optimizer)

    found, start = newest(args.out)
    if found:
        dcp.load({"state": state}, checkpoint_id=found)

    loss = math.nan  # where all steps were made before
    mine = slice(mesh["data"].get_local_rank(), None, data_ranks)
    for step in range(start + 1, args.steps + 1):
        tokens = batch_of(step)[mine].to(device)
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss := loss.detach(), group=mesh["data"].get_group())
        loss = loss.item() / data_ranks
        if rank == 0:
            print(f"step {step} loss {loss!r}", flush=True)
        if step % args.save_every == 0:
            dcp.save({"state": state}, checkpoint_id=Path(args.out) / f"step-{step}")
    if rank == 0:
        print(f"done step {args.steps} loss {loss!r}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
