"""A training has an accident beside it, and goes on."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hpcsched.errors import ConfigError
from hpcsched.worker import Parts
from hpcsched.worker.checkpoint.pinning import Cuda
from hpcsched.worker.checkpoint.shared_memory import Arena
from hpcsched.worker.packed import Failed, load, pack


class Asking(nn.Module):
    """Waits for the device in its forward pass: no graph can hold it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.body(x)
        return y if y.sum().item() > 0 else 2 * y


def nothing(device: torch.device) -> str:
    return "no accident"


def refused_pack(device: torch.device) -> str:
    """A pack that is to be one graph, and cannot."""
    members = []
    for seed in range(2):
        model = Asking()
        parts = Parts(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
            dataset=(torch.randn(32, 16), torch.randint(4, (32,))),
            global_batch=8,
            loss=lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1], reduction="none"),
        )
        members.append(load(parts, name=str(seed), steps=100))
    try:
        together = pack(members, mode="graph")
        for _ in range(10):
            together.step()
    except (ConfigError, Failed) as error:
        return str(error)
    return "nothing was refused"


def refused_capture(device: torch.device) -> str:
    """What torch itself leaves behind; for information."""
    if device.type != "cuda":
        return "no graphs here"
    x = torch.ones(8, device=device)
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
            nn.functional.dropout(x).sum().item()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return "nothing was refused"


def failed_registration(device: torch.device) -> str:
    """As when the driver cannot pin a page; for information."""
    if device.type != "cuda":
        return "no driver here"
    cudart: Any = torch.cuda.cudart()
    return f"cudaHostRegister: {int(cudart.cudaHostRegister(64, 4096, 0))}"


def failed_arena(device: torch.device) -> str:
    """A state is saved into memory that cannot be pinned."""
    codes: list[int] = []

    class Unable(Cuda):
        """CUDA, but for where it is to pin: the driver itself refuses."""

        def host_register(self, address: int, size: int) -> int:
            codes.append(int(super().host_register(64, 4096)))
            return codes[-1]

    arena = Arena.open(os.memfd_create("gpu-day"), Unable())
    assert arena is not None
    state = {"step": 1, "samples": 1, "model": {"w": torch.ones(1000, device=device)}}
    saved = arena.reserve(state)
    arena.save(state)
    arena.close()
    if device.type == "cuda" and not any(codes):
        raise RuntimeError(f"the driver was to refuse, and has not: {codes}")
    return f"room {saved}, cudaHostRegister: {codes}"


def out_of_memory(device: torch.device) -> str:
    try:
        torch.empty(10**15, device=device)
    except (RuntimeError, MemoryError) as error:
        return str(error).splitlines()[0]
    return "there was room"


CASES: dict[str, Callable[[torch.device], str]] = {
    "none": nothing,
    "pack refused as a graph": refused_pack,
    "capture refused by torch": refused_capture,
    "registration failed": failed_registration,
    "arena not pinned": failed_arena,
    "out of memory": out_of_memory,
}
FOR_INFORMATION = ("capture refused by torch", "registration failed")
"""What torch and CUDA do by themselves."""


def training_with(case: str, kind: str) -> dict[str, Any]:
    """A training with dropout on a device: some steps, the accident, some steps.

    Returns what `happened`, the `error` that a later step had, and a `digest` of the training's weights.
    """
    torch.set_num_threads(1)
    device = torch.device(kind)
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.3), nn.Linear(256, 8)).to(device)
    x, y = torch.randn(32, 64, device=device), torch.randint(8, (32,), device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    for _ in range(2):
        step()
    drawn = torch.get_rng_state()  # models and data of the accident are drawn on the CPU, nothing on a GPU
    happened, error = "", ""
    try:
        happened = CASES[case](device)
        torch.set_rng_state(drawn)
        for _ in range(3):
            step()
    except Exception as wrong:
        error = f"{type(wrong).__name__}: {(str(wrong).splitlines() or [''])[0]}"
    found: dict[str, Any] = {"happened": happened, "error": error, "digest": ""}
    if device.type == "cuda" and not error:
        here = torch.cuda.current_stream(device)
        found["on_default_stream"] = here == torch.cuda.default_stream(device)
    if not error:
        weights = [p.detach().cpu().numpy().tobytes() for p in model.parameters()]
        found["digest"] = hashlib.sha256(b"".join(weights)).hexdigest()[:16]
    return found
