"""The random number generators of one rank: keep, put back, set anew."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch


def capture(device: torch.device) -> dict[str, Any]:
    """The states of Python's, numpy's and torch's generators (that of `device` too)."""
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.asarray(keys, dtype=np.int64)), position, has_gauss, cached),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def restore(state: dict[str, Any], device: torch.device) -> None:
    """Put back what `capture` returned: the next random numbers are the same again."""
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)


def reseed(seed: int, step: int, rank: int) -> None:
    """Start all generators anew from (seed, step, rank), for ranks that have no state to go on from."""
    digest = hashlib.sha256(f"{seed}/{step}/{rank}".encode()).digest()
    number = int.from_bytes(digest[:8], "big") >> 1
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.manual_seed(number)
