"""The random number generators of one rank: keep, put back, set anew."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

PYTHONS = tuple(name for name in dir(random.Random) if not name.startswith("_") and hasattr(random, name))
"""The functions of the module `random` that draw from the process's generator, or seed, keep, set it."""


def capture(device: torch.device) -> dict[str, Any]:
    """The states of Python's, numpy's and torch's generators (that of `device` too)."""
    return {
        **capture_others(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def capture_others() -> dict[str, Any]:
    """The states of Python's and numpy's generators."""
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.asarray(keys, dtype=np.int64)), position, has_gauss, cached),
    }


def moved(state: dict[str, Any], device: torch.device) -> bool:
    """Whether anything has been drawn since `capture` returned this."""
    now = capture(device)
    (_, keys, *rest), (_, others, *left) = now["numpy"], state["numpy"]
    same = now["python"] == state["python"] and rest == left and torch.equal(keys, others)
    same = same and torch.equal(now["torch"], state["torch"])
    return not (same and (now["cuda"] is None or torch.equal(now["cuda"], state["cuda"])))


def restore(state: dict[str, Any], device: torch.device) -> None:
    """Put back what `capture` returned: the next random numbers are the same again."""
    restore_others(state)
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)


def restore_others(state: dict[str, Any]) -> None:
    """The same for Python's and numpy's."""
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))


def reseed(*words: object) -> None:
    """Start all generators anew from `words`: (seed, step, rank) where there is no state to go on from.

    Words that print differently give streams that have nothing to do with each other.
    """
    number = _number(words)
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.manual_seed(number)  # those of GPUs too


@contextlib.contextmanager
def seeded(*words: object) -> Iterator[None]:
    """Inside, the CPU's generators start from `words`; afterwards they go on as if nothing had been drawn."""
    former = random.getstate(), np.random.get_state(), torch.get_rng_state()
    number = _number(words)
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.default_generator.manual_seed(number)
    try:
        yield
    finally:
        random.setstate(former[0])
        np.random.set_state(former[1])
        torch.set_rng_state(former[2])


def _number(words: tuple[object, ...]) -> int:
    digest = hashlib.sha256("/".join(map(str, words)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
