"""Suspending into memory and resuming from there, on a GPU; resizing in place, on two."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.gpu, pytest.mark.torch]

if not torch.cuda.is_available():
    pytest.skip("torch sees no GPU here", allow_module_level=True)

import torch.distributed as dist  # noqa: E402

from hpcsched.worker.checkpoint.shared_memory import Arena  # noqa: E402
from hpcsched.worker.ranks import backend  # noqa: E402

HPCSCHED = [sys.executable, "-m", "hpcsched"]

TRAINER = """
import time
import torch
from torch import nn
from hpcsched.worker import Parts, Trainer

class Slow(Trainer):
    def build(self, args):
        model = nn.Sequential(nn.Linear(64, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, 4))
        x = torch.randn(256, 64)

        def loss(model, batch):
            time.sleep(0.02)
            return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

        return Parts(model=model, optimizer=torch.optim.AdamW(model.parameters()), global_batch=32,
                     dataset=(x, torch.randint(0, 4, (256,))), loss=loss)
"""

JOBS = """
schema = 1
[[job]]
name = "a"
trainer = "slow:Slow"
steps = 600
strategy = {{ kind = "ddp", reproducible = true, shards = 4 }}
gpus = {gpus}
"""


def test_state_goes_from_the_gpu_into_the_arena_and_back() -> None:
    generator = torch.Generator("cuda").manual_seed(1)
    tensors = {
        "weight": torch.randn(1000, 333, device="cuda", generator=generator),
        "half": torch.randn(77, device="cuda", generator=generator).half(),
        "last": torch.randn(2, 3, 8, 8, device="cuda").to(memory_format=torch.channels_last),
        "here": torch.arange(9),
    }
    arena = Arena.open(os.memfd_create("arena"))
    assert arena is not None
    state = {"step": 3, "samples": 12, "model": tensors}
    assert arena.reserve(state)
    for _ in range(3):
        arena.save(state)
    loaded = arena.load()
    assert loaded["step"] == 3
    for name, tensor in tensors.items():
        assert torch.equal(loaded["model"][name].to(tensor.device), tensor), name
    own = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    loaded = arena.load(into={"model": own})
    for name, tensor in tensors.items():
        assert loaded["model"][name] is own[name], name
        assert torch.equal(own[name], tensor), name
    arena.close()


def run(folder: Path, gpus: int, *orders: str) -> torch.Tensor:
    """Run the job, give it these orders one after the other; returns its final weights."""
    folder.mkdir()
    (folder / "slow.py").write_text(TRAINER)
    (folder / "jobs.toml").write_text(JOBS.format(gpus=gpus))
    env = {**os.environ, "HPCSCHED_DATABASE": str(folder / "h.db"), "HPCSCHED_DIR": str(folder / "run")}
    command = [*HPCSCHED, "run", "jobs.toml", "--devices", f"cuda:{gpus}", "--quiet"]
    agent = subprocess.Popen(command, cwd=folder, env=env)
    try:
        for order in orders:
            wanted = {"suspend": "RUNNING", "resume": "SUSPENDED"}[order]
            deadline = time.monotonic() + 120
            while not _is(folder, wanted) and time.monotonic() < deadline:
                time.sleep(0.1)
            subprocess.run([*HPCSCHED, order, "a"], env=env, check=True, timeout=60)
        assert agent.wait(300) == 0
    finally:
        agent.kill()
    from hpcsched.worker import load_checkpoint

    final = load_checkpoint(folder / "run" / "jobs" / "1" / "checkpoint")
    return torch.cat([value.flatten().double() for value in final["model"].values()])


def _is(folder: Path, state: str) -> bool:
    try:
        (job,) = json.loads((folder / "run" / "status.json").read_bytes())["jobs"]
    except (OSError, ValueError):
        return False
    return bool(job["state"] == state and (state != "RUNNING" or job["ready"]))


def test_a_suspended_training_ends_with_the_same_bits(tmp_path: Path) -> None:
    plain = run(tmp_path / "plain", 1)
    assert torch.equal(run(tmp_path / "elastic", 1, "suspend", "resume", "suspend", "resume"), plain)


def test_two_gpus_give_the_bits_of_one(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    assert torch.equal(run(tmp_path / "two", 2), run(tmp_path / "one", 1))


def test_a_group_over_nccl_is_made_and_aborted_again_and_again() -> None:
    """Of one rank, which is all that NCCL takes on one GPU. An abort leaves nothing behind."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    free = []
    for number in range(5):
        store = dist.PrefixStore(f"group {number}", dist.HashStore())
        dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=device)
        backend.connect_now(device)
        backend.set_patience(dist.group.WORLD, 60.0)
        tensor = torch.full((1 << 20,), 3.0, device=device)
        dist.all_reduce(tensor)
        backend.settle(device, 60.0)
        backend.end_groups()
        assert not dist.is_initialized()
        assert bool((tensor == 3).all())
        free.append(torch.cuda.mem_get_info(device)[0])
    assert free[1] - free[-1] < 64 << 20, free
