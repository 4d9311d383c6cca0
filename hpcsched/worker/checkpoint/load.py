"""Checkpoints, whole or sharded, read from disk."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from hpcsched.errors import StoreError
from hpcsched.patience import patiently
from hpcsched.worker.checkpoint.files import SHARDED, CheckpointStore, damage, first_line, record_of


def load_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a checkpoint, or the newest good one of a checkpoint folder; tensors whole, on the CPU.

    Returns a dict with `model` and `optimizer` (state dicts), `step`, `samples`, `scheduler` (state
    dict or None), `sampler`, `rng` and `extra`.

    Raises StoreError when there is none, or it is damaged. No code in a file is run.
    """
    path = Path(path)
    if path.is_dir() and path.suffix != SHARDED:
        newest = CheckpointStore(path).newest()
        if newest is None:
            raise StoreError(f"{path}: no good checkpoint in this folder")
        path = newest
    elif not path.exists():
        raise StoreError(f"{path}: no such checkpoint")
    elif record_of(path).exists() and (why := damage(path)):
        raise StoreError(f"{path}: {why}")
    return read_checkpoint(path)


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint that was looked at before, in one process. Raises StoreError."""
    if path.suffix == SHARDED:
        from hpcsched.worker.checkpoint.sharded import read_whole

        return read_whole(path)
    try:
        state = patiently(lambda: torch.load(path, map_location="cpu", weights_only=True))
    except Exception as error:  # torch.load fails in many ways on a file that is no checkpoint
        raise StoreError(f"{path}: cannot be read: {first_line(error)}") from error
    if not isinstance(state, dict):
        raise StoreError(f"{path}: not a checkpoint of hpcsched")
    return state
